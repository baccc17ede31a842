"""Every Triton kernel of ours compiles for the GPUs that the project names, on a machine without any.

Run as a script for one target, it calls the operations with tensors on the CPU and compiles what they would launch.
"""

import importlib
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_llm.kernels import selection

ROOT = Path(__file__).parents[3]
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}


@pytest.mark.integration
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__, target], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "kernels that were not compiled: set()\n"), done.stderr


def compile_all(target: str) -> set[str]:
    """Names of kernels that no operation launched; an error of the compiler is raised."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from tests.gpu import test_attention_kernels as attention
    from tests.gpu import test_fused_kernels as fused
    from tests.gpu import test_mixer_gradient as mixer
    from tests.gpu import test_norm_kernels as norm

    run, compiled = JITFunction.run, set()

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        compiled.add(f"{self.fn.__module__}.{self.__name__}")
        run(self, *arguments, warmup=True, **options)

    JITFunction.run = compile_only
    there = {"get_current_target": GPUTarget(*TARGETS[target]), "get_current_device": 0, "get_current_stream": 0}
    triton.runtime.driver.set_active(SimpleNamespace(**{k: lambda *_, v=v: v for k, v in there.items()}))
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=100)
    selection._missing_for_triton = lambda: None
    selection._unfit = lambda x: "fp64" if x.dtype == torch.float64 else None
    with selection.kernels("triton"):
        for check, case in (
            (norm.test_a_norm_and_its_gradients_equal_the_plain_ones, (48, (5, 7), True)),
            (mixer.test_a_mixer_and_its_gradients_equal_the_formula, (65, (64, 1, 128))),
            (fused.test_a_mixer_in_one_kernel_equals_the_plain_one, (True, 50, (64, 1, 128))),
            (fused.test_a_mixer_in_one_kernel_equals_the_plain_one, (True, 1, (64, 1, 128))),
            (fused.test_the_fused_head_equals_its_logits, (100,)),
            (attention.test_a_token_in_one_kernel_equals_the_plain_attention, (65, (1, 64), True)),
            (attention.test_rotated_heads_and_their_gradients_equal_the_plain_ones, (3, 5, 1, (1, 64), True)),
            (attention.test_swiglu_and_its_gradient_equal_the_plain_ones, ((3, 5, 96),)),
        ):
            with suppress(AssertionError):  # nothing has computed anything
                check(*case, torch.bfloat16)
        with suppress(AssertionError):
            fused.test_an_iteration_judged_by_kernels_equals_the_plain_rule((6, 8, 48), "sequence")
    names = [path.stem for path in (ROOT / "implicit_llm" / "kernels" / "triton").glob("*.py")]
    modules = [importlib.import_module(f"implicit_llm.kernels.triton.{n}") for n in names if n != "mamba_ssm"]
    functions = {f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return {f"{f.fn.__module__}.{f.__name__}" for f in functions if f.__name__.endswith("_kernel")} - compiled


if __name__ == "__main__":
    sys.stdout.write(f"kernels that were not compiled: {compile_all(sys.argv[1])}\n")
