"""Check that pages, help and error messages are plain English; `make check` runs this.

    python tests/language.py [PAGE ...]

A sentence has at most 30 words and one semicolon, and avoids the phrases below. Docstrings and tables are checked only
for the phrases. A docstring does not begin in the middle of a sentence, and a class name occurs once in the code.
Prints one line for each finding, with what to write instead.
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

from markdown_it import MarkdownIt  # noqa: E402
from typer.main import get_command  # noqa: E402

from implicit_llm_workflow.console import app  # noqa: E402
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
_MIDDLE = re.compile(r"(?:As|Of|By|Those|Likewise)\b")
_ALLOWED = re.compile(r"(?:model|index|README) cards?|\bmodel card\b", re.IGNORECASE)


def main(names: list[str]) -> int:
    pages = names or [*PAGES, "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/reference/cli.md"]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in pages}
    if not names:
        texts |= dict(helps(get_command(app), "help of implicit-llm"))
    findings = [finding for name, text in texts.items() for finding in of_text(name, text)]
    if not names:
        findings += [*of_errors(), *of_docstrings(), *of_class_names()]
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 1 if findings else 0


def of_text(name: str, text: str) -> Iterator[str]:
    for line, sentence, is_prose in sentences(text):
        yield from (f"{name}:{line}: {what}" for what in findings_in(sentence, is_prose))


def helps(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the help of every command and option."""
    yield path, inspect.cleandoc(command.help or "").replace("\b", "")
    for item in command.params:
        yield f"{path} {item.opts[0]}", getattr(item, "help", None) or ""
    for below in getattr(command, "commands", {}).values():
        yield from helps(below, f"{path} {below.name}")


def of_errors() -> Iterator[str]:
    """Messages of exceptions in the code."""
    for place, node in code():
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            message = " ".join(" ".join(text_of(argument) for argument in node.exc.args).split())
            yield from (f"{place}:{node.lineno}: {what}" for what in findings_in(message, is_prose=False))


def of_docstrings() -> Iterator[str]:
    """Yield docstrings that begin in the middle of a sentence, and the phrases in all docstrings."""
    for place, node in code():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if _MIDDLE.match(text):
                yield f"{place}:{node.body[0].lineno}: begin with a verb or an article: {text[:90]}"
            for line, sentence, is_prose in sentences(text):
                found = findings_in(sentence, is_prose, has_limits=False)
                yield from (f"{place}:{node.body[0].lineno + line - 1}: {what}" for what in found)


def of_class_names() -> Iterator[str]:
    """Public class names that an earlier module has too."""
    places: dict[str, str] = {}
    for place, node in code():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            here = f"{place}:{node.lineno}"
            if (other := places.setdefault(node.name, here)) != here:
                yield f"{here}: {other} has a class {node.name} too; name one of them by what it holds"


def code() -> Iterator[tuple[str, ast.AST]]:
    """Yield all nodes of the code's syntax trees, each with its file."""
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield str(path.relative_to(ROOT)), node


def text_of(node: ast.AST) -> str:
    """A string of the code, with X for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "X" for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return ""


def findings_in(sentence: str, is_prose: bool, *, has_limits: bool = True) -> Iterator[str]:
    """Yield phrases to avoid; in prose also a leading clause and, with `has_limits`, too many words or semicolons."""
    plain = _ALLOWED.sub("X", re.sub(r'`[^`]*`|"[^"]*"', "X", sentence))
    for phrase, instead in _PHRASES.items():
        for found in phrase.findall(plain):
            yield f"{found!r}: write {instead}: {sentence[:90]}"
    if is_prose and _CLAUSE.match(plain):
        yield f"begin with a subject, not with a clause: {sentence[:90]}"
    if not (is_prose and has_limits):
        return
    words = [word for word in plain.split() if re.search(r"\w", word)]
    if len(words) > MAX_WORDS:
        yield f"{len(words)} words, at most {MAX_WORDS}: {sentence[:90]}"
    if plain.count(";") > 1:
        yield f"{plain.count(';')} semicolons: {sentence[:90]}"


def sentences(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, sentence, whether it is prose) of Markdown, X for code; headings and cells of tables are not prose."""
    before = ""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.map is not None:
            line = token.map[0] + 1
        if token.type == "inline":
            known = {"code_inline": "X", "softbreak": " "}
            plain = "".join(known.get(part.type, part.content) for part in token.children or [])
            for sentence in re.split(r"(?<=[.!?]) +(?=[\"'(\[]*[A-Z0-9])", plain):
                yield line, sentence, before == "paragraph_open"
        before = token.type


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
