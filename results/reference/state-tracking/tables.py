"""Write the tables of this folder from `inputs.tar.xz` and the plan of the experiment. In the checkout's root:

    python results/reference/state-tracking/tables.py [FOLDER]

A row is complete when every planned seed of its run, phase and evaluation has a result.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.planning.graph import build_graph

HERE = Path(__file__).parent
JOB = ["run", "phase", "evaluation", "seed"]
ROWS = ["run", "phase", "hard_fraction", "length", "mode", "seed"]
METRICS = [
    *["num_samples", "accuracy_last10", "accuracy_sequence", "accuracy_token", "chance_last10", "iterations_per_token"],
    *["unconverged_share", "token_match_sequential"],
]
ACCURACY = [*["run", "phase", "mode", "hard_fraction", "length", "seed"], *METRICS, "num_parameters", "fingerprint"]


def main(folder: Path = HERE) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(HERE / "inputs.tar.xz") as archive:
            archive.extractall(scratch, filter="data")
        results = Path(scratch, "results/state-tracking")
        trained = {one["fingerprint"]: one for one in manifests(results / "train", "*/*/manifest.json")}
        measured = manifests(results / "evaluate", "*/*/*/manifest.json")
        rows = pd.DataFrame([row for one in measured for row in rows_of(one, trained, results)])
        training = pd.DataFrame([training_row(one, results) for one in trained.values()])
    jobs = planned().merge(rows[JOB].drop_duplicates(), how="left", indicator="state")
    jobs["is_there"] = jobs.pop("state") == "both"
    whole = jobs.groupby(JOB[:3]).is_there.transform("all")
    rows = rows.merge(jobs[whole][JOB], how="left", indicator="state").sort_values(ROWS)
    is_complete = rows.pop("state") == "both"
    left = jobs[~jobs.is_there].groupby(JOB[:3]).seed.agg(lambda seeds: " ".join(map(str, sorted(seeds)))).reset_index()
    write(rows.loc[is_complete, ACCURACY], folder / "accuracy.csv")
    write(rows.loc[~is_complete, ACCURACY], folder / "incomplete.csv")
    write(left.rename(columns={"seed": "seeds"}), folder / "not-run.csv")
    write(training, folder / "training.csv")


def planned() -> pd.DataFrame:
    """The evaluations that the experiment plans, a row each."""
    nodes = build_graph(load_experiment(Path("workflow/config/state-tracking.yaml"))).values()
    names = [(node.run, *node.name.split("/")[1:], node.seed) for node in nodes if node.stage == "evaluate"]
    return pd.DataFrame(names, columns=JOB)


def manifests(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def rows_of(one: dict[str, Any], trained: dict[str, Any], results: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation, one for each test set and mode."""
    model = trained[one["identity"]["upstream"]["model"]]
    seed = model["identity"]["config"]["seed"]
    run, phase, evaluation = one["name"].split("/")
    job = {"run": run.removesuffix(f"-s{seed}"), "phase": phase, "evaluation": evaluation, "seed": seed}
    job |= {"fingerprint": one["fingerprint"][:16], "num_parameters": model["summary"]["num_parameters"]}
    metrics = json.loads((results / "evaluate" / one["name"] / one["files"][0]["path"]).read_text())
    return [
        job | {key: record[key] for key in [*METRICS, "mode", "hard_fraction", "length"]}
        for record in metrics["records"]
    ]


def training_row(one: dict[str, Any], results: Path) -> dict[str, Any]:
    """What a training job did; `busy_seconds` is the sum over its attempts."""
    provenance = json.loads((results / "train" / one["name"] / "provenance.json").read_text())
    summary = one["summary"]
    return {
        "job": f"train/{one['name']}",
        "fingerprint": one["fingerprint"][:16],
        "step": summary["global_step"],
        "parameters": summary["num_parameters"],
        "busy_seconds": sum(attempt["busy_s"] for attempt in provenance["attempts"]),
        "train_accuracy_last10": summary["metrics"]["accuracy_last10"],
        "loss": summary["metrics"]["loss"],
    }


def write(frame: pd.DataFrame, path: Path) -> None:
    frame.to_csv(path, index=False, float_format="%.6g")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
