"""What to record of a program that was not written for it: the `DISPATCH_TRACE*` variables, as one value.

`dispatch-trace run` turns its options into the same variables, so that both say the same. Imports no torch.
Booleans are strict; a variable that nobody reads is an error, because it is a misspelt one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispatch_trace.config import read_steps, record_options
from dispatch_trace.errors import ConfigError
from dispatch_trace.patterns import compile_select

SWITCH = "DISPATCH_TRACE"
PREFIX = "DISPATCH_TRACE_"
ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")
# Read elsewhere: they say how the recorder works, not what it records.
OTHERS = frozenset({"DISPATCH_TRACE_DEBUG", "DISPATCH_TRACE_KERNEL"})
_PLACEHOLDER = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of a recording that nobody wrote into the program.

    Attributes:
      output: where the trace goes; `{pid}` and `{rank}` stand for the process and its rank. None: named after
        the program.
      level, ops: as of `dt.record`.
      save: one word, or `PATTERN=WORD` for some modules; the last match wins.
      select: patterns over module paths.
      steps: as "0,3-5"; empty for all.
      stats: names of statistics, empty for all.
      root: which modules are roots (`capture.roots.RootFinder`); empty: every outermost one.
      lines: patterns over the program's Python modules whose lines are recorded.
      overwrite: replace an earlier trace of this process's rank.
    """

    output: str | None = None
    level: str = "op"
    save: tuple[str, ...] = ("stats",)
    select: tuple[str, ...] = ()
    ops: str | None = None
    steps: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()
    root: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    overwrite: bool = False

    def record_arguments(self) -> dict[str, Any]:
        """The arguments for `dt.record`.

        Raises:
          ConfigError, PatternError: a value that it would refuse.
        """
        arguments: dict[str, Any] = {
            "level": self.level,
            "save": _save_rules(self.save),
            "select": list(self.select) or None,
            "ops": self.ops,
            "steps": read_steps(self.steps, option="steps"),
            "stats": list(self.stats) or None,
        }
        record_options(**arguments)
        compile_select(self.root, option="root")
        compile_select(self.lines, option="lines")
        return {**arguments, "overwrite": self.overwrite}

    def output_of(self, program: str, *, pid: int, rank: int) -> Path:
        """Where this process's trace goes.

        Raises:
          ConfigError: the output has a placeholder that stands for nothing.
        """
        values = {"pid": str(pid), "rank": str(rank)}

        def value(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise ConfigError(
                    f"output={self.output!r}: {match[0]} stands for nothing; {{pid}} and {{rank}} do."
                )
            return values[match[1]]

        return Path(_PLACEHOLDER.sub(value, self.output or f"{program}.trace"))

    @property
    def names_processes(self) -> bool:
        """Whether each process has an output of its own."""
        return self.output is not None and "{pid}" in self.output

    def variables(self) -> dict[str, str]:
        """The environment that says the same."""
        texts = {
            "OUTPUT": self.output,
            "LEVEL": self.level,
            "SAVE": "\n".join(self.save),
            "SELECT": "\n".join(self.select),
            "OPS": self.ops,
            "STEPS": ",".join(self.steps),
            "STATS": ",".join(self.stats),
            "ROOT": "\n".join(self.root),
            "LINES": "\n".join(self.lines),
            "OVERWRITE": "1" if self.overwrite else "0",
        }
        return {SWITCH: "1"} | {PREFIX + name: text for name, text in texts.items() if text}


def is_on(name: str, text: str) -> bool:
    """Reads a boolean variable.

    Raises:
      ConfigError: it is neither on nor off.
    """
    word = text.strip().lower()
    if word not in (*ON, *OFF):
        raise ConfigError(f"{name}={text!r}: expected one of {', '.join(ON)} or {', '.join(OFF[1:])}.")
    return word in ON


def settings_from(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings that the variables describe, whether `DISPATCH_TRACE` is on or not.

    SELECT, SAVE, ROOT and LINES may hold several values, one a line; STEPS and STATS are separated by commas.
    Raises:
      ConfigError: a variable of ours that does not exist, or a boolean that is none.
    """
    given = {name.removeprefix(PREFIX): text for name, text in environ.items() if name.startswith(PREFIX)}
    known = [name.removeprefix(PREFIX) for name in (*_NAMES, *OTHERS)]
    for name in given:
        if name not in known:
            raise ConfigError(f"{PREFIX}{name} is no variable of ours.{_closest(name, known)}")
    text = {name: value for name, value in given.items() if value.strip()}

    def lines(name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        return tuple(line.strip() for line in text.get(name, "").splitlines() if line.strip()) or default

    def commas(name: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in text.get(name, "").split(",") if part.strip())

    return Settings(
        output=text.get("OUTPUT"),
        level=text.get("LEVEL", "op"),
        save=lines("SAVE", ("stats",)),
        select=lines("SELECT"),
        ops=text.get("OPS"),
        steps=commas("STEPS"),
        stats=commas("STATS"),
        root=lines("ROOT"),
        lines=lines("LINES"),
        overwrite=is_on(f"{PREFIX}OVERWRITE", given.get("OVERWRITE", "")),
    )


_NAMES = tuple(
    PREFIX + name
    for name in (
        "OUTPUT",
        "LEVEL",
        "SAVE",
        "SELECT",
        "OPS",
        "STEPS",
        "STATS",
        "ROOT",
        "LINES",
        "OVERWRITE",
    )
)


def _closest(name: str, known: list[str]) -> str:
    from rapidfuzz import process

    best = process.extractOne(name, known, score_cutoff=60)
    return f" Closest: {PREFIX}{best[0]}." if best else f" There are {', '.join(_NAMES)}."


def _save_rules(words: tuple[str, ...]) -> str | list[tuple[str, str]]:
    """`dt.record`'s `save`, from words and `PATTERN=WORD`; modules that nothing names have statistics."""
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    rules = [(".*", "stats")]
    for word in words:
        pattern, equals, save = word.rpartition("=")
        rules.append((pattern if equals else ".*", save))
    return rules
