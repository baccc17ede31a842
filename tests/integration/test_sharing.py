"""A saved model loads where the package is installed and not imported, also in stock lm-eval; elsewhere it is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
TASKS = Path(__file__).parents[2] / "workflow" / "config" / "lm_eval" / "local"
LOAD = """
import sys
from transformers import AutoModelForCausalLM
class NotInstalled:
    def find_spec(self, name, *_):
        if name == "implicit_llm":
            raise ModuleNotFoundError("No module named 'implicit_llm'")
sys.meta_path.insert(0, NotInstalled())
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(" ".join(str(error).split()))
del sys.meta_path[0]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__, model.solver.tol)
model.save_pretrained(sys.argv[2])
"""


def run(tmp_path: Path, *command: str) -> str:
    """Its output; without a network, and with a cache of its own for the code that transformers copies."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("family", ["llama3"])
def test_a_saved_model_loads_without_the_import_and_names_the_package_that_is_missing(
    folder: Path, tmp_path: Path
) -> None:
    output = run(tmp_path, sys.executable, "-c", LOAD, str(folder), str(tmp_path / "again"))
    missing, loaded = output.splitlines()
    assert "implicit_llm" in missing
    assert "pip install implicit_llm" in missing
    assert loaded == "implicit_llm.models.causal_lm 0.01"
    for name in ("config.json", "modeling_implicit.py", "README.md"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("family", ["mamba2"])
def test_stock_lm_eval_scores_a_saved_model(folder: Path, tmp_path: Path) -> None:
    lm_eval = Path(sys.executable).with_name("lm_eval")
    run(
        tmp_path, str(lm_eval), "--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True",
        "--tasks", "local_cloze", "--include_path", str(TASKS), "--limit", "4", "--device", "cpu",
        "--output_path", str(tmp_path / "scores"),
    )  # fmt: skip
    (scores,) = (tmp_path / "scores").rglob("results_*.json")
    assert json.loads(scores.read_text(encoding="utf-8"))["results"]["local_cloze"]["acc,none"] >= 0
