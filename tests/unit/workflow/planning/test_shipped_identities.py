"""The identities of all jobs of the shipped experiments, without their code: changed ones make every result stale.

After a change that is meant, `python -m tests.unit.workflow.planning.test_shipped_identities` writes the digests anew.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from implicit_llm_contracts.runs.identity import digest
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.project_dirs import CONFIG_DIR

SHIPPED = sorted(path.stem for path in CONFIG_DIR.glob("*.yaml"))
DIGESTS = Path(__file__).with_name("shipped_identities.json")


def identities_digest(name: str, results: Path) -> str:
    """One digest of the identities of all jobs, each with an empty code digest."""
    plan = Plan(load_experiment(CONFIG_DIR / f"{name}.yaml"), results, lambda code: "")
    return digest({key: json.loads(identity.to_json()) for key, identity in plan.identities.items()})


@pytest.mark.parametrize("name", SHIPPED)
def test_the_identities_of_a_shipped_experiment_are_those_of_results_made_before(name: str, tmp_path: Path) -> None:
    assert identities_digest(name, tmp_path) == json.loads(DIGESTS.read_text(encoding="utf-8"))[name]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        found = {name: identities_digest(name, Path(folder)) for name in SHIPPED}
    DIGESTS.write_text(f"{json.dumps(found, indent=2)}\n", encoding="utf-8")
