from __future__ import annotations

from pathlib import Path

import pytest

from implicit_llm_workflow.commands.command_targets import config_file_of


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "demo"),
        ("-n --cores 2", "demo"),
        ("paper -n", "paper"),
        ("-n --profile profiles/local miniature", "miniature"),
        ("--profile paper --cores 1", "demo"),  # a profile of that name
        ("figure_1_right", "paper"),
        ("--cores 1 results/miniature/report/manifest.json", "miniature"),
        ("results/unknown/report/manifest.json", "demo"),
        ("train evaluate", "demo"),
    ],
)
def test_the_first_target_that_is_an_experiment_chooses_its_file(words: str, name: str) -> None:
    assert config_file_of(words.split()).name == f"{name}.yaml"


def test_an_experiment_beside_the_snakefile_comes_before_the_project_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "workflow" / "config" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("name: mine\n")
    monkeypatch.chdir(tmp_path)
    assert config_file_of(["mine"]).resolve() == mine
    mine.with_name("paper.yaml").write_text("name: paper\n")
    assert config_file_of(["table_downstream"]).resolve() == mine.with_name("paper.yaml")
