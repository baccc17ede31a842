"""Make the report of kept results again, with the code of today: results/README.md says how to keep them.

python -m implicit_llm_report.kept results/demo page          # page/declared/index.html
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from implicit_llm_contracts.runs import MANIFEST, Input, Journal, Manifest, StageContext
from implicit_llm_report import stage


def make_again(results: Path, target: Path) -> None:
    """Make the report of RESULTS in TARGET/declared, from the inputs that its manifest names."""
    manifest = Manifest.read(results / "report" / MANIFEST)
    make_page(results, target, manifest.config, manifest.upstream, manifest.fingerprint)


def make_page(results: Path, target: Path, config: Mapping[str, Any], roles: Iterable[str], fingerprint: str) -> None:
    """Make a report of these settings in TARGET/declared; a role is that of an input, such as `train:a5-s0/free`."""
    folders = {role: results.absolute() / role.replace(":", "/", 1) for role in roles}
    context = StageContext(
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
    stage.run(context)


if __name__ == "__main__":
    typer.run(make_again)
