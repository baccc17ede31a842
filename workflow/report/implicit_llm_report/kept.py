"""Make the report of stored results again with the current code; results/README.md explains how to store them.

python -m implicit_llm_report.kept results/demo page          # page/declared/index.html
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml

from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest
from implicit_llm_contracts.runs.stage_context import Input, StageContext
from implicit_llm_report import stage


def make_again(results: Path, target: Path, experiment: Path | None = None) -> None:
    """Make the report of RESULTS in TARGET/declared, from the inputs that the manifest of the stored report names.

    Without a complete report, the manifest is that of `implicit-llm missing --report`. If the YAML file of the
    EXPERIMENT is given, every setting in its section `report` replaces the stored setting.
    """
    whole = results / "report"
    manifest = Manifest.read((whole if whole.exists() else results / "report-with-missing") / MANIFEST)
    folders = {role: results.absolute() / role.replace(":", "/", 1) for role in manifest.upstream}
    today = yaml.safe_load(experiment.read_text(encoding="utf-8"))["report"] if experiment is not None else {}
    make_page(folders, target, {**manifest.config, **today}, manifest.fingerprint)


def make_page(folders: Mapping[str, Path], target: Path, config: Mapping[str, Any], fingerprint: str) -> None:
    """Write a report with the settings `config` to `target`/declared. `folders`: the run directories by role.

    Raises: UserError.
    """
    stage.run(context_of(folders, target, config, fingerprint))


def context_of(folders: Mapping[str, Path], target: Path, config: Mapping[str, Any], fingerprint: str) -> StageContext:
    """Return the context of a report that has no run directory and writes below `target`. Raises: ManifestError."""
    return StageContext(
        stage="report",
        name="report",
        fingerprint=fingerprint,
        config=dict(config),
        inputs={role: Input(folder, Manifest.read(folder / MANIFEST)) for role, folder in folders.items()},
        run_dir=target,
        work=target,
        journal=Journal(None),
        log=logging.getLogger(__name__),
        runtime={},
        is_main=True,
    )


if __name__ == "__main__":
    typer.run(make_again)
