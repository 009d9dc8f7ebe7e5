"""Patterns over module paths: ranges, full matches and the messages when nothing matches."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch_trace.errors import DispatchTraceError, NoMatchError, PatternError
from dispatch_trace.patterns import closest_paths, compile_select, expand_ranges, select_modules

PATHS = ["", "embed", *(f"layers.{i}{end}" for i in range(12) for end in ("", ".attn", ".mlp")), "norm"]


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("layers.0-3", ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("0-1.mlp", ["0.mlp", "1.mlp"]),
        ("5-5", ["5"]),
        (r"layers\.9-10\.mlp", [r"layers\.9\.mlp", r"layers\.10\.mlp"]),
        ("a.0-1.b.2-3", ["a.0.b.2", "a.0.b.3", "a.1.b.2", "a.1.b.3"]),
        ("(layers.0-1|norm)", ["(layers.0|norm)", "(layers.1|norm)"]),
        ("h.08-10", ["h.08", "h.09", "h.10"]),
        ("layers.[0-3]", ["layers.[0-3]"]),
        ("layers.x0-3", ["layers.x0-3"]),
        ("layers.0-3x", ["layers.0-3x"]),
        (r"layers.0\-3", [r"layers.0\-3"]),
        (r"layers.0-3\d", [r"layers.0-3\d"]),
        ("", [""]),
    ],
)
def test_a_range_is_a_whole_component(pattern: str, expanded: list[str]) -> None:
    assert expand_ranges(pattern) == expanded


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["layers", "attn", "q_proj", r"\d+", ".*"]),
            st.tuples(st.integers(0, 12), st.integers(0, 3)).map(lambda r: f"{r[0]}-{r[0] + r[1]}"),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.sampled_from(["layers", "attn", "0", "3", "11", "15"]), min_size=1, max_size=4),
)
def test_a_selector_matches_what_one_of_the_expanded_patterns_matches(
    components: list[str], path: list[str]
) -> None:
    pattern, name = ".".join(components), ".".join(path)
    expected = any(re.fullmatch(expanded, name) for expanded in expand_ranges(pattern))
    assert compile_select(pattern).matches(name) == expected


def test_matches_are_full_matches() -> None:
    selector = compile_select(["layers.1", "norm"])
    assert selector.patterns == ("layers.1", "norm")
    assert [path for path in PATHS if selector.matches(path)] == ["layers.1", "norm"]
    assert compile_select(".*").matches("")


def test_what_lies_beneath_a_match_is_covered() -> None:
    selector = compile_select("layers.0-1")
    assert [path for path in PATHS if selector.covers(path)] == [
        "layers.0",
        "layers.0.attn",
        "layers.0.mlp",
        "layers.1",
        "layers.1.attn",
        "layers.1.mlp",
    ]
    assert all(compile_select("").covers(path) for path in PATHS)


def test_modules_come_in_their_own_order_and_once() -> None:
    assert select_modules(["norm", "layers.3-2000.attn|layers.11.*", "norm"], PATHS) == [
        *(f"layers.{i}.attn" for i in range(3, 11)),
        "layers.11",
        "layers.11.attn",
        "layers.11.mlp",
        "norm",
    ]


def test_no_match_names_the_closest_path() -> None:
    paths = ["", "blocks", "blocks.0", "blocks.0.attn", "blocks.0.mlp.fc1", "head"]
    with pytest.raises(NoMatchError) as caught:
        select_modules("blocks.*.atn", paths)
    assert str(caught.value) == (
        "select='blocks.*.atn' matched 0 of 6 modules.\n"
        "Closest: 'blocks.0.attn'. Patterns are full-match regexes on dotted paths."
    )
    assert isinstance(caught.value, DispatchTraceError)


def test_one_pattern_of_several_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(
        NoMatchError, match=r"modules='layers\.12' matched 0 of 39 modules\.\nClosest: 'layers\.1"
    ):
        select_modules(["norm", "layers.12"], PATHS, option="modules")


def test_without_any_module_there_is_nothing_to_propose() -> None:
    with pytest.raises(NoMatchError, match=r"matched 0 of 1 modules\.\nPatterns are full-match"):
        select_modules("mlp", [""])
    assert closest_paths("mlp", []) == []


def test_escapes_and_wildcards_do_not_hide_the_closest_path() -> None:
    paths = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(3) for p in "qkvo"]
    assert (
        closest_paths(r"model\.layers\.\d+\.self_atn\.q_proj", paths)[0] == "model.layers.0.self_attn.q_proj"
    )


@pytest.mark.parametrize("compiles", [expand_ranges, compile_select])
def test_an_upside_down_range_is_an_error(compiles: object) -> None:
    assert callable(compiles)
    with pytest.raises(PatternError, match=r"select='layers\.3-0': the range 3-0 is upside down\. Write 0-3"):
        compiles("layers.3-0")


def test_an_invalid_expression_is_an_error_that_says_where() -> None:
    with pytest.raises(PatternError, match=r"select='layers\.\(' is no regular expression: .* position 7\. "):
        compile_select("layers.(")


def test_ranges_cannot_eat_all_memory() -> None:
    with pytest.raises(PatternError, match=r"Write \\d\+ for any number"):
        compile_select("layers.0-99999999999")
    with pytest.raises(PatternError, match="more than 100000 patterns"):
        expand_ranges("0-999.0-999")
    assert compile_select("0-999.0-999").matches("999.0"), "as an expression it is small"
