"""The page in a real browser: headless Chromium, driven by Playwright."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memmap_buffer import ConcatBuffer, ReplayBuffer, publish

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
META = {"task": "int", "who": ("U120", ())}
FIELDS = {
    "image": ("uint8", (16, 16, 3)),
    "action": ("float32", 2),
    "reward": "float32",
    "terminated": "bool",
    "note": "U200",
}
SECONDS = 30_000
GONE = "status of 410"  # what the browser says where an episode went while its picture was asked for


def store(buffer: ReplayBuffer, number: int, steps: int = 0) -> None:
    steps = steps or 10 + number
    rows = {
        "image": np.full((steps, 16, 16, 3), 8 * number),
        "action": np.random.default_rng(number).random((steps, 2)),
    }
    rows |= {"reward": np.ones(steps), "terminated": np.arange(steps) == steps - 1, "note": [HOSTILE] * steps}
    buffer.store_episode(**rows, task=number % 3, who=HOSTILE if number == 3 else f"robot {number}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Any]]:
    """A function that browses a buffer in a window of its own; no error may be left in its console."""
    contexts, served, problems = [], [], list[str]()

    def opened(buffer: ReplayBuffer | ConcatBuffer, width: int = 1280, scheme: str = "light", **options: Any) -> Any:
        served.append(buffer.browse(**options))
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(SECONDS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda line: problems.append(line.text) if line.type == "error" and GONE not in line.text else None,
        )
        page.goto(served[-1].address)
        page.wait_for_selector(".tabulator-row")
        return page

    yield opened
    for each in [*contexts, *served]:
        each.close()
    assert problems == []


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(tmp_path / "data", 50, 200, FIELDS, meta_fields=META) as buffer:
        for number in range(8):
            store(buffer, number)
        yield buffer


def wait_for_serials(page: Any, *wanted: int) -> None:
    cells = "[...document.querySelectorAll('.tabulator-row [tabulator-field=serial]')]"
    shown = f"wanted => {cells}.map(cell => cell.innerText).join() === wanted"
    page.wait_for_function(shown, arg=",".join(map(str, wanted)))


def click_on(page: Any, serial: int) -> None:
    cell = page.locator("[tabulator-field=serial]", has_text=re.compile(f"^{serial}$"))
    page.locator(".tabulator-row").filter(has=cell).click()


def add_condition(page: Any, text: str) -> None:
    page.fill("#condition", text)
    page.press("#condition", "Enter")


def test_episodes_are_sorted_filtered_opened_and_played(buffer: ReplayBuffer, tab: Callable[..., Any]) -> None:
    page = tab(buffer)
    wait_for_serials(page, *range(7, -1, -1))
    page.click(".tabulator-col[tabulator-field=length]")
    wait_for_serials(page, *range(8))
    add_condition(page, "length>=14")
    add_condition(page, "task!=1")
    wait_for_serials(page, 5, 6)
    assert page.inner_text("#count") == "2 of 8 episodes"
    page.click("#conditions li:first-child button")
    wait_for_serials(page, 0, 2, 3, 5, 6)
    page.click(".tabulator-row >> nth=3")
    page.wait_for_selector(".pane .curves figure >> nth=3")
    page.wait_for_function("() => document.querySelector('.pane .step').textContent === '0 of 14'")
    image = page.query_selector(".pane .frames img")
    assert image.evaluate("async i => { await i.decode(); return [i.naturalWidth, i.naturalHeight]; }") == [16, 16]
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.pane .step').textContent === '1 of 14'")
    page.fill(".pane .rate input", "100")
    page.click(".pane h2")
    page.keyboard.press(" ")
    page.wait_for_function("() => document.querySelector('.pane .step').textContent === '14 of 14'")
    page.wait_for_function("() => document.querySelector('.pane .values').innerText.includes('terminated\\nTrue')")
    page.keyboard.press("j")
    page.wait_for_function("() => document.querySelector('.pane h2').textContent === 'Episode 6'")
    page.keyboard.press("Escape")
    assert page.query_selector(".pane") is None


def test_marks_set_by_keys_are_there_after_a_reload_and_choose_what_is_trained_on(
    buffer: ReplayBuffer, tab: Callable[..., Any]
) -> None:
    page = tab(buffer)
    for number, key in ((7, "g"), (6, "b")):
        click_on(page, number)
        page.wait_for_function(f"() => document.querySelector('.pane h2')?.textContent === 'Episode {number}'")
        page.keyboard.press(key)
        page.wait_for_selector(f".pane .labels .{'good' if key == 'g' else 'bad'}")
    page.once("dialog", lambda dialog: dialog.accept("the cable was loose"))
    page.keyboard.press("n")
    page.wait_for_function("() => document.querySelector('.pane .note').textContent === 'the cable was loose'")
    page.once("dialog", lambda dialog: dialog.accept("cable"))
    page.keyboard.press("l")
    page.wait_for_function("() => document.querySelector('.pane .labels').innerText.includes('cable')")
    page.reload()
    page.wait_for_function("() => document.querySelector('.pane .note')?.textContent === 'the cable was loose'")
    add_condition(page, "mark!=bad")
    wait_for_serials(page, 7, 5, 4, 3, 2, 1, 0)
    page.keyboard.press("u")
    wait_for_serials(page, *range(7, -1, -1))
    assert {serial: mark.labels for serial, mark in buffer.marks().items()} == {7: ("good",), 6: ("cable",)}


def test_marks_of_two_tabs_are_both_kept_and_seen_in_each(buffer: ReplayBuffer, tab: Callable[..., Any]) -> None:
    pages = tab(buffer), tab(ReplayBuffer.from_folder(buffer.folder))
    for number, page in enumerate(pages):
        click_on(page, number)
        page.wait_for_selector(".pane .curves figure >> nth=3")
        page.keyboard.press("b")
    for page in pages:
        page.wait_for_function("() => document.querySelectorAll('#table .labels .bad').length === 2")
    assert {*buffer.marks()} == {0, 1}


def test_keys_lead_through_all_pages_and_behind_what_leaves_the_filter(
    buffer: ReplayBuffer, tab: Callable[..., Any]
) -> None:
    for number in range(8, 30):
        store(buffer, number)
    page = tab(buffer)
    click_on(page, 7)
    for number in range(6, 1, -1):  # 5 is the first of the second page
        page.keyboard.press("j")
        page.wait_for_function(f"() => document.querySelector('.pane h2')?.textContent === 'Episode {number}'")
    for number in range(3, 8):
        page.keyboard.press("k")
        page.wait_for_function(f"() => document.querySelector('.pane h2')?.textContent === 'Episode {number}'")
    add_condition(page, "mark=")
    for number in (7, 6):
        page.wait_for_selector(f".pane h2:text-is('Episode {number}')")
        page.keyboard.press("g")
        page.wait_for_function(f"() => document.querySelector('#count').textContent === '{22 + number} of 30 episodes'")
        page.keyboard.press("j")
        page.wait_for_function(f"() => document.querySelector('.pane h2')?.textContent === 'Episode {number - 1}'")


def test_what_a_recorder_publishes_appears_by_itself(buffer: ReplayBuffer, tab: Callable[..., Any]) -> None:
    page = tab(ReplayBuffer.from_folder(buffer.folder, read_only=True))
    wait_for_serials(page, *range(7, -1, -1))
    store(buffer, 8)
    buffer.delete([0, 1])
    wait_for_serials(page, *range(8, 1, -1))
    page.wait_for_function("() => document.querySelector('.tabulator-row [tabulator-field=return]').innerText === '18'")


def test_text_of_a_strangers_folder_is_shown_as_text(buffer: ReplayBuffer, tab: Callable[..., Any]) -> None:
    buffer.mark([3], add=["<b>bold"], note=HOSTILE)
    page = tab(buffer, title=HOSTILE)
    click_on(page, 3)
    page.wait_for_selector(".pane .curves figure >> nth=3")
    page.wait_for_function("() => document.querySelector('.pane .values').innerText.includes('<script>')")
    assert page.title() == HOSTILE
    assert page.inner_text(".pane .note") == HOSTILE
    assert page.inner_text(".tabulator-row [tabulator-field=who] >> nth=4") == HOSTILE
    assert page.query_selector(".pane script, .pane b, #table b, #table script") is None


def test_two_episodes_stand_side_by_side(buffer: ReplayBuffer, tab: Callable[..., Any]) -> None:
    page = tab(buffer)
    page.click(".tabulator-row >> nth=0")
    page.wait_for_selector(".pane .curves figure >> nth=3")
    page.keyboard.press("c")
    page.click(".tabulator-row >> nth=2")
    page.wait_for_function(
        "[...document.querySelectorAll('.pane h2')].map(h => h.textContent).join() === 'Episode 7,Episode 5'"
    )
    page.wait_for_function("() => document.querySelectorAll('.pane .curves figure').length === 8")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "[...document.querySelectorAll('.pane .step')].map(s => s.textContent).join() === '1 of 16,1 of 14'"
    )


def test_statistics_lead_to_the_episodes_concerned(buffer: ReplayBuffer, tab: Callable[..., Any]) -> None:
    rows = {"image": np.zeros((5, 16, 16, 3)), "reward": np.ones(5), "terminated": np.arange(5) == 4, "note": [""] * 5}
    buffer.store_episode(**rows, action=np.full((5, 2), np.nan), task=0, who="")
    page = tab(buffer)
    page.click("#show-statistics")
    page.wait_for_function("() => document.querySelector('#checked').textContent === 'All 9 episodes are checked.'")
    page.click("#checks tr:has-text('NaN') a")
    wait_for_serials(page, 8)
    assert page.inner_text("#conditions").startswith("nan=action")


def test_a_range_of_a_histogram_filters(buffer: ReplayBuffer, tab: Callable[..., Any]) -> None:
    page = tab(buffer)
    page.wait_for_selector("#histograms figure .u-over")
    box = page.query_selector("#histograms figure .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.98, box["y"] + 20, steps=5)
    page.mouse.up()
    page.wait_for_function("() => document.querySelectorAll('#conditions li').length === 2")
    wait_for_serials(page, 7, 6, 5)


def test_numbers_that_differ_in_their_last_digits_only_are_drawn(tmp_path: Path, tab: Callable[..., Any]) -> None:
    fields = {"constant": "int64", "near": "int64", "zero": "float32"}
    with ReplayBuffer(tmp_path / "near", 4, 9, fields, meta_fields={"stamp": "int64"}) as buffer:
        for number in range(2):
            near = 2**60 + 256 * np.arange(8)
            buffer.store_episode(constant=np.full(8, 2**62), near=near, zero=np.zeros(8), stamp=2**60 + 256 * number)
        page = tab(buffer)
        page.wait_for_selector("#histograms figure canvas")
        page.click(".tabulator-row >> nth=0")
        page.wait_for_selector(".pane .curves figure >> nth=2")
        assert page.locator(".pane .curves canvas").count() == 3
        assert str(2**60 + 256) in page.inner_text("#table")


def test_shards_behind_a_url_are_shown_without_marks(
    tmp_path: Path, buffer: ReplayBuffer, tab: Callable[..., Any]
) -> None:
    publish(buffer.folder, str(tmp_path / "root"))
    source = ReplayBuffer.from_folder(f"file://{tmp_path}/root/data", cache=tmp_path / "cache")
    page = tab(source)
    wait_for_serials(page, *range(7, -1, -1))
    assert page.query_selector(".tabulator-col[tabulator-field=mark]") is None
    page.click(".tabulator-row >> nth=0")
    page.wait_for_selector(".pane .curves figure >> nth=3")
    page.keyboard.press("b")
    assert page.text_content(".pane .rerun") == f"memmap-buffer view file://{tmp_path}/root/data 7"
    assert page.query_selector("#problem:not([hidden])") is None


def test_a_root_of_shards_is_one_table(tmp_path: Path, tab: Callable[..., Any]) -> None:
    for shard in range(2):
        with ReplayBuffer(tmp_path / f"shard-0000{shard}", 4, 50, FIELDS, meta_fields=META) as buffer:
            store(buffer, shard)
            store(buffer, shard + 2)
    page = tab(ConcatBuffer.from_root(tmp_path))
    wait_for_serials(page, 1, 0, 1, 0)
    page.click(".tabulator-row >> nth=0")
    page.wait_for_function("() => document.querySelector('.pane h2')?.textContent === 'Episode 1-1'")
    page.wait_for_selector(".pane .curves figure >> nth=3")
    page.keyboard.press("b")
    page.wait_for_selector("#table .labels .bad")
    assert page.text_content(".pane .rerun") == f"memmap-buffer view {tmp_path}/shard-00001 1"
    assert {*ConcatBuffer.from_root(tmp_path).marks()} == {(1, 1)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(
    buffer: ReplayBuffer, tab: Callable[..., Any], width: int, scheme: str
) -> None:
    page = tab(buffer, width, scheme)
    fits = "document.documentElement.scrollWidth <= window.innerWidth"
    assert page.evaluate(fits)
    page.click(".tabulator-row >> nth=0")
    page.wait_for_selector(".pane .curves figure >> nth=3")
    assert page.evaluate(fits)
    page.click("#show-keys")
    assert page.evaluate(fits)


@pytest.mark.slow
def test_a_hundred_thousand_episodes_are_there_within_a_second(tmp_path: Path, tab: Callable[..., Any]) -> None:
    fields = {"x": "float32", "reward": "float32"}
    with ReplayBuffer(tmp_path, 100_000, 4, fields, meta_fields={"task": "int"}) as buffer:
        for number in range(100_000):
            buffer.store_episode(x=[0, 1], reward=[number, 1], task=number % 7)
        page = tab(buffer)
        wait_for_serials(page, *range(99_999, 99_974, -1))
        add_condition(page, "task=3")
        page.wait_for_function("() => document.querySelector('#count').textContent === '14286 of 100000 episodes'")
        page.click(".tabulator-col[tabulator-field=return]")
        wait_for_serials(page, *range(3, 3 + 25 * 7, 7))
