"""The report in a browser: whole, within the screen, without a network and without complaints."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.report.sample_language_runs import family, make_babi_runs, make_language_runs
from tests.unit.report.sample_runs import SampleRun, make_report, make_runs

WORDS = (
    SampleRun("a5-implicit", "A5", True, 0.2, (0.2, 0.5), steps=200, seeds=(0, 1)),
    SampleRun("a5-explicit", "A5", False, 0.2, (0.2, 0.5), steps=200),
)
PAGES = ("index.html", "numbers.html")
REFERENCE = Path(__file__).parents[2] / "results" / "reference"
LACKED = "evaluate:a5-explicit-s1/explicit/word-problem"
# Elements that stick out on the right without a frame that scrolls, by their first words.
OVERFLOWING = """
const width = document.documentElement.clientWidth;
const scrolls = (element) => element && element !== document.body &&
  (['auto', 'scroll', 'hidden'].includes(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
return [...document.body.querySelectorAll('*')]
  .filter((element) => element.getBoundingClientRect().right > width + 1 && !scrolls(element.parentElement))
  .map((element) => element.tagName + ': ' + element.textContent.trim().slice(0, 60));
"""
# Boxes of the drawing and of its longest text, in pixels.
FIGURES = """
return [...document.querySelectorAll('figure')].map((figure) => ({
  name: figure.id,
  heading: figure.querySelector('h3').textContent,
  caption: figure.querySelector('figcaption').textContent.trim(),
  drawings: [...figure.querySelectorAll('.panels svg')].map((svg) => {
    const box = svg.getBoundingClientRect();
    return [box.width, box.height, svg.querySelectorAll('path, rect, use').length, svg.querySelectorAll('text').length];
  }),
}));
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Word problems, language models and CatbAbI, and one result that is missing; returns the folder of the page."""
    folder = tmp_path_factory.mktemp("report")
    roles = make_runs(folder / "results", WORDS)
    roles |= make_language_runs(folder / "results", family("mamba2", "implicit_mamba2", seeds=(0,)))
    roles |= make_babi_runs(folder / "results", seeds=(0,))
    item = {"job": LACKED.replace(":", "/"), "role": LACKED, "state": "failed", "why": "a word " * 30}
    item |= {"command": "snakemake --configfile x.yaml results/demo/" + LACKED.replace(":", "/") + "/manifest.json"}
    return make_report(folder, roles, missing=[item])


def open_page(browser: Any, page: Path, width: int) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(page.as_uri())


def test_every_figure_is_there_has_size_a_caption_and_something_drawn(browser: Any, report: Path) -> None:
    open_page(browser, report / "numbers.html", 1280)
    figures = {figure["name"]: figure for figure in browser.execute_script(FIGURES)}
    drawn = {f"figure-{path.stem}" for path in (report / "figures").glob("*.svg")}
    assert set(figures) == drawn
    for figure in figures.values():
        assert (figure["heading"] != "", len(figure["caption"]) > 40, figure["drawings"] != []) == (True,) * 3, figure
        for width, height, shapes, texts in figure["drawings"]:
            assert (width > 200, height > 100, shapes > 3, texts > 3) == (True,) * 4, figure["name"]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("unfolded", [False, True])
def test_nothing_sticks_out_of_the_screen(browser: Any, report: Path, page: str, width: int, unfolded: bool) -> None:
    open_page(browser, report / page, width)
    if unfolded:
        browser.execute_script("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert browser.execute_script(OVERFLOWING) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("experiment", sorted(page.parent.name for page in REFERENCE.glob("*/index.html")))
def test_the_kept_reports_have_at_most_six_screens(browser: Any, experiment: str) -> None:
    open_page(browser, REFERENCE / experiment / "index.html", 1280)
    assert browser.execute_script("return document.documentElement.scrollHeight") <= 7000
    assert browser.execute_script("return document.querySelectorAll('figure').length") <= 5


@pytest.mark.parametrize("page", PAGES)
def test_the_page_loads_nothing_and_the_console_stays_empty(browser: Any, report: Path, page: str) -> None:
    open_page(browser, report / page, 1280)
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded == []
    assert browser.get_log("browser") == []


def test_a_number_leads_to_the_run_it_comes_from(browser: Any, report: Path) -> None:
    open_page(browser, report / "numbers.html", 1280)
    number = browser.find_element("css selector", "#numbers tr.headline a.n")
    assert re.search(
        r"fingerprint [0-9a-f]{16}, MLflow run [0-9a-f]{32}, metrics.json sha256", number.get_attribute("title")
    )
    browser.execute_script("arguments[0].click()", number)
    anchor = number.get_attribute("href").partition("#")[2]
    target = browser.find_element("id", anchor)
    assert target.is_displayed()
    assert "fingerprint" in target.text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_letters_of_figures_stand_out_from_the_page_by_day_and_by_night(
    browser: Any, report: Path, scheme: str
) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        open_page(browser, report / "index.html", 1280)
        text, paper = browser.execute_script(
            "return [getComputedStyle(document.querySelector('.panels svg text')).fill, "
            "getComputedStyle(document.body).backgroundColor]"
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert contrast(text, paper) > 4.5


def contrast(first: str, second: str) -> float:
    """Ratio of luminances of two colours rgb(...), as of WCAG 2."""
    shades = sorted(_luminance([int(value) for value in re.findall(r"\d+", color)[:3]]) for color in (first, second))
    return (shades[1] + 0.05) / (shades[0] + 0.05)


def _luminance(channels: list[int]) -> float:
    linear = [c / 12.92 / 255 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
