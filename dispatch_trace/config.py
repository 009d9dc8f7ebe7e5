"""What to record, as one checked value.

No torch import; bad values raise `ConfigError` or `PatternError` here, before anything is touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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
    sketch: bool = True
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
    sketch: bool = True,
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
        sketch=bool(sketch),
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
