"""The extension points, used from outside of the package by the examples of docs/extending.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import implicit_llm
from implicit_llm.solver.fixed_point import solve
from implicit_llm.solver.methods import make_update
from implicit_llm.solver.residual import make_rule
from implicit_llm_contracts.config.registry import NameTaken
from implicit_llm_contracts.plugins import load_plugin
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_data.groups import InvalidTable, load_group, register_group
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.planning.code_digest import job_sources
from implicit_llm_workflow.planning.plan import Plan
from tests.refusals import refused

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "examples" / "extending"
EXPERIMENTS = [EXAMPLES / "gated-rnn.yaml", EXAMPLES / "parity.yaml"]


class Linear:
    """f(z) = 0.9 z + 1 on every channel: the fixed point is 10."""

    def __call__(self, z_BLD: torch.Tensor) -> torch.Tensor:
        return 0.9 * z_BLD + 1

    def select(self, index_B: torch.Tensor) -> Linear:
        return self

    def is_wanted(self, num_open: int) -> bool:
        return num_open > 0


def plan_of(path: Path, results: Path) -> Plan:
    return Plan(load_experiment(path), results)


def copied(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    return tmp_path / "examples" / "gated-rnn.yaml"


def test_an_own_method_and_an_own_rule_find_the_fixed_point_in_fewer_steps_than_the_built_in_ones() -> None:
    load_plugin(EXAMPLES / "heavy_ball.py")
    z0 = torch.zeros(2, 5, 3, dtype=torch.float64)
    taken = {}
    for method, stop in (("damped", "token"), ("heavy_ball", "most_tokens")):
        implicit_llm.SolverConfig(method=method, stop=stop)
        rule = make_rule(stop, 1e-6, is_training=True)
        z, stats = solve(Linear(), z0, update=make_update(method, 0.8), rule=rule, max_iter=500)
        assert torch.allclose(z, torch.full_like(z, 10.0), atol=1e-3)
        taken[method] = float(stats.num_iter.max())
    assert taken["heavy_ball"] < taken["damped"]


def test_a_model_solves_by_an_own_method_in_training_and_in_evaluation() -> None:
    load_plugin(EXAMPLES / "heavy_ball.py")
    config = implicit_llm.ImplicitMamba2Config(vocab_size=6, hidden_size=16, num_hidden_layers=1, head_dim=8)
    config.solver = implicit_llm.SolverConfig(method="heavy_ball", stop="most_tokens", eval_stop="most_tokens")
    model = implicit_llm.ImplicitMamba2ForCausalLM(config)
    ids = torch.arange(6)[None]
    assert model.train()(ids, labels=ids).loss.isfinite()
    assert model.eval()(ids).solver_stats.num_iter.max() >= 1


def test_an_own_family_agrees_with_itself_in_all_modes_and_is_saved_and_loaded(tmp_path: Path) -> None:
    module = load_plugin(EXAMPLES / "gated_rnn.py")
    solver = implicit_llm.SolverConfig(tol=1e-6, max_iter=200)
    config = module.GatedRnnConfig(vocab_size=6, hidden_size=16, num_hidden_layers=2, solver=solver)
    torch.manual_seed(0)
    model = implicit_llm.models.auto.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # a random stack has no single fixed point; this one contracts
        for layer in model.backbone.layers:
            layer.in_proj.g *= 0.1
            layer.out_proj.g *= 20
        model.backbone.injection.proj.g *= 2
    ids = torch.randint(6, (2, 10))
    with torch.no_grad():
        logits = {mode: model(ids, eval_mode=mode).logits for mode in ("simultaneous", "blockwise", "sequential")}
        padded = torch.nn.functional.pad(ids, (3, 0))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
        behind = model(padded, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(logits["blockwise"], logits["sequential"], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits["blockwise"], logits["simultaneous"], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits["blockwise"], behind, atol=1e-5, rtol=0)
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 13)
    model.save_pretrained(tmp_path)
    again = implicit_llm.models.auto.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_own_groups_are_those_of_the_square_and_of_the_quaternions() -> None:
    load_plugin(EXAMPLES / "small_groups.py")
    tables = {name: load_group(name).table.astype(int) for name in ("D4", "Q8")}
    for table in tables.values():
        assert (table != table.T).any()
        assert (np.sort(table, axis=1) == np.arange(8)).all()
    involutions = {name: sum(table[a, a] == 0 for a in range(1, 8)) for name, table in tables.items()}
    assert involutions == {"D4": 5, "Q8": 1}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1]], "square of integers"),
        ([[0, 1], [1, 2]], "outside 0..1"),
        ([[1, 0], [0, 1]], "element 0 is not the identity"),
        ([[0, 1, 2], [1, 2, 2], [2, 1, 0]], "not associative"),
    ],
)
def test_a_table_that_is_no_monoid_is_refused(table: list[list[int]], message: str) -> None:
    with pytest.raises(InvalidTable, match=message):
        register_group("broken", table)


def test_built_in_names_are_taken() -> None:
    with pytest.raises(NameTaken, match="'S3' is built in"):
        register_group("S3", [[0]])
    with pytest.raises(NameTaken, match="'anderson' is built in"):
        implicit_llm.register_method("anderson", lambda tau: make_update("plain", tau))
    with pytest.raises(NameTaken, match="'token' is built in"):
        implicit_llm.register_stop("token", lambda z, fz, tol: None)  # type: ignore[arg-type, return-value]


def test_planning_with_plugins_imports_neither_them_nor_torch() -> None:
    lines = [
        "import sys; from pathlib import Path",
        "from implicit_llm_workflow.experiment_files.experiment import load_experiment",
        "from implicit_llm_workflow.planning.plan import Plan",
        *(f"Plan(load_experiment(Path({str(path)!r})), Path('none')).identities" for path in EXPERIMENTS),
        "print([name for name in ('torch', 'gated_rnn', 'parity') if name in sys.modules])",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_jobs_that_use_a_plugin_depend_on_its_source(tmp_path: Path) -> None:
    before = plan_of(copied(tmp_path), tmp_path)
    plugin = tmp_path / "examples" / "gated_rnn.py"
    moved = shutil.copytree(tmp_path / "examples", tmp_path / "changed")
    (moved / "gated_rnn.py").write_text(plugin.read_text().replace("(1 - gate_BLD)", "gate_BLD"))
    after = plan_of(moved / "gated-rnn.yaml", tmp_path)
    changed = {key for key, identity in before.identities.items() if identity.code != after.identities[key].code}
    assert changed == {key for key, node in before.nodes.items() if node.stage in ("train", "evaluate")}
    sources = job_sources(before.code(before.nodes["train/implicit-s0/free"]))
    assert sources["gated_rnn"].path == plugin
    assert "implicit_llm.models.layers" in sources


def test_a_comment_in_a_plugin_changes_nothing_and_a_file_that_it_reads_does(tmp_path: Path) -> None:
    path = copied(tmp_path)
    text = path.read_text().replace("[gated_rnn.py]", "[gated_rnn.py, small_groups.py]")
    text = text.replace("group: S3", "group: Q8")
    codes = []
    changes = {"small_groups.py": lambda text: f"# a comment\n{text}", "q8.csv": lambda text: text[::-1]}
    for file, change in ("small_groups.py", str), *changes.items():
        folder = shutil.copytree(path.parent, tmp_path / f"copy-{len(codes)}")
        (folder / "gated-rnn.yaml").write_text(text)
        (folder / file).write_text(change((folder / file).read_text()))
        codes.append(plan_of(folder / "gated-rnn.yaml", tmp_path).identities["data/s3-train"].code)
    assert codes[0] == codes[1] != codes[2]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[gated_rnn.py]", "[gated.py]", "gated.py: the plugin cannot be read"),
        ("group: S3", "group: D6", "data.s3.group: 'D6' is no group"),
        ("[gated_rnn.py]", "[gated_rnn.py, gated_rnn.py]", "both add 'gated_rnn'"),
        ("max_iter: 16", "method: heavy_bal", "solver.method: 'heavy_bal' is none of plain"),
    ],
)
def test_a_mistake_in_an_experiment_with_plugins_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = copied(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with refused(message, ConfigError):
        load_experiment(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "has no PLUGIN = "),
        ("PLUGIN = dict(methods=[])\n", "PLUGIN is not a literal"),
        ('PLUGIN = {"method": []}\n', "unknown key 'method'; did you mean 'methods'"),
        ('PLUGIN = {"methods": ["plain"]}\n', "solver method 'plain' is built in"),
        ('PLUGIN = {"groups": {"S3": 6}}\n', "group 'S3' is built in"),
        ('PLUGIN = {"methods": ["unregistered"]}\n', "declares 'unregistered', which the file does not have"),
        ('PLUGIN = {"groups": {"D5": 10}}\n', "declares the group 'D5' of 10 elements"),
        ("PLUGIN = {\n", "is not valid Python"),
    ],
)
def test_a_mistake_in_a_plugin_is_one_line_that_names_it(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / f"own_{abs(hash(source))}.py"
    path.write_text(source)
    with refused(f"^{path}.*{message}", ConfigError):
        load_plugin(path)


@pytest.mark.slow
def test_an_own_family_learns_s3_through_the_workflow_and_its_explicit_twin_does_not(tmp_path: Path) -> None:
    accuracy = {
        (record["is_implicit"], record["length"]): record["accuracy_token"]
        for record in records_of(tmp_path, "gated-rnn")
        if record["mode"] in ("parallel", "sequential")
    }
    assert accuracy[True, 8] > 0.98
    assert accuracy[False, 8] < 0.85


@pytest.mark.slow
def test_an_own_task_is_made_trained_evaluated_and_drawn(tmp_path: Path) -> None:
    records = records_of(tmp_path, "parity")
    assert {record["length"]: record["accuracy_token"] > 0.95 for record in records} == {8: True, 16: True}
    report = tmp_path / "results" / "parity" / "report"
    assert "parity-by-length-0" in (report / "figures" / "parity-by-length.svg").read_text()
    page = (report / "index.html").read_text()
    assert "Accuracy on parity by the number of bits." in page
    assert ">bits</text>" in page


def records_of(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    """What the evaluations of an example found, made by a copy of the project's Snakefile elsewhere."""
    shutil.copytree(EXAMPLES, tmp_path / "extending")
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(PROJECT / "Snakefile"), "--cores", "2"]
    command += ["--directory", str(tmp_path), "--configfile", str(tmp_path / "extending" / f"{name}.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    files = (tmp_path / "results" / name / "evaluate").rglob("metrics.json")
    return [record for path in files for record in json.loads(path.read_text())["records"]]
