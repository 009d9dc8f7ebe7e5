"""Steps that repeat: judged at once they come out as one by one, pair for pair and to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from aligning import Net, net
from folding import (
    MANY,
    STEPS,
    Change,
    Faulty,
    assert_same,
    assert_same_findings,
    both_ways,
    inputs,
    judge_ranks,
    run,
    run_faulty,
)
from torch import nn

import dispatch_trace as dt
from dispatch_trace import per_step
from dispatch_trace.align.folded_pairs import FoldedPairs
from dispatch_trace.align.repeated import fold
from dispatch_trace.judge.handed_on import AstrayError
from dispatch_trace.later import Relay
from dispatch_trace.report.facts import pair_row
from dispatch_trace.store.reader import open_ranks


class Rewritten(nn.Module):
    """A linear layer and its GELU, written out in other ops."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


class Attention(nn.Module):
    """A block with what depends on the data: softmax, a choice of the largest, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.t() / 32**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        x = x + self.out(torch.softmax(scores, -1) @ v)
        return x + torch.topk(x, 2, -1).values.sum(-1, keepdim=True) + (x > 0).to(x.dtype)


def attention() -> nn.Module:
    torch.manual_seed(3)
    return Attention().eval()


def noisy(model: nn.Module, noise: float) -> nn.Module:
    """A copy in which what a layer returns is off by rounding, each time otherwise."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)

    def add(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (1 + noise * torch.randn(out.shape, generator=generator))

    linear = next(m for m in copied.modules() if isinstance(m, nn.Linear))
    linear.register_forward_hook(add)
    return copied


def reordered(model: nn.Module) -> nn.Module:
    """A copy that multiplies in double where the reference does in single precision: rounding everywhere."""
    copied = copy.deepcopy(model)
    for linear in (m for m in copied.modules() if isinstance(m, nn.Linear)):
        linear.forward = lambda x, own=linear: nn.functional.linear(  # type: ignore[method-assign, misc]
            x.flip(-1), own.weight.flip(-1), own.bias
        )
    return copied


@pytest.mark.parametrize(
    "change",
    [copy.deepcopy, reordered, lambda model: noisy(model, 3e-7)],
    ids=["the same program", "products in another order", "rounding that differs each time"],
)
@pytest.mark.parametrize("model", [net, attention])
def test_clean_pairs_come_out_as_step_by_step(
    tmp_path: Path, model: Callable[[], nn.Module], change: Callable[[nn.Module], nn.Module]
) -> None:
    ref = run(tmp_path / "ref", model(), inputs())
    target = run(tmp_path / "target", change(model()), inputs())
    once, each = both_ways(ref, target)
    assert_same(once, each)
    assert once is not None and once.verdict == each.verdict == "match"


def test_lower_precision_comes_out_as_step_by_step(tmp_path: Path) -> None:
    ref = run(tmp_path / "ref", net(), inputs())
    target = run(tmp_path / "target", net().bfloat16(), [x.bfloat16() for x in inputs()])
    assert_same(*both_ways(ref, target))


def test_other_ops_in_a_module_come_out_as_step_by_step(tmp_path: Path) -> None:
    written_out = net()
    written_out.blocks[1].up = Rewritten(written_out.blocks[1].up)  # type: ignore[index, union-attr]
    ref, target = run(tmp_path / "ref", net(), inputs()), run(tmp_path / "target", written_out, inputs())
    for sides in ((ref, target), (target, ref)):  # extra records on either side
        assert_same(*both_ways(*sides))


def test_what_one_trace_left_out_comes_out_as_step_by_step(tmp_path: Path) -> None:
    ref = run(tmp_path / "ref", net(), inputs())
    target = run(tmp_path / "target", net(), inputs(), select=r"|blocks\.0.*", ops="aten.addmm")
    for sides in ((ref, target), (target, ref)):
        once, each = both_ways(*sides)
        assert_same(once, each)


@pytest.mark.parametrize(
    "options", [{"exact": True}, {"tolerance": 1e-3}, {"declared": "matmul operands bf16"}]
)
def test_options_count_for_all_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    ref = run(tmp_path / "ref", net(), inputs())
    same = run(tmp_path / "same", net(), inputs())
    assert_same(*both_ways(ref, same, **options))


def test_shapes_alone_are_judged_step_by_step(tmp_path: Path) -> None:
    ref, target = (run(tmp_path / name, net(), inputs(), save="meta") for name in ("ref", "target"))
    once, each = both_ways(ref, target)
    assert once is None and each.verdict == "inconclusive"  # each step has its own reasons
    found = dt.align(ref, target)
    assert found.reasons == each.reasons and len(found.reasons) == 6


def test_a_nan_in_every_step_of_both_comes_out_as_step_by_step(tmp_path: Path) -> None:
    given = inputs()
    for x in given:
        x[2, 3] = torch.nan
    ref, target = run(tmp_path / "ref", net(), given), run(tmp_path / "target", reordered(net()), given)
    assert_same(*both_ways(ref, target))


def grown(out: torch.Tensor) -> torch.Tensor:
    return out * 1.05


def blurred(out: torch.Tensor) -> torch.Tensor:
    return out * (1 + 0.05 * torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))


def poisoned(out: torch.Tensor) -> torch.Tensor:
    return out.index_fill(0, torch.tensor([0]), torch.nan)


@pytest.mark.parametrize("change", [grown, blurred, poisoned])
@pytest.mark.parametrize("steps", [{7}, range(6, MANY), range(MANY)], ids=["one step", "later", "all"])
def test_faults_come_out_as_step_by_step(tmp_path: Path, steps: Collection[int], change: Change) -> None:
    given = inputs(MANY)
    ref = run(tmp_path / "ref", net(), given)
    target = run_faulty(tmp_path / "target", net(), given, Faulty(steps, change))
    once, each = both_ways(ref, target)
    assert_same_findings(once, each)
    assert once is not None and once.verdict == "diverged"
    assert [finding.step for finding in once.findings] == list(steps)


def test_faults_that_lead_to_other_decisions_come_out_as_step_by_step(tmp_path: Path) -> None:
    """Which values of a step are within noise behind a fault hangs on its numbers."""
    given = inputs(30)
    ref = run(tmp_path / "ref", attention(), given)
    target = run_faulty(tmp_path / "target", attention(), given, Faulty(range(1, 30, 2), blurred))
    assert_same_findings(*both_ways(ref, target))


def test_a_bug_in_the_program_comes_out_as_step_by_step(tmp_path: Path) -> None:
    wrong = net()
    wrong.blocks[1].scale = 1.5  # type: ignore[index, union-attr]
    ref, target = run(tmp_path / "ref", net(), inputs(MANY)), run(tmp_path / "target", wrong, inputs(MANY))
    assert_same_findings(*both_ways(ref, target))


@pytest.mark.parametrize("factor", [1.1, 1.0003])
def test_what_all_steps_share_is_blamed_once(tmp_path: Path, factor: float) -> None:
    """A weight belongs to no step: the first that reads it is named, in folded steps as well."""
    wrong = net()
    with torch.no_grad():
        wrong.blocks[1].up.weight.mul_(factor)  # type: ignore[index, union-attr]
    given = inputs(2 * MANY)
    ref, target = run(tmp_path / "ref", net(), given), run(tmp_path / "target", wrong, given)
    once, each = both_ways(ref, target)
    assert_same_findings(once, each)
    assert once is not None and [(f.label, f.step) for f in once.findings] == [("parameter", 0)]


def test_other_inputs_from_some_step_on_come_out_as_step_by_step(tmp_path: Path) -> None:
    given = inputs(MANY)
    others = [x * 1.01 if step >= 6 else x for step, x in enumerate(given)]
    ref, target = run(tmp_path / "ref", net(), given), run(tmp_path / "target", net(), others)
    once, each = both_ways(ref, target)
    assert_same_findings(once, each)
    assert once is not None and [f.step for f in once.findings] == list(range(6, MANY))


def test_steps_of_which_each_goes_its_own_way_are_judged_one_by_one(tmp_path: Path) -> None:
    """Folding them would take as many rounds as there are steps."""
    given = inputs(4)
    ref = run(tmp_path / "ref", net(), given)
    target = run_faulty(tmp_path / "target", net(), given, Faulty({1, 3}, blurred))
    once, each = both_ways(ref, target)
    assert once is None and each.verdict == "diverged"
    listed = [f for f in dt.align(ref, target).findings if f.label != "nondeterministic"]
    assert [repr(asdict(f)) for f in listed] == [repr(asdict(f)) for f in each.findings]


class Failing(Net):
    """Wrong in one call of many, by as much as asked for."""

    def __init__(self, at: int, factor: float) -> None:
        super().__init__()
        self.at, self.factor, self.calls = at, factor, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (self.factor if self.calls == self.at + 1 else 1.0)


@pytest.mark.parametrize(("factor", "verdict"), [(1.5, "diverged"), (torch.nan, "diverged"), (1.0, "match")])
def test_one_bad_step_of_many_is_found(tmp_path: Path, factor: float, verdict: str) -> None:
    torch.manual_seed(0)
    good = Failing(-1, 1.0).eval()
    torch.manual_seed(0)
    bad = Failing(4, factor).eval()
    ref, target = run(tmp_path / "ref", good, inputs()), run(tmp_path / "target", bad, inputs())
    found, each = dt.align(ref, target), judge_ranks(open_ranks(ref)[0], open_ranks(target)[0])
    assert found.verdict == each.verdict == verdict
    assert [repr(f) for f in found.findings] == [repr(f) for f in each.findings if verdict == "diverged"]
    if verdict == "diverged":
        assert found.first is not None and found.first.step == 4
    # The rows of a nondeterministic op do not count here, and the rest is the same either way.
    assert [pair_row(p) for p in found.pairs] == [pair_row(p) for p in each.pairs]


def test_steps_that_go_astray_are_judged_beside_the_others(tmp_path: Path) -> None:
    """A step whose values vanish takes other rules than its neighbours, without being wrong."""
    given = inputs(8)
    given[5] = torch.zeros(6, 32)
    plain = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    ref, target = run(tmp_path / "ref", plain, given), run(tmp_path / "target", reordered(plain), given)
    folded = fold(open_ranks(ref)[0], open_ranks(target)[0])
    assert folded is not None
    with pytest.raises(AstrayError):
        judge_ranks(folded.ref, folded.target)
    assert folded.astray() == {5}
    assert_same(*both_ways(ref, target))


def test_missing_steps_and_torn_traces_come_out_as_step_by_step(tmp_path: Path) -> None:
    ref = run(tmp_path / "ref", net(), inputs(8))
    short = run(tmp_path / "short", net(), inputs(5))
    once, each = both_ways(ref, short)
    assert_same(once, each)
    assert each.verdict == "inconclusive"
    torn = run(tmp_path / "torn", net(), inputs(8))
    index = next((torn / "rank0").glob("index-*"))
    index.write_bytes(index.read_bytes()[:-40])
    assert_same(*both_ways(ref, torn))


class Delayed(nn.Module):
    """Adds what the call before the last one made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.made: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made.append(self.linear(x))
        return self.made[-1] + self.made[max(len(self.made) - 3, 0)]


def test_steps_that_read_earlier_ones_or_keep_tensors_do_not_repeat(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = Delayed().eval()
    other = copy.deepcopy(one)
    ref, target = run(tmp_path / "ref", one, inputs()), run(tmp_path / "target", other, inputs())
    assert fold(open_ranks(ref)[0], open_ranks(target)[0]) is None
    kept = [run(tmp_path / name, net(), inputs(), save="tensors") for name in ("a", "b")]
    assert fold(*(open_ranks(path)[0] for path in kept)) is None
    alone = [run(tmp_path / name, net(), inputs(2)) for name in ("c", "d")]
    assert fold(*(open_ranks(path)[0] for path in alone)) is None


def test_an_alignment_of_repeated_steps_answers_like_any_other(tmp_path: Path) -> None:
    ref, target = run(tmp_path / "ref", net(), inputs()), run(tmp_path / "target", reordered(net()), inputs())
    found, again = dt.align(ref, target), dt.align(ref, target, steps=range(STEPS))
    assert isinstance(found.pairs, FoldedPairs) and isinstance(again.pairs, list)
    assert [pair_row(p) for p in found.pairs] == [pair_row(p) for p in again.pairs]
    assert pair_row(found.pairs[-1]) == pair_row(again.pairs[-1])
    assert [pair_row(p) for p in found.pairs[3:9]] == [pair_row(p) for p in again.pairs[3:9]]
    assert found.table() == again.table()
    mine, theirs = found.to_json(), again.to_json()
    assert mine == theirs
    last = found.pairs[-1]
    assert [p.target.seq for p in found.upstream(last)] == [p.target.seq for p in again.upstream(last)]


def test_numbers_found_step_by_step_have_the_bits_of_plain_ones() -> None:
    generator = np.random.default_rng(0)
    own, gain = np.exp(generator.normal(0, 5, (2, 50)))
    together, relay = per_step.Together(50), Relay(50)
    errors: list[float] = []

    def error(before: float, at: int) -> float:
        shrunk = per_step.smallest(float(gain[at]), 1.0) * before
        return per_step.hypot(float(own[at]), per_step.greatest(0.0, per_step.hypot(shrunk * 1.0, 0.0)))

    for at in range(50):
        errors.append(error(errors[-1] if at else 2.0, at))
    before = relay.handed(2.0, lambda at: made.values[at - 1])
    steps = per_step.PerStep(gain, together)
    shrunk = per_step.smallest(cast(float, steps), 1.0) * cast(Any, before)
    inner = per_step.greatest(0.0, per_step.hypot(shrunk * 1.0, 0.0))
    made = cast(Any, per_step.hypot(per_step.each(own, together), inner))
    assert (steps < made) == (gain[0] < errors[0])
    with pytest.raises(per_step.SeveralNumbersError):
        float(made)
    for _ in range(49):
        relay.advance()
    assert made.values == errors
    (answers,) = relay.answers()
    assert answers.tolist() == [bool(a > b) for a, b in zip(errors, gain.tolist(), strict=True)]
    with pytest.raises(per_step.SeveralNumbersError):
        made * 2.0


def test_numbers_of_steps_have_the_bits_of_plain_ones() -> None:
    generator = np.random.default_rng(0)
    table = np.exp(generator.normal(0, 30, (3, 200))) * generator.choice([0.0, 1.0, 1.0, np.inf], (3, 200))
    together = per_step.Together(200)
    numbers = [per_step.PerStep(row, together) for row in table]
    for function in (per_step.hypot, per_step.greatest, per_step.smallest):
        found = function(*numbers)
        assert [function(*column) for column in table.T.tolist()] == found.values.tolist(), function
    assert not together.astray.any()
    assert bool(numbers[0] < numbers[1]) == bool(table[0, 0] < table[1, 0])
    assert (together.astray == ((table[0] < table[1]) != (table[0, 0] < table[1, 0]))).all()
    assert f"{numbers[0]:.3g}" == f"{table[0, 0]:.3g}" and together.astray[1:].all()
