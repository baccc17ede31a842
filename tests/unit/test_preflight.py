"""The device of a job, and the short job that looks at a machine before."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_llm.device import NoGpu, choose_device
from implicit_llm.evaluation.inputs import load_model
from implicit_llm.kernels import chunked_scan, ssd
from implicit_llm_workflow.launching import preflight
from implicit_llm_workflow.launching.preflight import Preflight, PreflightFailed
from tests.unit.workflow.console_calls import run


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
    file = SimpleNamespace(path="work/model/config.json")
    trained: Any = SimpleNamespace(dir=tmp_path, manifest=SimpleNamespace(files=[file]))
    with pytest.raises(NoGpu, match="use --device auto or cpu") as caught:
        load_model(trained, {"device": "cuda"})
    assert caught.value.exit_code == 2


@pytest.fixture
def here(tmp_path: Path) -> Preflight:
    return Preflight("small", "cpu", "auto", tmp_path / "results", 1000)


def test_a_machine_that_can_do_the_jobs_is_described(here: Preflight) -> None:
    here.results.mkdir()
    found = here.run()
    assert found["hardware"] == "small"
    assert found["driver"]["device"] == "cpu"
    assert found["kernel"]["backend"] == "torch"
    assert found["kernel"]["difference"] == 0.0
    assert found["storage"]["needed_bytes"] == 2200
    assert "torch" in found["environment"]["versions"]
    assert list(here.results.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named_with_what_to_install(here: Preflight) -> None:
    with pytest.raises(PreflightFailed, match="hardware class h100 on ") as caught:
        replace(here, hardware="h100", device="cuda").driver()
    assert caught.value.failure_class == "env"
    is_for_cpus = torch.version.cuda is None and torch.version.hip is None
    assert ("is a build for CPUs; install the one for its GPUs" in str(caught.value)) == is_for_cpus
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
    message = writable if is_file else r"free for .* and 2200000000000000\d* are needed, 2.2 times"
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
