"""The mutation bench: cases are what they claim to be, and the scoreboard counts them as it says.

A few cases run through recording and alignment here; every kind on every architecture is planted (and
checked to reach the output) under `-m slow`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

# transformers and what it loads warn on import and on some calls; none of that is ours to judge.
pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("transformers", reason="the models come from transformers (extra: demo)")

import mutants  # noqa: E402
import torch  # noqa: E402
from mutation import kernels, rounding  # noqa: E402
from mutation.cases import ARCHS, CLEAN, MUTANTS, Draw, Subject, Truth, build, drawn, mutant, while_running  # noqa: E402
from mutation.ways import Answer, hunt_pair, live_pair, record_pair  # noqa: E402

import dispatch_trace as dt  # noqa: E402

SOME = (
    "llama-norm_eps-0",
    "bert-mask_ignored-0",
    "llama-rope_pairs-0",
    "bert-kernel_scaled-0",
    "llama-weight_transposed-0",
    "bert-layers_swapped-0",
    "llama-qkv_fused-0",
    "bert-bfloat16_target-0",
)


def test_thirty_mutants_of_many_kinds_half_with_changed_weights() -> None:
    program = mutants.draw_cases(15, 0, "program")
    weights = mutants.draw_cases(15, 0, "weights")
    names = program + weights
    kinds = {mutants.parse_name(name)[1] for name in names}
    assert len(set(names)) == 30, "a case was drawn twice"
    assert len(kinds) >= 8, f"only {len(kinds)} kinds"
    assert {MUTANTS[mutants.parse_name(name)[1]].changes for name in weights} == {"weights"}
    assert "weights" not in {MUTANTS[mutants.parse_name(name)[1]].changes for name in program}
    assert len({name.partition("-")[0] for name in names}) >= 10, "the architectures do not take turns"


@pytest.mark.parametrize("num", [1, 20, 90])
def test_more_cases_than_kinds_are_numbered(num: int) -> None:
    names = mutants.draw_cases(num, 3, "weights")
    assert len(set(names)) == num
    for name in names:
        mutants.parse_name(name)


def test_ten_architectures_times_twenty_kinds() -> None:
    bugs = [known for known in MUTANTS.values() if known.changes != "fault"]
    kinds = Counter(arch for known in bugs for arch in drawn(known.archs, ()))
    assert len(kinds) >= 10
    assert min(kinds.values()) >= 20, f"few kinds of bugs for one of {kinds}"


def test_architectures_and_kinds_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--list", "--arch", "t5,vit", "--kind", "norm_eps,weight_scaled,threads", "--num", "6"]
    assert mutants.main([*chosen, "--num-clean", "2", "--seeds", "1-2,5"]) == 0
    names = capsys.readouterr().out.split()
    assert {name.split("-")[0] for name in names} == {"t5", "vit"}
    assert {name.split("-")[1] for name in names} == {"norm_eps", "weight_scaled", "threads"}
    with pytest.raises(SystemExit):
        mutants.main(["--list", "--arch", "t6"])
    assert "no such kind or architecture: t6" in capsys.readouterr().err


def test_the_quick_subset_is_located(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What every commit is measured by: one case of each sort, on several architectures."""
    assert mutants.main(["--quick", "--save", "leaves"]) == 0
    score = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("leaves"))
    assert score.split()[1:] == ["5/5", "5/5", "0", "0", "0", "0", "0/2", "2/2"]


def test_draws_depend_on_the_seed_alone() -> None:
    assert mutants.draw_cases(15, 5, "program") == mutants.draw_cases(15, 5, "program")
    assert mutants.draw_cases(15, 5, "program") != mutants.draw_cases(15, 6, "program")
    first, again = build("llama-weight_scaled-0", 7), build("llama-weight_scaled-0", 7)
    assert first.truth == again.truth
    assert first.effect == again.effect
    other = build("llama-weight_scaled-0", 8)
    assert other.effect != first.effect


def test_clean_pairs_take_turns_between_architectures() -> None:
    names = mutants.clean_cases(10)
    assert len({mutants.parse_name(name)[1] for name in names}) == 10
    counts = Counter(name.partition("-")[0] for name in names)
    assert max(counts.values()) <= 2, f"one architecture stands for many: {counts}"


def test_every_kind_says_what_bug_it_is() -> None:
    for kind, known in MUTANTS.items():
        assert known.plant.__doc__, f"{kind} has no docstring"
    for kind, harmless in CLEAN.items():
        assert harmless.apply.__doc__, f"{kind} has no docstring"
    assert len(MUTANTS) >= 20


@pytest.mark.parametrize("name", ["llama-nothing-0", "llama-norm_eps", "bert-rope_pairs-0", "norm_eps"])
def test_a_name_that_is_no_case_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no case: expected arch-kind-number"):
        mutants.parse_name(name)


def test_an_unknown_case_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        mutants.main(["--only", "llama-nothing-0"])
    assert stopped.value.code == 2
    assert "'llama-nothing-0' is no case" in capsys.readouterr().err


def test_patterns_select_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--list", "--only", "llama-rope*", "bert-norm_eps-3"]) == 0
    names = capsys.readouterr().out.split()
    assert "llama-rope_pairs-0" in names
    assert names[-1] == "bert-norm_eps-3"


def _check_planted(name: str, directory: Path, seed: int = 0) -> None:
    """A mutant reaches the output and its truth names what is there; a clean pair stays within its bound."""
    built = build(name, seed)
    truth = built.truth
    if truth is None:
        assert built.effect <= built.tolerated, f"{name} is no clean pair: {built.effect:g}"
        return
    changes = MUTANTS[mutants.parse_name(name)[1]].changes
    if changes != "fault":
        assert built.effect > 30 * built.noise, f"{name} is within noise: {built.effect:g}"
    assert (changes == "weights") == _parameters_differ(built.subject), f"{name} changes {changes}"
    for path in (truth.module, *truth.accept_modules):
        built.subject.reference.get_submodule(path)
    _, target = record_pair(built.subject, directory, "meta")
    ops = {record.op for record in dt.open(target).find(kind="op", module=truth.module, call=truth.call)}
    if truth.ops is not None:
        assert ops & set(truth.ops), f"{name}: none of {truth.ops} among {ops}"


def _parameters_differ(subject: Subject) -> bool:
    reference = dict(subject.reference.named_parameters())
    target = dict(subject.target.named_parameters())
    assert reference.keys() == target.keys()
    return any(not torch.equal(reference[name], target[name]) for name in reference)


@pytest.mark.parametrize("name", SOME)
def test_a_case_is_what_it_claims_to_be(name: str, tmp_path: Path) -> None:
    _check_planted(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(ARCHS))
def test_every_case_is_what_it_claims_to_be(arch: str, tmp_path: Path) -> None:
    for name in mutants.every_case(archs=[arch]):
        for seed in (0, 1):
            _check_planted(name, tmp_path, seed)


@pytest.mark.parametrize(
    ("name", "seed", "save", "precision", "outcomes"),
    [
        # A rotary head of which no part is left unrotated: an empty operand carries no error.
        ("phi-norm_centred-0", 1, "stats", "fp32", {"located"}),
        # The caller of a module that was given both operands is innocent.
        ("t5-cross_attention_inputs-0", 1, "leaves", "fp32", {"located"}),
        # In bfloat16 a token goes to another expert, and the experts get other numbers of tokens.
        ("mixtral-bfloat16_target-0", 2, "tensors", "fp32", {"match", "inconclusive"}),
        # A mask that no sketch compares is not what the target does besides.
        ("gpt2-softmax_dim-0", 2, "stats", "mixed", {"located"}),
        # A value stands for the nearest of the reference, however wide the band of a choice of experts.
        ("mixtral-experts_not_renormed-1", 3, "stats", "mixed", {"located"}),
        # The keys that are cut from a fused projection are right, which heals nothing in its queries.
        ("phi-weight_row_zeroed-0", 3, "stats", "mixed", {"located"}),
        # Rows of requests take data, which leaves give back.
        ("qwen-cached_decode-0", 2, "leaves", "fp32", {"match"}),
        # One token alone runs other experts than those of the prompt it stands in, one of them as often.
        ("mixtral-cached_decode-0", 11, "leaves", "mixed", {"match", "inconclusive"}),
    ],
)
def test_what_was_once_missed_or_raised_an_alarm(
    name: str, seed: int, save: str, precision: Any, outcomes: set[str]
) -> None:
    (row,) = mutants.run_case(name, seed, [save], precision=precision)
    assert row.outcome in outcomes, mutants.describe(row)


@pytest.mark.parametrize("name", ["llama-softmax_dim-0", "bert-kernel_element-0", "bert-dropout_active-0"])
def test_the_reference_is_never_touched(name: str) -> None:
    """What is patched for the target's run is undone after it, so that the reference computes as before."""
    subject = build(name, 0).subject
    before = subject.run_reference()
    target = subject.run_target()
    after = subject.run_reference()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    again = subject.run_target()
    assert all(torch.equal(one, other) for one, other in zip(target, again, strict=True)), "not repeatable"


def test_a_helper_is_replaced_only_while_the_module_runs() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.relu(x)

    patched, other = Module(), Module()
    while_running(patched, "torch.nn.functional", relu=torch.neg)
    x = torch.tensor([2.0])
    assert patched(x).item() == -2
    assert other(x).item() == 2
    failing = Module()
    while_running(failing, "torch.nn.functional", relu=lambda x: x.nothing)
    with pytest.raises(AttributeError):
        failing(x)
    assert other(x).item() == 2, "not restored after an exception"


def test_a_kernel_fault_hits_one_op_of_one_body() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with torch.no_grad():
        right = model(x)
        inner = model[0](x)
        site = kernels.Site("1", 0, "aten.addmm", 0)
        with kernels._Fault(model, site, lambda out: out.mul_(2)).planted():
            assert torch.equal(model(x), 2 * right)
            assert torch.equal(model[0](x), inner)
        assert torch.equal(model(x), right), "the fault outlived its context"


def test_a_fault_sits_below_the_recorder(tmp_path: Path) -> None:
    """The trace holds the same ops, and the wrong value as the op's own result."""
    built = build("llama-kernel_scaled-0", 0)
    traces = [dt.open(path) for path in record_pair(built.subject, tmp_path, "stats")]
    ops = [[record.op for record in trace.records if record.kind == "op"] for trace in traces]
    assert ops[0] == ops[1]
    assert built.truth is not None and built.truth.ops is not None
    (op,) = built.truth.ops
    sums = [
        [record.stats()["sum"] for record in trace.find(kind="op", module=built.truth.module, op=op)]
        for trace in traces
    ]
    assert sums[0] != sums[1]


def test_rounding_towards_zero_never_rounds_up() -> None:
    exact = torch.tensor([1 + 2.0**-9, -(1 + 2.0**-8 + 2.0**-9), 3.0], dtype=torch.float64)
    cut = rounding.towards_zero(exact, torch.bfloat16)
    assert cut.tolist() == [1.0, -1.0, 3.0]
    assert exact.bfloat16().tolist() != cut.tolist(), "rounding to nearest does the same here"


def _results(record: dt.Record) -> list[str]:
    return [record.hash(s.name) for s in record.slots if s.role == "out" and s.is_tensor]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mixed"])
@pytest.mark.parametrize("kind", ["fault_scaled_little", "fault_ulp", "fault_truncated", "fault_element"])
def test_a_faulty_kernel_spoils_one_result(kind: str, precision: Any, tmp_path: Path) -> None:
    built = build(f"llama-{kind}-0", 0, precision)
    truth = built.truth
    assert truth is not None and truth.ops is not None
    spoilt = dt.open(record_pair(built.subject, tmp_path / "spoilt", "stats")[1])
    built.subject.around_target.clear()
    sound = dt.open(record_pair(built.subject, tmp_path / "sound", "stats")[1])
    pairs = [p for p in zip(sound.records, spoilt.records, strict=True) if p[0].kind == "op"]
    first = next(b for a, b in pairs if _results(a) != _results(b))
    assert (first.module, first.call, first.op, first.n) == (truth.module, truth.call, truth.ops[0], truth.n)


def test_a_planted_bug_is_located_and_a_clean_pair_matches(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ["--only", "bert-weight_transposed-0", "bert-saved_and_loaded-0", "--json", str(file)]
    assert mutants.main(arguments) == 0
    rows = {(row["case"], row["save"]): row for row in json.loads(file.read_text())}
    assert len(rows) == 4
    for save in ("tensors", "stats"):
        planted = rows["bert-weight_transposed-0", save]
        assert planted["outcome"] == "located", planted
        assert planted["found_label"] == "parameter"
        assert planted["op_ok"] is True
        assert planted["naive"]["allclose"] == "located"
        assert rows["bert-saved_and_loaded-0", save]["outcome"] == "match"


def test_what_the_file_holds_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    row = mutants.Row(
        case="llama-threads-0", seed=0, save="stats", effect=0.0, noise=1e-7, outcome="inconclusive"
    )
    mutants.save_rows(file, [row])
    before = file.read_bytes()
    arguments = ["--only", "llama-threads-0", "--save", "stats", "--json", str(file)]
    assert mutants.main(arguments) == 0
    assert "inconclusive" in capsys.readouterr().out, "the case was run, though its row was there"
    assert file.read_bytes() == before
    row.error = "RuntimeError: it failed"
    mutants.save_rows(file, [row])
    assert mutants.main(arguments) == 0
    assert json.loads(file.read_text())[0]["outcome"] == "match", "a failed case is to be tried again"


def test_a_failing_case_is_a_row_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    @mutant(archs=["bert"])
    def always_fails(subject: Subject) -> Truth:
        raise RuntimeError("no such place")

    try:
        arguments = ["--only", "bert-always_fails-0", "bert-threads-0", "--save", "stats"]
        assert mutants.main(arguments) == 0
    finally:
        del MUTANTS["always_fails"]
    out = capsys.readouterr().out
    assert "RuntimeError: no such place" in out
    assert "bert-threads-0" in out
    stats = next(line for line in out.splitlines() if line.startswith("stats"))
    assert stats.split()[1:] == ["0/1", "0/0", "0", "0", "0", "1", "0/1", "1/1"]


def test_a_bug_that_never_reaches_the_output_is_an_error() -> None:
    @mutant(archs=["bert"])
    def changes_nothing(subject: Subject) -> Truth:
        return Truth(module="", what="nothing")

    try:
        (row,) = mutants.run_case("bert-changes_nothing-0", 0, ["stats"])
    finally:
        del MUTANTS["changes_nothing"]
    assert "none of 10 draws reached the output" in row.error


def _answer(verdict: str, module: str | None = None, op: str | None = None, call: int = 0) -> Answer:
    finding = dt.Finding(module=module or "", call=call, step=0, op=op, label="introduced")
    first = finding if verdict == "diverged" else None
    return Answer(verdict=verdict, findings=[finding] if module is not None else [], first=first)


@pytest.mark.parametrize(
    ("answer", "outcome", "op_ok"),
    [
        (_answer("diverged", "a.b", "aten.mm"), "located", True),
        (_answer("diverged", "a.c", "aten.mm"), "located", True),
        (_answer("diverged", "a.b", "aten.add"), "located", False),
        (_answer("diverged", "a.b", "aten.mm", call=1), "wrong", False),
        (_answer("diverged", "a", "aten.mm"), "wrong", False),
        (_answer("inconclusive", "a.b", "aten.mm"), "inconclusive", False),
        (_answer("match"), "missed", False),
    ],
)
def test_a_mutant_is_judged_by_module_call_and_op(answer: Answer, outcome: str, op_ok: bool) -> None:
    truth = Truth(module="a.b", ops=("aten.mm",), accept_modules=("a.c",), what="a bug")
    row = mutants.Row(case="llama-x-0", seed=0, save="stats", changes="program")
    mutants._judge(row, truth, answer)
    assert (row.outcome, row.op_ok) == (outcome, op_ok)
    assert row.named is (answer.findings != [] and answer.findings[0].module in ("a.b", "a.c"))


@pytest.mark.parametrize("name", ["gemma-gate_up_order-0", "qwen-embedding_row-0"])
def test_live_comparison_and_hunt_name_a_mutant(tmp_path: Path, name: str) -> None:
    built = build(name, 0)
    truth = built.truth
    assert truth is not None
    for ask in (live_pair, hunt_pair):
        answer = ask(built.subject, tmp_path)
        assert answer.verdict == "diverged", ask
        assert (answer.first.module, answer.first.call) == (truth.module, truth.call), ask
    assert answer.runs == 6
    assert answer.written_bytes > 0


@pytest.mark.parametrize("name", ["mamba-weights_int8-0", "vit-matmul_split-0"])
def test_live_comparison_and_hunt_let_a_clean_pair_pass(tmp_path: Path, name: str) -> None:
    built = build(name, 0)
    for ask in (live_pair, hunt_pair):
        assert ask(built.subject, tmp_path).verdict == "match", ask


def test_the_scoreboard_counts_each_outcome() -> None:
    def row(number: int, changes: str, outcome: str, ops: list[str] | None, op_ok: bool | None) -> Any:
        naive = dict.fromkeys(mutants.RULES, "alarm" if changes == "" else "missed")
        return mutants.Row(
            case=f"llama-x-{number}",
            seed=0,
            save="tensors",
            changes=changes,
            outcome=outcome,
            true_ops=ops,
            op_ok=op_ok,
            naive=naive,
        )

    rows = [
        row(0, "program", "located", ["aten.mm"], True),
        row(1, "kernel", "located", None, None),
        row(2, "weights", "wrong", ["aten.mm"], False),
        row(3, "weights", "missed", ["aten.mm"], False),
        row(4, "weights", "inconclusive", ["aten.mm"], False),
        row(5, "", "match", None, None),
        row(6, "", "alarm", None, None),
        row(7, "", "inconclusive", None, None),
    ]
    lines = mutants.scoreboard(rows).splitlines()
    assert lines[1].split() == ["tensors", "2/5", "1/4", "1", "1", "1", "0", "1/3", "1/3"]
    cosine = next(line for line in lines if line.startswith("cosine"))
    assert cosine.split()[-8:] == ["0/5", "-", "0", "0", "5", "0", "3/3", "0/3"]


def test_choices_come_from_the_text_alone() -> None:
    one, same, other = Draw("a"), Draw("a"), Draw("b")
    options = list(range(1000))
    assert one.choice(options) == same.choice(options)
    assert torch.equal(one.randn(8), same.randn(8))
    assert not torch.equal(one.randn(8), other.randn(8))
