"""Write the tables of this folder from `inputs.tar.xz`.

    python results/reference/language-models/tables.py [FOLDER]              # the tables alone, into FOLDER
    python results/reference/language-models/tables.py --keep [RESULTS ...]  # and the reports and pages

`--keep results/language-models-repeated` first packs what a report reads of these results, in place of what was kept
of that experiment. Then it writes all that follows: tables, reports with their claims, generated parts of the pages.
"""

import json
import runpy
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pandas as pd

from implicit_llm_report.kept import make_again

HERE = Path(__file__).absolute().parent
ROOT = HERE.parents[2]
INPUTS = HERE / "inputs.tar.xz"
JOBS = ("data", "train", "evaluate", "report", "report-with-missing")
PACKED = ("manifest.json", "metrics.json", "provenance.json", "journal.jsonl", "config.json")
PAGES = ("index.html", "numbers.html", "claims.json")
MEASURED = [
    *["length", "mode", "eval_stop", "num_tokens", "loss", "f_evaluations_per_token", "unconverged_share"],
    *["train_tokens", "train_flops", "num_parameters"],
]
PAIR = ["length", "mode", "against", "num_tokens", "token_agreement", "kl"]
KEYS = ["experiment", "run", "phase", "seed", "evaluation"]


def main(folder: Path = HERE) -> None:
    """Write the tables; validation text is in one of its own, because it chooses rates and weight decays."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.unpack_archive(INPUTS, scratch)
        results = Path(scratch, "results")
        curves = pd.DataFrame(row for job in sorted(results.glob("*/train/*/*")) for row in curve(job))
        jobs = sorted(results.glob("*/evaluate/*/*/*"))
        losses = {split: [job for job in jobs if split_of(job) == split] for split in ("test", "validation")}
        made = {
            "training_loss": curves,
            "test_loss": table((job for job in losses["test"] if job.name != "agreement"), MEASURED),
            "validation_loss": table(losses["validation"], MEASURED),
            "agreement": table((job for job in losses["test"] if job.name == "agreement"), PAIR),
        }
    for name, frame in made.items():
        frame.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def table(jobs: Iterable[Path], columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame([row for job in jobs for row in rows(job, columns)], columns=[*KEYS, *columns])


def keep(folders: Sequence[Path]) -> None:
    """Add results to the inputs, and write the tables, the reports and the pages."""
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):  # so that a report names results/, not this folder
        shutil.unpack_archive(INPUTS)
        for folder in folders:
            pack(folder, Path("results", folder.name))
        if folders:
            with tarfile.open(INPUTS, "w:xz") as archive:
                archive.add("results", filter=without_owner)
        for manifest in sorted(Path("results").glob("*/report*/manifest.json")):
            make_report(manifest.parents[1])
    main()
    runpy.run_path(str(ROOT / "docs/written.py"), run_name="__main__")


def pack(folder: Path, target: Path) -> None:
    """Copy what a report reads of the results in a folder, in place of what TARGET has."""
    found = [path for job in JOBS for path in (folder / job).rglob("*") if path.name in PACKED and path.is_file()]
    if not any(path.name == "metrics.json" for path in found):
        raise SystemExit(f"error: {folder}/evaluate has no metrics.json; give the folder of an experiment in results/")
    shutil.rmtree(target, ignore_errors=True)
    for path in found:
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid, member.gid, member.uname, member.gname, member.mtime = 0, 0, "", "", 0
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def make_report(results: Path) -> None:
    """Write the report of an experiment: here or, of one other than language-models, in a folder of its own name."""
    target = HERE.parent / results.name
    target.mkdir(exist_ok=True)
    make_again(results, results / "page", ROOT / f"workflow/config/{results.name}.yaml")
    for name in PAGES:
        shutil.copyfile(results / "page/declared" / name, target / name)


def manifest_of(job: Path) -> dict[str, Any]:
    return json.loads((job / "manifest.json").read_text())


def split_of(job: Path) -> str:
    """Return the split of the text that an evaluation reads, by the manifest of its data."""
    [data] = (role for role in manifest_of(job)["identity"]["upstream"] if role != "model")
    return manifest_of(job.parents[3] / "data" / data)["identity"]["config"]["split"]


def named(job: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the name of a training job or of its evaluation, and the manifest."""
    manifest = manifest_of(job)
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
    if sys.argv[1:2] == ["--keep"]:
        keep([Path(folder).absolute() for folder in sys.argv[2:]])
    else:
        main(*map(Path, sys.argv[1:]))
