"""What users can set: resources and settings, as sbatch gets them and as docs/further.md lists them."""

import json
import re
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from snakemake_executor_plugin_submitit.request import not_understood, requested, sbatch_options, sbatch_request
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.store import CLASSES


def request(settings: ExecutorSettings | None = None, threads: int = 1, **resources: Any) -> dict[str, Any]:
    return sbatch_request(resources, threads, settings or ExecutorSettings())


def test_resources_become_options_of_sbatch() -> None:
    found = request(threads=3, runtime=90, mem_mb=4000, gpus=2, gpu_model="h100", constraint="a&b", nodes=2)
    assert found == {
        "time": 90,
        "signal": "B:USR2@120",
        "cpus-per-task": 3,
        "mem": "4000M",
        "gpus-per-node": "h100:2",
        "constraint": "a&b",
        "nodes": 2,
        "ntasks-per-node": 1,
        "requeue": True,
    }


def test_a_resource_comes_before_a_setting() -> None:
    settings = ExecutorSettings(partition="p", account="a", qos="q", reservation="r", timeout_min=7)
    names = ("partition", "account", "qos", "reservation", "time")
    assert [request(settings)[name] for name in names] == ["p", "a", "q", "r", 7]
    found = request(settings, slurm_partition="x", slurm_account="y", qos="z", reservation="s", runtime=8)
    assert [found[name] for name in names] == ["x", "y", "z", "s", 8]


@pytest.mark.parametrize(
    ("partition", "minutes"),
    [("short", 20), (None, 30), ("short,day", 1440), ("short,free", 5000), ("free", 5000)],
)
def test_a_job_asks_for_no_more_time_than_its_partition_allows(partition: str | None, minutes: int) -> None:
    limits = {"short": 20, "day": 1440, "": 30}
    for resource in ("slurm_partition", "partition"):
        found = sbatch_request({"runtime": 5000, resource: partition}, 1, ExecutorSettings(), limits)
        assert (found["time"], found["signal"]) == (minutes, "B:USR2@120")
    assert sbatch_request({"runtime": 9}, 1, ExecutorSettings(partition="short"), limits)["time"] == 9


DEFAULTS = request()


@pytest.mark.parametrize(
    ("resources", "settings", "changes"),
    [
        ({"gpus": 2, "gres": "gpu:v100:4"}, {}, {"gres": "gpu:v100:4"}),
        ({"tasks": 6, "mpi": "mpirun"}, {}, {"ntasks": 6, "nodes": None, "ntasks-per-node": None}),
        ({"tasks": 6, "nodes": 2}, {}, {"ntasks": 6, "nodes": 2, "ntasks-per-node": None}),
        ({"tasks_per_node": 3, "nodes": 2}, {}, {"ntasks-per-node": 3, "nodes": 2}),
        ({"tasks": 4, "tasks_per_node": 2}, {}, {"ntasks": 4, "nodes": None, "ntasks-per-node": 2}),
        ({"mem_mb": 1000}, {"extra_mem_mb": 500}, {"mem": "1500M"}),
        ({"mem_mb_per_cpu": 100, "mem_mb": 0}, {}, {"mem-per-cpu": "100M"}),
        ({"mem_mb": 1000, "slurm_extra": "--mem-per-cpu=2G"}, {}, {"mem-per-cpu": "2G"}),
        ({"slurm_extra": "--nice=2"}, {"extra": "--nice=1 --exclusive"}, {"nice": "2", "exclusive": True}),
        ({"slurm_extra": "--no-requeue"}, {}, {"no-requeue": True, "requeue": None}),
        ({"slurm_extra": "--requeue"}, {"no_requeue": True}, {"requeue": True}),
        ({"slurm_requeue": False}, {}, {"no-requeue": True, "requeue": None}),
        ({}, {"no_requeue": True}, {"no-requeue": True, "requeue": None}),
        ({"runtime": 1}, {}, {"time": 1, "signal": "B:USR2@20"}),  # within the time limit
    ],
)
def test_resources_and_settings_change_the_request(
    resources: dict[str, Any], settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    expected = {name: value for name, value in {**DEFAULTS, **changes}.items() if value is not None}
    assert request(ExecutorSettings(**settings), **resources) == expected


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("runtme", "did you mean runtime"),
        ("slurm_partitoin", "did you mean slurm_partition"),
        ("time", "set the resource runtime instead"),
        ("slurm_time", "set the resource runtime instead"),
        ("mail_type", "type slurm_extra='--mail-type=...'"),
        ("slurm_nodelist", "type slurm_extra='--nodelist=...'"),
    ],
)
def test_a_misspelt_resource_or_an_option_of_sbatch_is_refused(name: str, hint: str) -> None:
    with pytest.raises(WorkflowError, match=f"resource {name}: not understood.*{hint}"):
        not_understood([name], [None], ())


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"clusters": "b"}, "--clusters=b: only the cluster of SLURM_CONF"),  # elsewhere its jobs would count as lost
        ({"slurm_extra": "--clusters=b"}, "--clusters=b: only the cluster of SLURM_CONF"),
        ({"runtime": -1}, "^resource runtime=-1: give a number, at least 0$"),
        ({"runtime": "soon"}, "^resource runtime=soon: give a number"),
        ({"gpus": "many"}, "^resource gpus=many: give a whole number, at least 0$"),
        ({"gpus": 0.5}, "^resource gpus=0.5: give a whole number"),
        ({"nodes": "two"}, "^resource nodes=two: give a whole number"),
        ({"tasks": [1]}, "^resource tasks="),
        ({"tasks_per_node": "x"}, "^resource tasks_per_node="),
        ({"mem_mb": "lots"}, "^resource mem_mb="),
        ({"mem_mb_per_cpu": "lots"}, "^resource mem_mb_per_cpu="),
        ({"cpus_per_task": "four"}, "^resource cpus_per_task=four: give a whole number"),
        ({"mem_mb": 3000, "mem_mb_per_cpu": 300}, "mem_mb=3000 and mem_mb_per_cpu=300: give one of them, and set"),
        ({"slurm_extra": "--comment='a"}, "^resource slurm_extra=--comment='a: no closing quotation; close it$"),
        ({"slurm_extra": "-p gpu"}, "resource slurm_extra: '-p'"),
        ({"slurm_extra": "--time=2:00:00"}, "^resource slurm_extra: --time: set the resource runtime instead$"),
        ({"slurm_extra": "--partition gpu"}, "--partition: set the resource slurm_partition instead$"),
        ({"slurm_extra": "--signal=USR1"}, "--signal: set --submitit-signal-delay-s instead$"),
        ({"slurm_extra": "--output=mine"}, "^resource slurm_extra: --output: only the plugin sets it; remove it$"),
    ],
)
def test_what_cannot_be_asked_of_slurm_is_refused(resources: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        request(**resources)


@pytest.mark.parametrize(
    ("gres", "number"),
    [("gpu", 1), ("gpu:4", 4), ("gpu:h100", 1), ("gpu:h100:4", 4), ("gpu:1g.10gb:2", 2), ("nvme:1,gpu:2", 2), ("", 0)],
)
def test_the_gpus_of_a_gres_are_counted(gres: str, number: int) -> None:
    assert requested({"gres": gres}, 1, ExecutorSettings())["gpu"] == number


def test_a_setting_does_not_change_what_is_derived_from_a_resource_either() -> None:
    with pytest.raises(WorkflowError, match=r"^--submitit-extra: --time: set the resource runtime instead$"):
        request(ExecutorSettings(extra="--exclusive --time=5"))


def test_a_number_that_depends_on_files_to_come_is_no_error_yet() -> None:
    assert request(gpus="<TBD>") == request()


def test_a_resource_that_nobody_uses_is_named_and_one_of_the_rule_or_of_a_limit_is_not() -> None:
    names = ["mem_mb", "tmpdir", "device", "licence_slots", "floppies"]
    command = "train --device {resources.device:q}"
    assert not_understood(names, [command], {"licence_slots"}) == ["floppies"]
    assert not_understood(names, [command, lambda wildcards, resources: resources.floppies], {"licence_slots"}) == []


def test_options_of_sbatch_are_read_in_both_spellings() -> None:
    found = sbatch_options("--nice 3 --exclusive --comment='a b'", "x")
    assert found == {"nice": "3", "exclusive": True, "comment": "a b"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # Snakemake imports the executor at every start, within each job too
        ("Executor", {"torch", "numpy", "submitit", "cloudpickle", "mlflow", "datasets", "implicit_llm", "snakemake"}),
        # the process of each job imports only its own side
        ("step", {"submitit", "yaml", "snakemake_interface_common", "snakemake_interface_executor_plugins"}),
    ],
)
def test_imports_cost_little_at_the_start_of_snakemake_and_of_each_job(module: str, heavy: set[str]) -> None:
    load = f"import sys; from snakemake_executor_plugin_submitit import {module}"
    code = f"{load}; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_catalog_of_plugins_can_write_the_settings_as_json() -> None:
    """As the catalog does for its page of a plugin."""
    settings = ExecutorPluginRegistry().get_plugin("submitit").get_settings_info()
    assert {"name": "cluster", "default": "slurm"}.items() <= json.loads(json.dumps(settings))[0].items()


def test_every_setting_has_a_help_text_and_reads_back_from_the_command_line() -> None:
    plugin = ExecutorPluginRegistry().get_plugin("submitit")
    parser = ArgumentParser()
    plugin.register_cli_args(parser, "executor")
    given = ["--submitit-cluster", "local", "--submitit-requeue-limit", "3", "--submitit-partition", "gpu"]
    settings = plugin.get_settings(parser.parse_args(given))
    assert (settings.cluster, settings.requeue_limit, settings.partition) == ("local", 3, "gpu")
    assert settings == ExecutorSettings(cluster="local", requeue_limit=3, partition="gpu")


PAGE = Path(__file__).parents[1] / "docs" / "further.md"


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_setting_stands_there_with_its_default() -> None:
    shown = {
        name: default.strip("`") for names, default, _ in rows("Settings") for name in re.findall(r"`([a-z-]+)`", names)
    }
    defaults = {field.name.replace("_", "-"): field.default for field in fields(ExecutorSettings)}
    assert shown == {name: "" if value is None else str(value) for name, value in defaults.items()}


def test_every_class_of_failure_has_its_rule() -> None:
    named = {word for names, *_ in rows("Stopping and resuming") for word in names.split(", ")}
    assert named == set(CLASSES)
