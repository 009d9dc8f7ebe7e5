"""Which module call of the target belongs to which of the reference: by step, path and call number.

Rename rules map paths of the reference to paths of the target. Ops of a call that has no partner count as
ops of the nearest enclosing call that has one, so that a body written out in place still lines up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dispatch_trace.align.graph import Call, CallKey, Program
from dispatch_trace.errors import ConfigError, RenameError
from dispatch_trace.patterns import closest_paths


class Renames:
    """Rules `reference path -> target path`.

    A rule applies to the path that it names and to all beneath it; with the characters of a regular
    expression in it, to every path that it matches whole (`\\1` in the replacement). The longest plain
    rule wins.
    """

    def __init__(self, rules: Any) -> None:
        self._plain: dict[str, str] = {}
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        self.found: dict[str, str] = {}  # pairs by structure, where paths and rules say nothing
        self.moved: dict[str, str] = {}  # siblings that are stored in another order
        for old, new in _rules(rules):
            if re.fullmatch(r"[\w.\-]*", old):
                if self._plain.get(old, new) != new:
                    raise RenameError(f"rename gives {old!r} two names: {self._plain[old]!r} and {new!r}.")
                self._plain[old] = new
            else:
                try:
                    self._patterns.append((re.compile(old), new))
                except re.error as error:
                    raise RenameError(f"rename {old!r} is no regular expression: {error}.") from None

    def __bool__(self) -> bool:
        return bool(self._plain or self._patterns)

    def apply(self, path: str) -> str:
        """The target's path for one of the reference."""
        for known in (self.moved, self.found):
            if path in known:
                return known[path]
        return self.by_rule(path)

    def cycle(self) -> list[str]:
        """Paths that rules send round in a circle, [] where none do."""
        for start in self._plain:
            chain = [start]
            while (path := self._plain.get(chain[-1])) is not None and path != chain[-1]:
                if path == start:
                    return chain
                if path in chain:
                    break
                chain.append(path)
        return []

    def nearest(self, path: str) -> str:
        """The same; where trees differ, for a module without partner that of the nearest around it."""
        while self.found and path and path not in self.found and path not in self.moved:
            path = path.rpartition(".")[0]
        return self.apply(path)

    def by_rule(self, path: str) -> str:
        """The path that the rules alone give."""
        for pattern, new in self._patterns:
            if pattern.fullmatch(path):
                return pattern.sub(new, path, count=1)
        head, tail = path, ""
        while True:
            if head in self._plain:
                new = self._plain[head]
                return f"{new}.{tail}" if new and tail else new or tail
            if not head:
                return path
            head, _, last = head.rpartition(".")
            tail = f"{last}.{tail}" if tail else last

    def check(self, ref_paths: Iterable[str], target_paths: Iterable[str]) -> None:
        """Raises RenameError for a rule that matches nothing, or maps two paths to one."""
        ref, target = set(ref_paths), set(target_paths)
        for old, new in self._plain.items():
            below = f"{old}." if old else ""
            if old not in ref and not any(path.startswith(below) for path in ref):
                raise RenameError(_no_match(old, ref, "the reference"))
            under = f"{new}." if new else ""
            if new not in target and not any(path.startswith(under) for path in target):
                raise RenameError(_no_match(new, target, "the target"))
        for pattern, _ in self._patterns:
            if not any(pattern.fullmatch(path) for path in ref):
                raise RenameError(_no_match(pattern.pattern, ref, "the reference"))
        seen: dict[str, str] = {}
        for path in sorted(ref):
            new = self.by_rule(path)
            if new in target and seen.setdefault(new, path) != path:
                raise RenameError(f"rename maps both {seen[new]!r} and {path!r} to {new!r}.")


def _rules(rules: Any) -> list[tuple[str, str]]:
    if rules is None:
        return []
    if isinstance(rules, str):
        rules = [rules]
    items = list(rules.items()) if isinstance(rules, Mapping) else list(rules)
    found = []
    for item in items:
        if isinstance(item, str):
            old, equals, new = item.partition("=")
            item = (old, new) if equals else None
        if not isinstance(item, tuple | list) or len(item) != 2 or not all(isinstance(p, str) for p in item):
            raise ConfigError(
                f"rename={rules!r}: expected {{reference path: target path}} or 'OLD=NEW' rules."
            )
        found.append((item[0], item[1]))
    return found


def _no_match(rule: str, paths: set[str], where: str) -> str:
    closest = closest_paths(rule, sorted(paths))
    hint = f"\nClosest: {', '.join(map(repr, closest))}." if closest else ""
    return f"rename: {rule!r} matches 0 of {len(paths)} module paths of {where}.{hint}"


def module_paths(program: Program) -> set[str]:
    """All paths that the trace knows: of its calls and of its module table."""
    return table_paths(program.reader.header) | {call.path for call in program.calls.values()}


def table_paths(header: Mapping[str, Any]) -> set[str]:
    """Paths of a header's module table."""
    return {str(row.get("path", "")) for row in header.get("modules") or []}


def pair_calls(
    ref: Program,
    target: Program,
    models: Mapping[str, str],
    renames: Renames,
    steps: Mapping[tuple[str, int], int] | None = None,
) -> dict[CallKey, CallKey]:
    """Calls of the reference to calls of the target.

    Args:
      steps: by (model, step) of the reference the step of the target; None where they have one number.
    Raises:
      RenameError: a rule matches nothing, or two paths get one name.
    """
    renames.check(module_paths(ref), module_paths(target))
    pairs: dict[CallKey, CallKey] = {}
    for step, model, path, number in ref.calls:
        other = step if steps is None else steps.get((model, step))
        if model in models and other is not None:
            key = (other, models[model], renames.apply(path), number)
            if key in target.calls:
                pairs[(step, model, path, number)] = key
    return pairs


def host(call: Call, paired: Mapping[CallKey, Any]) -> Call:
    """The nearest call around (or this one) that has a partner; the outermost if none has."""
    for around in call.enclosing():
        if around.key in paired:
            return around
    return call.enclosing()[-1]
