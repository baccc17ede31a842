"""What the rules hand to a shell is quoted, whatever a config, a profile or a command line puts there."""

from __future__ import annotations

import re

import pytest

from implicit_llm_workflow.project_dirs import PROJECT_DIR

RULES = sorted((PROJECT_DIR / "workflow" / "rules").glob("*.smk"))
SHELL = re.compile(r"^ +shell:\n((?: {8,}.*\n)+)", re.MULTILINE)
FIELD = re.compile(r"(?<!\{)\{([^{}]+)\}")
NUMBERS = {"threads"}  # Snakemake itself makes it an integer


def shell_commands() -> list[tuple[str, str]]:
    return [(path.name, command) for path in RULES for command in SHELL.findall(path.read_text(encoding="utf-8"))]


def test_there_are_commands_to_look_at() -> None:
    assert {name for name, _ in shell_commands()} >= {"data.smk", "train.smk", "evaluate.smk", "report.smk"}


@pytest.mark.parametrize(("name", "command"), shell_commands())
def test_every_field_of_a_shell_command_is_quoted(name: str, command: str) -> None:
    bare = [field for field in FIELD.findall(command) if not field.endswith(":q") and field not in NUMBERS]
    assert not bare, f"{name}: write {{{bare[0]}:q}}"
