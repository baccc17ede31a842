"""Training over nodes, and the short job that looks at a machine before."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_llm.device import NoGpu, choose_device
from implicit_llm.evaluation.frame import load_model
from implicit_llm.models.mamba2 import chunked_scan, ssd
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.runs.launched import Death, LaunchFolder, ProcessEnd, judge
from implicit_llm_workflow.launching import launch, preflight
from implicit_llm_workflow.launching.launch import Allocation, LaunchError, require_nodes
from implicit_llm_workflow.launching.preflight import Preflight, PreflightFailed
from tests.unit.workflow.experiments import run

NODES = Allocation("7", 2, 16)


def end(rank: int, code: int, failure_class: str | None = "bug") -> ProcessEnd:
    return ProcessEnd(rank, code, failure_class, f"rank {rank}", float(rank))


LOST_CONNECTION = end(1, 1)
KILLED, ENDED_BY_LAUNCHER = Death(2, -signal.SIGKILL, "n1"), Death(3, -signal.SIGTERM, "n1")


@pytest.mark.parametrize(("error", "code"), [(SystemExit("no GPU"), 1), (SystemExit(75), 75), (ValueError("x"), 1)])
def test_the_recorded_exit_code_is_a_number(tmp_path: Path, error: BaseException, code: int) -> None:
    LaunchFolder(tmp_path).record_end(error, rank=0)
    assert LaunchFolder(tmp_path).verdict(1).code == code


@pytest.mark.parametrize(("parent", "code"), [("os.getppid()", 0), ("1", -signal.SIGKILL)])
def test_a_process_whose_parent_is_gone_before_it_begins_ends(parent: str, code: int) -> None:
    begin = f"import os; from implicit_llm_contracts.runs import launched; launched.die_with({parent})"
    assert subprocess.run([sys.executable, "-c", begin], check=False).returncode == code


@pytest.mark.parametrize(
    ("ends", "deaths", "code", "failure_class"),
    [
        ([end(0, 75, "preempted"), LOST_CONNECTION], [KILLED], 75, "preempted"),
        ([LOST_CONNECTION, end(2, 1, "hang")], [], 1, "hang"),
        ([LOST_CONNECTION, end(2, 2, "quota"), end(3, 75, "preempted")], [KILLED], 2, "quota"),
        ([LOST_CONNECTION], [ENDED_BY_LAUNCHER, KILLED], 137, "node_fail"),
        ([LOST_CONNECTION], [ENDED_BY_LAUNCHER], 1, "bug"),
        ([], [ENDED_BY_LAUNCHER, Death(1, 2, "n1")], 2, None),
        ([], [], 1, None),
    ],
    ids=["a commit", "a hang", "a full disk", "a kill", "a bug", "a silent end", "nothing known"],
)
def test_of_many_ends_the_one_that_is_the_reason_counts(
    ends: list[ProcessEnd], deaths: list[Death], code: int, failure_class: str | None
) -> None:
    assert judge(0, ends, deaths).code == 0  # the launcher ended well
    reason = judge(1, ends, deaths)
    assert (reason.code, reason.failure_class) == (code, failure_class)


def test_slurm_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert Allocation.current() == Allocation("", 1, None)
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "5", "SLURM_JOB_CPUS_PER_NODE": "32(x4),24"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = Allocation.current()
    assert (found.num_nodes, found.cpus_per_node) == (5, 24)


@pytest.mark.parametrize(
    ("nodes", "given", "message"),
    [(2, Allocation(), "there are 1 here"), (4, NODES, "there are 2 here"), (1, NODES, "there are 2 here")],
)
def test_fewer_or_more_nodes_are_refused(nodes: int, given: Allocation, message: str) -> None:
    require_nodes(1, Allocation())
    require_nodes(2, NODES)
    with pytest.raises(LaunchError, match=message) as caught:
        require_nodes(nodes, given)
    assert caught.value.failure_class == "env"


def test_srun_starts_one_agent_on_each_node_beside_the_step_it_is_called_in(
    tmp_path: Path,
) -> None:
    job = launch.NodeJob(tmp_path, 0, 2, 8, ("-m", "module", "--option"), "n1", 29500, threads=2)
    words = launch._srun(job, cpus=16)
    all_cpus = "--cpus-per-task=16"  # of a node, which its processes share
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=1", all_cpus} <= {*words}
    assert fill(launch.NodeJob, json.loads(words[-1]), "node") == job


def test_what_a_killed_attempt_left_between_nodes_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    with launch._folder(tmp_path, NODES) as path:
        (path / "end-0.json").write_text("{}")
        with launch._folder(tmp_path, NODES) as again:
            assert again == path
            assert list(path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


CATCHES = """
import signal, sys, time
caught = []
signal.signal(signal.SIGUSR2, lambda number, frame: caught.append(number))
print("ready", flush=True)
while not caught:
    time.sleep(0.01)
sys.exit(75)
"""


def test_a_process_is_told_when_it_is_ready_however_early_the_signal_came() -> None:
    with launch.LauncherSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR2)
        with subprocess.Popen([sys.executable, "-c", CATCHES], stdout=subprocess.PIPE, text=True) as process:
            said: list[str] = []

            def ready() -> set[int]:
                said.append(process.stdout.readline())  # empty once the process has ended
                return {process.pid}

            assert launch.wait([process], stop, ready) == [75]
    assert stop.received == signal.SIGTERM


@pytest.mark.parametrize(("words", "code", "said"), [(["--version"], 0, "implicit-llm "), (["compare"], 2, "error: ")])
def test_a_process_of_several_ends_though_its_clean_up_would_wait_for_ever(
    words: list[str], code: int, said: str
) -> None:
    begin = "import atexit, threading; atexit.register(threading.Event().wait)"
    begin += f"; from implicit_llm_workflow.console import main; main({words})"
    command, several = [sys.executable, "-c", begin], os.environ | {"RANK": "1"}
    done = subprocess.run(command, env=several, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True)


def test_a_second_ctrl_c_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    def interrupted(processes: list[subprocess.Popen[str]], stop: launch.LauncherSignals, ready: object) -> None:
        started.extend(processes)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(launch, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch._run_on_nodes([sys.executable, "-c", "import time; time.sleep(600)"])
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("has_gpu", "wanted", "chosen"),
    [
        (False, "auto", "cpu"),
        (False, "cpu", "cpu"),
        (True, "auto", "cuda"),
        (True, "cpu", "cpu"),
        (True, "cuda", "cuda"),
    ],
)
def test_auto_takes_a_gpu_if_there_is_one(
    has_gpu: bool, wanted: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert choose_device(wanted) == chosen


def test_an_evaluation_on_a_gpu_that_is_not_there_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trained: Any = SimpleNamespace(dir=tmp_path, manifest=SimpleNamespace(model_folder="work/model"))
    with pytest.raises(NoGpu, match="use --device auto or cpu") as caught:
        load_model(trained, {"device": "cuda"})
    assert caught.value.exit_code == 2


@pytest.fixture
def here(tmp_path: Path) -> Preflight:
    return Preflight("small", "cpu", "auto", tmp_path / "results", 1000)


def test_a_machine_that_can_do_the_jobs_is_described(here: Preflight) -> None:
    here.results.mkdir()
    found = here.run()
    assert (found["hardware"], found["driver"]["device"], found["storage"]["needed_bytes"]) == ("small", "cpu", 2200)
    assert (found["kernel"]["backend"], found["kernel"]["difference"]) == ("torch", 0.0)
    assert "torch" in found["environment"]["versions"]
    assert list(here.results.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named_with_what_to_install(here: Preflight) -> None:
    with pytest.raises(PreflightFailed, match="hardware class h100 on ") as caught:
        replace(here, hardware="h100", device="cuda").driver()
    assert caught.value.failure_class == "env"
    assert f"({{'cuda': {torch.version.cuda!r}, 'hip': {torch.version.hip!r}}}) sees no GPU" in str(caught.value)
    with pytest.raises(PreflightFailed, match="PyTorch sees no NVIDIA or ROCm GPU"):
        replace(here, kernels="triton").kernel()


def test_a_wrong_gradient_is_named_with_the_release_of_triton(here: Preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = chunked_scan.scan_gradient, []

    def wrong_on_the_second_device(*inputs: Any) -> tuple[Any, ...]:
        calls.append(inputs)
        dx, ddt, dA, dB, *others = plain(*inputs)
        return dx, ddt, dA, dB if len(calls) == 1 else -dB, *others

    monkeypatch.setattr(ssd, "scan_gradient", wrong_on_the_second_device)
    monkeypatch.setattr(preflight, "_version", lambda package: "3.6.0")
    with pytest.raises(
        PreflightFailed, match=r"the gradient of B by kernels torch \(triton 3.6.0\) is off by .* on cpu"
    ):
        here.kernel()


@pytest.mark.parametrize("is_file", [False, True])
def test_a_disk_that_is_too_small_and_a_folder_that_cannot_be_written_are_refused(
    here: Preflight, is_file: bool
) -> None:
    here.results.write_text("a file where the folder should be") if is_file else here.results.mkdir()
    writable = rf"{here.results} \(.*\); make the folder writable"
    message = writable if is_file else r"2.2 times the largest checkpoint need 2098083496\.\d MiB more"
    with pytest.raises(PreflightFailed, match=message):
        replace(here, checkpoint_bytes=10**15).storage()


def test_an_environment_without_a_package_is_refused(here: Preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PACKAGES", ("torch", "a-package-nobody-has"))
    with pytest.raises(PreflightFailed, match="a-package-nobody-has is not installed for "):
        here.environment()


def test_the_command_tells_the_executor_the_class_of_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = tmp_path / "status.json"
    monkeypatch.setenv("SUBMITIT_JOB_STATUS", str(status))
    where = ("--results", str(tmp_path), "--checkpoint-bytes", str(10**15))
    code, _, err = run(capsys, "preflight", "--hardware", "h100", "--device", "cpu", *where)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: hardware class h100 on ")
    assert json.loads(status.read_text())["failure_class"] == "env"
