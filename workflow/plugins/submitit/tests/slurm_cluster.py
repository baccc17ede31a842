"""A whole Slurm on this machine, for tests: five nodes with GPUs that are not there, and accounting.

Everything is its own: configuration, ports, munge socket, data base; several can run side by side, and nothing of the
machine is changed but for one line in /etc/hosts while it runs (names of nodes must resolve for torch.distributed).

    partition   nodes             GPUs a node
    mi300x      mi300x1,mi300x2   2 x mi300x     the default
    v100        v100n1            2 x v100
    h100        h100n1            2 x h100
    a100        a100n1            4 x a100       the worked site of docs/your-cluster.md
    low         mi300x1,mi300x2                  jobs of `mi300x` preempt those of `low`, which are requeued
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sbatch": "slurm-client",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
NODES = {"mi300x1": "mi300x", "mi300x2": "mi300x", "v100n1": "v100", "h100n1": "h100", "a100n1": "a100"}
GPUS = {"mi300x": 2, "v100": 2, "h100": 2, "a100": 4}
CPUS = {"mi300x": 8, "v100": 8, "h100": 8, "a100": 64}  # which Slurm believes, as the memory
MEMORY_MB = {"mi300x": 32000, "v100": 32000, "h100": 32000, "a100": 500000}
HOSTS = Path("/etc/hosts")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A running Slurm; skips where none can be started."""
    if os.geteuid() != 0:
        pytest.skip("a Slurm for tests is started by root only")
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})
    if missing:
        pytest.skip(f"packages are missing: apt-get install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as root:
        cluster = SlurmCluster(Path(root))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@dataclass
class SlurmCluster:
    """`root`: of its files. `start` before, `stop` after, also after a start that failed."""

    root: Path
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The environment for commands that are to use this Slurm."""
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**outer, "SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        for name in ("etc", "log", "run", "state", "dev", "mysql", *(f"spool.{node}" for node in NODES)):
            (self.root / name).mkdir(parents=True, exist_ok=True)
            (self.root / name).chmod(0o755)
        names = ["ctld", "dbd", "mysql", *NODES]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._write_configuration()
        self._edit_hosts(add=True)
        self._start_munge()
        self._start_database()
        self._start_slurm()

    def stop(self) -> None:
        """Stop the daemons, by their pid files, in the reverse order; jobs first."""
        with suppress(OSError, subprocess.SubprocessError):
            self.run("scancel", "--full", "--user", "root", timeout=10)
        for node in NODES:
            self._stop(f"slurmd.{node}")
        for daemon in ("slurmctld", "slurmdbd", "mariadb", "munged"):
            self._stop(daemon)
        self._edit_hosts(add=False)

    def run(self, *command: str, timeout: float = 60) -> str:
        """Run a command of Slurm; its stdout. Raises: CalledProcessError."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout, check=True)
        return done.stdout

    def states(self) -> dict[str, str]:
        """State by id of every job so far, also those that were requeued and are pending again."""
        rows = self.run("sacct", "-X", "-n", "-P", "-S", "now-2days", "-o", "JobID,State").splitlines()
        rows += self.run("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T").splitlines()  # the accounting lags behind
        return {job_id: state.split()[0] for job_id, _, state in (row.partition("|") for row in rows)}

    def resume_nodes(self) -> None:
        for node in NODES:
            if self.run("sinfo", "-h", "-n", node, "-o", "%T").split()[0].startswith(("down", "drain")):
                self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def _write_configuration(self) -> None:
        host, root, ports = socket.gethostname().partition(".")[0], self.root, self.ports
        for gpu in range(max(GPUS.values())):
            device = root / "dev" / f"gpu{gpu}"
            if not device.exists():
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))  # a character device like /dev/null
        gres = [f"NodeName={n} Name=gpu Type={t} File={root}/dev/gpu[0-{GPUS[t] - 1}]" for n, t in NODES.items()]
        (root / "etc" / "gres.conf").write_text("\n".join(["AutoDetect=off", *gres, ""]))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[node]} CPUs={CPUS[kind]} "
            f"RealMemory={MEMORY_MB[kind]} Gres=gpu:{kind}:{GPUS[kind]} Feature={kind} State=UNKNOWN"
            for node, kind in NODES.items()
        ]
        text = CONFIGURATION.format(host=host, root=root, **ports)
        self.conf.write_text(text + "\n".join([*nodes, PARTITIONS]))
        dbd = root / "etc" / "slurmdbd.conf"
        dbd.write_text(DATABASE.format(root=root, **ports))
        dbd.chmod(0o600)

    def _start_munge(self) -> None:
        key = self.root / "etc" / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        run = self.root / "run"
        options = [f"--socket={run}/munge.socket", f"--key-file={key}", f"--pid-file={run}/munged.pid"]
        options += [f"--log-file={self.root}/log/munged.log", f"--seed-file={run}/munged.seed", "--force"]
        subprocess.run(["munged", *options], check=True, capture_output=True)
        self._wait("munge", lambda: self._succeeds("munge", "-n", f"--socket={run}/munge.socket"))

    def _start_database(self) -> None:
        data, run = self.root / "mysql", self.root / "run"
        if not (data / "mysql").exists():
            install = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}"]
            subprocess.run([*install, "--skip-test-db"], check=True, capture_output=True)
        options = ["--no-defaults", "--user=root", f"--datadir={data}", f"--socket={data}/socket"]
        options += ["--bind-address=127.0.0.1", f"--port={self.ports['mysql']}", f"--log-error={data}/error.log"]
        options += ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", "--skip-name-resolve"]
        options += ["--innodb-flush-log-at-trx-commit=0"]
        with open(self.root / "log" / "mariadb.log", "ab") as log:
            process = subprocess.Popen(["mariadbd", *options], stdout=log, stderr=log, start_new_session=True)
        (run / "mariadb.pid").write_text(f"{process.pid}\n")
        client = ["mariadb", "--no-defaults", f"--socket={data}/socket"]
        self._wait("mariadb", lambda: self._succeeds(*client, "-e", "SELECT 1"))
        subprocess.run([*client, "-e", SQL], check=True, capture_output=True)
        subprocess.run(["slurmdbd"], env=self.env, check=True, capture_output=True)
        self._wait("slurmdbd", lambda: self._succeeds("sacctmgr", "-n", "-Q", "list", "cluster"))
        self.run("sacctmgr", "-i", "-Q", "add", "cluster", "test")

    def _start_slurm(self) -> None:
        subprocess.run(["slurmctld"], env=self.env, check=True, capture_output=True)
        self._wait("slurmctld", lambda: self._succeeds("scontrol", "ping"))
        for node in NODES:
            subprocess.run(["slurmd", "-N", node], env=self.env, check=True, capture_output=True)
        self._wait("nodes", lambda: self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split().__len__() >= 4)

    def _stop(self, daemon: str) -> None:
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            process = psutil.Process(int((self.root / "run" / f"{daemon}.pid").read_text()))
            process.terminate()
            for alive in psutil.wait_procs([process], timeout=10)[1]:
                alive.kill()

    def _succeeds(self, *command: str) -> bool:
        return subprocess.run(command, env=self.env, capture_output=True, timeout=30, check=False).returncode == 0

    def _wait(self, what: str, is_ready: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not is_ready():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in (self.root / "log").glob("*.log"))
                raise TimeoutError(f"{what} is not ready after {seconds} s\n{logs}")
            time.sleep(0.1)

    def _edit_hosts(self, add: bool) -> None:
        tag = f"# slurm for tests in {self.root}"
        with open("/run/lock/slurm-tests-hosts", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = [line for line in HOSTS.read_text().splitlines() if not line.endswith(tag)]
            if add:
                lines.append(f"127.0.0.1 {' '.join(NODES)} {tag}")
            HOSTS.write_text("\n".join(lines) + "\n")  # in place: the file may be a mount


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


SQL = (
    "CREATE DATABASE IF NOT EXISTS slurm_acct_db; CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';"
    " GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';"
)

# cred_expire: a requeued job waits until its old credential is void, 2 minutes otherwise.
# preempt_send_user_signal: a preempted job gets the signal of --signal first.
# config_overrides: four nodes may claim more CPUs than this machine has.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
GresTypes=gpu
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
MinJobAge=300
InactiveLimit=0
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={dbd}
AccountingStoragePass={root}/run/munge.socket
AccountingStorageTRES=gres/gpu
"""
PARTITIONS = """\
PartitionName=mi300x Nodes=mi300x1,mi300x2 Default=YES PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=v100 Nodes=v100n1 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=h100 Nodes=h100n1 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=a100 Nodes=a100n1 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=low Nodes=mi300x1,mi300x2 PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 MaxTime=INFINITE State=UP
"""
DATABASE = """\
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
DbdHost=localhost
DbdPort={dbd}
SlurmUser=root
LogFile={root}/log/slurmdbd.log
PidFile={root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mysql}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""
