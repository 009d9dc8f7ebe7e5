"""Programs that `dispatch-trace run` starts in processes of their own, and processes that nobody records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, dispatch_trace, environment, run_python
from programs import NET

import dispatch_trace as dt


def test_program_without_models_is_an_error_of_the_command(tmp_path: Path) -> None:
    done = dispatch_trace("run", "--output", tmp_path / "t", "--", "-c", "print(1)", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "1\n")
    assert done.stderr == "dispatch_trace: ERROR: nothing was recorded: the program never imported torch.\n"


def test_killed_program_is_said_to_be_killed_and_its_records_counted(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(NET + "import os, time; time.sleep(2.5); os.kill(os.getpid(), 9)")
    done = dispatch_trace("run", "--output", tmp_path / "t", "--", script, cwd=tmp_path)
    assert done.returncode == 128 + 9
    assert "the program was killed by SIGKILL" in done.stderr
    assert "the process ended without closing its trace; the 2" in done.stderr
    assert not dt.open(tmp_path / "t").closed and len(list(dt.open(tmp_path / "t").records)) > 20


# Under other programs -----------------------------------------------------------------------------


def test_module_pytest_and_environment_run_as_without_the_recorder(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import sys, torch\n"
        "def test_one():\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    model(torch.ones(1, 2))\n"
        "    assert sys.argv[1:] == ['-q', 'test_one.py']\n"
    )
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden = 1")
    (tmp_path / "conftest.py").write_text("import sys; assert sys.hidden")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dispatch_trace", "run", "--output", "t-{rank}", "--"),
            *("-m", "pytest", "-q", "test_one.py"),
        ],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{ROOT}:{tmp_path}"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    trace = dt.open(tmp_path / "t-0")
    assert trace.header["models"][""]["class"] == "torch.nn.modules.linear.Linear"


def test_every_rank_of_torchrun_records_itself(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(2, 2)\n"
        "model(torch.ones(1, 2))\n"
        "dist.destroy_process_group()\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script.name]
    done = dispatch_trace("run", "--output", "t", "--", *launcher, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trace = dt.open(tmp_path / "t")
    assert [rank.rank for rank in trace.ranks] == [0, 1] and trace.complete
    assert all(f"rank {rank}: attached to 1 module and " in done.stderr for rank in (0, 1))


# Off ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off", None])
def test_off_means_nothing_at_all(value: str | None) -> None:
    """No hook, no mode, no patched import, and not even torch."""
    program = (
        "import sys, os, atexit\n"
        "path, finders, leave = list(sys.path), list(sys.meta_path), os._exit\n"
        "before = atexit._ncallbacks()\n"
        "import dispatch_trace\n"
        "assert 'torch' not in sys.modules\n"
        "assert (sys.path, sys.meta_path, os._exit) == (path, finders, leave)\n"
        "assert atexit._ncallbacks() == before\n"
        "assert not any(name.startswith('_DISPATCH_TRACE') for name in os.environ)\n"
    )
    if value == "off":  # importing torch takes long: once
        program += (
            "import torch\n"
            "assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl\n"
            "torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
            "assert torch._C._len_torch_dispatch_stack() == 0\n"
            "assert torch.nn.Module.__call__.__module__ == 'torch.nn.modules.module'\n"
            "assert 'dispatch_trace.recorder' not in sys.modules\n"
        )
    done = run_python("-c", program, **({} if value is None else {"DISPATCH_TRACE": value}))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"DISPATCH_TRACE": "flase"}, "DISPATCH_TRACE='flase': expected one of 1, true, yes, on or 0, false"),
        (
            {"DISPATCH_TRACE": "1", "DISPATCH_TRACE_OVERWRITE": "ja"},
            "DISPATCH_TRACE_OVERWRITE='ja': expected",
        ),
        ({"DISPATCH_TRACE": "1", "DISPATCH_TRACE_OUPUT": "x"}, "Closest: DISPATCH_TRACE_OUTPUT."),
        (
            {"DISPATCH_TRACE": "1", "DISPATCH_TRACE_LEVEL": "all"},
            "level='all': expected one of 'op', 'module'",
        ),
    ],
)
def test_nonsense_in_a_variable_is_an_error(variables: dict[str, str], message: str) -> None:
    done = run_python("-c", "import dispatch_trace", **variables)
    assert done.returncode == 1 and message in done.stderr


def test_commands_of_ours_do_not_record_themselves(tmp_path: Path) -> None:
    done = run_python("-m", "dispatch_trace", "show", str(tmp_path), DISPATCH_TRACE="1")
    assert done.returncode == 2 and done.stderr.startswith("NotATraceError: ")
    assert "recorded" not in done.stderr
