from pathlib import Path

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_report.registry import registry
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.yaml_files import experiment_path
from implicit_llm_workflow.planning.graph import build_graph, report_figures, report_tables
from implicit_llm_workflow.results.explain import upstream_closure
from tests.unit.workflow.experiments import ExperimentFile

EXCERPTS = """
excerpts:
  figure_3:
    title: "Figure 3"
    figures: [accuracy-by-length]
    tables: [accuracy]
    from: [{runs: [implicit], evaluations: ["word-*"]}]
  figure_training:
    title: "Training"
    figures: [training-curves]
    from: [{runs: [explicit], evaluations: []}]
"""


@pytest.fixture
def shown(tiny: ExperimentFile) -> ExperimentFile:
    return tiny.add(EXCERPTS)


def test_an_excerpt_needs_the_evaluations_that_it_shows_and_their_models(shown: ExperimentFile) -> None:
    plan = shown.plan()
    figure = plan.find("figure_3")
    assert sorted(figure.upstream) == [
        "evaluate:implicit-s0/free/word-problem",
        "evaluate:implicit-s1/free/word-problem",
        *(f"train:implicit-s{seed}/{phase}" for seed in (0, 1) for phase in ("free", "unrolled")),
    ]
    assert not any("explicit" in key.partition("implicit")[0] for key in upstream_closure(plan, [figure.key]))
    assert list(plan.find("figure_training").upstream) == ["train:explicit-s0/explicit"]


def test_an_excerpt_is_made_by_the_report_s_code_with_its_own_title_and_names(shown: ExperimentFile) -> None:
    plan = shown.plan()
    figure, report = plan.find("figure_3"), plan.find("report")
    assert plan.code(figure) == plan.code(report)
    changed = {key for key in figure.config if figure.config[key] != report.config.get(key)}
    assert changed == {"title", "figures", "tables", "jobs"}
    assert figure.config["jobs"].keys() == figure.upstream.keys()
    assert (figure.config["figures"], figure.config["tables"]) == (["accuracy-by-length"], ["accuracy"])
    assert plan.manifests("report") == [plan.manifest(report)]  # no part of what is made by default


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("runs: [implicit]", "runs: [implicid]", r"excerpts\.figure_3\.from\[0\]\.runs: .*did you mean 'implicit'"),
        ('"word-*"', "word-problems", r"excerpts\.figure_3\.from\[0\]\.evaluations: .*did you mean 'word-problem'"),
        ("[accuracy-by-length]", "[accuracy-by-lenght]", r"excerpts\.figure_3\.figures: .*did you mean"),
        ("[accuracy]", "[perplexity]", r"excerpts\.figure_3\.tables: unknown key 'perplexity'"),
        ("  figure_3:", "  figure-3:", r"figure-3.*figure_ or table_ with lower-case"),
    ],
)
def test_an_excerpt_of_what_there_is_not_is_refused(shown: ExperimentFile, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_graph(shown.edit(old, new).load())


@pytest.mark.parametrize("name", ["paper", "miniature"])
def test_the_paper_and_the_miniature_have_every_figure_and_table(name: str) -> None:
    experiment = load_experiment(experiment_path(name))
    assert report_figures(experiment) == list(registry().figures)
    assert report_tables(experiment) == list(registry().tables)


def test_the_page_and_the_miniature_have_the_excerpts_of_the_paper_and_the_other_scales_have_no_others() -> None:
    paper, miniature, *others = (
        load_experiment(experiment_path(name)).excerpts.keys() for name in ("paper", "miniature", "demo", "h200")
    )
    page = (Path(__file__).parents[4] / "docs" / "paper.md").read_text()
    assert [name for name in paper if f"| `{name}` |" not in page] == []
    assert list(miniature) == list(paper)
    for other in others:
        assert other <= paper
