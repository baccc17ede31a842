"""Tools around transformers take our models as they are: lm-eval, Trainer, torch.compile, device maps."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

BOTH = pytest.mark.parametrize("family", ["mamba2", "llama3"])


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(23)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w0")


@BOTH
def test_lm_eval_scores_a_model_as_its_own_logits_do(make_model, tokenizer, family: str) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = make_model(family, dtype=torch.float32, tol=1e-5, eval_max_iter=200)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=32)
    pairs = [("w1 w2", " w3"), ("w4 w5 w6 w7", " w8")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (context, word), (got, _) in zip(pairs, harness.loglikelihood(requests), strict=True):
        ids = tokenizer(context + word, return_tensors="pt").input_ids
        expected = model(ids).logits[0, -2].log_softmax(-1)[ids[0, -1]].item()
        assert got == pytest.approx(expected, abs=1e-4)


@BOTH
@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_trainer_evaluates_and_predicts_the_logits_alone(make_model, tmp_path: Path, family: str, kind: str) -> None:
    model = make_model(family, kind, dtype=torch.float32)
    rows = torch.randint(0, 23, (5, 8))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        tmp_path, per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )

    def accuracy(prediction: EvalPrediction) -> dict[str, float]:
        return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}

    trainer = Trainer(model, arguments, eval_dataset=data, compute_metrics=accuracy)
    expected = model(rows).logits
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx((expected.argmax(-1) == rows).double().mean().item())
    torch.testing.assert_close(torch.from_numpy(trainer.predict(data).predictions), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("family", ["mamba2", "llama3"])
def test_compiled_model_gives_the_same_logits(make_model, family: str) -> None:
    """Compiled by the backend that needs no C++ compiler: what is tested is that tracing keeps the numbers."""
    model = make_model(family, tol=1e-9, eval_max_iter=3, eval_mode="simultaneous")
    input_ids = torch.randint(0, 23, (2, 6))
    expected = model(input_ids).logits
    torch.testing.assert_close(torch.compile(model, backend="eager")(input_ids).logits, expected, atol=1e-8, rtol=1e-8)


@BOTH
def test_a_device_map_loads_a_model(make_model, family: str, tmp_path: Path) -> None:
    model = make_model(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16)
    assert mapped.dtype == torch.bfloat16
    assert mapped(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


IMPORTS = """
import sys, torch, implicit_llm
from implicit_llm.kernels import operations, selection
selection.select_kernels("torch")
x = torch.ones(1, 4, 8)
operations.rms_norm(x, None, torch.ones(8), 1e-5)
operations.causal_conv(x, torch.ones(8, 4), None)
operations.ssd(x[..., None], x, -torch.ones(8), x[:, :, None], x[:, :, None])
assert "implicit_llm.kernels.triton.mamba_ssm" not in sys.modules
print(*sorted({name.split('.')[0] for name in sys.modules}))
"""


def test_the_library_and_its_torch_kernels_import_neither_other_kernels_nor_workflow_tools() -> None:
    """What `import implicit_llm` costs beyond transformers' own model classes is what it imports beyond them."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "implicit_llm" in loaded
    assert not loaded & {
        "mamba_ssm",
        "causal_conv1d",
        "snakemake",
        "mlflow",
        "datasets",
        "lm_eval",
        "matplotlib",
        "submitit",
    }
