"""Make the report of this folder again, from `inputs.tar.xz`, with the code of today. In the checkout's root:

    python results/reference/h200/page.py TARGET          # TARGET/declared/index.html

A result counts whatever code made it, if its settings are those that the experiment plans. `reduction` is left out: it
came later, and says how several GPUs add their gradients.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from implicit_llm_report.kept import make_page
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.missing import find_missing, report_with_missing

HERE = Path(__file__).parent
CONFIG = Path("workflow/config/h200.yaml")


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        shutil.unpack_archive(HERE / "inputs.tar.xz", scratch)
        plan = Plan(load_experiment(CONFIG), Path(scratch, "results"))
        page = plan.nodes["report"]
        missing = [one for one in find_missing(plan, page) if not is_kept(plan, one.job)]
        identity, _ = report_with_missing(plan, page, missing)
        make_page(plan.root, target, identity.config, identity.upstream, identity.fingerprint)


def is_kept(plan: Plan, job: str) -> bool:
    difference = plan.statuses[job].difference
    return difference is not None and all(change.startswith("reduction ") for change in difference.config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
