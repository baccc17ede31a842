"""Check that pages, help and error messages are plain English; `make check` runs this.

    python tests/language.py [PAGE ...]

A sentence has at most 30 words and one semicolon, and avoids the phrases below. Code, tables and quotations in
backticks are not read, except for the phrases in tables. Prints one line for each finding, with what to write instead.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.pages import PAGES  # noqa: E402

MAX_WORDS = 30
CODE = ("implicit_llm", "workflow/lib", "workflow/report/implicit_llm_report", "workflow/plugins/submitit/src")
INSTEAD = {
    r"tells?|told": "says, shows, reports",
    r"speaks? for": "represents, decides",
    r"by hand": "manually",
    r"(?:stands?|lies?|stood) (?:in|on|at|below|beside|there|behind|with)(?! 0)": "is",
    r"of which": "a sentence of its own",
    r"of now|as of now": "current",
    r"put (?:it |them |that )?right|puts right": "fix",
    r"(?:goes|going|went|go) on(?! (?:PATH|CPU|GPU))": "continues, resumes",
    r"(?:made|make|makes) (?:it |them |its \w+ )?(?:again|anew)": "rebuild",
    r"anew": "again",
    r"a training\b(?! \w)": "a training run, a training job",
    r"trainings": "training runs",
    r"mend(?:s|ed|ing)?": "fix",
    r"but for": "except for",
    r"for you to see to": "you must",
    r"nothing moves": "nothing changes",
    r"who (?:knows|wants|needs|has) .{0,60}\bcan": "if you ..., you can",
    r"holes?": "missing results",
    r"(?<!model )cards?(?!:)": "GPU",
    r"the like of|withal|thereof|hereof|wherefrom|whereby": "plain words",
    r"is to be (?:made|done|had|found)": "must be",
    r"so it is": "a sentence with a subject",
    r"other than in": "unlike in",
}
_PHRASES = {re.compile(rf"(?<![\w`/-])(?:{phrase})(?![\w`/-])", re.IGNORECASE): fix for phrase, fix in INSTEAD.items()}
_CLAUSE = re.compile(r"^(?:What|Who|Whoever|Whatever) [^?]*[.]$")
_ALLOWED = re.compile(r"(?:model|index|README) cards?|\bmodel card\b", re.IGNORECASE)


def main(names: list[str]) -> int:
    pages = names or [*PAGES, "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/reference/cli.md"]
    findings = [finding for name in pages for finding in of_page(name)]
    if not names:
        findings += [*of_help(), *of_errors()]
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 1 if findings else 0


def of_page(name: str) -> Iterator[str]:
    for number, sentence, is_prose in sentences((ROOT / name).read_text(encoding="utf-8")):
        yield from (f"{name}:{number}: {what}" for what in findings_in(sentence, is_prose))


def of_help() -> Iterator[str]:
    """The help of every command and option of `implicit-llm`."""
    from typer.main import get_command

    from implicit_llm_workflow.console import app

    def commands(command: Any, path: str) -> Iterator[tuple[str, str]]:
        yield path, inspect.cleandoc(command.help or "").replace("\b", "")
        for item in command.params:
            yield f"{path} {item.opts[0]}", getattr(item, "help", None) or ""
        for below in getattr(command, "commands", {}).values():
            yield from commands(below, f"{path} {below.name}")

    for path, text in commands(get_command(app), "implicit-llm"):
        for _, sentence, is_prose in sentences(text):
            yield from (f"help of {path}: {what}" for what in findings_in(sentence, is_prose))


def of_errors() -> Iterator[str]:
    """Messages of exceptions in the code."""
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                message = " ".join(" ".join(text_of(argument) for argument in node.exc.args).split())
                yield from (f"{place}: {what}" for what in findings_in(message, is_prose=False))


def text_of(node: ast.AST) -> str:
    """A string of the code, with X for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "X" for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return ""


def findings_in(sentence: str, is_prose: bool) -> Iterator[str]:
    plain = _ALLOWED.sub("X", re.sub(r'`[^`]*`|"[^"]*"', "X", sentence))
    for phrase, instead in _PHRASES.items():
        for found in phrase.findall(plain):
            yield f"{found!r}: write {instead}: {sentence[:90]}"
    if not is_prose:
        return
    words = [word for word in plain.split() if re.search(r"\w", word)]
    if len(words) > MAX_WORDS:
        yield f"{len(words)} words, at most {MAX_WORDS}: {sentence[:90]}"
    if plain.count(";") > 1:
        yield f"{plain.count(';')} semicolons: {sentence[:90]}"
    if _CLAUSE.match(plain):
        yield f"begin with a subject, not with a clause: {sentence[:90]}"


def sentences(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, sentence, whether it is prose) of Markdown; rows of tables and headings are not prose."""
    block: list[str] = []
    start, in_code = 1, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        is_other = in_code or is_fence or re.match(r"\s*(?:\||#|<|\\b)| {4} *\S", line) is not None
        begins = re.match(r"\s*(?:[-*:]|\d+\.) ", line) is not None
        if (is_other or begins or not line.strip()) and block:
            yield from ((start, sentence, True) for sentence in split(" ".join(block)))
            block = []
        if is_other:
            if not in_code and not is_fence and line.lstrip().startswith(("|", "#")):
                yield number, plain_text(line), False
        elif line.strip():
            start = start if block else number
            block.append(re.sub(r"^\s*(?:[-*:]|\d+\.) ", "", line).strip())
        in_code ^= is_fence


def split(paragraph: str) -> list[str]:
    return re.split(r"(?<=[.!?])(?:\*\*)? +(?=[\"'`*(\[]*[A-Z0-9`])", plain_text(paragraph))


def plain_text(markdown: str) -> str:
    """Links by their text."""
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("**", "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
