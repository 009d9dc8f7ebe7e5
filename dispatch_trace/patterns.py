"""Patterns over module paths: regular expressions under fullmatch, with ranges of numbers.

A range is a whole dotted component `lo-hi`: `layers.0-3.mlp` stands for four paths. Components may be
separated by `.` or `\\.` and may end at a group (`(layers.0-3|norm)`); inside a character class a
`0-9` keeps its usual meaning. `00-11` counts with leading zeros.

Imports the standard library only; rapidfuzz when an error has to name the closest paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dispatch_trace.errors import NoMatchError, PatternError

MAX_EXPANSIONS = 100_000
_RANGE = re.compile(r"(?<![^.(|:])(\d+)-(\d+)(?![^.)|\\])(?!\\[^.])")
_HELP = "Patterns are full-match regexes on dotted paths."


@dataclass(frozen=True, slots=True)
class Selector:
    """Patterns, ready to match.

    Attributes:
      patterns: as they were written.
    """

    patterns: tuple[str, ...]
    _compiled: tuple[re.Pattern[str], ...] = field(repr=False)

    def matches(self, path: str) -> bool:
        """Whether any pattern matches the whole path (the root's path is "")."""
        return any(pattern.fullmatch(path) for pattern in self._compiled)

    def covers(self, path: str) -> bool:
        """Whether any pattern matches the path or a module that it lies in."""
        while not self.matches(path):
            if not path:
                return False
            path = path.rpartition(".")[0]
        return True


def expand_ranges(pattern: str, *, option: str = "select") -> list[str]:
    """Writes out every range: `layers.0-1.mlp` becomes `layers.0.mlp` and `layers.1.mlp`.

    Raises:
      PatternError: a range is upside down, or there are more than `MAX_EXPANSIONS` patterns.
    """
    expanded = [""]
    end = 0
    for match in _RANGE.finditer(pattern):
        numbers = _numbers(match, pattern, option)
        if len(numbers) * len(expanded) > MAX_EXPANSIONS:
            raise PatternError(
                f"{option}={pattern!r}: its ranges stand for more than {MAX_EXPANSIONS} patterns. "
                r"Write \d+ for any number."
            )
        before = pattern[end : match.start()]
        expanded = [head + before + number for head in expanded for number in numbers]
        end = match.end()
    return [head + pattern[end:] for head in expanded]


def compile_select(patterns: str | Iterable[str], *, option: str = "select") -> Selector:
    """Compiles one pattern or several.

    Args:
      patterns: as the user wrote them.
      option: what the option is called, for messages.
    Raises:
      PatternError: a pattern is no regular expression or holds an upside-down range.
    """
    written = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    return Selector(written, tuple(_compile(pattern, option) for pattern in written))


def select_modules(
    patterns: str | Iterable[str], paths: Sequence[str], *, option: str = "select"
) -> list[str]:
    """The paths that at least one pattern matches, in their own order.

    Args:
      patterns: one pattern or several.
      paths: all module paths there are (of all models together: a pattern that matches none of them
        is an error).
    Raises:
      PatternError: as `compile_select`.
      NoMatchError: a pattern matches nothing; names the closest paths.
    """
    selector = compile_select(patterns, option=option)
    chosen: set[str] = set()
    for pattern, compiled in zip(selector.patterns, selector._compiled, strict=True):
        found = [path for path in paths if compiled.fullmatch(path)]
        if not found:
            raise NoMatchError(_no_match(pattern, paths, option))
        chosen.update(found)
    return [path for path in paths if path in chosen]


def closest_paths(pattern: str, paths: Iterable[str], limit: int = 3) -> list[str]:
    """The paths most like a pattern, best first, for an error message."""
    from rapidfuzz import fuzz, process

    plain = re.sub(r"\\d[+*]?|\[[^]]*\][+*]?|\.\*|\.\+", "0", pattern).replace("\\", "")
    scored = process.extract(plain, [path for path in paths if path], scorer=fuzz.ratio, limit=limit)
    best = scored[0][1] if scored else 0.0
    return [path for path, score, _ in scored if score >= best - 5.0]


def _compile(pattern: str, option: str) -> re.Pattern[str]:
    def alternatives(match: re.Match[str]) -> str:
        return "(?:" + "|".join(_numbers(match, pattern, option)) + ")"

    try:
        return re.compile(_RANGE.sub(alternatives, pattern))
    except re.error as error:
        raise PatternError(f"{option}={pattern!r} is no regular expression: {error}. {_HELP}") from None


def _numbers(match: re.Match[str], pattern: str, option: str) -> list[str]:
    low, high = match.groups()
    if int(low) > int(high):
        raise PatternError(
            f"{option}={pattern!r}: the range {low}-{high} is upside down. Write {high}-{low}, "
            f"or {low}\\-{high} for a module of that name."
        )
    if int(high) - int(low) >= MAX_EXPANSIONS:
        raise PatternError(
            f"{option}={pattern!r}: the range {low}-{high} stands for more than {MAX_EXPANSIONS} numbers. "
            r"Write \d+ for any number."
        )
    width = len(low) if low.startswith("0") and len(low) == len(high) else 0
    return [f"{number:0{width}d}" for number in range(int(low), int(high) + 1)]


def _no_match(pattern: str, paths: Sequence[str], option: str) -> str:
    message = f"{option}={pattern!r} matched 0 of {len(paths)} modules."
    closest = closest_paths(pattern, paths)
    hint = f"Closest: {', '.join(map(repr, closest))}. " if closest else ""
    return f"{message}\n{hint}{_HELP}"
