"""Which module of the target is which of the reference, where their paths differ: by the weights they own.

Modules that own one parameter each pair with their parameters. A module around them pairs with the
innermost module of the other side that holds the partners of all that it holds, if the reverse holds as well:
so trees of other depth and other nesting pair as far as they mean the same, and no further.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from dispatch_trace.align.content import Comparer, Layout
from dispatch_trace.align.graph import Program
from dispatch_trace.align.modules import Renames
from dispatch_trace.align.unions import Gathering, Union, common_path
from dispatch_trace.align.weights import NUMBER, WeightPair, pair_weights
from dispatch_trace.schema import StoredRecord

# Up to this share of the paths two implementations may have in common by chance.
_FEW = 0.34


def pair_modules(
    ref_paths: Collection[str],
    target_paths: Collection[str],
    weights: Iterable[WeightPair],
    pinned: Mapping[str, str],
    alike: Iterable[tuple[str, str]] = (),
) -> dict[str, str]:
    """Paths of the reference to paths of the target.

    Args:
      ref_paths, target_paths: of modules that are called.
      weights: parameters that belong together.
      pinned: pairs that are known: by rule or by name.
      alike: paths, of both sides, that hold the same numbers.
    """
    to_target: dict[str, set[str]] = defaultdict(set)
    to_ref: dict[str, set[str]] = defaultdict(set)
    for pair in weights:
        for part in pair.ref:
            to_target[part.module].add(pair.target.module)
            to_ref[pair.target.module].add(part.module)
    for old, new in [*pinned.items(), *alike]:
        to_target[old].add(new)
        to_ref[new].add(old)
    up = _gathered(to_target, ref_paths)
    down = _gathered(to_ref, target_paths)
    used = set(pinned.values())
    found: dict[str, str] = {}
    for path in sorted(ref_paths, key=lambda p: -p.count(".")):
        if path in pinned or path not in up:
            continue
        other = up[path]
        back = down.get(other)
        if other in target_paths and other not in used and back == path:
            found[path] = other
            used.add(other)
    _as_siblings(found, used, target_paths)
    _by_analogy(found | dict(pinned), found, used, ref_paths, target_paths)
    return found


def _as_siblings(found: dict[str, str], used: set[str], target_paths: Collection[str]) -> None:
    """Where a weight found no partner its module pairs too deep: with the part that the others are in."""

    def role(path: str) -> str:
        return NUMBER.sub("*", path)

    roles: dict[str, Counter[str]] = defaultdict(Counter)
    for old, new in found.items():
        roles[role(old)][role(new)] += 1
    for old, new in list(found.items()):
        common, count = roles[role(old)].most_common(1)[0]
        outer = ".".join(new.split(".")[: common.count(".") + 1])
        is_common = 2 * count > roles[role(old)].total() and role(outer) == common
        if is_common and outer != new and outer in target_paths and outer not in used:
            found[old] = outer
            used.add(outer)
            used.discard(new)


def _by_analogy(
    known: dict[str, str],
    found: dict[str, str],
    used: set[str],
    ref_paths: Collection[str],
    target_paths: Collection[str],
) -> None:
    """What is called so in one layer is called so in the others: other weights are no other role."""

    def around(path: str) -> tuple[str, str]:
        inner = path
        while inner:
            inner = inner.rpartition(".")[0]
            if inner in known:
                break
        return inner, path[len(inner) + 1 :] if inner else path

    roles: dict[str, Counter[str]] = defaultdict(Counter)
    for old, new in known.items():
        outer, role = around(old)
        place = known.get(outer, "")
        if old and new and (not place or new.startswith(f"{place}.")):
            roles[role][new[len(place) + 1 :] if place else new] += 1
    for path in sorted(ref_paths, key=lambda p: p.count(".")):
        outer, role = around(path)
        if path in known or not roles[role] or outer not in known:
            continue
        name = roles[role].most_common(1)[0][0]
        other = f"{known[outer]}.{name}" if known[outer] else name
        if other in target_paths and other not in used:
            known[path] = found[path] = other
            used.add(other)


def _gathered(partners: Mapping[str, set[str]], paths: Collection[str]) -> dict[str, str]:
    """For each path the innermost path that holds the partners of all beneath it."""
    found: dict[str, str] = {}
    known = set(paths)
    for path, others in partners.items():
        common = common_path(sorted(others))
        while True:
            if path in known:
                found[path] = common if path not in found else common_path([found[path], common])
            if not path:
                break
            path = path.rpartition(".")[0]
    return found


def find_structure(
    ref: Program,
    target: Program,
    comparer: Comparer,
    models: Mapping[str, str],
    renames: Renames,
    notices: list[str],
) -> tuple[list[WeightPair], list[Union]]:
    """Pairs modules and parameters that neither paths nor rules pair; nothing where those suffice.

    Args:
      renames: takes the module pairs (`Renames.found`).
      notices: takes what people should know.
    Returns: parameters that pair by content; values that hold the same numbers in an order not known.
    """
    theirs, ours = ({call.path for call in program.calls.values()} for program in (ref, target))
    pinned = {path: renames.by_rule(path) for path in theirs if renames.by_rule(path) in ours}
    lone = len(theirs) - len(pinned), len(ours) - len(set(pinned.values()))
    if not models:
        return [], []
    if all(lone) and not renames and len(pinned) <= _FEW * min(len(theirs), len(ours)):
        pinned = {path: new for path, new in pinned.items() if not path}  # names agree by chance
    taken = set()
    for (model, path, name), versions in ref.params.items():
        named = target.params.get((models.get(model, model), renames.by_rule(path), name), ())
        if named and (path in pinned or path not in theirs):
            taken |= {(0, versions[0].seq), (1, named[0].seq)}
    stacks = [
        any(len(v[0].slots[0].shape) == 3 and (side, v[0].seq) not in taken for v in program.params.values())
        for side, program in enumerate((ref, target))
    ]
    if not all(lone) and stacks[0] == stacks[1]:
        return [], []
    weights = pair_weights(ref, target, comparer, taken, notices)
    gathering = Gathering(ref, target, comparer, weights, taken)
    alike = gathering.by_figures()
    if not all(lone):  # the same modules, of which one side holds a list in one weight
        gathering.by_place(pinned)
        return weights + gathering.routers(), gathering.unions()
    renames.found = pair_modules(theirs, ours, weights, pinned, alike) | pinned
    gathering.by_place(renames.found)
    weights += gathering.routers()
    taken |= gathering.taken()
    return weights + pair_roles(ref, target, weights, renames.found, taken), gathering.unions()


def pair_roles(
    ref: Program,
    target: Program,
    weights: Iterable[WeightPair],
    modules: Mapping[str, str],
    taken: Collection[tuple[int, int]],
) -> list[WeightPair]:
    """Parameters of paired modules whose contents differ: each alone of its shape in its module."""
    known = (
        {r.seq for pair in weights for r in pair.ref} | {seq for side, seq in taken if side == 0},
        {pair.target.seq for pair in weights} | {seq for side, seq in taken if side == 1},
    )
    left = []
    for side, program in enumerate((ref, target)):
        homes: dict[str, list[StoredRecord]] = defaultdict(list)
        for versions in program.params.values():
            if versions[0].seq not in known[side] and versions[0].slots[0].content >= 0:
                homes[versions[0].module].append(versions[0])
        left.append(homes)
    found = []
    for path, theirs in left[0].items():
        ours = left[1].get(modules.get(path, ""), []) if path in modules else []
        for a in theirs:
            size = sorted(a.slots[0].shape)
            alike = [b for b in ours if sorted(b.slots[0].shape) == size]
            rivals = [r for r in theirs if sorted(r.slots[0].shape) == size]
            if len(alike) == len(rivals) == 1:
                found.append(WeightPair((a,), alike[0], _turned(a, alike[0]), "place", 0.7))
    return found


def _turned(a: StoredRecord, b: StoredRecord) -> Layout | None:
    before, after = a.slots[0].shape, b.slots[0].shape
    if before == after or len(before) != 2:
        return None
    return Layout((a.slots[0].content,), (before[1],), 1, 0, tuple(range(before[1])))
