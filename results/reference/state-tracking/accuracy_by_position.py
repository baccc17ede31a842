"""Accuracy at each position of a word of 512 elements of S5, per seed, from the kept results.

    python results/reference/state-tracking/accuracy_by_position.py

Writes accuracy_by_position.json into the folder of the S5 model of the package, from inputs.tar.xz. `implicit-llm try`
shows it beside what it measures.
"""

import json
import tarfile
from pathlib import Path

FOLDER = Path(__file__).absolute().parent
TARGET = FOLDER.parents[2] / "implicit_llm/trained/s5-state-passing-s0/accuracy_by_position.json"
LENGTH = 512
# An explicit model has one mode; of the implicit one this is the mode in which `implicit-llm try` reads.
MODES = {"parallel", "blockwise-8-token"}
RUNS = ("s5-state-passing", "s5-explicit-layers1", "s5-explicit-layers4", "s5-explicit-layers16")
SAME_FOR_ALL_SEEDS = ("run", "mode", "num_layers", "num_parameters", "num_samples", "train_length")


def main() -> None:
    rows = [record for record in records() if record["length"] == LENGTH and record["mode"] in MODES]
    found = [summary([row for row in rows if row["run"] == run]) for run in RUNS]
    lines = ",\n".join(json.dumps(of_run) for of_run in found)
    TARGET.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def records() -> list[dict]:
    """The records of every metrics.json of the S5 evaluations, in the order of their seeds."""
    found = []
    with tarfile.open(FOLDER / "inputs.tar.xz") as archive:
        for member in archive:
            if "/word-problem-s5" in member.name and member.name.endswith("/metrics.json"):
                found += json.load(archive.extractfile(member))["records"]
    return sorted(found, key=lambda record: record["seed"])


def summary(rows: list[dict]) -> dict:
    """Return one line of the file: the values that all seeds of a run share, and a list of accuracies per seed."""
    shared = {key: rows[0][key] for key in SAME_FOR_ALL_SEEDS}
    assert all(row[key] == value for row in rows for key, value in shared.items())
    accuracy = [[round(share, 4) for share in row["accuracy_per_position"]] for row in rows]
    return {**shared, "seeds": [row["seed"] for row in rows], "accuracy_per_position": accuracy}


if __name__ == "__main__":
    main()
