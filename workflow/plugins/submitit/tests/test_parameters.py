"""Resources and settings, as sbatch gets them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.parameters import sbatch_options, slurm_parameters
from snakemake_executor_plugin_submitit.settings import ExecutorSettings


def parameters(settings: ExecutorSettings | None = None, threads: int = 1, **resources: Any) -> dict[str, Any]:
    return slurm_parameters(resources, threads, settings or ExecutorSettings())


def test_resources_become_parameters() -> None:
    found = parameters(threads=3, runtime=90, mem_mb=4000, gpus=2, gpu_model="h100", constraint="a&b", nodes=2)
    assert found["time"] == 90
    assert found["mem"] == "4000M"
    assert found["cpus_per_task"] == 3
    assert found["gpus_per_node"] == "h100:2"
    assert found["constraint"] == "a&b"
    assert found["nodes"] == 2
    assert "--nodes=1" in found["srun_args"]
    assert "--ntasks=1" in found["srun_args"]


def test_a_resource_comes_before_a_setting() -> None:
    settings = ExecutorSettings(partition="p", account="a", qos="q", timeout_min=7)
    assert parameters(settings)["partition"] == "p"
    found = parameters(settings, slurm_partition="x", slurm_account="y", qos="z", runtime=8)
    assert [found[name] for name in ("partition", "account", "qos", "time")] == ["x", "y", "z", 8]


def test_gres_takes_the_place_of_gpus() -> None:
    found = parameters(gpus=2, gres="gpu:v100:4")
    assert found["gres"] == "gpu:v100:4"
    assert "gpus_per_node" not in found


def test_memory_for_snakemake_comes_on_top() -> None:
    assert parameters(ExecutorSettings(extra_mem_mb=500), mem_mb=1000)["mem"] == "1500M"
    assert "mem" not in parameters(mem_mb_per_cpu=100, mem_mb=1000)


def test_further_options_of_the_resource_come_after_those_of_the_setting() -> None:
    settings = ExecutorSettings(extra="--nice=1 --exclusive")
    further = parameters(settings, slurm_extra="--nice=2 --comment='a b'", reservation="r")["additional_parameters"]
    assert further == {"requeue": True, "reservation": "r", "nice": "2", "exclusive": True, "comment": "a b"}


def test_a_job_may_ask_not_to_be_requeued() -> None:
    assert parameters(slurm_extra="--no-requeue")["additional_parameters"] == {"no-requeue": True}


def test_options_of_sbatch_are_read_in_both_spellings() -> None:
    assert sbatch_options("--nice 3 --exclusive --mail-type=END", "x") == {
        "nice": "3",
        "exclusive": True,
        "mail-type": "END",
    }
    with pytest.raises(WorkflowError, match="resource slurm_extra: '-p'"):
        sbatch_options("-p gpu", "resource slurm_extra")


def test_a_time_limit_below_a_minute_is_refused() -> None:
    with pytest.raises(WorkflowError, match="runtime"):
        parameters(runtime=-1)


@pytest.mark.parametrize("resources", [{"tasks": 2}, {"mpi": "mpirun"}])
def test_resources_that_would_be_dropped_are_refused(resources: dict[str, Any]) -> None:
    with pytest.raises(WorkflowError, match=r"this executor starts one process; give `nodes` and `tasks_per_node`"):
        parameters(**resources)
    assert parameters(tasks=1)["ntasks_per_node"] == 1


def test_the_signal_comes_within_the_time_limit() -> None:
    assert parameters(runtime=1)["signal_delay_s"] == 20
    assert parameters(runtime=600)["signal_delay_s"] == 120


def test_the_plugin_costs_nothing_at_every_start_of_snakemake() -> None:
    """Snakemake imports it at every start, within each job too."""
    heavy = {"torch", "numpy", "submitit", "cloudpickle", "mlflow", "datasets", "implicit_llm", "snakemake"}
    code = f"import sys, snakemake_executor_plugin_submitit; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_setting_has_a_help_text_and_reads_back_from_the_command_line() -> None:
    from argparse import ArgumentParser

    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    plugin = ExecutorPluginRegistry().get_plugin("submitit")
    parser = ArgumentParser()
    plugin.register_cli_args(parser, "executor")
    given = ["--submitit-cluster", "local", "--submitit-requeue-limit", "3", "--submitit-partition", "gpu"]
    settings = plugin.get_settings(parser.parse_args(given))
    assert (settings.cluster, settings.requeue_limit, settings.partition) == ("local", 3, "gpu")
    assert settings == ExecutorSettings(cluster="local", requeue_limit=3, partition="gpu")
