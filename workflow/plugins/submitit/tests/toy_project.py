"""A project that is not this one: a training that writes checkpoints when it is asked to stop, and its Snakemake."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_cluster import SlurmCluster

TRAIN = '''\
"""Counts to --steps, one step each --pause, none while there is a file `hold`; asked to stop, writes how far it came
and exits with 75."""
import argparse, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--pause", type=float, default=0.5)
parser.add_argument("--log")
parser.add_argument("--is-stuck", action="store_true")
options = parser.parse_args()
asked = []
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))
checkpoint, journal = Path("checkpoint"), open("journal", "a")
Path("environ").write_text("\\n".join(f"{name}={value}" for name, value in os.environ.items()))


def say(**event):
    journal.write(json.dumps(event) + "\\n")
    journal.flush()


def say_progress(step):
    path = Path(os.environ["SUBMITIT_JOB_STATUS"])
    tmp = path.with_name("status.tmp")
    tmp.write_text(json.dumps({"progress": step}))
    tmp.replace(path)


step = int(checkpoint.read_text()) if checkpoint.exists() else 0
with open(options.log, "a") as log:
    print(f"starting at step {step}", file=log, flush=True)
say(start=step, pid=os.getpid(), job=os.environ.get("SLURM_JOB_ID"), node=os.environ.get("SLURMD_NODENAME"))
while step < options.steps:
    time.sleep(options.pause)
    while os.path.exists("hold") and not asked:
        time.sleep(0.1)
    if not options.is_stuck:
        step += 1
    say(step=step)
    if asked:
        checkpoint.write_text(str(step))
        say_progress(step)
        say(stop=step, asked=asked)
        sys.exit(75)
'''

SNAKEFILE = """\
rule all:
    default_target: True
    input: "result.txt"

rule train:
    output: "trained.txt"
    log: "train.log"
    params: steps=config.get("steps", 4), pause=config.get("pause", 0.5), more=config.get("more", "")
    resources: **config.get("resources", {})
    shell: "python train.py --steps {params.steps} --pause {params.pause} {params.more} --log {log} && date > {output}"

rule small:
    output: "small/{i}.txt"
    resources:
        runtime=5,
        gpus=lambda wildcards: "many" if wildcards.i == config.get("wrong") else 0,
    shell: "echo {wildcards.i} > {output}"

rule growing:
    output: "grown.txt"
    retries: 2
    resources: mem_mb=lambda wildcards, attempt: 200 * attempt, runtime=5
    shell: "echo {resources.mem_mb} >> asked && [ {resources.mem_mb} -ge 400 ] && touch {output}"

rule result:
    input: "trained.txt", expand("small/{i}.txt", i=range(config.get("small", 0)))
    output: "result.txt"
    shell: "cat {input} > {output}"
"""


@dataclass
class ToyProject:
    """`cluster`: None for processes of this machine; `path_variable`: in place of PATH."""

    path: Path
    cluster: SlurmCluster | None = None
    path_variable: str | None = None
    drivers: list[subprocess.Popen[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)  # of the driver's environment, besides those of the tests

    def __post_init__(self) -> None:
        self._jobs_before = len(self.cluster.states()) if self.cluster else 0
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "train.py").write_text(TRAIN)
        (self.path / "Snakefile").write_text(SNAKEFILE)

    def start(self, *options: str, **config: Any) -> subprocess.Popen[str]:
        """Start a driver; its output goes to driver-N.log."""
        given = {"resources": {"mem_mb": 500, "runtime": 5}, **config}
        kind = "slurm" if self.cluster else "local"
        command = [sys.executable, "-m", "snakemake", "--executor", "submitit", "--submitit-cluster", kind]
        command += ["--jobs", "6", "--nolock", "--rerun-incomplete", "--latency-wait", "2", "--show-failed-logs"]
        command += ["--submitit-poll-interval-s", "1", "--submitit-extra-mem-mb", "500"]
        (self.path / "config.json").write_text(json.dumps(given))
        command += [*options, "--configfile", "config.json"]
        log = open(self.path / f"driver-{len(self.drivers)}.log", "w")  # noqa: SIM115
        driver = subprocess.Popen(
            command, cwd=self.path, env=self.env, stdout=log, stderr=log, text=True, start_new_session=True
        )
        self.drivers.append(driver)
        return driver

    def start_until(self, num_steps: int, *options: str, **config: Any) -> subprocess.Popen[str]:
        """Start a driver; return when the training has done more steps than that."""
        driver = self.start(*options, **config)
        self.wait_until(lambda: len(self.steps()) > num_steps)
        return driver

    def run(self, *options: str, code: int = 0, says: tuple[str, ...] = (), **config: Any) -> str:
        """Run a driver to its end, which must be this exit code; what it printed, with all of `says` in it."""
        self.start(*options, **config)
        return self.finish(*says, code=code)

    def finish(self, *says: str, code: int = 0) -> str:
        ended, said = self.drivers[-1].wait(timeout=300), self.said()
        assert ended == code, said
        assert [text for text in says if text not in said] == [], said
        return said

    @property
    def submitted(self) -> int:
        """How many jobs Slurm got since this project was made."""
        assert self.cluster is not None
        return len(self.cluster.states()) - self._jobs_before

    def said(self) -> str:
        return (self.path / f"driver-{len(self.drivers) - 1}.log").read_text()

    def kill_driver(self) -> None:
        """As a crash of the login node would: nothing of it is left, the jobs are untouched."""
        os.kill(self.drivers[-1].pid, signal.SIGKILL)
        self.drivers[-1].wait()

    def stop(self) -> None:
        for driver in self.drivers:
            if driver.poll() is None:
                driver.kill()
                driver.wait()
        if self.cluster:
            self.cluster.run("scancel", "--user", "root")

    def wait_until(self, is_so: Callable[[], Any], seconds: float = 60) -> Any:
        """Wait until `is_so` returns something true, and return that."""
        deadline = time.monotonic() + seconds
        driver = self.drivers[-1] if self.drivers and self.drivers[-1].poll() is None else None
        while not (value := is_so()):
            if time.monotonic() > deadline or (driver is not None and driver.poll() == 1):
                raise TimeoutError(f"not so within {seconds} s\n{self.said()}")
            time.sleep(0.1)
        return value

    @property
    def env(self) -> dict[str, str]:
        env = dict(self.cluster.env if self.cluster else os.environ)
        path = os.pathsep.join([f"{self.path}/shims", str(Path(sys.executable).parent), env["PATH"]])
        return {**env, "PATH": path if self.path_variable is None else self.path_variable, **self.variables}

    def shim(self, program: str, *lines: str) -> None:
        """Put lines of shell in the place of one of Slurm's programs; $REAL is the real one."""
        write_program(self.path / "shims", program, *lines)

    def journal(self) -> list[dict[str, Any]]:
        path = self.path / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self) -> list[int]:
        return [event["step"] for event in self.journal() if "step" in event]

    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.journal() if "start" in event]

    def job(self, rule: str) -> Path:
        """The executor's folder of the job of a rule."""
        (found,) = (self.path / ".snakemake" / "submitit" / "jobs").glob(f"{rule}-*")
        return found

    def record(self, rule: str) -> dict[str, Any]:
        """What the executor has recorded; nothing before it submits the job."""
        found = list((self.path / ".snakemake" / "submitit" / "jobs").glob(f"{rule}-*/record.json"))
        return json.loads(found[0].read_text()) if found else {}

    def outcome(self, rule: str) -> dict[str, Any]:
        """How the last submission of the job of a rule ended."""
        path = self.job(rule) / f"outcome-{self.record(rule)['number']}.json"
        return json.loads(path.read_text())


def write_program(folder: Path, program: str, *lines: str) -> None:
    """Lines of shell under a name; with the folder first on PATH they stand in for $REAL, the program of that name."""
    folder.mkdir(exist_ok=True)
    path = folder / program
    path.write_text("\n".join(["#!/bin/bash", f"REAL={shutil.which(program)}", *lines, ""]))
    path.chmod(0o755)
