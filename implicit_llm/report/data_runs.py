"""The data sets behind the inputs of a report, as far as they still lie beside them.

They are no inputs: no number comes from them but through a training phase or an evaluation. The picture of the lineage
names them; one that is gone has its fingerprint alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from implicit_llm.runs.stage import Input
from implicit_llm_contracts.runs.manifest import FILE_NAME, Manifest, ManifestError

DATA = "data"


def find_data(inputs: Iterable[Input], wanted: Collection[str]) -> dict[str, Input]:
    """By fingerprint, those of `wanted`."""
    folders = sorted({folder for given in inputs if (folder := _data_folder(given)) is not None})
    found: dict[str, Input] = {}
    for path in (path for folder in folders for path in sorted(folder.glob(f"*/{FILE_NAME}"))):
        try:
            manifest = Manifest.read(path)
        except ManifestError:
            continue  # of no input; `implicit-llm verify` tells
        if manifest.fingerprint in wanted:
            found.setdefault(manifest.fingerprint, Input(path.parent, manifest))
    return found


def _data_folder(given: Input) -> Path | None:
    """The data sets of the experiment that a run belongs to: results/<experiment>/data."""
    key = f"{given.manifest.stage}/{given.manifest.name}"
    if not given.dir.as_posix().endswith(f"/{key}"):
        return None
    return given.dir.parents[key.count("/")] / DATA
