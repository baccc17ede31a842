"""Plan an experiment: its nodes, the result that each node should have, and the results that already exist."""

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from implicit_llm_contracts.errors import ConfigError, UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.atomic import read_object, storage_errors, temporary_name
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest
from implicit_llm_contracts.runs.run_directory import (
    FINGERPRINT_DIGITS,
    WORK,
    committed,
    is_result_shown,
    work_directory,
)
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE
from implicit_llm_workflow.experiment_files.experiment import Experiment
from implicit_llm_workflow.experiment_files.yaml_files import experiment_names, experiment_path, read_yaml
from implicit_llm_workflow.file_digests import FileDigests
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import JobCode, job_code, job_digest, record_code
from implicit_llm_workflow.planning.graph import build_graph, report_figures, report_tables
from implicit_llm_workflow.planning.staleness import (
    EXCERPT,
    PAGES,
    Acceptance,
    Status,
    find_acceptance,
    needed_again,
    status_of,
)
from implicit_llm_workflow.project_dirs import LOCAL_PROFILE

RESULTS = Path("results")
# The file beside the driver's lock that stores the profile and experiment file of the driver, and whether it stops.
DRIVER_RECORD = ".driver.json"


PLANNED = "planned"  # the only key of the config file that `write_job_files` writes for the jobs


class UnknownTarget(UserError):
    """The experiment has no job or target of the requested name, or an option does not accept this form of the name."""


def check_results(folder: Path) -> None:
    """Raise UserError if the folder of all results is a file, a link to no folder, or the folder of one experiment."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise UserError(
            f"{folder}: is a file, or a link to a folder that is not there; restore the folder, or move it away"
        )
    if os.path.isfile(folder / DRIVER_RECORD):
        raise UserError(
            f"{folder}: is the folder of one experiment; give that of all results, "
            f"--results {shlex.quote(str(folder.parent))}"
        )


def check_file(experiment: Experiment, root: Path) -> None:
    """Raise ConfigError if the results in `root` are those of another file whose experiment has the same name."""
    other, mine, name = read_object(root / DRIVER_RECORD).get("config"), experiment.source, None
    if not (isinstance(other, str) and os.path.isfile(other) and os.path.isfile(mine)) or os.path.samefile(other, mine):
        return
    with suppress(ConfigError):  # a broken file has no name
        name = read_yaml(Path(other)).get("name")
    if name == experiment.name:
        raise ConfigError(
            f"{mine}: name: {root} has the results of {other}, which has the same name; give one of the files another "
            "name, or delete the other file"
        )


def check_place(experiment: Experiment, results: Path) -> None:
    """Raise ConfigError if the experiment has plugins and the working directory is not the folder that has `results`.

    Identities have the paths of plugins relative to the working directory, so every result would seem to be missing.
    """
    folder = results.absolute().parent.resolve()
    if experiment.kinds.plugins and folder.is_dir() and not folder.samefile(Path.cwd()):
        raise ConfigError(
            f"{experiment.source}: plugins: a job finds them by their paths relative to the folder that has "
            f"{results.name}/; type `cd {shlex.quote(str(folder))}` first"
        )


class Plan:
    """The plan of an experiment, whose jobs and records are below `root`, which is `results` / <experiment>.

    The digests of files are cached beside it, in `results` / .digests.json. Identities are computed on first use.
    """

    def __init__(
        self,
        experiment: Experiment,
        results: Path = RESULTS,
        code_of: Callable[[JobCode], str] = job_digest,
        *,
        has_identities: bool = True,
    ) -> None:
        """Build the graph of the jobs. `code_of`: returns the digest of a job's code.

        Without `has_identities`, no file is hashed, and `identities` lack the digests; this is for a job, which gets
        its identity in a file. Raises: ConfigError if the results are those of another file with the same name.
        """
        self.experiment = experiment
        self.root = results / experiment.name
        if has_identities:
            check_file(experiment, self.root)
        digests = FileDigests(results / ".digests.json") if has_identities else None
        self.nodes = build_graph(experiment, digests, self._recorded_config)
        self.figures = report_figures(experiment)
        self.tables = report_tables(experiment)
        self.code_of = code_of
        self._accepted: dict[str, Acceptance] = {}

    @cached_property
    def identities(self) -> dict[str, Identity]:
        """The wanted identity of each job, by key; for a result accepted with other code, the recorded identity."""
        return self.identify(self.settle)

    @cached_property
    def fingerprints(self) -> frozenset[str]:
        """The fingerprints of all wanted results."""
        return frozenset(identity.fingerprint for identity in self.identities.values())

    def identify(self, settle: Callable[[str, Identity], Identity]) -> dict[str, Identity]:
        """Compute each identity from config, code and inputs, and return the result of `settle` for it, by job key."""
        found: dict[str, Identity] = {}
        for key, node in self.nodes.items():  # the inputs of a node come before it
            upstream = {role: found[source].fingerprint for role, source in node.upstream.items()}
            code = self.code_of(self.code(node))
            found[key] = settle(key, Identity(node.stage, node.name, node.config, code, upstream))
        return found

    def settle(self, key: str, wanted: Identity) -> Identity:
        """Return the wanted identity, or the recorded one if a result with other code was accepted.

        The acceptance is stored for `accepted`.
        """
        acceptance = find_acceptance(self.run_dir(self.nodes[key]), wanted)
        if acceptance is None:
            return wanted
        self._accepted[key] = acceptance
        return replace(wanted, code=acceptance.recorded_code)

    @property
    def accepted(self) -> dict[str, Acceptance]:
        """The valid acceptances, by the keys of their jobs."""
        _ = self.identities  # fills _accepted
        return self._accepted

    def code(self, node: Node) -> JobCode:
        """Return the code that the node's job can run."""
        source = self.nodes[node.upstream[MODEL_ROLE]] if MODEL_ROLE in node.upstream else node
        return job_code(node.stage, node.config, source.config.get("model"), self.experiment.kinds)

    def record_code(self) -> None:
        """Write the records of the code of all jobs, from which a later change of the code can be named."""
        record_code(self.root, map(self.code, self.nodes.values()), self.code_of)

    def find(self, target: str) -> Node:
        """Return a node by its key, run directory or manifest, or an excerpt by its name.

        Raises: UnknownTarget, which names the nearest key or experiment.
        """
        key = target.rstrip("/").removesuffix(f"/{MANIFEST}").removeprefix(f"{self.root.as_posix()}/")
        key = key.partition(f"/{WORK}/")[0]
        if key in self.experiment.excerpts:
            key = f"{EXCERPT}/{key}"
        if key not in self.nodes:
            hint = nearest(
                key,
                [*self.nodes, *experiment_names()],
                f"`{self.list_command}` lists them, and `implicit-llm list` the experiments",
            )
            raise UnknownTarget(f"{target}: experiment {self.experiment.name} has no such job; {hint}")
        return self.nodes[key]

    def _recorded_config(self, node: Node) -> Mapping[str, Any]:
        found = Manifest.find(self.run_dir(node) / MANIFEST)
        return {} if found is None else found.config

    def run_dir(self, node: Node) -> Path:
        return self.root / node.key

    def manifest(self, node: Node) -> str:
        """Return the path of the node's declared manifest, which is in the work folder of the wanted result."""
        return f"{self.work[node.key]}/{MANIFEST}"

    @cached_property
    def work(self) -> dict[str, str]:
        """The work folder of each job's wanted result."""
        root, digits = self.root.as_posix(), FINGERPRINT_DIGITS
        return {key: f"{root}/{key}/{WORK}/{it.fingerprint[:digits]}" for key, it in self.identities.items()}

    def outputs(self, node: Node) -> dict[str, str]:
        """Return the declared path of each output of the node's rule, by its readable path in the run directory."""
        names = [MANIFEST]
        if node.stage in PAGES:
            names += ["index.html", "claims.json"]
        if node.stage == "report":
            names += ["numbers.html", "numbers.tex"]
            names += [f"tables/{table}.{form}" for table in self.tables for form in ("csv", "tex")]
            names += [f"figures/{figure}.svg" for figure in self.figures]
        return {f"{self.run_dir(node).as_posix()}/{name}": f"{self.work[node.key]}/{name}" for name in names}

    def identity_file(self, node: Node) -> Path:
        """Return the file of a job's identity; its name contains the fingerprint, so a new identity has a new file."""
        fingerprint = self.identities[node.key].fingerprint
        return self.root / ".jobs" / node.key / f"{fingerprint[:FINGERPRINT_DIGITS]}.json"

    def identity_text(self, node: Node) -> str:
        """Return the text that a job receives: its identity and the run directories of its inputs."""
        directories = {role: (self.root / key).as_posix() for role, key in node.upstream.items()}
        return self.identities[node.key].to_json(directories)

    def write_job_files(self) -> Path:
        """Write missing and changed identity files, and a config file with the plan's experiment; return its path.

        Jobs must not use an experiment file that somebody has edited in the meantime.
        """
        for node in self.nodes.values():
            _write_if_changed(self.identity_file(node), self.identity_text(node))
        text = json.dumps({PLANNED: self.experiment.read}, ensure_ascii=False)
        name = hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]
        path = self.root / ".jobs" / f"experiment-{name}.json"
        _write_if_changed(path, text)
        return path

    @property
    def wanted(self) -> list[str]:
        """Keys of the jobs that a run of the experiment requests: all except excerpts, which are requested by name."""
        return [key for key, node in self.nodes.items() if node.stage != EXCERPT]

    @property
    def target_manifests(self) -> list[str]:
        """The manifests of wanted jobs that are no input of a wanted job; from these Snakemake finds every wanted job.

        The report alone is not enough, because a missing input of a fresh report would not be restored. If every job
        were a target, Snakemake would check each job twice.
        """
        wanted = [self.nodes[key] for key in self.wanted]
        inputs = {item.key for node in wanted for item in self.read_by(node)}
        return self.targets(node for node in wanted if node.key not in inputs)

    def targets(self, nodes: Iterable[Node]) -> list[str]:
        """Return the declared manifests of the nodes, without freed results, which count as done."""
        return [self.manifest(node) for node in nodes if not self.statuses[node.key].is_freed]

    def read_by(self, node: Node) -> list[Node]:
        """Return the jobs whose manifests are the inputs of the node's rule.

        Snakemake ignores the age of an `ancient` file only if the file exists. Therefore a fresh job has no input
        that was freed or will be computed again. A page (report or excerpt) has no freed input, because it reads only
        the small files.
        """
        found = {key: self.statuses[key] for key in node.upstream.values()}
        if self.statuses[node.key].state == "fresh":
            return [self.nodes[key] for key, it in found.items() if it.state == "fresh" and it.is_declared]
        return [self.nodes[key] for key, it in found.items() if not (node.stage in PAGES and it.is_freed)]

    def running(self, keys: Iterable[str]) -> set[str]:
        """Return the keys of the jobs that Snakemake runs for the jobs `keys`: these and upstream jobs if not fresh."""
        reached, waiting = set(keys), list(keys)
        while waiting:
            new = {item.key for item in self.read_by(self.nodes[waiting.pop()])} - reached
            reached |= new
            waiting += new
        return {key for key in reached if self.statuses[key].state != "fresh"}

    @property
    def profile(self) -> str:
        """The profile of the last driver, or the local profile if there was no driver."""
        return read_object(self.root / DRIVER_RECORD).get("profile") or LOCAL_PROFILE

    @property
    def driver_lock(self) -> Path:
        """The lock file of the Snakemake process that runs the experiment; `gc` and `accept` hold it too."""
        return self.root / ".driver.lock"

    @property
    def is_driver_stopping(self) -> bool:
        """Whether the last driver got a signal to stop, so that it only waits for its running jobs."""
        return bool(read_object(self.root / DRIVER_RECORD).get("is_stopping"))

    @property
    def argument(self) -> str:
        """The experiment as a quoted command-line argument: its name, or the file if the name does not lead to it."""
        source = self.experiment.source
        has_name = self.experiment.name in experiment_names() and experiment_path(self.experiment.name) == Path(source)
        return shlex.quote(self.experiment.name if has_name else source)

    @property
    def list_command(self) -> str:
        """The shell command that lists the jobs."""
        return f"implicit-llm status {self.argument} --jobs"

    def command_for(self, nodes: Iterable[Node]) -> str:
        """Return the shell command that runs these jobs and their dependencies, or everything if there are no nodes."""
        return shlex.join(self.snakemake(self.profile, map(self.target, nodes)))

    def target(self, node: Node) -> str:
        """Return the node's target for Snakemake: results/<experiment>/<job>/manifest.json.

        It is the copy in the run directory, not the manifest in work/, relative to Snakemake's working directory.
        """
        return (RESULTS / self.root.name / node.key / MANIFEST).as_posix()

    def snakemake(self, profile: str, targets: Iterable[str]) -> list[str]:
        """Return the words of the command that makes these targets, or everything if there are no targets."""
        # --configfile consumes all arguments up to the next option, so targets must not follow it directly.
        words = ["snakemake", "--configfile", self.experiment.source, "--profile", profile]
        if self.root.parent.resolve() != RESULTS.resolve():
            words += ["--directory", str(self.root.parent.parent)]
        return [*words, *targets]

    def with_inputs(self, keys: Iterable[str]) -> list[str]:
        """Return these keys and those of all their direct and indirect inputs, in the order of the plan."""
        found = set(keys)
        for key in reversed(self.nodes):  # the inputs of a node come before it
            if key in found:
                found.update(self.nodes[key].upstream.values())
        return [key for key in self.nodes if key in found]

    def made_from(self, keys: Collection[str]) -> list[Node]:
        """Return the nodes of these keys and all nodes that depend on their results."""
        found: dict[str, Node] = {}
        for key, node in self.nodes.items():  # the inputs of a node come before it
            if key in keys or not found.keys().isdisjoint(node.upstream.values()):
                found[key] = node
        return list(found.values())

    def manifests(self, stage: str) -> list[str]:
        """Return the declared manifests of all nodes of the stage, without freed results."""
        return self.targets(node for node in self.nodes.values() if node.stage == stage)

    @cached_property
    def statuses(self) -> dict[str, Status]:
        """The status of each job, determined at the first access."""
        return self.look()

    def look(self) -> dict[str, Status]:
        """Return the current status of each job. A freed result is stale if a job that will run reads its files."""
        accepted = self.accepted
        return needed_again(
            self.nodes,
            {
                key: status_of(self.run_dir(node), self.identities[key], node, accepted.get(key))
                for key, node in self.nodes.items()
            },
        )

    def stale(self) -> dict[str, str]:
        """Return the reason for each stale result, by the key of its job."""
        return {key: status.why for key, status in self.statuses.items() if status.state == "stale"}

    def shows_another(self, key: str) -> bool:
        """Return whether the wanted result exists but the job's run directory shows another result.

        This is so when a change was undone, until Snakemake starts again.
        """
        status = self.statuses[key]
        is_there = status.state == "fresh" and status.is_declared
        return is_there and not is_result_shown(self.root / key, Path(self.work[key]))

    def page(self, node: Node) -> Path:
        """Return the path of the page that a report or excerpt wrote; if it is fresh, that of the wanted result."""
        folder = Path(self.work[node.key]) if self.shows_another(node.key) else self.run_dir(node)
        return folder / "index.html"

    def recorded(self, node: Node) -> Path | None:
        """Return the path of the manifest in the work folder of the recorded result, or else of the wanted one.

        The manifest may be damaged. Return None if the folder has none.
        """
        found = self.statuses[node.key].recorded
        work = Path(self.work[node.key]) if found is None else work_directory(self.run_dir(node), found.fingerprint)
        return committed(work)


def _write_if_changed(path: Path, text: str) -> None:
    """Write the text unless the file already contains it. Nothing is synced, because there are thousands of files.

    Raises: StorageError; no temporary file remains.
    """
    if path.exists() and path.read_text(encoding="utf-8") == f"{text}\n":
        return
    temporary = temporary_name(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(f"{text}\n", encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
