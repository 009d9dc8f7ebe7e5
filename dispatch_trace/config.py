"""What to record, as one checked value.

No torch import; bad values raise `ConfigError` or `PatternError` here, before anything is touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dispatch_trace.errors import ConfigError, PatternError
from dispatch_trace.patterns import Selector, compile_select
from dispatch_trace.schema import SAVES, STATISTICS, Save

Level = Literal["op", "module"]
Params = Literal["none", "stats", "tensors"]
OnError = Literal["warn", "raise"]
Steps = int | range | set[int] | frozenset[int] | Callable[[int], bool]
DEFAULT_MAX_PENDING_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Options of `dt.record`, checked.

    Attributes:
      level: "op" records ops and modules, "module" modules only (no dispatch mode at all).
      save: what is kept of the values, for every module that no pair in `save_rules` names.
      save_rules: (selector, save) pairs over module paths; the last that matches wins.
      selector: which module paths; None for all.
      ops: regular expression on op base names; None for all.
      steps: which steps; None for all.
      stats: names of the statistics wanted; None for all.
      inputs, sketch: record input slots; take sketches.
      params: what to keep of parameters and buffers.
      on_error: what a fault of the recorder does.
    """

    level: Level = "op"
    save: Save = "stats"
    save_rules: tuple[tuple[Selector, Save], ...] = ()
    selector: Selector | None = None
    select: tuple[str, ...] = ()
    ops: str | None = None
    steps: Steps | None = None
    stats: tuple[str, ...] | None = None
    inputs: bool = True
    sketch: bool | str = True
    params: Params = "stats"
    on_error: OnError = "warn"
    _save_of: dict[str, Save] = field(default_factory=dict, repr=False)

    @property
    def wants_values(self) -> bool:
        """Whether anything beyond sites, shapes and dtypes is recorded somewhere."""
        return self.save != "meta" or any(save != "meta" for _, save in self.save_rules)

    def save_of(self, path: str) -> Save:
        """What is kept of the values of one module."""
        found = self._save_of.get(path)
        if found is None:
            found = self.save
            for selector, save in self.save_rules:
                if selector.matches(path):
                    found = save
            self._save_of[path] = found
        return found

    def wants_op(self, base: str) -> bool:
        return self.ops is None or re.fullmatch(self.ops, base) is not None

    def wants_step(self, step: int) -> bool:
        """Whether a step is among those asked for."""
        if self.steps is None:
            return True
        if callable(self.steps):
            return bool(self.steps(step))
        if isinstance(self.steps, int):
            return step == self.steps
        return step in self.steps

    def wants_module(self, path: str) -> bool:
        """Whether a module's return is recorded: with level "op" also below a selected module."""
        if self.selector is None:
            return True
        return self.selector.matches(path) if self.level == "module" else self.wants_ops_of(path)

    def wants_ops_of(self, path: str) -> bool:
        """Whether the ops of a module's body are recorded: those of selected modules and all beneath."""
        if self.level != "op":
            return False
        return self.selector is None or self.selector.covers(path)

    def header(self) -> dict[str, Any]:
        """The options as plain values, for the header of the trace."""
        return {
            "level": self.level,
            "save": self.save,
            "save_rules": [[list(s.patterns), save] for s, save in self.save_rules],
            "select": list(self.select),
            "ops": self.ops,
            "steps": _plain_steps(self.steps),
            "stats": None if self.stats is None else list(self.stats),
            "inputs": self.inputs,
            "sketch": self.sketch,
            "params": self.params,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """What an engine is to capture of its models.

    Attributes:
      modules: patterns over the target model's modules.
      draft_modules: over the draft model's.
      vision_modules: over the vision encoder's, without the `visual.` that they are written with.
      capture_dir: where the traces go; None where nothing is to be captured.
      capture_filter: which of the captured names are written; None for all.
    """

    modules: tuple[str, ...] = ()
    draft_modules: tuple[str, ...] = ()
    vision_modules: tuple[str, ...] = ()
    capture_dir: str | None = None
    capture_filter: tuple[str, ...] | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is to be captured."""
        return bool(self.modules or self.draft_modules or self.vision_modules)

    @classmethod
    def from_neuron_config(cls, config: Mapping[str, Any] | None) -> CaptureConfig:
        """Reads the `tensor_capture` dict of an engine's configuration.

        Args:
          config: the configuration that holds `tensor_capture`, or that dict itself: `modules`,
            `draft_modules` (a pattern or several; one that starts with `visual.` is for the vision
            encoder), `capture_dir`, `capture_filter`. None or no such key: nothing is captured.

        Raises:
          ConfigError: an unknown key, a value of the wrong type, or modules without a `capture_dir`.
          PatternError: a pattern that is none.
        """
        given: Any = {} if config is None else config
        if isinstance(given, Mapping):
            known = set(given) & {"tensor_capture", *_CAPTURE_KEYS}
            given = given.get("tensor_capture", given if known else {}) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"tensor_capture={given!r}: expected a dict with {', '.join(_CAPTURE_KEYS)}.")
        for key in given:
            if key not in _CAPTURE_KEYS:
                raise ConfigError(
                    f"tensor_capture[{key!r}]: no such key. Expected {', '.join(_CAPTURE_KEYS)}."
                )
        lists = {key: _strings(f"tensor_capture[{key!r}]", given.get(key)) for key in _CAPTURE_KEYS[:3]}
        for key, patterns in lists.items():
            if patterns and key != "capture_filter":
                compile_select(list(patterns), option=f"tensor_capture[{key!r}]")
        everything = lists["modules"] or ()
        directory = given.get("capture_dir")
        if directory is not None and not isinstance(directory, (str, os.PathLike)):
            raise ConfigError(f"tensor_capture['capture_dir']={directory!r}: expected a path.")
        found = cls(
            modules=tuple(p for p in everything if not p.startswith(_VISUAL)),
            draft_modules=lists["draft_modules"] or (),
            vision_modules=tuple(p.removeprefix(_VISUAL) for p in everything if p.startswith(_VISUAL)),
            capture_dir=None if directory is None else os.fspath(directory),
            capture_filter=lists["capture_filter"],
        )
        if found.enabled and found.capture_dir is None:
            raise ConfigError("tensor_capture: modules are given and no 'capture_dir' to write to.")
        return found


_CAPTURE_KEYS = ("modules", "draft_modules", "capture_filter", "capture_dir")
_VISUAL = "visual."


def _strings(option: str, value: Any) -> tuple[str, ...] | None:
    """A string or a collection of strings as a tuple."""
    if value is None:
        return None
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple, set, frozenset)) or not all(isinstance(v, str) for v in values):
        raise ConfigError(f"{option}={value!r}: expected a string or a list of strings.")
    return tuple(sorted(values) if isinstance(values, (set, frozenset)) else values)


def record_options(
    *,
    level: str = "op",
    save: str | Sequence[tuple[str, str]] = "stats",
    stats: Iterable[str] | None = None,
    select: str | Iterable[str] | None = None,
    ops: str | None = None,
    steps: Any = None,
    inputs: bool = True,
    params: str | None = None,
    sketch: bool | str = True,
    on_error: str = "warn",
) -> RecordOptions:
    """Checks the options of `dt.record` and fills in what depends on others.

    Raises:
      ConfigError: a value that the option cannot have, or two that contradict each other.
      PatternError: a pattern that is no regular expression, or an upside-down range.
    """
    _one_of("level", level, get_args(Level))
    _one_of("on_error", on_error, get_args(OnError))
    default, rules = _save_rules(save)
    values = {default, *(s for _, s in rules)}
    if level == "module":
        if ops is not None:
            raise ConfigError(
                f"ops={ops!r} with level='module': no op is recorded there. Drop ops, or use level='op'."
            )
        if "leaves" in values:
            raise ConfigError(
                "save='leaves' with level='module': leaves are found by the ops that read them. "
                "Use level='op', or save='tensors'."
            )
    if ops is not None:
        try:
            re.compile(ops)
        except re.error as error:
            raise PatternError(
                f"ops={ops!r} is no regular expression: {error}. It is matched whole against base names "
                "such as 'aten.mm'."
            ) from None
    keeps = bool(values & {"leaves", "tensors"})
    if params is None:
        params = "tensors" if keeps else "stats"
    _one_of("params", params, get_args(Params))
    names = None
    if stats is not None:
        names = tuple([stats] if isinstance(stats, str) else stats)
        for name in names:
            _one_of("stats", name, STATISTICS)
    patterns = () if select is None else ((select,) if isinstance(select, str) else tuple(select))
    return RecordOptions(
        level=level,  # type: ignore[arg-type]
        save=default,
        save_rules=tuple((compile_select([p]), s) for p, s in rules),
        selector=compile_select(list(patterns)) if patterns else None,
        select=patterns,
        ops=ops,
        steps=_checked_steps(steps),
        stats=names,
        inputs=bool(inputs),
        sketch=sketch if sketch == "narrow" else bool(sketch),
        params=params,  # type: ignore[arg-type]
        on_error=on_error,  # type: ignore[arg-type]
    )


def _one_of(option: str, value: object, allowed: Iterable[str]) -> None:
    if value not in tuple(allowed):
        raise ConfigError(f"{option}={value!r}: expected one of {', '.join(map(repr, allowed))}.")


def _save_rules(save: str | Sequence[tuple[str, str]]) -> tuple[Save, list[tuple[str, Save]]]:
    if isinstance(save, str):
        _one_of("save", save, SAVES)
        return save, []  # type: ignore[return-value]
    rules: list[tuple[str, Save]] = []
    for rule in save:
        if not (isinstance(rule, (tuple, list)) and len(rule) == 2 and all(isinstance(r, str) for r in rule)):
            raise ConfigError(f"save={save!r}: expected one of {SAVES} or a list of (pattern, save) pairs.")
        _one_of("save", rule[1], SAVES)
        rules.append((rule[0], rule[1]))  # type: ignore[arg-type]
    return "meta", rules


def read_steps(ranges: Sequence[str], *, option: str) -> set[int] | None:
    """Reads `N` and `N-M` (both ends included); None when no step was given.

    Args:
      option: what it is called, for messages.
    Raises:
      ConfigError: neither of both, or upside down.
    """
    steps: set[int] = set()
    for text in ranges:
        first, dash, last = text.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise ConfigError(f"{option} {text!r} is neither a number N nor a range N-M.") from None
        if high < low:
            raise ConfigError(f"{option} {text!r} is upside down. Write the smaller number first.")
        steps.update(range(low, high + 1))
    return steps or None


def _checked_steps(steps: Any) -> Steps | None:
    if steps is None:
        return None
    if callable(steps):
        predicate: Callable[[int], bool] = steps
        return predicate
    if isinstance(steps, bool) or not isinstance(steps, (int, range, set, frozenset, list, tuple)):
        raise ConfigError(
            f"steps={steps!r}: expected an int, a range, a set or a predicate of the step number."
        )
    if isinstance(steps, (list, tuple)):
        steps = frozenset(steps)
    if isinstance(steps, (set, frozenset)):
        bad = [s for s in steps if not isinstance(s, int)]
        if bad:
            raise ConfigError(f"steps={steps!r}: {bad[0]!r} is no step number.")
    elif isinstance(steps, int) and steps < 0:
        raise ConfigError(f"steps={steps}: steps are numbered from 0.")
    checked: Steps = steps
    return checked


def _plain_steps(steps: Steps | None) -> Any:
    if steps is None or isinstance(steps, int):
        return steps
    if isinstance(steps, range):
        return [steps.start, steps.stop, steps.step]
    if callable(steps):
        return "predicate"
    return sorted(steps)
