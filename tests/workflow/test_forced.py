"""`-R`, `-f` and `-F` compute again what is finished, and what is made from it."""

from tests.workflow.tiny_project import EVALUATED, NOTHING, Project

TRAINED = {"train/explicit-s0/explicit", "evaluate/explicit-s0/explicit/word-problem", "report"}


def test_what_the_user_forces_is_computed_again_and_its_log_keeps_both(project: Project) -> None:
    assert project.planned("-R", "evaluate_word_problem") == {*EVALUATED, "report"}
    forcing = ("-R", "results/tiny/train/explicit-s0/explicit/manifest.json")
    assert project.planned(*forcing) == TRAINED
    assert not list(project.results.rglob("*.again"))
    before = journals(project)
    project.snakemake(*forcing)
    assert {job for job, line in journals(project).items() if line != before[job]} == TRAINED
    assert not list(project.results.rglob("work/*.previous"))
    for job in TRAINED:
        text = (project.results / job / "job.log").read_text()
        assert text.count("done, ") == 2, text
        assert "to be computed again" in text
    assert NOTHING in project.snakemake()


def journals(project: Project) -> dict[str, str]:
    """The first line of each job's journal, which has the time."""
    paths = project.results.glob("**/work/*/journal.jsonl")
    return {str(path.parents[2].relative_to(project.results)): path.read_text().partition("\n")[0] for path in paths}


def test_what_is_made_from_a_forced_result_follows_in_the_next_run(project: Project) -> None:
    manifest = "results/tiny/train/explicit-s0/explicit/manifest.json"
    project.snakemake("-f", manifest)
    assert project.planned() == TRAINED - {"train/explicit-s0/explicit"}
    assert "forced" in project.command("implicit-llm", "explain", "--config", "tiny.yaml")
    project.snakemake()
    assert NOTHING in project.snakemake()
