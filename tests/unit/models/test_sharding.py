"""Models sharded by `fully_shard`, layer by layer, train and generate over two processes as in one."""

from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import implicit_llm  # noqa: F401  (registers the models, also in the processes)

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
