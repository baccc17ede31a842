"""The pages of the project, and the commands on them."""

import re
import shlex
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "results/README.md",
    "workflow/plugins/submitit/README.md",
    *sorted(
        path.relative_to(ROOT).as_posix() for path in (ROOT / "workflow" / "plugins" / "submitit" / "docs").glob("*.md")
    ),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
_COMMAND = re.compile(r"^(?: {4})?(?:\$ )?((?:implicit-llm|snakemake|make) (?:.*\\\n)*.*)$", re.MULTILINE)
_BLOCK = re.compile(r"^```\w*\n(.*?)^```$|((?:^ {4}.*\n|^\n)+)", re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> list[list[str]]:
    """The words of each command of the project that stands on a line of its own, fenced or indented."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = (fenced or indented for fenced, indented in _BLOCK.findall(text))
    commands = (command for block in blocks for command in _COMMAND.findall(block))
    words = (shlex.split(command.replace("\\\n", " "), comments=True) for command in commands)
    return [list(takewhile(lambda word: word not in (">", "|"), command)) for command in words]
