"""Write the tables of this folder from `inputs.tar.xz` and the plan of the experiment. In the checkout's root:

    python results/reference/state-tracking/tables.py [FOLDER]

A row is complete when every planned seed of its run, phase and evaluation has a result on its test set and in its mode.
An evaluation that was interrupted gives the rows that it had finished.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.planning.graph import Node, build_graph

HERE = Path(__file__).parent
RENAMED_MODES = {"published": "released-criterion"}  # by their names in `inputs.tar.xz`
JOB = ["run", "phase", "evaluation", "seed"]
ROWS = ["run", "phase", "hard_fraction", "length", "mode", "seed"]
GROUP = ["run", "phase", "evaluation", "hard_fraction", "length", "mode"]
METRICS = [
    *["num_samples", "accuracy_last10", "accuracy_sequence", "accuracy_token", "chance_last10", "iterations_per_token"],
    *["unconverged_share", "token_match_sequential"],
]
ACCURACY = [
    *["run", "phase", "mode", "eval_stop", "hard_fraction", "length", "seed"],
    *METRICS,
    "num_parameters",
    "fingerprint",
]


def main(folder: Path = HERE) -> None:
    plan = list(build_graph(load_experiment(Path("workflow/config/state-tracking.yaml"))).values())
    jobs = pd.DataFrame([job_of(node) for node in plan if node.stage == "evaluate"])
    jobs = jobs[~jobs.evaluation.str.startswith("ablation")]  # whose numbers the jobs of the protocol have
    with tempfile.TemporaryDirectory() as scratch:
        shutil.unpack_archive(HERE / "inputs.tar.xz", scratch)
        [results] = Path(scratch, "results").iterdir()  # packed under an earlier name of the experiment
        trained = {one["fingerprint"]: one for one in manifests(results / "train", "*/*/manifest.json")}
        measured = manifests(results / "evaluate", "*/*/*/manifest.json")
        finished = pd.DataFrame([finished_job(one, trained) for one in measured])
        records = [
            row for one in measured if of_words(one["identity"]["config"]) for row in rows_of(one, trained, results)
        ]
        rows = pd.DataFrame([*records, *interrupted_rows(results, trained, plan)])
        training = pd.DataFrame([training_row(one, results) for one in trained.values()])
    num_seeds = jobs.groupby(JOB[:3], as_index=False).agg(num_seeds=("seed", "size"))
    rows = rows.sort_values(ROWS).merge(num_seeds, how="left")
    is_complete = rows.groupby(GROUP).seed.transform("size") == rows.num_seeds
    left = jobs.merge(finished, how="left", indicator="state")
    left = left[left.state == "left_only"].groupby(JOB[:3]).seed
    left = left.agg(lambda seeds: " ".join(map(str, sorted(seeds)))).reset_index()
    write(rows.loc[is_complete, ACCURACY], folder / "accuracy.csv")
    write(rows.loc[~is_complete, ACCURACY], folder / "incomplete.csv")
    write(left.rename(columns={"seed": "seeds"}), folder / "not-run.csv")
    write(training, folder / "training.csv")


def manifests(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def of_words(config: Mapping[str, Any]) -> bool:
    """Return whether an evaluation is of word problems and has one row for each test set and mode."""
    return config["kind"] == "word_problem" and "sweep" not in config


def job_of(node: Node) -> dict[str, Any]:
    return dict(zip(JOB, [node.run, *node.name.split("/")[1:], node.seed], strict=True))


def finished_job(one: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
    seed = trained[one["identity"]["upstream"]["model"]]["identity"]["config"]["seed"]
    run, phase, evaluation = one["name"].split("/")
    return dict(zip(JOB, [run.removesuffix(f"-s{seed}"), phase, evaluation, seed], strict=True))


def rows_of(one: dict[str, Any], trained: dict[str, Any], results: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation, one for each test set and mode."""
    model = trained[one["identity"]["upstream"]["model"]]
    job = finished_job(one, trained) | {"fingerprint": one["fingerprint"][:16]}
    job |= {"num_parameters": model["summary"]["num_parameters"]}
    metrics = json.loads((results / "evaluate" / one["name"] / one["files"][0]["path"]).read_text())
    return [
        job
        | {key: record[key] for key in [*METRICS, "eval_stop", "hard_fraction", "length"]}
        | {"mode": RENAMED_MODES.get(record["mode"], record["mode"])}
        for record in metrics["records"]
    ]


def interrupted_rows(results: Path, trained: dict[str, Any], plan: list[Node]) -> list[dict[str, Any]]:
    """Return what evaluations had finished before they were interrupted, without values of a whole test set."""
    models = {one["name"]: one["summary"]["num_parameters"] for one in trained.values()}
    data = {node.name: node.config for node in plan if node.stage == "data"}
    rows = []
    for node in plan:
        folder = results / node.key
        if node.stage != "evaluate" or not of_words(node.config) or (folder / "manifest.json").exists():
            continue
        for path in sorted(folder.glob("work/*/partial/*.json")):
            role, mode = path.stem.split("--")
            row = (
                job_of(node)
                | {key: data[role][key] for key in ("hard_fraction", "length")}
                | {"mode": RENAMED_MODES.get(mode, mode)}
            )
            row |= {"fingerprint": path.parents[1].name, "num_parameters": models[node.name.rpartition("/")[0]]}
            found = json.loads(path.read_text())
            rows.append(row | {key: found.get(key) for key in [*METRICS, "eval_stop"]})
    return rows


def training_row(one: dict[str, Any], results: Path) -> dict[str, Any]:
    """Return a training job's row.

    `busy_seconds` is the sum over attempts and `carried_share` the mean over all steps. `last_iterations` is the mean
    of `num_iter` over the last 1,000 steps.
    """
    folder = results / "train" / one["name"]
    provenance = json.loads((folder / "provenance.json").read_text())
    [journal] = folder.glob(f"work/{one['fingerprint'][:16]}/journal.jsonl")
    lines = [line for line in map(json.loads, journal.read_text().splitlines()) if "values" in line]
    carried = [line["values"]["carried_share"] for line in lines if "carried_share" in line["values"]]
    summary = one["summary"]
    last = [line["values"] for line in lines if line["step"] > summary["global_step"] - 1000]
    iterations = [values["num_iter"] for values in last if "num_iter" in values]
    return {
        "job": f"train/{one['name']}",
        "fingerprint": one["fingerprint"][:16],
        "step": summary["global_step"],
        "parameters": summary["num_parameters"],
        "busy_seconds": sum(attempt["busy_s"] for attempt in provenance["attempts"]),
        "train_accuracy": summary["metrics"].get("accuracy_last10", summary["metrics"].get("accuracy")),
        "loss": summary["metrics"]["loss"],
        "carried_share": sum(carried) / len(carried) if carried else None,
        "last_iterations": sum(iterations) / len(iterations) if iterations else None,
    }


def write(frame: pd.DataFrame, path: Path) -> None:
    frame.to_csv(path, index=False, float_format="%.6g")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
