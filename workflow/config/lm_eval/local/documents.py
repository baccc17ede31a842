"""Load the documents of the local tasks: invented Python code in the style of the miniature experiment's corpus."""

import json
from pathlib import Path
from typing import Any


def documents(file: str, **_: Any) -> dict[str, Any]:
    """Return the documents of a task as the harness expects them: a `datasets.Dataset` by split, here only "test".

    `file`: the name of a file beside this module, with one JSON object a line. Other arguments are ignored.
    """
    from datasets import Dataset

    lines = Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
