"""The two stages from a configuration to CatbAbI, called by themselves."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.stages import babi_text, catbabi

SIMULATED: dict[str, Any] = {
    "kind": "babi_text",
    "source": "simulated",
    "seed": 0,
    "families": [1, 8, 19],
    "stories": {"train": 12, "valid": 4, "test": 5},
    "story_length": 6,
}
CATBABI: dict[str, Any] = {
    "kind": "catbabi",
    "collection": "simulated",
    "split": "train",
    "mode": "qa",
    "length": 50,
    "vocab_size": 192,
    "seed": 0,
    "drop_last_story": True,
}
ARCHIVE = {"kind": "babi_text", "source": "archive"}


def context_in(work: Path, config: dict[str, Any], **changes: Any) -> StageContext:
    """What a data stage works with in the folder `work`, without the frame of a job around it."""
    fields = {"name": f"babi-{work.name}", "inputs": {}, "runtime": {}, **changes}
    log, rest = logging.getLogger("implicit_llm.data"), {"run_dir": work.parent, "work": work, "is_main": True}
    return StageContext("data", fingerprint="0" * 64, config=config, journal=Journal(None), log=log, **fields, **rest)


def make_text(work: Path, downloads: Path | None = None, **config: Any) -> StageResult:
    return babi_text.run(
        context_in(
            work,
            {**SIMULATED, **config} if downloads is None else {**ARCHIVE, **config},
            runtime={"downloads": downloads},
        )
    )


def make_catbabi(work: Path, text: Path, **config: Any) -> StageResult:
    return catbabi.run(context_in(work, {**CATBABI, **config}, inputs={"text": SimpleNamespace(work=text)}))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
