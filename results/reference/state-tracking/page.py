"""Make the report of this folder again, from `inputs.tar.xz`, with the code of today. In the checkout's root:

    python results/reference/state-tracking/page.py [TARGET]        # TARGET/declared/index.html

Without a target the pages, claims.json and tables/ of this folder are written. Then run docs/written.py.

A result counts whatever code made it, if its settings are those that the experiment plans. Two differences are left
out. `reduction` came later, and says how several GPUs add their gradients. The modes of an evaluation were more: what
is now the ablation was measured by the jobs of the protocol.
"""

import shutil
import sys
import tempfile
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

from tables import RENAMED_MODES

from implicit_llm_report.kept import make_page
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.missing import find_missing, report_with_missing

HERE = Path(__file__).absolute().parent
CONFIG = Path("workflow/config/state-tracking.yaml")
TABLES = tuple(f"tables/{table}.csv" for table in ("babi", "jacobian", "test-time"))
KEPT = ("index.html", "numbers.html", "claims.json", *TABLES)
NOTE = "Commits that jobs did not record were noted manually: README.md beside this page has them, by run."


def main(target: Path) -> None:
    experiment = load_experiment(CONFIG)
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):  # so that the page names results/, not this folder
        shutil.unpack_archive(HERE / "inputs.tar.xz")
        plan = Plan(experiment)
        [packed] = Path("results").iterdir()  # an earlier name of the experiment
        packed.rename(plan.root)
        rename_modes(plan.root)
        page = without_ablation(plan.nodes["report"])
        missing = [replace(one, why="not finished") for one in find_missing(plan, page) if not is_kept(plan, one.job)]
        page = replace(page, config={**page.config, "note": NOTE})
        identity, found = report_with_missing(plan, page, missing)
        folders = {role: Path(folder).absolute() for role, folder in found.items()}
        make_page(folders, target, identity.config, identity.fingerprint)


def is_kept(plan: Plan, job: str) -> bool:
    difference = plan.statuses[job].difference
    return difference is not None and all(change.startswith(("reduction ", "modes.")) for change in difference.config)


def rename_modes(results: Path) -> None:
    """Give the modes in all metrics.json the names of today."""
    for path in results.glob("evaluate/*/*/*/work/*/metrics.json"):
        text = path.read_text()
        for earlier, name in RENAMED_MODES.items():
            text = text.replace(f'"mode": "{earlier}"', f'"mode": "{name}"')
        path.write_text(text)


def without_ablation(page: Node) -> Node:
    """The page without jobs that are not kept, and whose numbers the jobs of the protocol have."""
    jobs = {role: key for role, key in page.upstream.items() if not Path(key).name.startswith("ablation")}
    return replace(page, upstream=jobs)


def keep() -> None:
    """Write the pages and the claims of this folder."""
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch, "page"))
        for name in KEPT:
            shutil.copyfile(Path(scratch, "page", "declared", name), HERE / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute()) if sys.argv[1:] else keep()
