"""The names of `import dispatch_trace as dt`."""

from __future__ import annotations

import pytest
from command_line import run_python

import dispatch_trace as dt


@pytest.mark.parametrize("name", dt.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(dt, name) is not None
    assert name in dir(dt)


def test_align_stays_the_function_when_the_subpackage_of_that_name_is_imported() -> None:
    code = (
        "import dispatch_trace as dt; import dispatch_trace.align.pairs\n"
        "from dispatch_trace import align\n"
        "from dispatch_trace.align import steps\n"
        "assert dt.align is align and dt.align.__name__ == 'align', dt.align\n"
        "assert steps.chosen_steps(None) is None"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_imports_no_torch() -> None:
    result = run_python("-c", "import dispatch_trace, sys; sys.exit('torch' in sys.modules)")
    assert result.returncode == 0, result.stderr
