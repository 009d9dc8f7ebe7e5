"""Where a hunt looks next: modules under suspicion, what stands around them, and how large their data is."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dispatch_trace.align.pairs import Pair
from dispatch_trace.alignment import Alignment
from dispatch_trace.schema import StoredRecord
from dispatch_trace.store.reader import RankReader

_MAX_SUSPECTS = 3
_WIDTHS = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4}


class Places:
    """What a comparison of all modules knows of steps, paths and errors.

    Args:
      found: the comparison, made from recordings of all modules.
    """

    def __init__(self, found: Alignment) -> None:
        self._found = found
        self._pairs = [
            p for p in found.pairs if p.ref is not None and p.target is not None and p.target.kind == "module"
        ]
        self._ref_paths = {p.target.module: p.ref.module for p in self._pairs if p.ref and p.target}
        self._paths = {p.target.module for p in self._pairs if p.target}

    def suspects(self) -> list[tuple[str, ...]]:
        """Sets of modules to look into, the likeliest first; each with what stands around it."""
        modules = [finding.module for finding in self._found.findings if finding.fatal]
        modules += [p.target.module for p in self._pairs if p.target is not None and _is_over(p)]
        found: list[tuple[str, ...]] = [(path,) for path in dict.fromkeys(map(self._around, modules))]
        return [paths for paths in found if paths != ("",)][:_MAX_SUSPECTS]

    def contexts(self, module: str, within: tuple[str, ...]) -> list[str]:
        """Modules whose data would show a finding, the largest first: what stands around it, then itself."""
        around = self._around(module)
        inside = [around] if around and any(_is_beneath(around, path) for path in within or ("",)) else []
        return list(dict.fromkeys([*inside, module]))

    def ref_path(self, path: str) -> str:
        """The reference's path of a module of the target."""
        return self._ref_paths.get(path, path)

    def steps(self, modules: tuple[str, ...], step: int | None, side: int) -> frozenset[int] | None:
        """The one step of a side in which to look; None for all.

        Args:
          modules: of the target.
          step: of the target, None for the first in which one of the modules is wrong.
          side: 0 for the reference, 1 for the target.
        """
        if step is None:
            first = next((f for f in self._found.findings if f.fatal), None)
            wrong = (p.target.step for p in self._pairs if p.target is not None and _is_over(p))
            step = first.step if first is not None else next(wrong, None)
        if step is None:
            return None
        if side:
            return frozenset([step])
        theirs = {p.ref.step for p in self._pairs if p.ref and p.target and p.target.step == step}
        return frozenset(theirs) or None

    def renames(self, modules: tuple[str, ...]) -> dict[str, str]:
        """Rules for the paths in these modules that differ."""
        return {
            ref: path
            for path, ref in self._ref_paths.items()
            if ref != path and any(_is_beneath(path, top) for top in modules)
        }

    def _around(self, module: str) -> str:
        """The module around an innermost one, where it is not the root: it shows whether something heals."""
        if any(path != module and _is_beneath(path, module) for path in self._paths):
            return module
        return module.rpartition(".")[0] or module


def data_bytes(reader: RankReader, path: str, save: str) -> int:
    """What the data of a module and all beneath it would take.

    Args:
      reader: a recording of its ops with statistics.
      path: of the module; "" for all.
      save: "tensors", or "leaves".
    """
    sizes: dict[int, int] = {}
    for record in reader.records():
        if _is_beneath(record.module, path):
            for content in _kept(record, save):
                sizes[content] = _num_bytes(reader, content)
    return sum(sizes.values())


def _kept(record: StoredRecord, save: str) -> Iterator[int]:
    for slot in record.slots:
        if slot.content < 0:
            continue
        if save == "tensors" or record.kind == "param" or slot.leaf or record.random:
            yield slot.content


def _num_bytes(reader: RankReader, content: int) -> int:
    found = reader.content(content)
    digits = "".join(c for c in found.dtype.partition("_")[0] if c.isdigit())
    width = _WIDTHS.get(found.dtype, max(1, int(digits) // 8) if digits else 1)
    return math.prod(found.shape) * width


def _is_beneath(path: str, top: str) -> bool:
    return not top or path == top or path.startswith(f"{top}.")


def _is_over(pair: Pair) -> bool:
    """Whether a module returned more error than its band allows."""
    return pair.error is not None and pair.band is not None and pair.error > pair.band


__all__ = ["Places", "data_bytes"]
