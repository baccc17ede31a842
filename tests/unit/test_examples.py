"""The examples compute what the library computes, learn what they say, and extend it from outside of the package."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.solver.methods import Plain
from implicit_llm_contracts.config.registry import InvalidEntry, NameTaken
from implicit_llm_contracts.errors import ConfigError, InvalidValue
from implicit_llm_contracts.plugins import load_plugin
from implicit_llm_data.groups import InvalidTable, load_group, register_group
from implicit_llm_workflow.planning.code_digest import job_sources
from tests.pages import ROOT
from tests.refusals import refused
from tests.unit.solver.test_fixed_point import run, scaled
from tests.unit.workflow.experiments import ExperimentFile, real_plan

EXAMPLES = ROOT / "examples"


def load(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


short = load("implicit_in_200_lines")
IDS, LABELS = short.words(3, 20)


def library_model(**solver: object) -> torch.nn.Module:
    """The library's model of the same weights, with the rules of the example, which has no dropout."""
    model = AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model("s5-state-passing-s0"), dropout=0.0)
    rules = {"stop": "token", "eval_stop": "token", "eval_max_iter": short.MAX_ITER + 1, "block_len": None}
    model.solver = {**asdict(model.solver), **rules, **solver}
    return model


def test_the_short_file_is_as_short_as_it_says() -> None:
    assert len((EXAMPLES / "implicit_in_200_lines.py").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize(
    ("block_len", "mode"),
    [(1, {"eval_mode": "sequential"}), (8, {"eval_block_len": 8}), (20, {"eval_mode": "simultaneous"})],
)
def test_the_short_file_reads_as_the_library_does(block_len: int, mode: dict[str, object]) -> None:
    model = library_model(**mode).eval()
    w = short.load()
    for row in range(len(IDS)):  # one word at a time, so that the evaluations can be compared
        ids_1L = IDS[row : row + 1]
        with torch.inference_mode():
            theirs = model(ids_1L)
        mine_1LV, evaluations = short.read(w, ids_1L, block_len)
        torch.testing.assert_close(mine_1LV, theirs.logits, rtol=1e-3, atol=1e-3)
        blocks = -(-IDS.shape[1] // block_len)
        if IDS.shape[1] % block_len == 0:  # else the library's mean over tokens weighs the last block less
            assert evaluations / blocks == pytest.approx(float(theirs.solver_stats.f_evaluations[0]))
    assert torch.equal(short.read(w, IDS, block_len)[0].argmax(-1), LABELS)


@pytest.mark.parametrize(
    ("loss", "solver"),
    [
        (lambda w: short.phantom_loss(w, IDS, LABELS, max_iter=40), {"mode": "fixed_point", "max_iter": 40}),
        (lambda w: short.unrolled_loss(w, IDS, LABELS, steps=6), {"mode": "unrolled", "num_unroll": 6}),
    ],
)
def test_the_short_file_has_the_loss_and_the_gradient_of_the_library(loss, solver) -> None:  # type: ignore[no-untyped-def]
    model = library_model(**solver, phantom_steps=4).train()
    w = short.load()
    mine, theirs = loss(w), model(IDS, labels=LABELS, aligned=True).loss
    mine.backward()
    theirs.backward()
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    for name, parameter in model.named_parameters():
        gradient = w[name.removeprefix("backbone.")].grad
        distance = (gradient - parameter.grad).norm() / parameter.grad.norm()
        assert distance < 1e-2, name


def test_the_short_file_has_the_words_and_the_weights_of_the_project() -> None:
    table = torch.from_numpy(load_group("S5").table.astype("int64"))
    ids_BL, labels_BL = short.words(50, 2)
    assert torch.equal(labels_BL[:, 1], table[ids_BL[:, 0], ids_BL[:, 1]])
    saved = load_file(implicit_llm.trained_model("s5-state-passing-s0") / "model.safetensors")
    assert saved.keys() == {f"backbone.{name}" for name in short.load()}


def test_the_short_file_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    short.main(count=1, length=16)
    out = capsys.readouterr().out
    assert "8 tokens at a time: 100.0% of 1 x 16 answers right" in out
    cosines = [float(share) for share in re.findall(r"phantom steps: cosine (0\.\d+)", out)]
    assert len(cosines) == 4
    assert cosines == sorted(cosines)  # more steps, nearer to the gradient through all iterations


@pytest.mark.integration  # half a minute of training
def test_the_example_learns_to_track_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    found = load("train_word_problem").main(steps=500)
    assert found[16] > 0.95
    assert found[32] > 0.8
    assert "16 tokens" in capsys.readouterr().out


def test_the_notebook_is_made_from_the_example() -> None:
    path = EXAMPLES / "train_word_problem.py"
    kept = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    nbformat.validate(kept)
    printed = "".join(line for cell in kept["cells"] for output in cell.get("outputs", []) for line in output["text"])
    assert "64 tokens: 100.0% of the last ten answers are right" in printed
    for cell in kept["cells"]:
        cell |= {"outputs": []} if cell["cell_type"] == "code" else {}
    assert kept == load("notebook").notebook(path.read_text(encoding="utf-8"), is_run=False)


@pytest.mark.integration
def test_the_notebook_runs() -> None:
    client = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
    book = nbformat.read(EXAMPLES / "train_word_problem.ipynb", as_version=4)
    book.cells[-1].source = "found = main(steps=20)"
    client.NotebookClient(book, timeout=300).execute()
    assert "64 tokens" in book.cells[-1].outputs[-1].text


EXTENDING = ROOT / "examples" / "extending"
EXPERIMENTS = [EXTENDING / "gated-rnn.yaml", EXTENDING / "parity.yaml"]


def copied(folder: Path) -> ExperimentFile:
    """The experiment with an own family, in a copy of the examples."""
    shutil.copytree(EXTENDING, folder)
    return ExperimentFile(folder / "gated-rnn.yaml")


def test_an_own_method_and_an_own_rule_find_the_fixed_point_in_fewer_steps_than_the_built_in_ones() -> None:
    load_plugin(EXTENDING / "heavy_ball.py")
    f = scaled([[0.9] * 5] * 2)
    taken = {}
    for method, stop in (("damped", "token"), ("heavy_ball", "most_tokens")):
        implicit_llm.SolverConfig(method=method, stop=stop)
        z, stats = run(f, torch.zeros_like(f.x_BLD), method=method, stop=stop, max_iter=500)
        torch.testing.assert_close(z, f.x_BLD / (1 - 0.9), atol=1e-3, rtol=0)
        taken[method] = float(stats.num_iter.max())
    assert taken["heavy_ball"] < taken["damped"]


def test_a_model_solves_by_an_own_method_in_training_and_in_evaluation() -> None:
    load_plugin(EXTENDING / "heavy_ball.py")
    config = implicit_llm.ImplicitMamba2Config(vocab_size=6, hidden_size=16, num_hidden_layers=1, head_dim=8)
    config.solver = implicit_llm.SolverConfig(method="heavy_ball", stop="most_tokens", eval_stop="most_tokens")
    model = implicit_llm.ImplicitMamba2ForCausalLM(config)
    ids = torch.arange(6)[None]
    assert model.train()(ids, labels=ids).loss.isfinite()
    assert model.eval()(ids).solver_stats.num_iter.max() >= 1


def test_an_own_family_agrees_with_itself_in_all_modes_and_is_saved_and_loaded(tmp_path: Path) -> None:
    module = load_plugin(EXTENDING / "gated_rnn.py")
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
    load_plugin(EXTENDING / "small_groups.py")
    tables = {name: load_group(name).table.astype(int) for name in ("D4", "Q8")}
    for table in tables.values():
        assert (table != table.T).any()
        assert (np.sort(table, axis=1) == np.arange(8)).all()
    involutions = {name: sum(table[a, a] == 0 for a in range(1, 8)) for name, table in tables.items()}
    assert involutions == {"D4": 5, "Q8": 1}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (5, "square of integers"),
        ([[0, 1], [1]], "square of integers"),
        ([[0, 1]], "square of integers"),
        ([[0, 1], [1, 2]], "index of an element"),
        ([[1, 0], [0, 1]], "element 0 is not the identity"),
        ([[0, 1, 2], [1, 2, 2], [2, 1, 0]], "not associative"),
    ],
)
def test_a_table_that_is_no_monoid_is_refused(table: Any, message: str) -> None:
    with pytest.raises(InvalidTable, match=message):
        register_group("broken", table)


@pytest.mark.parametrize(
    ("register", "name", "entry"),
    [
        (register_group, "S3", [[0]]),
        (implicit_llm.register_method, "anderson", lambda tau: Plain()),
        (implicit_llm.register_stop, "token", lambda z, fz, tol: None),
    ],
)
def test_built_in_names_are_taken(register: Any, name: str, entry: Any) -> None:
    with pytest.raises(NameTaken, match=f"'{name}' is built in"):
        register(name, entry)


class NoSelect:
    """A method that cannot drop sequences."""

    def __init__(self, tau: float) -> None: ...

    def __call__(self, z_BLD: torch.Tensor, fz_BLD: torch.Tensor) -> torch.Tensor:
        return fz_BLD


class KeepsAll(NoSelect):
    """A method whose `select` keeps the memory of finished sequences."""

    z_BLD: torch.Tensor | float = 0.0

    def __call__(self, z_BLD: torch.Tensor, fz_BLD: torch.Tensor) -> torch.Tensor:
        self.z_BLD = self.z_BLD + fz_BLD
        return self.z_BLD

    def select(self, index_B: torch.Tensor) -> None: ...


class OneNumber(NoSelect):
    """A method that returns no iterate."""

    def __call__(self, z_BLD: torch.Tensor, fz_BLD: torch.Tensor) -> torch.Tensor:
        return fz_BLD.sum()

    def select(self, index_B: torch.Tensor) -> None: ...


def _progress(done: Any, residual: Any, by_token: Any) -> Any:
    return lambda z, fz, tol: implicit_llm.Progress(done(z), residual(z), by_token(z))


def _of_sequences(z: torch.Tensor) -> torch.Tensor:
    return z.sum((1, 2))


METHODS_AND_RULES: list[tuple[str, Any, str]] = [
    ("method", NoSelect, "what make.tau. returns has no select"),
    ("method", KeepsAll, "the second for sequences 0 and 2 of three, ended in RuntimeError"),
    ("method", OneNumber, "must return the next z .*, not "),
    ("method", lambda: None, "ended in TypeError"),
    ("stop", lambda z, fz, tol: (z, fz), "must return a Progress, not tuple"),
    ("stop", lambda z, fz: None, "ended in TypeError"),
    ("stop", _progress(lambda z: True, _of_sequences, lambda z: z.sum(2)), r"done_B as a tensor of booleans \(3,\)"),
    (
        "stop",
        _progress(lambda z: _of_sequences(z) > 0, lambda z: z.sum(), lambda z: z.sum(2)),
        "residual_B as a tensor",
    ),
    ("stop", _progress(lambda z: _of_sequences(z) > 0, _of_sequences, _of_sequences), "residual_BL as a tensor of num"),
]


@pytest.mark.parametrize(("kind", "entry", "message"), METHODS_AND_RULES)
def test_a_method_or_rule_that_cannot_work_is_refused_when_it_is_registered(
    kind: str, entry: Any, message: str
) -> None:
    with refused(rf"'mine': .*{message}", InvalidEntry):
        getattr(implicit_llm, f"register_{kind}")("mine", entry)
    with pytest.raises(InvalidValue, match="mine"):
        implicit_llm.SolverConfig(**{kind: "mine"})


def _family(name: str, mix: Any) -> Any:
    """The configuration of a family like the gated RNN's, with another `mix`."""
    gated = load_plugin(EXTENDING / "gated_rnn.py")
    config = type(f"{name}Config", (gated.GatedRnnConfig,), {"model_type": name})
    implicit_llm.register_family(name, config, type(f"{name}Layer", (gated.GatedRnnLayer,), {"mix": mix}))
    return config(vocab_size=6, hidden_size=16, num_hidden_layers=1)


def _gated(self: Any, *given: Any) -> Any:
    return load_plugin(EXTENDING / "gated_rnn.py").GatedRnnLayer.mix(self, *given)


def _adding(added: Any) -> Any:
    """A `mix` that adds something of its input to its output."""

    def mix(self: Any, h: torch.Tensor, *given: Any) -> Any:
        y, state = _gated(self, h, *given)
        return y + added(h), state

    return mix


FAULTS = {
    "later tokens change its output; make mix causal": _adding(lambda h: h.mean(1, keepdim=True)),
    "other sequences of the batch change its output": _adding(lambda h: h.mean(0)),
    "a sequence in parts has another output; let mix continue from its state": (
        lambda self, h, injection, state, valid: _gated(self, h, injection, None, valid)
    ),
    "no state differs from zeros; let mix start from zeros": (
        lambda self, h, injection, state, valid: _gated(
            self, h, injection, (h.new_ones(h.shape[0], h.shape[2]),) if state is None else state, valid
        )
    ),
    "padding changes its state; keep the state where valid_BL is False": (
        lambda self, h, injection, state, valid: _gated(self, h, injection, state, None)
    ),
}
OF_IMPLICIT = {
    "the input does not change its output; add injection_BLE in mix": (
        lambda self, h, injection, state, valid: _gated(self, h, None, state, valid)
    ),
}


@pytest.mark.parametrize(
    ("message", "mix", "is_implicit"),
    [(*fault, True) for fault in (FAULTS | OF_IMPLICIT).items()] + [(*fault, False) for fault in FAULTS.items()],
)
def test_the_check_of_a_layer_finds_what_is_wrong_with_it(message: str, mix: Any, is_implicit: bool) -> None:
    config = _family("faulty", mix)
    with refused(f"faultyLayer: {message}", ModelConfigError):
        implicit_llm.check_layer(type(config)(vocab_size=6, hidden_size=16, is_implicit=is_implicit))


@pytest.mark.parametrize("is_implicit", [True, False])
def test_the_check_accepts_the_layers_of_the_package_and_of_the_example(is_implicit: bool) -> None:
    gated = load_plugin(EXTENDING / "gated_rnn.py")
    state = torch.get_rng_state()
    for config in (
        gated.GatedRnnConfig(hidden_size=16, is_implicit=is_implicit),
        implicit_llm.ImplicitMamba2Config(hidden_size=64, is_implicit=is_implicit),
        implicit_llm.ImplicitLlama3Config(hidden_size=24, num_attention_heads=2, is_implicit=is_implicit),
    ):
        implicit_llm.check_layer(config)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("mix", "returned"),
    [
        (lambda self, *given: _gated(self, *given)[0], r"a tensor \(2, 3, 16\)"),
        (lambda self, *given: (_gated(self, *given)[0], None), r"a tuple of a tensor \(2, 3, 16\), a NoneType"),
        (lambda self, *given: (_gated(self, *given)[0], (torch.zeros(()),)), "a tuple of a tensor .*, a tuple of"),
        (
            lambda self, *given: (_gated(self, *given)[0][:1], ()),
            r"a tuple of a tensor \(1, 3, 16\), a tuple of nothing",
        ),
    ],
)
def test_a_layer_that_returns_no_output_with_its_state_is_refused_by_name(mix: Any, returned: str) -> None:
    model = implicit_llm.models.auto.AutoModelForCausalLM.from_config(_family("faulty", mix))
    with refused(f"faultyLayer.mix must return y .*; it returned {returned}", ModelConfigError):
        model(torch.zeros(2, 3, dtype=torch.long))


def test_a_forgotten_injection_width_is_named() -> None:
    gated = load_plugin(EXTENDING / "gated_rnn.py")
    config = type("NarrowConfig", (implicit_llm.ImplicitConfig,), {"model_type": "narrow"})

    class NarrowLayer(gated.GatedRnnLayer):
        def __init__(self, config: Any) -> None:
            super().__init__(gated.GatedRnnConfig(hidden_size=config.hidden_size))

    causal_lm = implicit_llm.register_family("narrow", config, NarrowLayer)
    model = causal_lm(config(vocab_size=6, hidden_size=16, num_hidden_layers=1))
    with refused("injection_width: NarrowLayer.mix cannot add an injection of width 16", ModelConfigError):
        model(torch.zeros(2, 3, dtype=torch.long))


def test_an_injection_that_would_be_added_to_every_channel_alike_is_refused() -> None:
    gated = load_plugin(EXTENDING / "gated_rnn.py")
    fields = {"model_type": "broadcast", "injection_width": property(lambda self: 1)}
    config = type("BroadcastConfig", (gated.GatedRnnConfig,), fields)
    causal_lm = implicit_llm.register_family("broadcast", config, type("BroadcastLayer", (gated.GatedRnnLayer,), {}))
    with refused("injection_width: 1 would be added to every channel alike; let BroadcastConfig", ModelConfigError):
        causal_lm(config(vocab_size=6, hidden_size=16, num_hidden_layers=1))
    causal_lm(config(vocab_size=6, hidden_size=16, num_hidden_layers=1, is_implicit=False))


def test_a_family_of_other_classes_is_refused() -> None:
    gated = load_plugin(EXTENDING / "gated_rnn.py")
    unmixed = type("Unmixed", (implicit_llm.RecurrentLayer,), {})
    for config, layer, message in (
        (gated.GatedRnnConfig, torch.nn.Linear, "layer must be a subclass of RecurrentLayer with mix"),
        (gated.GatedRnnConfig, unmixed, "layer must be a subclass of RecurrentLayer with mix"),
        (dict, gated.GatedRnnLayer, "config must be a subclass of ImplicitConfig"),
    ):
        with refused(message, InvalidEntry):
            implicit_llm.register_family("gated_rnn", config, layer)


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
    before, other = real_plan(copied(tmp_path / "before")), copied(tmp_path / "after")
    ExperimentFile(tmp_path / "after" / "gated_rnn.py").edit("(1 - gate_BLD)", "gate_BLD")
    after = real_plan(other)
    changed = {key for key, identity in before.identities.items() if identity.code != after.identities[key].code}
    assert changed == {key for key, node in before.nodes.items() if node.stage in ("train", "evaluate")}
    sources = job_sources(before.code(before.nodes["train/implicit-s0/free"]))
    assert sources["gated_rnn"].path == tmp_path / "before" / "gated_rnn.py"
    assert "implicit_llm.models.layers" in sources


def test_a_comment_in_a_plugin_changes_nothing_and_a_file_that_it_reads_does(tmp_path: Path) -> None:
    codes = []
    changes = {"small_groups.py": "# a comment\n{}", "q8.csv": "{}\n"}
    for name, text in {"README": "{}", **changes}.items():
        experiment = copied(tmp_path / name).edit("[gated_rnn.py]", "[gated_rnn.py, small_groups.py]")
        file = experiment.edit("group: S3", "group: Q8").path.with_name(name)
        experiment.beside(name, text.format(file.read_text() if file.exists() else ""))
        codes.append(real_plan(experiment).identities["data/s3-train"].code)
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
    with refused(message, ConfigError):
        copied(tmp_path / "examples").edit(old, new).load()


OWN_KINDS = {
    "tasks": '"labels": "aligned", "accuracy": ("accuracy", None), "learns": "", "limits": ""',
    "evaluations": '"data": ["word_problem"]',
}
WRONG_SETTINGS = {
    '"words": []': r".words: \[\] is no default that fixes the type",
    '"words": None': ".words: None is no default",
    '"words": {"a": 1}': ".words: {.*} is no default",
    '"words": [1, "a"]': ".words: .* is no default",
    '"class": 1': ": Field names must not be keywords: 'class'; rename the key",
}


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
        ('PLUGIN = {"files": ["absent.txt"]}\n', r"PLUGIN\['files'\] names absent.txt, which is not beside it"),
        ("PLUGIN = {\n", "is not valid Python"),
        *(
            (f'PLUGIN = {{"{kind}": {{"own": {{"settings": {{{setting}}}, {others}}}}}}}\n', f"own.settings{message}")
            for kind, others in OWN_KINDS.items()
            for setting, message in WRONG_SETTINGS.items()
        ),
    ],
)
def test_a_mistake_in_a_plugin_is_one_line_that_names_it(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / f"own_{abs(hash(source))}.py"
    path.write_text(source)
    with refused(f"^{path}.*{message}", ConfigError):
        load_plugin(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("PLUGIN = {}\nimport no_such_package\n", ":2: there is no module 'no_such_package'; install it, or"),
        ("PLUGIN = {}\n1 / 0\n", r":2: cannot be imported \(ZeroDivisionError: division by zero\)"),
        ("PLUGIN = {}\nreturn\n", r": cannot be imported \(SyntaxError: 'return' outside function"),
        ('PLUGIN = {"methods": ["unregistered"]}\n', ": PLUGIN declares 'unregistered'"),
    ],
)
def test_a_plugin_that_could_not_be_loaded_fails_again_in_the_same_way(
    tmp_path: Path, source: str, message: str
) -> None:
    path = tmp_path / f"own_{abs(hash(source))}.py"
    path.write_text(source)
    for _ in range(2):
        with refused(f"^{path}{message}", ConfigError):
            load_plugin(path)
    assert path.stem not in sys.modules


@pytest.mark.slow
def test_an_own_family_learns_s3_through_the_workflow_and_its_explicit_twin_does_not(tmp_path: Path) -> None:
    accuracy = {
        (record["is_implicit"], record["length"]): record["accuracy_token"]
        for record in records_of(tmp_path, "gated-rnn")
        if record["mode"] in ("parallel", "blockwise-8-token")
    }
    assert accuracy[True, 8] > 0.98
    assert accuracy[False, 8] < 0.85


@pytest.mark.slow
def test_an_own_task_is_made_trained_evaluated_and_drawn(tmp_path: Path) -> None:
    records = records_of(tmp_path, "parity")
    assert {record["length"]: record["accuracy_token"] > 0.95 for record in records} == {8: True, 16: True}
    report = tmp_path / "results" / "parity" / "report"
    assert 'id="axes_1"' in (report / "figures" / "parity-by-length.svg").read_text()
    page = (report / "index.html").read_text()
    assert "Accuracy on parity by the number of bits." in page
    assert ">bits</text>" in page


def records_of(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    """What the evaluations of an example found, made by a copy of the project's Snakefile elsewhere."""
    shutil.copytree(EXTENDING, tmp_path / "extending")
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "2"]
    command += ["--directory", str(tmp_path), "--configfile", str(tmp_path / "extending" / f"{name}.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    files = (tmp_path / "results" / name / "evaluate").rglob("metrics.json")
    return [record for path in files for record in json.loads(path.read_text())["records"]]
