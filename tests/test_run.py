"""Programs recorded without a line in them: what is found, named, counted, refused, and left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import dispatch_trace
from programs import EXAMPLES, NET, Programs, programs

import dispatch_trace as dt


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("programs")) as found:
        yield found


def models_of(path: Path) -> dict[str, int]:
    """Name of each model and how many steps it has."""
    steps = dt.open(path).steps
    return {name: sum(s.model == name for s in steps) for name in dict.fromkeys(s.model for s in steps)}


# What is found ------------------------------------------------------------------------------------


def test_pipeline_of_three_models_is_recorded_model_by_model_and_aligned(
    tmp_path: Path, server: Programs
) -> None:
    """The first run goes through the command line, in processes of its own from end to end."""
    done = dispatch_trace(
        "run", "--output", tmp_path / "a.trace", "--save", "tensors", "--", EXAMPLES / "draw.py", cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "picture (1, 6, 12)\n")
    assert "modules of 3 models (text_encoder, transformer, vae) and " in done.stderr

    trace = dt.open(tmp_path / "a.trace")
    assert trace.complete and trace.verify() == []
    assert models_of(tmp_path / "a.trace") == {"text_encoder": 1, "transformer": 3, "vae": 1}
    assert set(trace.header["models"]) == {row["model"] for row in trace.header["modules"]}
    encoder = [r for r in trace.records if r.model == "text_encoder" and r.kind == "module"]
    assert {r.step for r in encoder} == {0} and any(r.module == "blocks.1.attention" for r in encoder)
    steps = [r.step for r in trace.find(model="transformer", module="blocks.1", kind="module")]
    assert steps == [0, 1, 2]
    # What the scheduler computes between two calls belongs to the step before it.
    assert [r.step for r in trace.find(model="transformer", module="", op="aten.sub") if r.call is None][:1]
    assert [r.step for r in trace.find(model="vae", module="decoder.0", op="aten.addmm")] == [0]

    for name, arguments in {"b": [], "c": ["--fault"]}.items():
        ended = server.run(
            EXAMPLES / "draw.py", *arguments, OUTPUT=str(tmp_path / f"{name}.trace"), SAVE="tensors"
        )
        assert ended.status == 0, ended.output
    assert dt.align(tmp_path / "a.trace", tmp_path / "b.trace").verdict == "match"
    found = dt.align(tmp_path / "a.trace", tmp_path / "c.trace")
    assert found.verdict == "diverged" and found.first is not None
    assert (found.first.module, found.first.label) == ("decoder.0", "parameter")
    assert found.first.model == "vae"


def test_single_model_has_no_name_and_method_of_a_model_stands_for_its_call(
    tmp_path: Path, server: Programs
) -> None:
    program = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
    def encode(self, x):
        return self.encoder(x)
    def generate(self, x):
        x = self.encode(x)
        for _ in range(2):
            x = self.decoder(x)
        return x

model = Model()
with torch.no_grad():
    model.generate(torch.ones(1, 4))
    model.generate(torch.ones(1, 4))
"""
    ended = server.run(program, OUTPUT=str(tmp_path / "t"))
    assert ended.said.startswith("attached to 3 modules and "), ended.output
    trace = dt.open(tmp_path / "t")
    # A step lasts until one of its parts is called again.
    assert models_of(tmp_path / "t") == {"": 4}
    found = [(r.step, r.module, r.call) for r in trace.records if r.kind == "module"]
    calls = [(0, "encoder"), (0, "decoder"), (1, "decoder"), (1, "encoder"), (2, "decoder"), (3, "decoder")]
    assert found == [(*call, 0) for call in calls]


def test_names_come_from_what_holds_a_model_and_are_never_shared(tmp_path: Path, server: Programs) -> None:
    program = """
import torch
from torch import nn

class Runner:
    def __init__(self):
        self.model = nn.Linear(4, 4)
    def __call__(self, x):
        return self.model(x)

def call(m, x):
    return m(x)

first, second = Runner(), Runner()
held = {"critic": nn.Linear(4, 4)}
plain = nn.Linear(4, 4)
loss = nn.MSELoss()
x = torch.ones(1, 4)
with torch.no_grad():
    first(x), second(x), held["critic"](x), call(plain, x)
    loss(plain(x), x)
"""
    server.run(program, OUTPUT=str(tmp_path / "t"))
    # A loss has nothing to learn and is no model: it belongs to what ran before it.
    names = {"model": 1, "Linear": 1, "critic": 1, "plain": 2}
    assert models_of(tmp_path / "t") == names
    losses = list(dt.open(tmp_path / "t").find(op="aten.mse_loss"))
    assert [(r.model, r.module, r.call, r.step) for r in losses] == [("plain", "", None, 1)]


def test_step_filter_counts_by_model_and_says_whom_it_left_out(tmp_path: Path, server: Programs) -> None:
    ended = server.run(EXAMPLES / "draw.py", OUTPUT=str(tmp_path / "t"), STEPS="2")
    assert models_of(tmp_path / "t") == {"transformer": 1}
    assert [step.step for step in dt.open(tmp_path / "t").steps] == [2]
    assert "of 1 step to " in ended.said
    assert "no step of text_encoder, vae is among those asked for" in ended.said


@pytest.mark.parametrize(
    ("root", "found"),
    [
        ("net", {"": 3}),  # a variable
        ("Sequential", {"": 3}),  # a class
        (r"torch\.nn\..*\.ReLU", {"": 3}),  # a pattern over classes
        ("net.0", {"": 3}),  # an attribute path
        ("0-1", {"0": 3, "1": 3}),  # a range of paths below the outermost module
    ],
)
def test_root_takes_a_variable_a_class_a_pattern_or_a_path(
    tmp_path: Path, server: Programs, root: str, found: dict[str, int]
) -> None:
    ended = server.run(NET, OUTPUT=str(tmp_path / "t"), ROOT=root)
    assert ended.status == 0 and "ERROR" not in ended.said, ended.output
    steps = dt.open(tmp_path / "t").steps
    assert sorted(sum(s.model == name for s in steps) for name in {s.model for s in steps}) == sorted(
        found.values()
    )


def test_backward_and_other_threads_are_recorded(tmp_path: Path, server: Programs) -> None:
    program = """
import threading, torch
from torch import nn
model = nn.Linear(4, 1)
model(torch.ones(2, 4)).sum().backward()
thread = threading.Thread(target=lambda: model(torch.ones(1, 4)))
thread.start(), thread.join()
"""
    server.run(program, OUTPUT=str(tmp_path / "t"))
    trace = dt.open(tmp_path / "t")
    assert {r.grad_phase for r in trace.records} == {"fwd", "bwd"}
    assert [s.step for s in trace.steps] == [0, 1] and trace.complete


def test_mode_of_the_program_around_the_first_call_leaves_the_stack_in_order(
    tmp_path: Path, server: Programs
) -> None:
    program = """
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
model = nn.Linear(4, 4)
for _ in range(2):
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        model(torch.ones(2, 4))
    assert torch._C._len_torch_dispatch_stack() == 0, "a mode was left"
print("flops", flops.get_total_flops())
"""
    ended = server.run(program, OUTPUT=str(tmp_path / "t"))
    assert ended.status == 0 and "flops 64" in ended.output, ended.output
    assert [r.step for r in dt.open(tmp_path / "t").find(op="aten.addmm")] == [0, 1]


def test_lines_of_the_script_are_recorded(tmp_path: Path, server: Programs) -> None:
    program = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        h = x * 2
        return h + 1

def main():
    model = Model()
    for _ in range(2):
        y = model(torch.ones(3))

main()
"""
    ended = server.run(program, OUTPUT=str(tmp_path / "t"), LINES="__main__")
    assert "ERROR" not in ended.said, ended.output
    found = [(r.name, r.step, r.source) for r in dt.open(tmp_path / "t").records if r.kind == "inline"]
    assert [(name, step) for name, step, _ in found] == [("Model.forward.h", 0), ("Model.forward.h", 1)]
    assert all(source is not None and source.endswith(".py:7") for _, _, source in found)
    ended = server.run(program, OUTPUT=str(tmp_path / "u"), LINES="__mein__")
    assert "ERROR: NoMatchError: lines='__mein__' matched no module with functions" in ended.said


# Nothing found ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STEPS": "7-9"}, "no step matched"),
        ({"SELECT": "nett"}, "select='nett' matched 0 of 3 modules"),
        ({"OPS": "aten.foo"}, "ops='aten.foo' matched none of"),
        ({"ROOT": "net.7"}, "root='net.7' matched none of 3 modules that were called; their classes: Linear"),
        ({"LEVEL": "module", "STEPS": "5"}, "no step matched"),
    ],
)
def test_recording_without_records_fails_loudly(
    tmp_path: Path, server: Programs, variables: dict[str, str], message: str
) -> None:
    ended = server.run(NET, OUTPUT=str(tmp_path / "t"), **variables)
    assert ended.status == 0  # the program's
    assert "ERROR: " in ended.said and message in ended.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "nosuch.py"], "ConfigError: run: there is no 'nosuch.py' in"),
        ([], "ConfigError: run: no program. Write: dispatch-trace run [OPTIONS] -- script.py ARGS"),
        (["--output", "t{x}", "--", "-c", "1"], "{x} stands for nothing; {pid} and {rank} do."),
        (["--steps", "3-1", "--", "-c", "1"], "ConfigError: steps '3-1' is upside down."),
        (["--save", "much", "--", "-c", "1"], "ConfigError: save='much': expected one of"),
        (["--select", "(", "--", "-c", "1"], "PatternError: select='(' is no regular expression"),
        (["--root", "3-1", "--", "-c", "1"], "PatternError: root='3-1': the range 3-1 is upside down."),
        (["--output", "taken", "--", "-c", "1"], "TraceExistsError: taken is a file"),
    ],
)
def test_bad_usage_is_one_message_before_the_program_runs(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from dispatch_trace.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err.replace(f"{tmp_path}/", "")


def test_trace_that_is_there_is_replaced_only_when_asked(tmp_path: Path, server: Programs) -> None:
    output = str(tmp_path / "t")
    server.run(NET, OUTPUT=output)
    ended = server.run(NET, OUTPUT=output)
    assert ended.status == 0 and "ERROR: nothing was recorded: TraceExistsError: " in ended.said
    assert "ERROR" not in server.run(NET, OUTPUT=output, OVERWRITE="yes").said
    for _ in range(2):  # each process a trace of its own
        server.run(NET, OUTPUT=f"{output}-{{pid}}-{{rank}}")
    names = [path.name.split("-") for path in tmp_path.glob("t-*")]
    assert len(names) == 2 and all(pid.isdecimal() and rank == "0" for _, pid, rank in names)


# How it ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit(7)", 7, ""),
        ("raise ValueError('no')", 1, "the program raised ValueError; what was recorded until then is kept"),
        ("import os; os._exit(9)", 9, "the program ended by os._exit; the trace was closed before"),
        ("import os; os.fork() or (net(torch.ones(2, 4)), sys.exit(3))", 0, ""),
    ],
)
def test_exit_status_and_records_are_kept_however_a_program_ends(
    tmp_path: Path, server: Programs, ending: str, status: int, said: str
) -> None:
    ended = server.run(NET + ending, OUTPUT=str(tmp_path / "t"))
    assert ended.status == status and said in ended.said, ended.output
    trace = dt.open(tmp_path / "t")
    assert trace.closed and trace.verify() == []
    assert len(list(trace.find(op="aten.addmm"))) == 3
    assert trace.ranks[0].end is not None
    assert trace.ranks[0].end["aborted"] is ("raised" in said)


def test_switch_of_the_kernel_is_a_variable_like_any_other() -> None:
    from dispatch_trace.environment import settings_from

    assert settings_from({"DISPATCH_TRACE_KERNEL": "off", "DISPATCH_TRACE_LEVEL": "module"}).level == "module"
