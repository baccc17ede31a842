"""Snakemake's own tests for executor plugins."""

from __future__ import annotations

import pytest
import snakemake.common.tests as base

from slurm_cluster import SlurmCluster
from snakemake_executor_plugin_submitit import ExecutorSettings


class OnThisMachine(base.TestWorkflowsLocalStorageBase):
    cluster = "local"
    array_size = 0

    def get_executor(self) -> str:
        return "submitit"

    def get_executor_settings(self) -> ExecutorSettings:
        # the tests ask for 5 MB of memory, which would not even hold Python
        return ExecutorSettings(cluster=self.cluster, poll_interval_s=1, extra_mem_mb=500, array_size=self.array_size)


@pytest.mark.slow
class TestOnThisMachine(OnThisMachine):
    __test__ = True


class OnSlurm(OnThisMachine):
    cluster = "slurm"

    @pytest.fixture(autouse=True)
    def use_it(self, slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        slurm.resume_nodes()
        monkeypatch.setenv("SLURM_CONF", str(slurm.conf))


@pytest.mark.slow
class TestOnSlurm(OnSlurm):
    __test__ = True


@pytest.mark.slow
class TestOnSlurmWithArrays(OnSlurm):
    __test__ = True
    array_size = 10
