"""The pytest plugin: the fixture `trace_regression` and `--trace-update` (docs/testing.md).

Loaded by pytest wherever the package is installed, so it imports neither torch nor the rest of the package
until a test asks for the fixture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch_trace.testing import Regression

_WRITTEN = "dispatch_trace_written"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dispatch_trace")
    group.addoption(
        "--trace-update",
        action="store_true",
        help="write the golden traces of trace_regression instead of comparing with them",
    )
    parser.addini(
        "trace_golden",
        "folder of golden traces, relative to the test's own (default: golden)",
        default="golden",
    )


@pytest.fixture
def trace_regression(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Regression]:
    """Holds a model against the golden trace of this test: `trace_regression(model, *inputs)`."""
    from dispatch_trace.testing import Regression

    path = Path(request.path)
    found = Regression(
        path.parent / str(request.config.getini("trace_golden")) / path.stem,
        tmp_path,
        name=request.node.name,
        root=request.config.rootpath,
        update=bool(request.config.getoption("--trace-update")),
    )
    yield found
    for written in found.written:
        request.node.user_properties.append((_WRITTEN, str(written)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names the golden traces that were written, whichever process wrote them."""
    written = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "teardown" or hasattr(report, "user_properties")
        for key, value in getattr(report, "user_properties", ())
        if key == _WRITTEN
    ]
    if written:
        from dispatch_trace.testing import golden_size

        terminalreporter.section("golden traces")
        for path in dict.fromkeys(written):
            terminalreporter.line(f"wrote {path} ({golden_size(path)})")
