"""Check a machine before a long job: its environment, driver, kernels and disk, in seconds."""

import json
import logging
import os
import platform
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from implicit_llm_contracts.config.training import Kernels
from implicit_llm_contracts.config.values import Number
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import require_space, write_atomic
from implicit_llm_workflow.project_dirs import package_dir
from implicit_llm_workflow.text import first_line

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "safetensors", "numpy")  # packages that training needs on a bare node
SPACE_FACTOR = 2.2  # a checkpoint is written before the one that it replaces is deleted
_TOLERANCE = 0.1  # limit for the relative norm of bf16 minus fp32; for a wrongly compiled kernel this norm is about 1


class PreflightFailed(UserError):
    """A long job would fail on this machine; the message names the reason and the fix."""

    failure_class = "env"


@dataclass(frozen=True)
class Preflight:
    """The checks of a machine, and the properties that its hardware class (a kind of nodes) promises.

    Each check returns its findings or raises PreflightFailed. `results`: the folder that jobs must be able to write.
    `checkpoint_bytes`: the size of the largest checkpoint.
    """

    hardware: str = "this machine"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Kernels = "auto"
    results: Path = Path("results")
    checkpoint_bytes: Number = 0

    def run(self) -> dict[str, Any]:
        """Run all checks; return the hardware class, the host, and the findings and seconds of each check by its name.

        Raises: PreflightFailed at the first failed check.
        """
        found: dict[str, Any] = {"hardware": self.hardware, "host": socket.gethostname()}
        for check in (self.environment, self.driver, self.kernel, self.storage):
            begin = time.monotonic()
            found[check.__name__] = {**check(), "seconds": round(time.monotonic() - begin, 2)}
            log.info("%s: %s", check.__name__, json.dumps(found[check.__name__]))
        return found

    def environment(self) -> dict[str, Any]:
        """Check that the packages for training are installed; return the versions and the folder of this library."""
        versions = {package: _version(package) for package in PACKAGES}
        if lacking := [package for package, version in versions.items() if version is None]:
            raise self._failed(
                f"{lacking[0]} is not installed for {sys.executable}; install this project there: pip install -e ."
            )
        return {"python": platform.python_version(), "versions": versions, "library": str(package_dir().resolve())}

    def driver(self) -> dict[str, Any]:
        """Check that PyTorch can use the device that the class promises; return the device and PyTorch's build."""
        import torch

        build = {"cuda": torch.version.cuda, "hip": torch.version.hip}
        if self._device(torch) == "cpu":
            if self.device == "cuda":
                shown = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}
                raise self._failed(
                    f"PyTorch {torch.__version__} of {sys.executable} ({build}) sees no GPU, {shown}; install the "
                    "build for its GPUs there, as the files in envs/ do, give the class a partition with GPUs and a "
                    "number of them (gpus), or see by nvidia-smi or rocm-smi whether the driver is too old"
                )
            return {"device": "cpu", "build": build}
        try:
            properties = torch.cuda.get_device_properties(0)
        except RuntimeError as error:
            raise self._failed(
                f"the GPU cannot be used ({first_line(error)}); the driver may be older than PyTorch's CUDA or ROCm: "
                "install the build of PyTorch that the driver runs"
            ) from error
        return {
            "device": properties.name,
            "gpus": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "build": build,
        }

    def kernel(self) -> dict[str, Any]:
        """Check that output and gradients of a small Mamba2 model with the selected kernels are close to the CPU's.

        Return the kernels, Triton's version and the largest relative difference. The kernels stay selected.
        """
        import torch

        from implicit_llm.kernels.selection import KernelsUnavailable, select_kernels_for

        device = self._device(torch)
        try:
            backend = select_kernels_for(device, self.kernels)
            differences = _differences(torch, device)
        except KernelsUnavailable as error:
            raise self._failed(str(error)) from error
        except RuntimeError as error:
            raise self._failed(
                f"no kernel runs on {device} ({first_line(error)}); install a PyTorch that is built for this GPU "
                "(docs/install.md), or take --kernels torch"
            ) from error
        release = f"triton {_version('triton')}"
        for name, difference in differences.items():
            if not difference < _TOLERANCE:
                raise self._failed(
                    f"{name} by kernels {backend} ({release}) is off by {difference:.2g} on {device}; "
                    "take --kernels torch, or a PyTorch that docs/install.md names"
                )
        worst = max(differences.values())
        return {"backend": backend, "triton": _version("triton"), "difference": float(f"{worst:.2g}")}

    def storage(self) -> dict[str, Any]:
        """Check that `results` is writable and has space for a checkpoint; return the free and the needed bytes."""
        probe = self.results / f".preflight-{socket.gethostname()}-{os.getpid()}"
        needed = int(SPACE_FACTOR * self.checkpoint_bytes)
        try:
            write_atomic(probe, "written by the preflight job\n")
            probe.unlink()
            require_space(self.results, needed, f"{SPACE_FACTOR} times the largest checkpoint")
        except OSError as error:
            raise self._failed(
                f"results cannot be written to {self.results} ({first_line(error)}); make the folder writable, free "
                "some space, or put results on another disk by a link"
            ) from error
        return {"free_bytes": shutil.disk_usage(self.results).free, "needed_bytes": needed}

    def _device(self, torch: Any) -> str:
        return "cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu"

    def _failed(self, message: str) -> PreflightFailed:
        return PreflightFailed(f"hardware class {self.hardware} on {socket.gethostname()}: {message}")


def _differences(torch: Any, device: str) -> dict[str, float]:
    """Return by name the relative difference of a model's output and gradients on the device from those on the CPU.

    The model has one layer. It runs in bf16 on a GPU that supports it, and always in fp32 on the CPU.
    """
    from implicit_llm.kernels.selection import kernels, selected_kernels
    from implicit_llm.models.mamba2.model import ImplicitMamba2Config, ImplicitMamba2ForCausalLM

    # 64 x 64 is the state that some releases of Triton are known to compile wrongly; 200 tokens are several chunks.
    config = ImplicitMamba2Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, head_dim=64, state_size=64, is_implicit=False
    )
    inner, size, heads = config.intermediate_size, config.state_size, config.num_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ImplicitMamba2ForCausalLM(config).train()
        tokens_BL = torch.randint(config.vocab_size, (2, 200))
    bf16 = device == "cuda" and torch.cuda.is_bf16_supported()
    found = []
    for place, choice in (("cpu", "torch"), (device, selected_kernels())):
        model.to(place).zero_grad()
        with kernels(choice), torch.autocast(place, torch.bfloat16, enabled=bf16 and place == device):  # type: ignore[arg-type]
            logits_BLV = model(input_ids=tokens_BL.to(place)).logits
            logits_BLV.float().square().mean().backward()
        parts = model.backbone.layers[0].mixer.in_proj.weight.grad.split([inner, inner, size, size, heads])
        found.append([t.double().cpu().clone() for t in (logits_BLV.detach(), *parts)])
    names = ("the output", *(f"the gradient of {part}" for part in ("gate", "x", "B", "C", "dt")))
    return {name: float((ours - t).norm() / t.norm()) for name, t, ours in zip(names, *found, strict=True)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
