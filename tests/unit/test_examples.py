"""The examples compute what the library computes, learn what they say, and are the notebook that lies beside them."""

import json
import re
import runpy
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm_data.groups import load_group
from tests.pages import ROOT

EXAMPLES = ROOT / "examples"


def load(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


short = load("implicit_in_200_lines")
IDS, LABELS = short.words(3, 20)


def library_model(**solver: object) -> torch.nn.Module:
    """The library's model of the same weights, with the rules of the example."""
    model = AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model("s5-implicit-s0"))
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
    saved = load_file(implicit_llm.trained_model("s5-implicit-s0") / "model.safetensors")
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
