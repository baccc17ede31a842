"""A figure as a file."""

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure as Canvas
from matplotlib.textpath import TextPath

from implicit_llm_report.figures.charts import log_ticks
from implicit_llm_report.figures.svg import Figure, Panel, file_svg, series_of_names


@pytest.mark.parametrize("num_entries", [1, 6, 9])
def test_no_entry_of_a_legend_is_cut(num_entries: int) -> None:
    names = [(f"implicit model {n}, bounded phase", True) for n in range(num_entries)]
    legend = tuple(series_of_names(names).values())
    panels = tuple(Panel(str(n), lambda axis: None) for n in range(3))
    root = ElementTree.fromstring(file_svg(Figure("x", "X", panels, legend, ())))
    (shown,) = (one for one in root.iter() if one.attrib.get("id") == "legend_1")
    places = (one.attrib.get("transform", "") for one in shown.iter())
    translated = (re.match(r"translate\((\S+) \S+ scale\(0\.08", place) for place in places)
    lefts = [float(place[1]) for place in translated if place]
    assert len(lefts) >= num_entries
    assert min(lefts) >= 0
    label = TextPath((0, 0), legend[0].label, size=8).get_extents().width
    assert max(lefts) + label < float(root.attrib["width"].removesuffix("pt"))


@pytest.mark.parametrize("high", [1.3, 1.8, 2.9, 4, 50, 1e4])
def test_a_logarithmic_axis_has_several_ticks_however_short_it_is(high: float) -> None:
    axis = Canvas().subplots()
    axis.set(yscale="log", ylim=(0.98, high))
    log_ticks(axis.yaxis)
    assert len([tick for tick in axis.get_yticks() if 0.98 <= tick <= high]) > 1


def test_no_two_of_seven_implicit_and_four_explicit_lines_have_one_colour() -> None:
    names = [(f"i{index}", True) for index in range(7)] + [(f"e{index}", False) for index in range(4)]
    colors = [series.color for series in series_of_names(names).values()]
    assert len(set(colors)) == len(colors)


def test_an_evaluation_mode_looks_alike_in_every_figure() -> None:
    modes = [(f"implicit, {mode}", True) for mode in ("blockwise", "released-criterion", "own")]
    assert all(series_of_names([mode])[mode[0]] == series_of_names(modes)[mode[0]] for mode in modes[:2])
    assert len({series.color for series in series_of_names(modes).values()}) == 3
