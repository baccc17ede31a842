"""Training jobs of the command line on a Slurm for tests, submitted as submitit does: one process on the first node."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.identity import compute_fingerprint
from implicit_llm_workflow.planning.code_digest import job_code, job_digest
from slurm_cluster import SlurmCluster
from tests.unit.training.small_runs import request

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400


def with_code(identity: str) -> str:
    """An identity with the digest of the code as it is, which the command line compares."""
    values = json.loads(identity)
    values["code"] = job_digest(job_code("train", values["config"], values["config"]["model"]))
    parts = {key: values[key] for key in ("stage", "config", "code", "upstream")}
    return json.dumps({**values, "fingerprint": compute_fingerprint(**parts)})


@dataclass
class TrainingJob:
    """`nodes` of the allocation; `options` of `implicit-llm train`."""

    slurm: SlurmCluster
    run_dir: Path
    config: dict[str, Any]
    data: Path
    options: tuple[str, ...] = ()
    nodes: int = 2
    partition: str = "mi300x"
    job_id: str = ""

    @property
    def folder(self) -> Path:
        return self.run_dir.parent

    @property
    def status(self) -> dict[str, Any]:
        """What the executor is told."""
        path = self.folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def output(self) -> str:
        path = self.folder / f"{self.job_id}.out"
        return path.read_text() if path.exists() else ""

    def submit(self) -> TrainingJob:
        self.folder.mkdir(parents=True, exist_ok=True)
        identity = self.folder / "identity.json"
        identity.write_text(with_code(request(self.run_dir, self.config, self.data).identity))
        program = [str(Path(sys.executable).with_name("implicit-llm")), "train", "--run-dir", str(self.run_dir)]
        program += ["--identity", f"@{identity}", "--input", f"data={self.data}", "--device", "cpu"]
        program += ["--log-every-steps", "1", "--progress", "log", "--threads", "2", *self.options]
        program += ["--log", str(self.folder / "job.log")]
        step = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpus-per-task=2"]
        script = f"#!/bin/bash\nexec {shlex.join([*step, *program])}\n"
        command = ["sbatch", "--parsable", f"--nodes={self.nodes}", "--ntasks-per-node=1", "--cpus-per-task=2"]
        command += ["--mem=6000", "--time=10", "--signal=USR2@60", f"--partition={self.partition}", "--no-requeue"]
        command += [f"--output={self.folder}/%j.out", "--open-mode=append"]
        self.job_id = subprocess.run(
            command, input=script, env=self._environment(), capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
        return self

    def signal(self, name: str) -> None:
        """To every step of the job, as Slurm does before its time limit and before a preemption."""
        self.slurm.run("scancel", f"--signal={name}", self.job_id)

    def end(self) -> int:
        """Exit code, once the job is over."""
        return int(self.wait_until(self._row).partition(":")[0])

    def wait_until(self, is_so: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (value := is_so()):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)
        return value

    def _row(self) -> str:
        rows = self.slurm.run("sacct", "-X", "-n", "-P", "-j", self.job_id, "-o", "State,ExitCode").split("\n")
        state, _, code = rows[0].partition("|")
        return code if state and state.split()[0] not in ("PENDING", "RUNNING", "REQUEUED") else ""

    def _environment(self) -> dict[str, str]:
        ours = {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "1"}
        ours["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "workflow" / "lib")])
        return {**self.slurm.env, **ours, "SUBMITIT_JOB_STATUS": str(self.folder / "status.json")}
