"""Write the tables of this folder from `inputs.tar.xz`.

python results/reference/language-models/tables.py [FOLDER]
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).parent
MEASURED = [
    *["length", "mode", "eval_stop", "num_tokens", "loss", "f_evaluations_per_token", "unconverged_share"],
    *["train_tokens", "train_flops", "num_parameters"],
]
PAIR = ["length", "mode", "against", "num_tokens", "token_agreement", "kl"]


def main(folder: Path = HERE) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        shutil.unpack_archive(HERE / "inputs.tar.xz", scratch)
        results = Path(scratch, "results")
        curves = pd.DataFrame(row for job in sorted(results.glob("*/train/*/*")) for row in curve(job))
        jobs = sorted(results.glob("*/evaluate/*/*/*"))
        tests = pd.DataFrame(row for job in jobs if job.name != "agreement" for row in rows(job, MEASURED))
        pairs = pd.DataFrame(row for job in jobs if job.name == "agreement" for row in rows(job, PAIR))
    curves.to_csv(folder / "training_loss.csv", index=False, float_format="%.6g")
    tests.to_csv(folder / "test_loss.csv", index=False, float_format="%.6g")
    pairs.to_csv(folder / "agreement.csv", index=False, float_format="%.6g")


def named(job: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What names a training job or an evaluation of it, and its manifest."""
    manifest = json.loads((job / "manifest.json").read_text())
    run, phase = manifest["name"].split("/")[:2]
    name, _, seed = run.rpartition("-s")
    experiment = next(parent.parent.name for parent in job.parents if parent.name in ("train", "evaluate"))
    return {"experiment": experiment, "run": name, "phase": phase, "seed": int(seed)}, manifest


def curve(job: Path) -> Iterator[dict[str, Any]]:
    """The loss of each logged step, by the last attempt that made it."""
    name, _ = named(job)
    steps: dict[int, dict[str, Any]] = {}
    for journal in sorted(job.glob("work/*/journal.jsonl")):
        for line in journal.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "metrics" and "loss" in record["values"]:
                steps[record["step"]] = record["values"]
    for step, values in sorted(steps.items()):
        yield name | {"step": step} | {key: values[key] for key in ("tokens", "flops", "loss")}


def rows(job: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each length and mode, or for each pair of modes."""
    name, manifest = named(job)
    metrics = json.loads((job / manifest["files"][0]["path"]).read_text())
    for record in metrics["records"]:
        if record.get("measure", "pair") == "pair":
            yield name | {"evaluation": job.name} | {key: record[key] for key in columns}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
