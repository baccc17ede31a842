from __future__ import annotations

import json

import pytest

from implicit_llm_jobs.tracking import invocation as jobs_side
from implicit_llm_workflow.rules import invocation


def test_a_job_reads_what_the_driver_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    invocation.announce(["/usr/bin/snakemake", "--configfile", "my file.yaml"], environment)
    assert list(environment) == [invocation.VARIABLE] == [jobs_side.VARIABLE]
    monkeypatch.setenv(*environment.popitem())
    found = jobs_side.Invocation.current()
    assert found.command == "snakemake --configfile 'my file.yaml'"
    assert len(found.id) == 16
    assert found.started.endswith("+00:00")


def test_each_invocation_has_an_id_of_its_own_and_a_command_that_fits_the_environment() -> None:
    environments: tuple[dict[str, str], ...] = ({}, {})
    for environment in environments:
        invocation.announce(["snakemake", *["x" * 100] * 1000], environment)
        assert len(environment[invocation.VARIABLE]) < 4000
    assert len({json.loads(environment[invocation.VARIABLE])["id"] for environment in environments}) == 2


@pytest.mark.parametrize(
    ("words", "profile"),
    [("--profile profiles/gpu -n", "profiles/gpu"), ("demo --profile=gpu", "gpu"), ("--cores 1 demo", "usual")],
)
def test_the_profile_is_that_of_the_command_or_of_the_environment(words: str, profile: str) -> None:
    assert invocation.profile_in_use(["snakemake", *words.split()], {"SNAKEMAKE_PROFILE": "usual"}) == profile


def test_a_job_that_was_started_by_hand_belongs_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "null", "{", '{"id": "x"}', "[]"):
        monkeypatch.setenv(jobs_side.VARIABLE, text)
        assert jobs_side.Invocation.current() is None
