"""A few of the further zoo: each holds a rule fast that the cases of `tests/zoo` do not need.

`make more-zoo` runs all of it. The cases run in this process.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from test_zoo import tool

FOLDER = Path(__file__).resolve().parent / "more_zoo"
FILES = tool.find_cases(FOLDER)
# What goes wrong -> the numbers of cases that show it.
QUICK = {
    "memory is written to before it is read": ("152",),
    "the right value is written to another place": ("252",),
    "an argument changes the sizes of what follows": ("127",),
    "running statistics are written though the schema denies it": ("153",),
    "the recomputed pass draws other numbers": ("155",),
    "masks of two kinds meet a row that is masked throughout": ("169",),
    "a head that nobody reads differs": ("211",),
    "a module takes the wrong one of its own values": ("301",),
    "a value that is shared is written over": ("334",),
    "weights hold the same numbers in another order": ("349",),
    "values and weights change behind the recorder's back": ("366", "367"),
    "a copy reads the memory that it writes": ("377",),
    "what one call is not handed, others are right without": ("373",),
    "a module is to work on a constant, and hands it on": ("410",),
    "columns are in another order, and taken apart accordingly": ("426",),
    "memory grows after something has looked at it": ("427",),
    "a choice is made of a result of another size": ("444",),
    "a weight with two names is written to twice": ("459",),
}

# What the cases warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem)
        for file in FILES
        if tool.case_id(file) in {number for numbers in QUICK.values() for number in numbers}
    ],
)
def test_case(file: Path) -> None:
    settings = torch.get_rng_state()
    try:
        row = tool.run_case(file, "tensors")
    finally:
        torch.set_rng_state(settings)
    assert row["error"] is None, row["error"]
    found = f"{row['found_label']} {row['found_module']!r} {row['found_op']}"
    if row["group"] == "defect":
        assert row["verdict"] == "diverged"
        assert row["module_ok"] and row["op_ok"], f"blames {found}"
    else:
        assert row["verdict"] == "match", found
        assert row["capture_ok"] is not False, row["missing"]


def expected(file: Path) -> dict[str, Any]:
    """`EXPECT` of a case, read and not run: some cases import transformers."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "EXPECT":
            found: dict[str, Any] = ast.literal_eval(statement.value)
            return found
    raise AssertionError(f"{file.name} has no EXPECT")


def test_every_case_says_where_it_was_reported_and_what_is_right() -> None:
    groups = []
    for file in FILES:
        first = file.read_text(encoding="utf-8").splitlines()[0]
        assert " Ref: " in first and "#" in first, file.name
        expect = expected(file)
        assert expect["kind"] and expect["note"], file.name
        groups.append(tool.group_of(expect))
    assert len(FILES) == len({tool.case_id(file) for file in FILES})
    assert (groups.count("defect"), groups.count("benign")) == (199, 79)
