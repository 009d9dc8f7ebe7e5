"""The documents tell what the code does: errors, links, options, make targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import ROOT

from dispatch_trace import errors

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def error_names() -> set[str]:
    return {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.DispatchTraceError)
    }


def test_every_error_has_a_section() -> None:
    sections = set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    assert sections == error_names() - {"DispatchTraceError"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_documents_are_ones_that_the_parser_takes(document: Path) -> None:
    import shlex

    from dispatch_trace.cli import _parser

    for line in re.findall(
        r"^ {4}(dispatch-trace (?:align|show|verify|demo).*)$", document.read_text(), re.M
    ):
        _parser().parse_args(shlex.split(line, comments=True)[1:])  # exits where it does not know an option


def test_the_readme_opens_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines[2:4] == ["    make demo", "    make test"]


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint", "types", "bench", "zoo"} <= targets
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^ {4}|`)make ([a-z]+)", document.read_text(), re.MULTILINE):
            assert target in targets, f"{document.name} says `make {target}`"


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60
