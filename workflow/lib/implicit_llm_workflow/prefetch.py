"""Fetch the files that an experiment's jobs read from the network, so that the jobs themselves need no network.

Files of the Hugging Face hub are pinned to a commit and compared with the hub's digests; lm-eval's data sets are not.
`snapshot_download` resumes an interrupted download. If a fetch from the hub is recorded and the sizes of its files
agree, the hub is not used again.
"""

import glob
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import LM_EVAL
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.tasks import WORD_PROBLEM
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import require_space
from implicit_llm_contracts.runs.fetched_files import (
    CONFIG_FILE,
    INDEX_FILE,
    OTHER_MODEL_FILES,
    PICKLE_FILE,
    TEXT_SUFFIXES,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Fetched,
    FetchedFilesError,
    HubFiles,
    find_fetched,
    is_pinned,
    is_text,
    words_of,
)
from implicit_llm_contracts.runs.manifest import sha256_of
from implicit_llm_contracts.runs.places import local_files
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.project_dirs import CONFIG_DIR
from implicit_llm_workflow.text import first_line

BABI_URL = "http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz"
BABI_NAME = BABI_URL.rpartition("/")[2]
KEYS = {"dataset": "corpus", "tokenizer": "tokenizer", "model": "model"}  # of an experiment, by the kind of hub files
EVALUATION_DATA_FILE = CONFIG_DIR / "prefetch/evaluation-data.yaml"


Outcome = tuple[str, str]  # "there", "fetched" or "failed", and a line for the user


class FetchError(UserError):
    """A file could not be fetched or cannot be used; the message names the fix."""


@dataclass(frozen=True)
class BabiArchive:
    """The bAbI archive. `missing_files`: files that it may lack, because the experiment does not use them."""

    missing_files: tuple[str, ...]
    url: str = BABI_URL

    def fetch(self, downloads: Path) -> Outcome:
        """Find the archive that the jobs will use, or fetch the official one.

        Raises: BabiArchiveError if an existing archive is damaged, or if the existing official one lacks a file;
        FetchError.
        """
        # The module of the data job has the digests of the archive's files and the function that reads them.
        from implicit_llm_data.babi.archive import ARCHIVES, BabiArchiveError, read_archive

        for path in filter(Path.is_file, (downloads / name for name in ARCHIVES)):
            try:
                read_archive(path, self.missing_files)
                return "there", f"{path}, every file of it checked"
            except BabiArchiveError as error:
                if path.name == BABI_NAME or "is not in the archive" not in str(error):
                    raise
                break  # intact but incomplete; the official archive has all files
        path = downloads / BABI_NAME
        by_hand = f"fetch it where there is a network and put it at {path}"
        _download(self.url, path, by_hand)
        try:
            read_archive(path)
        except BabiArchiveError as error:
            path.unlink()
            reason = str(error).partition("; ")[0].replace(f"{path}: ", "")
            raise FetchError(f"{self.url}: sent something else than bAbI v1.2 ({reason}); {by_hand}") from error
        return "fetched", f"{path}, every file of it checked"


@dataclass(frozen=True)
class OnHub:
    """The files of a repository on the hub: data, a tokenizer, a model to train further, or an external baseline.

    `peer`: the name of the baseline in the experiment. `is_vouched`: whether the experiment names the sha256 of
    the pickle among the files.
    """

    files: HubFiles
    peer: str | None = None
    is_vouched: bool = False

    def fetch(self, downloads: Path) -> Outcome:
        """Fetch the files unless they exist; if their revision is no commit, also name the key that pins them.

        Raises: FetchError, also for a pickle that training or the experiment does not allow; FetchedFilesError for a
        damaged record of another split; StorageError.
        """
        files, folder, state = self.files, self.files.folder(downloads), "there"
        try:
            fetched = find_fetched(files, downloads)
            if fetched is None and (number := _usable_files(files, folder)):
                return "there", f"{folder}: put there by hand ({number} files), not compared with the hub"
        except FetchedFilesError:  # incomplete, or another version
            fetched = None
        if fetched is None:
            state, fetched = "fetched", fetch_hub_files(files, downloads)
        what, at = f"{folder}: {fetched}", f"peers.{self.peer}.checkpoint" if self.peer else KEYS[files.kind]
        if PICKLE_FILE in fetched.sizes and self.peer is None:
            raise FetchError(
                f"model {files.name}: is a pickle on the hub, and training reads safetensors only; name another, or "
                "the folder of a copy that is saved so"
            )
        if PICKLE_FILE in fetched.sizes and not self.is_vouched:
            raise FetchError(
                f"{what}; its {PICKLE_FILE} is a pickle, which is read only if the experiment file names its digest: "
                f"if you trust it, write {at}.sha256: {{{PICKLE_FILE}: {sha256_of(folder / PICKLE_FILE)}}}"
            )
        to_pin = "" if is_pinned(files.revision, fetched.commit) else f"; to pin it, write {at}.revision: "
        return state, f"{what}{to_pin and to_pin + fetched.commit}"


@dataclass(frozen=True)
class LocalFile:
    """A file that only the user can supply.

    `name`: a name or pattern, relative to the downloads folder or the working directory. `key`: the key of the
    experiment file that contains `name`.
    """

    name: str
    key: str

    def fetch(self, downloads: Path) -> Outcome:
        """Check that the file exists. Raises: FetchError if it does not, because only the user can supply it."""
        if found := local_files(self.name, downloads):  # the jobs search the same folders
            return "there", str(found[0][1])
        raise FetchError(
            f"{self.key}: {self.name} is neither below {downloads} nor below the working directory; put it there"
        )


@dataclass(frozen=True)
class EvaluationData:
    """A data set of lm-eval, which is stored in the cache of `datasets`."""

    dataset: str
    config: str | None = None
    revision: str | None = None

    def fetch(self, downloads: Path) -> Outcome:
        """Load the data set with `datasets`, which fetches the parts that are not in its cache. Raises: FetchError."""
        from datasets import DownloadMode, load_dataset

        name, mode = self.dataset + (f" ({self.config})" if self.config else ""), DownloadMode.REUSE_DATASET_IF_EXISTS
        try:
            load_dataset(self.dataset, self.config, revision=self.revision, download_mode=mode)
        except Exception as error:  # the hub, `datasets` and the network raise many kinds
            raise FetchError(
                f"data set {name}: {first_line(error)}; run prefetch where there is a network with the same HF_HOME, "
                "or copy that folder from there"
            ) from error
        return "fetched", f"data set {name} in the cache of datasets"


@dataclass(frozen=True)
class EvaluationDataFile:
    """The content of workflow/config/prefetch/evaluation-data.yaml, the data sets of lm-eval's tasks."""

    tasks: Mapping[str, EvaluationData]


Need = BabiArchive | OnHub | LocalFile | EvaluationData


def needs_of(plan: Plan, keys: Collection[str] | None = None) -> list[Need]:
    """Return each need of the jobs with these keys, or of all jobs of the plan, once, in the order of the jobs."""
    nodes = (node for key, node in plan.nodes.items() if keys is None or key in keys)
    return list(dict.fromkeys(need for node in nodes for need in _needs(node)))


def satisfy(need: Need, downloads: Path) -> Outcome:
    """Fetch a need unless it exists; return a failure instead of raising it, so that other needs are fetched too."""
    try:
        return need.fetch(downloads)
    except UserError as error:
        return "failed", str(error)


def _needs(node: Node) -> Iterator[Need]:
    stage, config = node.stage, node.config
    kind = config.get("kind")
    if stage == "data" and kind == "babi_text" and config["source"] == "archive":
        yield BabiArchive(tuple(config.get("missing_files") or ()))
    elif stage == "data" and kind == WORD_PROBLEM and "file" in config:
        yield LocalFile(config["file"], "folder")
    elif stage == "data" and kind == "tokenizer" and config["source"] == "file":
        yield LocalFile(config["file"], "tokenizer.file")
    elif stage == "data" and kind == "tokenizer" and config["source"] == "hub":
        yield OnHub(HubFiles("tokenizer", config["name"], config.get("revision")))
    elif stage == "data" and kind in ("tokenizer", "token_shard") and config.get("corpus"):
        yield from _corpus_needs(config["corpus"])
    elif stage == "train" and "revision" in config["model"]:
        yield OnHub(HubFiles("model", config["model"]["pretrained"], config["model"]["revision"]))
    elif stage == "checkpoint" and "hub" in config:
        files = HubFiles("model", config["hub"], config["revision"])
        yield OnHub(files, node.name, PICKLE_FILE in config["sha256"])
    elif stage == "checkpoint":
        yield LocalFile(f"{config['path']}/{CONFIG_FILE}", f"peers.{node.name}.checkpoint.path")
    elif stage == "evaluate" and kind == LM_EVAL:  # the user's own tasks have no entry in `known`
        known = fill(EvaluationDataFile, read_yaml(EVALUATION_DATA_FILE), str(EVALUATION_DATA_FILE)).tasks
        yield from (known[task] for task in config.get("tasks") or known if task in known)


def _corpus_needs(corpus: Mapping[str, Any]) -> Iterator[Need]:
    if corpus["source"] == "files":
        yield from (LocalFile(name, "corpus.files") for name in corpus["files"])
    elif corpus["source"] == "hub":
        yield OnHub(HubFiles("dataset", corpus["dataset"], corpus.get("revision"), corpus.get("split") or "train"))


def _download(url: str, path: Path, by_hand: str) -> None:
    import pooch

    pooch.get_logger().setLevel("WARNING")
    try:
        bar = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=60)
        pooch.retrieve(url, known_hash=None, fname=path.name, path=path.parent, downloader=bar)
    except OSError as error:  # includes the exceptions of `requests`
        raise FetchError(f"{url}: cannot be fetched ({first_line(error)}); {by_hand}") from error


def _usable_files(wanted: HubFiles, folder: Path) -> int:
    """Return the number of files that a job can use in a folder that the user has filled."""
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if wanted.kind == "model":
        return len(paths) if CONFIG_FILE in paths else 0
    return sum(path == TOKENIZER_FILE if wanted.kind == "tokenizer" else is_text(path) for path in paths)


_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def fetch_hub_files(need: HubFiles, downloads: Path) -> Fetched:
    """Fetch the missing files, compare each file with the hub's digest, and write and return the record of the fetch.

    Before the download, delete the records of other commits, because the download may replace their files. Delete the
    first file that has another digest.
    Raises: FetchError, also for such a file; FetchedFilesError for a damaged record; StorageError.
    """
    from huggingface_hub import HfApi, snapshot_download

    api, folder = HfApi(), need.folder(downloads)
    repo_type = "dataset" if need.kind == "dataset" else "model"
    try:
        commit = str(api.repo_info(need.name, repo_type=repo_type, revision=need.revision).sha)
        tree = api.list_repo_tree(need.name, repo_type=repo_type, revision=commit, recursive=True)
        sizes = wanted_files(need, {entry.path: entry.size for entry in tree if hasattr(entry, "size")})
        missing = {path: size for path, size in sizes.items() if not (folder / path).is_file()}
        require_space(folder, sum(missing.values()), f"{len(missing)} files of {need.kind} {need.name}")
        for record in need.all_records(downloads):
            if record == need.record(downloads) or Fetched.read(record).commit != commit:
                record.unlink()  # the download may replace the files of this record
        snapshot_download(
            need.name,
            repo_type=repo_type,
            revision=commit,
            local_dir=folder,
            allow_patterns=[glob.escape(path) for path in sizes],
        )
        found = api.verify_repo_checksums(need.name, repo_type=repo_type, revision=commit, local_dir=folder)
    except UserError:
        raise
    except Exception as error:  # the hub, its client and the network raise many kinds
        what = (
            f"{TOKENIZER_FILE} elsewhere and put it" if need.kind == "tokenizer" else "its files elsewhere and put them"
        )
        raise FetchError(
            f"{need.kind} {need.name}: {first_line(error)}; check name, revision and network, or fetch {what} into "
            f"{folder}"
        ) from error
    for path in (item["path"] for item in found.mismatches if item["path"] in sizes):
        (folder / path).unlink()
        raise FetchError(f"{folder / path}: did not have the digest that the hub gives; removed, run prefetch again")
    fetched = Fetched(need.revision, commit, sizes)
    fetched.write(need.record(downloads))
    return fetched


def wanted_files(need: HubFiles, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the files to fetch, by path.

    For a tokenizer, this is tokenizer.json. For a model, these are its config and weights, and tokenizer files
    if there are any. For a data set, these are the text files whose paths contain the split as a word, or all text
    files if none does.
    Raises: FetchError if there is no text file or tokenizer, or if a model lacks config or weights.
    """
    if need.kind == "model":
        found = _model_files(need, sizes)
    elif need.kind == "tokenizer":
        found = [path for path in sizes if path == TOKENIZER_FILE]
    else:
        texts = [path for path in sizes if is_text(path)]
        found = [path for path in texts if need.split in words_of(path)] or texts
    if not found:
        what = TOKENIZER_FILE if need.kind == "tokenizer" else f"file of text ({', '.join(TEXT_SUFFIXES)})"
        raise FetchError(f"{need.kind} {need.name}: has no {what} on the hub; name another in the config")
    return {path: sizes[path] for path in found}


def _model_files(need: HubFiles, names: Mapping[str, int]) -> list[str]:
    """Return the model's files; its weights are safetensors, whole or in shards, or else the pickle.

    Raises: FetchError if there is no config or no weights.
    """
    choices = ([WEIGHTS_FILE], [INDEX_FILE, *filter(_SHARD.fullmatch, names)], [PICKLE_FILE])
    weights = next((files for files in choices if files[0] in names), [])
    if CONFIG_FILE not in names or not weights:
        raise FetchError(
            f"model {need.name}: has no {CONFIG_FILE} with {WEIGHTS_FILE} or {PICKLE_FILE} on the hub; name another"
        )
    return [name for name in names if name in weights or name in (CONFIG_FILE, *OTHER_MODEL_FILES)]
