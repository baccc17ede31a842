"""Model cards, as the stages that save models write them."""

import re
import runpy
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from implicit_llm.cards import model_card
from implicit_llm.cards.model_card import render_card
from implicit_llm.models.lstm import LstmConfig
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.plugins import load_plugin
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import COMMIT, work_directory
from implicit_llm_workflow.planning.code_digest import JobCode, job_sources
from tests.pages import ROOT
from tests.unit.checkpoint.foreign import import_checkpoint, save_foreign
from tests.unit.training.small_runs import FREE, IMPLICIT, LLAMA, UNROLLED, make_data, make_rows, train_config
from tests.unit.training.small_runs import train as train_phase


def train_two_phases(folder: Path, data: Path, name: str = "s3-s0") -> Path:
    """The run directory of the second of two phases."""
    first, second = folder / name / "unrolled", folder / name / "free"
    phase: dict[str, Any] = {"name": "unrolled", "solver": UNROLLED, "end_step": 1}
    train_phase(first, train_config(phase=phase, total_steps=2), data)
    phase = {"name": "free", "index": 1, "start_step": 1, "end_step": 2, "solver": FREE}
    train_phase(second, train_config(phase=phase, total_steps=2), data, first)
    return second


def train_one_step(run_dir: Path, data: Path, **config: Any) -> ModelCard:
    """The card of a language model; `config` goes over its configuration."""
    about = {"task": "language_model", "labels": "next_token", "phase": {"end_step": 1}, "total_steps": 1}
    train_phase(run_dir, train_config(LLAMA, **about) | config, data)
    return ModelCard.load(card_of(run_dir))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    make_data(folder)
    train_two_phases(folder / "train", folder / "data" / "s3-train")
    return folder


def card_of(run_dir: Path) -> Path:
    (path,) = run_dir.glob("work/*/model/README.md")
    return path


def test_the_card_says_what_the_model_is_and_how_it_was_trained_and_has_the_head_that_the_hub_reads(
    results: Path,
) -> None:
    run_dir = results / "train" / "s3-s0" / "free"
    text = card_of(run_dir).read_text(encoding="utf-8")
    assert ModelCard(text).data.to_dict() == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "tags": ["mamba2", "implicit-llm", "implicit", "arxiv:2502.07827", "word-problem"],
    }
    manifest = Manifest.read(run_dir / "manifest.json")
    data = Manifest.read(results / "data" / "s3-train" / "manifest.json")
    first = Manifest.read(results / "train" / "s3-s0" / "unrolled" / "manifest.json")
    (index,) = [record for record in data.files if record.path.endswith("index.json")]
    for part in (
        "# Implicit Mamba2: word problem, phase free\n",
        f"An implicit Mamba2 model with {manifest.summary['num_parameters']:,} parameters",
        "each token is an element of S3,",
        f"| unrolled | 0 to 1 | unrolled: 2 iterations, all differentiated, damped by 0.8 | `{first.fingerprint[:16]}`",
        "| free | 1 to 2 | (4+2): up to 4 iterations (plain) until the relative residual of each sequence is below",
        f"| tokens, over all phases | {manifest.summary['tokens']:,} |",
        f"| precision of the matrix products | {manifest.config['precision']};",
        f"Fingerprint `{data.fingerprint}`:",
        f"| sha256 of `index.json` | `{index.sha256}` |",
        f"| `loss` | {manifest.summary['metrics']['loss']:.4g} |",
        "https://arxiv.org/abs/2502.07827",
    ):
        assert part in text
    assert "the curriculum goes on" not in text
    text = card_of(results / "train" / "s3-s0" / "unrolled").read_text(encoding="utf-8")
    assert "the state after phase `unrolled`, step 1 of 2: the curriculum goes on from here" in text


def test_the_lines_for_loading_load_the_model(results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = card_of(results / "train" / "s3-s0" / "free")
    (block,) = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) == 3
    (tmp_path / "load.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(path.parent)
    model = runpy.run_path(str(tmp_path / "load.py"))["model"]
    assert (model.config.model_type, model.solver.max_iter) == ("implicit_mamba2", 4)


def test_an_equal_run_elsewhere_has_an_equal_card_without_a_trace_of_name_and_machine(
    results: Path, tmp_path: Path
) -> None:
    text = card_of(results / "train" / "s3-s0" / "free").read_text(encoding="utf-8")
    other = train_two_phases(tmp_path, results / "data" / "s3-train", "other-s0")
    assert card_of(other).read_text(encoding="utf-8") == text
    for trace in (str(tmp_path), str(results), socket.gethostname()):
        assert trace not in text
    assert not re.search(r"20\d\d-\d\d-\d\d", text)


@pytest.mark.parametrize("stage", ["training", "checkpoint"])
def test_another_wording_of_cards_makes_no_model_stale(stage: str) -> None:
    sources = job_sources(JobCode(f"implicit_llm.{stage}.stage"))
    assert f"implicit_llm.{stage}.stage" in sources
    assert not [name for name in sources if name.startswith("implicit_llm.cards")]


def test_text_of_the_hub_is_named_in_the_head(tmp_path: Path) -> None:
    data = make_rows(tmp_path / "text-train")
    summary = {"corpus": {"source": "hub", "dataset": "owner/texts"}}
    found = replace(Manifest.read(data / "manifest.json"), summary=summary)
    found.write(work_directory(data, found.fingerprint) / COMMIT)
    card = train_one_step(tmp_path / "text-s0" / "only", data, model={**LLAMA, "vocab_size": 16})
    assert card.data.datasets == ["owner/texts"]
    assert card.data.tags == ["llama", "language-model"]
    assert "import implicit_llm" not in card.text
    assert "A base model" in card.text


def test_a_limit_of_different_tokens_is_told_with_the_passes_over_them(tmp_path: Path) -> None:
    data = make_rows(tmp_path / "text-train", tokens=16)
    text = train_one_step(tmp_path / "text-s0" / "only", data, model={**LLAMA, "vocab_size": 16}).text
    tokens = Manifest.read(tmp_path / "text-s0" / "only" / "manifest.json").summary["tokens"]
    assert f"| different ones among them | 16, {tokens / 16:.4g} passes |" in text


def test_a_model_that_began_as_one_of_the_hub_names_it_and_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_DATA", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models" / "owner" / "llama" / commit
    save_foreign("llama", folder)
    rows = make_rows(tmp_path / "rows")
    given = {"hub-s0": {"pretrained": "owner/llama", "revision": commit}, "mine-s0": {"pretrained": str(folder)}}
    of_hub, mine = (train_one_step(tmp_path / name / "only", rows, model=m) for name, m in given.items())
    assert [card.data.base_model for card in (of_hub, mine)] == ["owner/llama", None]
    assert f"those of `owner/llama` at commit `{commit}`; their licence" in of_hub.text
    assert "commit" not in mine.text.partition("their licence")[0]
    assert of_hub.data.license == mine.data.license == "unknown"


def test_the_card_of_an_imported_model_names_its_files_and_claims_nothing(tmp_path: Path) -> None:
    save_foreign("gpt_neox", tmp_path / "source")
    card = ModelCard.load(card_of(import_checkpoint(tmp_path)))
    manifest = Manifest.read(tmp_path / "run" / "manifest.json")
    assert card.data.to_dict() == {
        "license": "unknown",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gpt_neox"],
    }
    assert f"| `model.safetensors` | `{manifest.summary['source']['sha256']['model.safetensors']}` |" in card.text
    assert "copies of the originals" in card.text
    assert "# gpt_neox\n" in card.text
    assert "2502.07827" not in card.text  # not a model of the paper


def test_an_imported_model_of_the_hub_is_the_base_of_its_copy(tmp_path: Path) -> None:
    save_foreign("gpt_neox", tmp_path / "downloads" / "models" / "owner" / "neox" / "main")
    card = ModelCard.load(card_of(import_checkpoint(tmp_path, hub="owner/neox", revision=None)))
    assert card.data.base_model == "owner/neox"
    assert "`owner/neox` of Hugging Face's hub, commit not known." in card.text


def test_names_cannot_break_out_of_a_table_or_the_head() -> None:
    assert model_card.cell("a|b\nc") == r"a\|b c"
    base = "x\n---\nlicense: mit: {"
    values = {"fingerprint": "0", "layout": "transformers", "source": {"sha256": {}}}
    facts = model_card.ModelFacts("x", "x", 1, {}, None)
    card = ModelCard(render_card("checkpoint.md.j2", facts, values, license="unknown", base_model=base))
    assert card.data.license == "unknown"
    assert card.data.base_model == base


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "not finite"), (float("nan"), "not finite"), (0.00012345, "0.0001234")]
)
def test_a_number_that_is_not_finite_is_said_to_be_so(value: float | None, shown: str) -> None:
    assert model_card.number(value) == shown


def test_an_explicit_model_of_ours_still_needs_the_library(tmp_path: Path, results: Path) -> None:
    config = train_config({**IMPLICIT, "is_implicit": False}, phase={"end_step": 1, "solver": None}, total_steps=1)
    train_phase(tmp_path / "e-s0" / "only", config, results / "data" / "s3-train")
    text = card_of(tmp_path / "e-s0" / "only").read_text(encoding="utf-8")
    assert "An explicit Mamba2 model" in text
    assert "import implicit_llm" in text
    assert "solver_stats" not in text


def test_a_card_names_what_to_import_before_the_model_is_loaded() -> None:
    gated = load_plugin(ROOT / "examples/extending/gated_rnn.py").GatedRnnConfig(vocab_size=9, hidden_size=8)
    cards = [model_card.saved_card(AutoModelForCausalLM.from_config(config)) for config in (gated, LstmConfig())]
    imports = [re.findall(r"^import (\w+)", card, re.MULTILINE) for card in cards]
    assert imports == [["implicit_llm", "gated_rnn"], ["implicit_llm"]]
    assert not any("trust_remote_code" in card for card in cards)  # they are saved without code


def test_the_words_of_a_phase_name_its_blocks_its_gradient_and_the_stopping_rule_of_a_plugin() -> None:
    solver = SolverConfig(max_iter=32, phantom_steps=4, block_len=8)
    assert ", then 4 phantom-gradient steps with tau 0.8" in model_card.solver_words(solver)
    assert "up to 32 iterations (plain) in blocks of 8 tokens until" in model_card.solver_words(solver)
    implicit = model_card.solver_words(replace(solver, gradient="implicit"))
    assert implicit.startswith("(32+1): ")
    assert implicit.endswith(", then one step with the gradient of the implicit function theorem")
    own = replace(solver)
    object.__setattr__(own, "stop", "own_stop")  # registered by a plugin
    assert "residual by the rule own_stop is below" in model_card.solver_words(own)
