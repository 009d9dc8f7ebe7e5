"""Rename rules in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aligning import net, record
from torch import nn

from dispatch_trace import cli
from dispatch_trace.align.rename_file import read_rules
from dispatch_trace.errors import RenameError


def test_a_file_is_a_mapping_of_paths(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("blocks: layers\nhead: out\n")
    assert read_rules(path) == {"blocks": "layers", "head": "out"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "holds a list. Expected a mapping"),
        ("a: 3\n", "quote numbers"),
        ("a: b\na: c\n", "line 2: 'a' has two names: 'b' and 'c'. Keep one"),
        ("a: [b\n", "is no YAML"),
    ],
)
def test_anything_else_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(RenameError) as caught:
        read_rules(path)
    assert message in str(caught.value)


def test_rules_come_from_a_file_and_a_template_lists_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = record(tmp_path / "ref", net(), torch.ones(2, 32))
    target = record(tmp_path / "target", nn.Sequential(nn.Linear(32, 8)), torch.ones(2, 32))
    template, rules = tmp_path / "template.yaml", tmp_path / "rules.yaml"
    cli.main(["align", str(ref), str(target), "--rename-template", str(template)])
    assert '# "blocks.0": ' in template.read_text() and read_rules(template) == {}
    rules.write_text("nothing: '0'\n")
    assert cli.main(["align", str(ref), str(target), "--rename", str(rules)]) == 2
    assert "'nothing' matches 0 of" in capsys.readouterr().err
