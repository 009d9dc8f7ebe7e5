"""The command line end to end: verbs, exit statuses, messages, and what is (not) imported."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from command_line import ROOT, dispatch_trace, record_mlp, run_python

from dispatch_trace.cli import main


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ref and same (equal), wrong (a weight row off), and both kinds again with statistics only."""
    folder = tmp_path_factory.mktemp("traces")
    for name, scale in (("ref", 1.0), ("same", 1.0), ("wrong", 1.5)):
        record_mlp(folder / f"{name}.trace", scale=scale, steps=2)
        record_mlp(folder / f"{name}-stats.trace", scale=scale, steps=2, save="stats")
    return folder


def run(*args: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The command in this process: exit status, stdout, stderr."""
    status = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# --- start-up ---------------------------------------------------------------------------------------


def test_help_is_printed_within_300_ms() -> None:
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        result = dispatch_trace("--help")
        seconds.append(time.perf_counter() - start)
        if seconds[-1] < 0.3:  # once is enough: the machine may be busy, the program may not
            break
    assert result.returncode == 0
    assert "align" in result.stdout and "exit status" in result.stdout
    assert min(seconds) < 0.3, seconds


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["align", "--help"],
        ["show", "{ref}"],
        ["show", "{ref}", "--module", "fc0"],
        ["show", "{ref}", "--record", "3"],
        ["align", "{ref-stats}", "{wrong-stats}"],
        ["align", "{ref-stats}", "{same-stats}"],
    ],
    ids=lambda args: " ".join(args),
)
def test_torch_is_not_imported(args: list[str], traces: Path) -> None:
    args = [str(traces / f"{arg[1:-1]}.trace") if arg.startswith("{") else arg for arg in args]
    code = (
        "import sys; from dispatch_trace.cli import main; status = main(sys.argv[1:]); "
        "loaded = sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'rich')); "
        "print('LOADED', loaded[:3]); sys.exit(status)"
    )
    result = run_python("-c", code, *args)
    assert result.returncode in (0, 1), result.stderr
    assert "LOADED []" in result.stdout


def test_help_imports_nothing_that_is_slow() -> None:
    code = (
        "import sys; from dispatch_trace.cli import main; main(['--help']); "
        "sys.exit(any(m in sys.modules for m in ('numpy', 'msgpack', 'rapidfuzz', 'importlib.metadata')))"
    )
    assert run_python("-c", code).returncode == 0


# --- show and verify --------------------------------------------------------------------------------


def test_show_prints_the_header_and_the_module_tree(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("show", traces / "ref.trace", capsys=capsys)
    assert status == 0
    assert out.splitlines()[0] == f"{traces / 'ref.trace'}  complete"
    assert "level=op, save=tensors" in out
    assert "steps  2" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["(root)", "Sequential", "2", "-"] in rows
    assert ["fc0", "Linear", "2", "4"] in rows
    assert ["act", "ReLU", "2", "2"] in rows
    assert len(out.splitlines()) < 40


def test_show_with_a_step_counts_only_its_records(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("show", traces / "ref.trace", "--step", "1", capsys=capsys)
    assert ["act", "ReLU", "1", "1"] in [line.split() for line in out.splitlines()]


def test_numbered_siblings_of_one_shape_stand_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    import dispatch_trace as dt

    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.ReLU())
    with torch.no_grad(), dt.record(tmp_path / "x.trace", model):
        model(torch.ones(1, 4))
    _, out, _ = run("show", tmp_path / "x.trace", capsys=capsys)
    rows = [line.split() for line in out.splitlines()]
    assert ["0-2", "Linear", "1", "2"] in rows
    assert ["3", "ReLU", "1", "1"] in rows


def test_show_lists_the_records_of_a_module(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("show", traces / "ref.trace", "--module", "fc1", "--step", "0", capsys=capsys)
    assert status == 0
    kinds = [line.split()[2] for line in out.splitlines()[1:]]
    assert kinds == ["param", "param", "op", "op", "module"]
    assert "aten.addmm" in out


def test_show_counts_the_records_that_it_does_not_list(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run("show", traces / "ref.trace", "--op", "addmm", "--top", "1", capsys=capsys)
    assert len(out.splitlines()) == 3
    assert out.splitlines()[-1] == "... and 3 more (--top 4)"


def test_show_prints_one_record_in_full(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, listed, _ = run("show", traces / "ref.trace", "--op", "aten.addmm", "--top", "1", capsys=capsys)
    seq = listed.splitlines()[1].split()[0]
    status, out, _ = run("show", traces / "ref.trace", "--record", seq, capsys=capsys)
    assert status == 0
    assert out.startswith(f"record {seq}  op  fc0  aten.addmm")
    assert "aten.addmm.default" in out
    assert "in.mat1" in out and "in.mat2" in out
    assert "rms" in out and "hash" in out
    assert "command_line.py:" in out, "the source line is the caller's"


@pytest.mark.parametrize("save", ["", "-stats"])
def test_verify_of_a_sound_trace(traces: Path, save: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("verify", traces / f"ref{save}.trace", capsys=capsys)
    assert (status, out.split("  ")[0]) == (0, f"{traces / f'ref{save}.trace'}: sound")


# --- align ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["", "-stats"])
def test_equal_runs_match(traces: Path, save: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = [traces / f"{name}{save}.trace" for name in ("ref", "same")]
    status, out, err = run("align", *pair, capsys=capsys)
    assert (status, out.split()[0], err) == (0, "MATCH", "")
    assert "not compared: 0 records" in out


@pytest.mark.parametrize("save", ["", "-stats"])
def test_a_wrong_weight_diverges_and_is_named(
    traces: Path, save: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [traces / f"{name}{save}.trace" for name in ("ref", "wrong")]
    status, out, err = run("align", *pair, capsys=capsys)
    assert (status, out.split()[0], err) == (1, "DIVERGED", "")
    lines = [line.split() for line in out.splitlines()]
    judge = "estimates)" if save else "twins)"
    assert ["first", "finding", "parameter", "(by", judge] in lines
    assert ["module", "fc1", "(step", "0)"] in lines
    assert ["parameter", "weight"] in lines
    assert len(lines) < 40


def test_a_run_that_lacks_what_is_needed_is_inconclusive(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_mlp(tmp_path / "meta.trace", save="meta", steps=2)
    status, out, _ = run("align", traces / "ref.trace", tmp_path / "meta.trace", capsys=capsys)
    assert (status, out.split()[0]) == (3, "INCONCLUSIVE")
    assert "because   " in out


def test_json_holds_the_facts_of_the_screen(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    status, _, _ = run("align", traces / "ref.trace", traces / "wrong.trace", "--json", file, capsys=capsys)
    found = json.loads(file.read_text())
    assert status == 1
    assert found["verdict"] == "diverged"
    first = found["findings"][found["first"]]
    assert (first["module"], first["label"], first["fatal"]) == ("fc1", "parameter", True)
    assert sum(found["coverage"]["records"].values()) == sum(
        (pair["ref"] is not None) + (pair["target"] is not None) for pair in found["pairs"]
    )


def test_json_is_as_documented(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    run("align", traces / "ref.trace", traces / "wrong.trace", "--json", file, capsys=capsys)
    found = json.loads(file.read_text())
    document = (ROOT / "docs" / "json.md").read_text()

    def documented(section: str) -> set[str]:
        rows = re.findall(
            r"^\| (`.*?) \|", document.split(f"## {section}\n")[1].split("\n## ")[0], re.MULTILINE
        )
        return {name for row in rows for name in re.findall(r"`(\w+)`", row)}

    assert set(found) == set(re.findall(r'^  "(\w+)":', document, re.MULTILINE))
    assert set(found["findings"][0]) == documented("finding")
    assert set(found["coverage"]) == documented("coverage")
    assert set(found["pairs"][0]) == documented("pair")
    site = next(pair["ref"] for pair in found["pairs"] if pair["ref"] is not None)
    for name in site:
        assert f"`{name}`" in document


def test_steps_can_be_chosen(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    for option, steps in (("0", {0}), ("1-1", {1}), ("0-1", {0, 1})):
        run(
            "align",
            traces / "ref.trace",
            traces / "same.trace",
            "--step",
            option,
            "--json",
            file,
            capsys=capsys,
        )
        pairs = json.loads(file.read_text())["pairs"]
        assert {pair["target"]["step"] for pair in pairs if pair["target"]["kind"] == "op"} == steps


def test_renamed_modules_are_paired(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_mlp(tmp_path / "renamed.trace", steps=2, root="dense", scale=1.5)
    pair = [traces / "ref.trace", tmp_path / "renamed.trace"]
    rules = ["--rename", "fc0=dense0", "--rename", "fc1=dense1"]
    status, out, _ = run("align", *pair, *rules, capsys=capsys)
    assert status == 1
    assert ["module", "dense1", "(step", "0)"] in [line.split() for line in out.splitlines()]
    record_mlp(tmp_path / "same.trace", steps=2, root="dense")
    assert run("align", pair[0], tmp_path / "same.trace", *rules, capsys=capsys)[0] == 0


def test_exact_mode_and_tolerance_move_the_line(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_mlp(tmp_path / "near.trace", steps=2, scale=1 + 2**-23)
    pair = [traces / "ref.trace", tmp_path / "near.trace"]
    assert run("align", *pair, "--exact", capsys=capsys)[0] == 1
    assert run("align", traces / "ref.trace", traces / "same.trace", "--exact", capsys=capsys)[0] == 0
    wrong = [traces / "ref.trace", traces / "wrong.trace"]
    assert run("align", *wrong, capsys=capsys)[0] == 1
    assert run("align", *wrong, "--tolerance", "10", capsys=capsys)[0] == 0


def test_tools_align_is_the_same_program(traces: Path, tmp_path: Path) -> None:
    pair = [traces / "ref.trace", traces / "wrong.trace"]
    tool = run_python(str(ROOT / "tools" / "align.py"), *map(str, pair), cwd=tmp_path, PYTHONPATH="")
    verb = dispatch_trace("align", *pair)
    assert (tool.returncode, tool.stdout, tool.stderr) == (verb.returncode, verb.stdout, verb.stderr)
    assert tool.returncode == 1


def test_progress_is_shown_on_a_terminal_only(traces: Path) -> None:
    import pty
    import subprocess

    from command_line import environment

    command = [sys.executable, "-m", "dispatch_trace", "align", traces / "ref.trace", traces / "same.trace"]
    leader, follower = pty.openpty()
    env = environment(TERM="xterm-256color")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, cwd=ROOT, env=env) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # Linux ends a pseudo-terminal with EIO
            while part := os.read(leader, 4096):
                shown += part
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(leader)
    assert process.returncode == 0
    assert out.startswith(b"MATCH")
    assert b"\x1b[" in shown, "a bar was drawn"
    assert dispatch_trace("align", *command[-2:]).stderr == ""


# --- usage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: VERB"),
        (["polish"], "invalid choice: 'polish'"),
        (["align", "only-one"], "the following arguments are required: TARGET"),
        (["align", "a", "b", "--top", "-3"], "'-3' is no whole number from 0 on"),
        (["align", "a", "b", "--top", "x"], "'x' is no whole number from 0 on"),
        (["align", "a", "b", "--tolerance", "nan"], "'nan' is no finite number from 0 on"),
        (
            ["align", "a", "b", "--step", "x"],
            "ConfigError: --step 'x' is neither a number N nor a range N-M.",
        ),
        (["align", "a", "b", "--step", "3-1"], "ConfigError: --step '3-1' is upside down."),
        (["align", "a", "b", "--rename", "x"], "ConfigError: --rename 'x' has no '='."),
        (["align", "a", "b", "--rename", "x=y", "--rename", "x=z"], "gives 'x' two names: 'y' and 'z'"),
        (["align", "a", "b", "--json", "no/such/folder/x"], "'no/such/folder' is no directory"),
        (["align", "a", "b", "--json", "."], "--json '.' cannot be written: it is a directory."),
        (["show", "a", "--kind", "x"], "invalid choice: 'x'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_status_2_and_one_message(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(*args, capsys=capsys)
    assert status == 2
    assert message in err
    assert out == ""


def test_nothing_found_is_status_2(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = traces / "ref.trace"
    status, _, err = run("show", trace, "--module", "fc9", capsys=capsys)
    assert status == 2
    assert err.startswith("NoMatchError: --module='fc9' matched 0 of 4 modules.\nClosest: ")
    status, _, err = run("show", trace, "--record", "99999", capsys=capsys)
    assert status == 2
    assert err.startswith("NoMatchError: --record 99999: rank 0 holds ")
    status, _, err = run("show", trace, "--op", "conv2d", capsys=capsys)
    assert status == 2
    assert "no record of" in err and "op='conv2d'" in err
    status, _, err = run("show", trace, "--op", "(", capsys=capsys)
    assert status == 2
    assert err.startswith("PatternError: --op '(' is no regular expression")


def test_an_unforeseen_error_is_neither_match_nor_diverged(
    traces: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dispatch_trace.report import listing

    def broken(*args: object, **kwargs: object) -> str:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(listing, "overview", broken)
    status, _, err = run("show", traces / "ref.trace", capsys=capsys)
    assert status == 2
    assert err.startswith("internal error: ZeroDivisionError: by zero\nThis is a bug of dispatch_trace.")
    monkeypatch.setenv("DISPATCH_TRACE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["show", str(traces / "ref.trace")])


def test_a_reader_that_stops_early_is_no_error(traces: Path) -> None:
    import subprocess

    from command_line import environment

    command = f"{sys.executable} -m dispatch_trace show {traces / 'ref.trace'} --top 999 --op '.*' | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert result.stdout.startswith("seq")
    assert result.stderr == ""


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import dispatch_trace as package

    status, out, _ = run("--version", capsys=capsys)
    assert (status, out) == (0, f"dispatch-trace {package.__version__}\n")
