"""The HTML report in a real browser: what stands on it, and what clicks and keys do."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import align_models, batch, changed, net, record
from browser import CHROMIUM, Browser
from command_line import ROOT, dispatch_trace, run_python
from torch import nn

import dispatch_trace as dt
from dispatch_trace.report import html_details
from dispatch_trace.report.html import command, embedded

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium (Debian), or one on the PATH"
)
HOSTILE = (
    "<script>pwned=1<\u2215script>",
    "</script><script>pwned=2</script>",
    '"><img src=x onerror=pwned=3>',
)


def wrong_scale(model: Any) -> None:
    model.blocks[1].scale = 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def diverged(folder: Path) -> dt.Alignment:
    found = align_models(folder, net(), changed(wrong_scale), batch(), twins=False)
    assert found.verdict == "diverged"
    found.to_html(folder / "diverged.html")
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser, folder: Path, diverged: dt.Alignment) -> Iterator[Browser]:
    """The page of the diverged pair, freshly opened; no script may fail, nothing may be asked for."""
    browser.requests.clear()
    browser.errors.clear()
    browser.open(folder / "diverged.html")
    yield browser
    assert browser.errors == []
    assert all(address.startswith("file:") for address in browser.requests)


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# --- without a browser ------------------------------------------------------------------------------


def test_the_first_screen_stands_in_the_page_as_text(diverged: dt.Alignment) -> None:
    assert diverged.first is not None
    shown = diverged.to_html().partition("<script")[0]
    for fact in ("diverged", "1 fatal finding", diverged.first.module, diverged.first.op, diverged.ref):
        assert fact is not None and fact in shown
    assert "--no-twins --html report.html" in shown


def test_the_page_refers_to_nothing_outside_itself(diverged: dt.Alignment) -> None:
    text = diverged.to_html()
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)\s*=\s*["']""", text)
    for name in ("report_data.js", "report_page.js", "report_detail.js"):
        script = (ROOT / "dispatch_trace" / "report" / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(", script)


def test_the_command_gives_every_option_again() -> None:
    options = {
        "rename": {"a b": "c"},
        "declared": "matmul bf16",
        "steps": [0, 2],
        "tolerance": 1e-3,
        "exact": True,
    }
    assert command("r", "t x", options) == (
        "dispatch-trace align r 't x' --rename 'a b=c' --declared 'matmul bf16' --step 0 --step 2 "
        "--tolerance 0.001 --exact --html report.html"
    )
    assert command("r", "t", {"refs": ["r2", "r 3"]}).startswith(
        "dispatch-trace align r t --ref-run r2 --ref-run 'r 3' "
    )
    assert command("r", "t", {"rows": {"dim": 0, "keep": 2}}).startswith("dt.align('r', 't', rows={'dim': 0")


def test_embedded_data_cannot_end_its_element() -> None:
    text = embedded({"name": "</script><!--<script>&\u2028", "value": float("inf")})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"name": "</script><!--<script>&\u2028", "value": "inf"}


def test_tensors_are_shown_by_histogram_place_and_worst_element() -> None:
    ref = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)).numpy()
    target = ref.copy()
    target[7, 31] += 2.0
    target[9, 40] = float("nan")
    shown = html_details.tensors(ref, target)
    assert [row[0] for row in shown["worst"]] == [[9, 40], [7, 31]]
    assert shown["worst"][1][3] == pytest.approx(2.0, abs=1e-5)
    assert (shown["nonfinite"], shown["equal"], shown["numel"]) == (1, 4998, 5000)
    assert shown["largest"] == pytest.approx(2.0, abs=1e-5)
    assert sum(shown["histogram"]["counts"][0]) == 5000 and sum(shown["histogram"]["counts"][1]) == 4999
    cells = shown["map"]["cells"]
    marked = {(y, x): c for y, line in enumerate(cells) for x, c in enumerate(line) if c != "."}
    # 40 blocks of rows begin at 50 i // 40, 72 of columns at 100 i // 72.
    assert marked == {(6, 23): "t", (7, 29): "!"}


def test_a_comparison_of_statistics_writes_a_page_without_torch(folder: Path) -> None:
    x = batch()
    record(folder / "a", net(), x, save="stats")
    record(folder / "b", changed(wrong_scale), x, save="stats")
    code = (
        "import sys; from dispatch_trace.cli import main; status = main(sys.argv[1:]); "
        "print('TORCH', 'torch' in sys.modules); sys.exit(status)"
    )
    out = folder / "stats.html"
    result = run_python("-c", code, "align", str(folder / "a"), str(folder / "b"), "--html", str(out))
    assert result.returncode == 1 and "TORCH False" in result.stdout, result.stderr
    data = data_of(out.read_text())
    assert data["details"] == {} and any(row[0] for row in data["columns"]["stats"])


def test_traces_that_are_gone_cost_the_details_only(folder: Path) -> None:
    found = align_models(folder / "gone", net(), changed(wrong_scale), batch(), twins=False)
    shutil.rmtree(folder / "gone")
    data = data_of(found.to_html())
    assert data["details"] == {} and len(data["columns"]["module"]) == len(found.pairs)


def test_a_page_that_cannot_be_written_is_refused_before_the_work() -> None:
    result = dispatch_trace("align", "no.trace", "no.trace", "--html", "no/such/page.html")
    assert result.returncode == 2 and "--html 'no/such/page.html' cannot be written" in result.stderr


# --- in the browser ---------------------------------------------------------------------------------


@needs_chromium
def test_curve_marks_the_finding_and_draws_the_band(page: Browser) -> None:
    assert page.run("document.querySelectorAll('#curve .pt-over').length") >= 1
    assert page.run("document.querySelector('#curve-mark') !== null")
    assert page.run("document.querySelector('#curve .bandarea').getBBox().width") > 500
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


@needs_chromium
def test_a_click_opens_the_pair_with_everything_about_it(page: Browser, diverged: dt.Alignment) -> None:
    page.click("#open-first")
    page.wait("!document.querySelector('#detail').hidden")
    text = page.run("document.querySelector('#detail').innerText")
    for heading in (
        "Statistics",
        "Values",
        "Difference",
        "Where the error lies",
        "Worst elements",
        "Upstream",
    ):
        assert heading in text
    assert diverged.first is not None and diverged.first.module in text
    assert page.run("document.querySelectorAll('#detail svg').length") == 2
    before = page.run("document.querySelector('#detail h3').textContent")
    page.click("#detail .links button")
    page.wait(f"document.querySelector('#detail h3').textContent !== {json.dumps(before)}")


@needs_chromium
def test_arguments_that_differ_are_set_side_by_side(page: Browser, diverged: dt.Alignment) -> None:
    page.click("#open-first")
    page.wait("!document.querySelector('#detail').hidden")
    row = page.run("[...document.querySelectorAll('#detail tr.differs')].map(r => r.innerText).join('|')")
    assert "1.0" in row and "1.5" in row


@needs_chromium
def test_filters_and_search_narrow_the_table(page: Browser) -> None:
    def shown() -> int:
        return int(page.run("document.querySelector('#count').textContent").split()[0])

    everything = shown()
    page.click("#search")
    page.type("gelu")
    page.wait(f"parseInt(document.querySelector('#count').textContent) < {everything}")
    assert shown() == 3
    assert page.run("[...document.querySelectorAll('#list .op')].every(n => n.textContent.includes('gelu'))")
    page.press("Escape")
    page.wait(f"parseInt(document.querySelector('#count').textContent) === {everything}")
    choose = (
        "(id, v) => {{const n = document.querySelector(id); n.value = v; n.dispatchEvent(new Event({}))}}"
    )
    page.run(f"({choose.format(chr(39) + 'change' + chr(39))})('#show-filter', 'introduced')")
    assert shown() == 1
    page.run(f"({choose.format(chr(39) + 'change' + chr(39))})('#show-filter', '')")
    page.run(f"({choose.format(chr(39) + 'input' + chr(39))})('#module-filter', 'blocks.1')")
    assert 0 < shown() < everything
    page.run(f"({choose.format(chr(39) + 'input' + chr(39))})('#module-filter', 'nothing.like.this')")
    assert shown() == 0 and not page.run("document.querySelector('#empty').hidden")


@needs_chromium
def test_keys_move_fold_open_and_close(page: Browser) -> None:
    page.run("document.querySelector('#list').focus()")
    lines = "parseInt(document.querySelector('#list').style.height)"
    page.click("#collapse")
    folded = page.run(lines)
    page.run("document.querySelector('#list').focus()")
    page.press("Home")
    page.press("ArrowRight")
    assert page.run(lines) > folded
    page.press("ArrowLeft")
    assert page.run(lines) == folded
    page.press("n")
    page.wait("!document.querySelector('#detail').hidden")
    page.press("Escape")
    assert page.run("document.querySelector('#detail').hidden")
    at = page.run("Number(document.querySelector('.line.active').dataset.at)")
    page.press("ArrowDown")
    assert page.run("Number(document.querySelector('.line.active').dataset.at)") == at + 1
    page.press("/")
    assert page.run("document.activeElement.id") == "search"


@needs_chromium
def test_the_theme_follows_the_system_and_can_be_chosen(page: Browser, folder: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.run(ground) == "rgb(255, 255, 255)"
    page.click("#theme")
    page.click("#theme")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    assert page.run(ground) == "rgb(18, 21, 27)"
    page.click("#theme")
    page.open(folder / "diverged.html", dark=True)
    assert page.run(ground) == "rgb(18, 21, 27)"


@needs_chromium
def test_a_narrow_window_does_not_overflow_and_prints(page: Browser, folder: Path) -> None:
    page.open(folder / "diverged.html", width=420)
    assert page.run("document.documentElement.scrollWidth") <= 420
    assert page.pdf().startswith(b"%PDF")


@needs_chromium
def test_names_of_a_trace_stay_text(browser: Browser, folder: Path) -> None:
    model = nn.Sequential()
    for name in HOSTILE:
        model.add_module(name, nn.Linear(8, 8))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight[1] += 1.0
    found = align_models(folder / "hostile", model, other, torch.ones(2, 8), twins=False)
    found.to_html(folder / "hostile.html")
    browser.errors.clear()
    browser.open(folder / "hostile.html")
    browser.click("#expand")
    browser.click("#open-first")
    browser.wait("!document.querySelector('#detail').hidden")
    assert browser.run("typeof pwned") == "undefined"
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert HOSTILE[2] in browser.run("document.querySelector('#first-finding').textContent")
    assert HOSTILE[1] in browser.run("document.querySelector('#list').textContent")
    assert browser.errors == []


@needs_chromium
@pytest.mark.parametrize("empty", [True, False], ids=["nothing paired", "match"])
def test_pages_without_a_finding_say_so(
    empty: bool, browser: Browser, folder: Path, diverged: dt.Alignment
) -> None:
    if empty:
        records = dict.fromkeys(diverged.coverage["records"], 0)
        found = replace(
            diverged,
            verdict="inconclusive",
            findings=[],
            pairs=[],
            coverage={**diverged.coverage, "records": records},
        )
    else:
        found = dt.align(diverged.ref, diverged.ref, twins=False)
    found.to_html(folder / "plain.html")
    browser.errors.clear()
    browser.open(folder / "plain.html")
    assert "No findings" in browser.run("document.querySelector('#first-finding').innerText")
    assert browser.run("document.querySelector('#empty').hidden") is not empty
    assert browser.errors == []


@needs_chromium
def test_20000_pairs_stay_fluid(browser: Browser, folder: Path, diverged: dt.Alignment) -> None:
    pairs = []
    for step in range(20_000 // len(diverged.pairs) + 1):
        for pair in diverged.pairs:
            sides = [
                None if r is None else replace(r, step=step, seq=r.seq + 1000 * step)
                for r in (pair.ref, pair.target)
            ]
            pairs.append(replace(pair, ref=sides[0], target=sides[1]))
    many = replace(diverged, pairs=pairs[:20_000])
    assert len(many.to_html(folder / "many.html")) < 16 << 20
    browser.open(folder / "many.html")
    browser.click("#quiet-filter")
    browser.click("#expand")
    assert browser.run("parseInt(document.querySelector('#list').style.height)") > 20_000 * 28
    assert browser.run("document.querySelectorAll('#list .line').length") < 100
    # Our own work for a jump of ten screens, in the jumps that a busy machine disturbed least.
    draw_ms = browser.run(
        """(() => { const all = []; for (let n = 0; n < 60; n++) { scrollBy(0, 9000);
        const t = performance.now(); draw(); document.body.offsetHeight; all.push(performance.now() - t); }
        return all.sort((a, b) => a - b)[6]; })()"""
    )
    assert draw_ms < 150, draw_ms  # drawing all lines would take seconds
    search_ms = browser.run(
        "(() => { const t = performance.now(); state.filter.search = 'gelu'; applyFilter(); "
        "return performance.now() - t })()"
    )
    assert search_ms < 1000, search_ms
    print(f"20,000 pairs: a jump is drawn in {draw_ms:.1f} ms, search {search_ms:.0f} ms")
