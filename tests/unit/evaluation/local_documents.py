"""Makes the documents of the local tasks: made-up Python in the manner of its standard library.

`python -m tests.unit.evaluation.local_documents` writes the files anew.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "workflow" / "config" / "lm_eval" / "local"
NUM_DOCUMENTS = 64
NUM_ENDINGS = 4

NAMES = ("name", "value", "path", "data", "key", "line", "file", "size", "index", "result", "text", "item")
CLASSES = ("Handler", "Parser", "Reader", "Writer", "Buffer", "Message", "Counter", "Request")
ERRORS = ("ValueError", "TypeError", "KeyError", "OSError", "RuntimeError", "AttributeError")
VERBS = ("read", "write", "close", "get", "set", "parse", "format", "find", "update")

# The last word can be told from what stands before it.
LAST_WORDS = (
    "    def __init__(self, {name}):\n        self.{name} = {name}",
    "    def get_{name}(self):\n        return self._{name}",
    '    if not isinstance({name}, str):\n        raise TypeError("{name} must be a string")\n    return {name}',
    "    for {name} in self._{name}s:\n        yield {name}",
    "    {name} = kwargs.pop('{name}', None)\n    if {name} is None:\n        return None",
    "    with open(path) as file:\n        for {name} in file:\n            print({name})\n    return None",
    "class {kind}(object):\n\n    def {verb}(self):\n        return self",
    "    try:\n        {name} = self.{verb}()\n    except {error} as exc:\n        raise {error} from exc",
)
# Beginning and end; the other endings of a document are the words of other ends in another order.
CONTINUATIONS = (
    ("    def {verb}(self, {name}=None):\n", "        if {name} is None:\n            {name} = self._{name}"),
    ("    try:\n        {name} = self.{verb}()\n", "    except {error}:\n        return None"),
    ("class {kind}(object):\n    def __init__(self, {name}):\n", "        self.{name} = {name}"),
    ("    for {name} in range(len(self.{name}s)):\n", "        if {name} not in self._{verb}:\n            continue"),
    ("    if not isinstance({name}, str):\n", '        raise {error}("{name} must be a string")'),
    ("import os\nimport sys\n\n", "def {verb}(path, {name}=None):\n    return os.path.join(path, {name})"),
    ("    with open(path, 'r') as file:\n", "        for line in file:\n            {name}.append(line)"),
    ("    def __repr__(self):\n", "        return '%s(%r)' % (self.__class__.__name__, self.{name})"),
)
# The statement that the blank begins; only one of two keywords goes with it.
STATEMENTS = {
    "raise": ("{error}('{name} is not valid')", '{error}("no such {name}")'),
    "def": ("{verb}(self, {name}):", "__init__(self, {name}=None):"),
    "import": ("os, sys, re", "sys"),
    "return": ("self._{name}", "None"),
    "class": ("{kind}(object):", "{kind}(Exception):"),
    "for": ("{name} in self._{name}s:", "{name} in range(10):"),
    "if": ("not isinstance({name}, str):", "{name} is None:"),
    "except": ("{error}:", "({error}, OSError) as exc:"),
    "with": ("open(path) as file:", "self._lock:"),
}


class _Dice:
    """Choices by random() alone, the one method that gives equal numbers in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, count: int) -> int:
        return int(self._random() * count)

    def choose(self, items: Sequence[Any]) -> Any:
        return items[self.below(len(items))]

    def shuffle(self, items: Sequence[Any]) -> list[Any]:
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(len(rest))]

    def fill(self, *templates: str) -> tuple[str, ...]:
        words = {"name": NAMES, "kind": CLASSES, "error": ERRORS, "verb": VERBS}
        chosen = {slot: self.choose(choices) for slot, choices in words.items()}
        return tuple(template.format(**chosen) for template in templates)


def _last_words() -> list[dict[str, Any]]:
    dice = _Dice(1)
    return [{"text": dice.fill(LAST_WORDS[i % len(LAST_WORDS)])[0]} for i in range(NUM_DOCUMENTS)]


def _continuations() -> list[dict[str, Any]]:
    dice = _Dice(2)
    parts = [dice.fill(*CONTINUATIONS[i % len(CONTINUATIONS)]) for i in range(NUM_DOCUMENTS)]
    documents = []
    for index, (context, ending) in enumerate(parts):
        label = dice.below(NUM_ENDINGS)
        # Ends of other kinds, so that no length and no word gives the right one away.
        others = [other for i, (_, other) in enumerate(parts) if (i - index) % len(CONTINUATIONS)]
        wrong = [_disordered(dice.choose(others), dice) for _ in range(NUM_ENDINGS - 1)]
        endings = [*wrong[:label], ending, *wrong[label:]]
        documents.append({"context": context, "endings": endings, "label": label})
    return documents


def _disordered(text: str, dice: _Dice) -> str:
    """The words of `text` in another order, the white space where it was."""
    parts = re.split(r"(\s+)", text)
    words = dice.shuffle([part for part in parts if part.strip()])
    return "".join(words.pop() if part.strip() else part for part in parts)


def _clozes() -> list[dict[str, Any]]:
    dice, keywords = _Dice(3), tuple(STATEMENTS)
    documents = []
    for index in range(NUM_DOCUMENTS):
        right = keywords[index % len(keywords)]
        other = dice.choose([keyword for keyword in keywords if keyword != right])
        (rest,) = dice.fill(dice.choose(STATEMENTS[right]))
        label = dice.below(2)
        options = [right, other] if label == 0 else [other, right]
        documents.append({"sentence": f"    _ {rest}", "options": options, "label": label})
    return documents


MAKERS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "last_word": _last_words,
    "continuation": _continuations,
    "cloze": _clozes,
}


def text_of(name: str) -> str:
    """The content of a task's file."""
    return "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in MAKERS[name]())


if __name__ == "__main__":
    for made in MAKERS:
        (FOLDER / f"{made}.jsonl").write_text(text_of(made), encoding="utf-8")
