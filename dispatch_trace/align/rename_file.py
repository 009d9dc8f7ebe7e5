"""Rename rules in a YAML file, and a template of them for what stayed without partner.

A file holds one mapping, paths of the reference to paths of the target. The template lists the modules of the
reference that have no partner, with the target's closest in comments; nothing holds until it is filled in.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from dispatch_trace.align.pairs import Pair
from dispatch_trace.errors import RenameError
from dispatch_trace.patterns import closest_paths

_FORM = "a mapping of strings, one line for each module: REFERENCE.PATH: TARGET.PATH"


def read_rules(path: str | os.PathLike[str]) -> dict[str, str]:
    """The rules of a file.

    Raises:
      RenameError: it is no YAML, or holds something else than a mapping of paths.
      OSError: it cannot be read.
    """
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a path that stands twice: YAML would take the last without a word."""

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[object, object]:
        found: dict[object, object] = {}
        for key_node, value_node in node.value:
            key, value = loader.construct_object(key_node), loader.construct_object(value_node)
            if isinstance(key, str) and key in found and found[key] != value:
                raise RenameError(
                    f"{path}, line {key_node.start_mark.line + 1}: {key!r} has two names: {found[key]!r} and "
                    f"{value!r}. Keep one of them."
                )
            found[key] = value
        return found

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    text = Path(path).read_text(encoding="utf-8")
    try:
        given = yaml.load(text, Loader)  # a SafeLoader: nothing is evaluated
    except (yaml.YAMLError, TypeError) as error:
        raise RenameError(f"{path} is no YAML: {error}\nExpected {_FORM}.") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RenameError(f"{path} holds a {type(given).__name__}. Expected {_FORM}.")
    for old, new in given.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise RenameError(f"{path}: {old!r}: {new!r} is no rule. Expected {_FORM}; quote numbers.")
    return given


def template(pairs: Iterable[Pair]) -> str:
    """YAML with the reference's modules that have no partner, to be filled in.

    Args:
      pairs: of an alignment.
    """
    import yaml

    theirs: dict[str, None] = {}
    ours: dict[str, None] = {}
    for pair in pairs:
        record = pair.ref or pair.target
        if record is not None and record.kind == "module" and pair.outcome in ("ref-only", "target-only"):
            (theirs if pair.target is None else ours)[record.module] = None
    lines = [
        "# Modules of the reference without partner. Write the target's path behind each that has one,",
        "# take away the '#', and pass the file as --rename FILE.yaml. A rule counts for all beneath it.",
    ]
    for path in lone_paths(theirs):
        lines.append("")
        lines += [f"#   close: {other}" for other in closest_paths(path, sorted(ours))]
        quoted = yaml.safe_dump(path, default_style='"', width=1 << 20).strip()
        lines.append(f"# {quoted}: ")
    return "\n".join(lines) + "\n"


def lone_paths(paths: Collection[str]) -> list[str]:
    """The outermost of some paths."""
    return [p for p in sorted(paths) if not any(p != q and q and p.startswith(f"{q}.") for q in paths)]
