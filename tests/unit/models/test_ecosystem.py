"""Tools around transformers take our models as they are: Trainer, torch.compile, device maps, `fully_shard`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)

import implicit_llm  # noqa: F401  (registers the models, also in the processes)


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
def test_compiled_model_gives_the_same_logits(make_model, family: str) -> None:
    """Compiled by the backend that needs no C++ compiler: what is tested is that tracing keeps the numbers."""
    model = make_model(family, tol=1e-9, eval_max_iter=3, eval_mode="simultaneous")
    input_ids = torch.randint(0, 23, (2, 6))
    expected = model(input_ids).logits
    torch.testing.assert_close(torch.compile(model, backend="eager")(input_ids).logits, expected, atol=1e-8, rtol=1e-8)


def test_a_device_map_loads_a_model(make_model, family: str, tmp_path: Path) -> None:
    model = make_model(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16)
    assert mapped.dtype == torch.bfloat16
    assert mapped(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


IMPORTS = """
import sys, torch, implicit_llm
from implicit_llm.kernels import causal_conv, norm, selection, ssd
selection.select_kernels("torch")
x = torch.ones(1, 4, 8)
norm.rms_norm(x, None, torch.ones(8), 1e-5)
causal_conv.causal_conv(x, torch.ones(8, 4), None)
ssd.ssd(x[..., None], x, -torch.ones(8), x[:, :, None], x[:, :, None])
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


MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "llama3": {},
    "mamba2 with implicit gradient": {"gradient": "implicit", "gradient_tol": 1e-10},
}
# Of these two batches the first takes more iterations, and its sequences stop apart.
BATCHES = (torch.randint(1, 23, (2, 8), generator=torch.Generator().manual_seed(0)), torch.full((2, 8), 3))


def _tokens(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    return model.eval().generate(ids, attention_mask=mask, max_new_tokens=3, eos_token_id=None, pad_token_id=0)


def _sharded_passes(rank: int, folder: Path) -> None:
    """In each process and for each model: tokens of its batch, then gradients, which both processes sum up."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for layer in model.base.layers:
            fully_shard(layer)
        fully_shard(model)
        parameters = list(model.parameters())
        tokens = _tokens(model, BATCHES[rank])
        output = model.train()(BATCHES[rank], labels=BATCHES[rank])
        output.loss.backward()
        gradients = [parameter.grad.full_tensor() for parameter in parameters]
        torch.save((gradients, tokens, output.solver_stats.num_iter), folder / f"{name}-{rank}.pt")
    distributed.destroy_process_group()


def test_two_sharded_processes_give_the_gradients_and_tokens_of_one(make_model, tmp_path: Path) -> None:
    models = {
        name: make_model(name.split()[0], num_hidden_layers=2, tol=1e-6, max_iter=60, block_len=4, **settings)
        for name, settings in MODELS.items()
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    multiprocessing.set_forkserver_preload(["implicit_llm", "torch.distributed.fsdp"])  # imported once for both
    multiprocessing.start_processes(_sharded_passes, (tmp_path,), nprocs=2, start_method="forkserver")
    for name, model in models.items():
        found = [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        for ids, (_, tokens, num_iter) in zip(BATCHES, found, strict=True):
            assert torch.equal(tokens, _tokens(model, ids))
            output = model.train()(ids, labels=ids)
            (output.loss / 2).backward()
            assert torch.equal(num_iter, output.solver_stats.num_iter)
        assert not torch.equal(found[0][2], found[1][2])
        for got, parameter in zip(found[0][0], model.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, atol=1e-12, rtol=1e-10)
