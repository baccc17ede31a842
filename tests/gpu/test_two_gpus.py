"""Test that every process of a training run on two GPUs, started by the workflow's launcher, ends when the run ends.

NCCL's clean-up at the end of a process used to wait for ever after steps with captured graphs.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from implicit_llm_workflow.planning.code_digest import job_code, job_digest
from tests.limits import wait_until
from tests.pages import ROOT
from tests.unit.training.small_runs import EXPLICIT, IMPLICIT, make_data, request, train_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs"),
]
DEADLINE_S = 180


@pytest.mark.parametrize("model", [EXPLICIT, {**IMPLICIT, "dropout": 0.0}], ids=["explicit", "implicit"])
@pytest.mark.parametrize(("is_stopped", "code"), [(False, 0), (True, 75)], ids=["to the end", "stopped"])
def test_processes_on_two_gpus_end_when_their_training_does(
    tmp_path: Path, model: dict, is_stopped: bool, code: int
) -> None:
    steps = 10**6 if is_stopped else 30
    config = train_config(model, phase={"end_step": steps}, total_steps=steps)
    data, run_dir = make_data(tmp_path), tmp_path / "train" / "two"
    wanted = request(run_dir, config, data).identity
    wanted = replace(wanted, code=job_digest(job_code("train", config, config["model"])))
    identity = tmp_path / "identity.json"
    identity.write_text(wanted.to_json({"data": str(data)}))
    command = [sys.executable, "-m", "implicit_llm_workflow.console", "train", "--run-dir", str(run_dir)]
    command += ["--identity", f"@{identity}", "--device", "cuda", "--processes-per-node", "2", "--threads", "2"]
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "workflow/lib", "workflow/report"))
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}) as process:
        if is_stopped:
            wait_until(lambda: any(run_dir.glob("work/*/journal.jsonl")), DEADLINE_S)
            process.send_signal(signal.SIGUSR2)
        assert process.wait(DEADLINE_S) == code
