"""Define the interface of a stage: the context with its inputs and work folder, and the result that it returns."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from implicit_llm_contracts.config.fill import fill, fill_keys
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.plugins import BUILTIN, Kinds
from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_contracts.runs.run_directory import JOURNAL, job_key, work_directory

T = TypeVar("T")

MODEL_ROLE, TOKENIZER_ROLE = "model", "tokenizer"  # roles of inputs


class InputMissing(UserError):
    """A job needs an input that its identity does not name."""


@dataclass(frozen=True)
class Input:
    """A finished run that a job reads."""

    dir: Path
    manifest: Manifest

    @property
    def work(self) -> Path:
        """The folder of the run's artifacts."""
        return work_directory(self.dir, self.manifest.fingerprint)

    @property
    def journal(self) -> Path:
        return self.work / JOURNAL


@dataclass(frozen=True)
class StageContext:
    """The context in which the body of a stage runs. The body writes only below `work`.

    Files below `work / "declared"` that the result names are also copied to two folders, with the same relative path:
    to `work`, where Snakemake expects the outputs of a rule, and to the run directory.
    """

    stage: str
    name: str
    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, Input]
    run_dir: Path
    work: Path
    journal: Journal
    log: logging.Logger
    runtime: dict[str, Any]
    is_main: bool  # False on ranks above 0 of a distributed job, whose journal and result are ignored
    kinds: Kinds = BUILTIN

    def settings(self, cls: type[T]) -> T:
        """Return the config as a `cls`; drop the key `kind` if `cls` has no such field. Raises: ConfigError."""
        dropped = {"kind"} - fill_keys(cls).keys()
        config = {key: value for key, value in self.config.items() if key not in dropped}
        return fill(cls, config, job_key(self.stage, self.name))

    def given(self, role: str) -> Input:
        """Return the input with this role. Raises: InputMissing."""
        if role not in self.inputs:
            raise InputMissing(
                f"{self.stage}/{self.name}: no input `{role}`; add its run directory to `inputs` of the identity"
            )
        return self.inputs[role]

    @property
    def downloads(self) -> Path:
        """The folder of fetched files."""
        return downloads_folder(self.runtime.get("downloads"))


@dataclass(frozen=True)
class StageResult:
    """The result of a stage.

    `files`: files or directories below work, absolute or relative to work. `summary`: a few main numbers.
    """

    files: Sequence[Path | str]
    summary: dict[str, Any]
