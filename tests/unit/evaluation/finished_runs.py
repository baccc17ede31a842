"""Finished runs for tests of the evaluation stages: untrained models, and the frame that runs a stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm_contracts.runs.identity import compute_fingerprint
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.stage import StageRequest, run_stage


def request(run_dir: Path, stage_name: str, name: str, config: dict[str, Any], inputs: dict[str, Path]) -> StageRequest:
    upstream = {role: Manifest.read(path / "manifest.json").fingerprint for role, path in inputs.items()}
    parts: dict[str, Any] = {"stage": stage_name, "config": config, "code": "c0de", "upstream": upstream}
    identity = json.dumps({**parts, "name": name, "fingerprint": compute_fingerprint(**parts)})
    return StageRequest(run_dir, identity, inputs, {"device": "cpu"})


def train_nothing(folder: Path, kind: str, name: str, vocab_size: int, summary: dict[str, Any]) -> Path:
    """The run directory of a training phase `<name>-<kind>-s7/free` that left an untrained model and a checkpoint."""

    def body(context: StageContext) -> StageResult:
        torch.manual_seed(0)
        sizes = {"vocab_size": vocab_size, "hidden_size": 16, "expand": 2, "head_dim": 8, "state_size": 8}
        config = implicit_llm.load_config(f"mamba2-state-tracking-{kind}", **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(context.work / "model")
        (context.work / "checkpoint").mkdir()
        (context.work / "checkpoint" / "state.json").write_text("{}")
        return StageResult(["model", "checkpoint"], summary)

    run_dir = folder / "train" / kind
    run_stage(request(run_dir, "train", f"{name}-{kind}-s7/free", {"seed": 7}, {}), body)
    return run_dir


def records(run_dir: Path) -> list[dict[str, Any]]:
    manifest = Manifest.read(run_dir / "manifest.json")
    return json.loads((run_dir / manifest.files[0].path).read_text())["records"]
