"""Fetch what an experiment needs from the network, so that its jobs can run without one."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.file_digests import PICKLE_FILE
from implicit_llm_workflow.prefetching.prefetch_http import Download, FetchError, fetch
from implicit_llm_workflow.prefetching.prefetch_hub import (
    FetchedFile,
    fetch_hub_files,
    fetched_before,
    find_fetch,
    hub_folder,
    put_by_hand,
)
from implicit_llm_workflow.prefetching.prefetch_needs import (
    BabiArchive,
    EvaluationData,
    HubCheckpoint,
    HubFiles,
    LocalFile,
    Need,
)

BABI_URL = "http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz"
BABI_NAME = "tasks_1-20_v1-2.tar.gz"
BABI_MAX_BYTES = 1 << 27  # several times the archive


@dataclass(frozen=True)
class Outcome:
    """One line for the user."""

    state: Literal["there", "fetched", "failed"]
    what: str


def satisfy(need: Need, downloads: Path, *, babi_url: str = BABI_URL) -> Outcome:
    """Fetch what is needed unless it is there; a failure is an outcome, so that the others are still fetched."""
    try:
        match need:
            case BabiArchive():
                return _babi(need, downloads, babi_url)
            case HubFiles():
                return _hub_safe_files(need, downloads)
            case HubCheckpoint():
                return _hub_checkpoint(need, downloads)
            case EvaluationData():
                return _evaluation_data(need)
            case LocalFile():
                return _local_file(need, downloads)
    except UserError as error:
        return Outcome("failed", str(error))


def _babi(need: BabiArchive, downloads: Path, url: str) -> Outcome:
    """The archive as the jobs look for it, or the official one. Files that lie there damaged are not touched."""
    # The digests of the members and the way they are read belong to the job that uses them.
    from implicit_llm_data.babi.archive import ARCHIVES, BabiArchiveError, read_archive

    for name in ARCHIVES:
        path = downloads / name
        if path.is_file():
            try:
                read_archive(path, need.missing_files)
            except BabiArchiveError as error:
                if name == BABI_NAME or "is not in the archive" not in str(error):
                    return Outcome("failed", str(error))
                break  # whole, but with fewer files than are wanted: the official one has them all
            return Outcome("there", f"{path}, every file of it checked")

    def check(path: Path) -> None:
        try:
            read_archive(path)
        except BabiArchiveError as error:
            reason = str(error).partition("; ")[0].replace(f"{path}: ", "")
            raise FetchError(f"{url}: sent something else than bAbI v1.2 ({reason}); {download.by_hand}") from error

    download = Download(url, downloads / BABI_NAME, check, BABI_MAX_BYTES)
    fetch(download)
    return Outcome("fetched", f"{download.target}, every file of it checked")


def _hub_files(need: HubFiles, downloads: Path) -> Outcome:
    folder = hub_folder(need, downloads)
    found = fetched_before(need, downloads)
    if found is not None:
        return Outcome("there", f"{folder}: {found}")
    by_hand = put_by_hand(need, downloads)
    if by_hand:
        return Outcome("there", f"{folder}: put there by hand ({by_hand} files), not compared with the hub")
    return Outcome("fetched", f"{folder}: {fetch_hub_files(need, downloads)}")


def _hub_safe_files(need: HubFiles, downloads: Path) -> Outcome:
    """The files of data, of a tokenizer, or of a model that training begins with."""
    outcome = _hub_files(need, downloads)
    if _fetched_pickle(need, downloads) is None:
        return outcome
    return Outcome(
        "failed",
        f"model {need.name}: is a pickle on the hub, and training reads safetensors only; name another, or the folder "
        "of a copy that is saved so",
    )


def _hub_checkpoint(need: HubCheckpoint, downloads: Path) -> Outcome:
    """The files; and what to write into the experiment file, so that the import is what was meant."""
    outcome = _hub_files(need.files, downloads)
    fetch = find_fetch(need.files, downloads)
    pickle = _fetched_pickle(need.files, downloads)
    at = f"peers.{need.peer}.checkpoint"
    if pickle is not None and not need.is_vouched:
        return Outcome(
            "failed",
            f"{outcome.what}; its {PICKLE_FILE} is a pickle, which is read only if the experiment file names its "
            f"digest: if you trust it, write {at}.sha256: {{{PICKLE_FILE}: {pickle.sha256}}}",
        )
    if fetch is not None and need.files.revision is None:
        return Outcome(outcome.state, f"{outcome.what}; to pin it, write {at}.revision: {fetch.commit}")
    return outcome


def _fetched_pickle(need: HubFiles, downloads: Path) -> FetchedFile | None:
    fetch = find_fetch(need, downloads)
    return None if fetch is None else next((file for file in fetch.files if file.path == PICKLE_FILE), None)


def _evaluation_data(need: EvaluationData) -> Outcome:
    from datasets import DownloadMode, load_dataset

    name = f"data set {need.dataset}{f' ({need.config})' if need.config else ''}"
    try:
        load_dataset(
            need.dataset, need.config, revision=need.revision, download_mode=DownloadMode.REUSE_DATASET_IF_EXISTS
        )
    except Exception as error:  # of the hub, `datasets` and the network
        raise FetchError(
            f"{name}: {_first_line(error)}; run prefetch where there is a network with the same HF_HOME, "
            "or copy that folder from there"
        ) from error
    return Outcome("fetched", f"{name} in the cache of datasets")


def _local_file(need: LocalFile, downloads: Path) -> Outcome:
    """Only looked for: nobody but the user knows where it comes from."""
    for folder in (downloads, Path()):
        names = [need.name, *glob.iglob(need.name, root_dir=folder, recursive=True)]  # as the jobs look for it
        if any((folder / name).is_file() for name in names):
            return Outcome("there", f"{folder / need.name}")
    if Path(need.name).is_absolute():
        return Outcome("failed", f"{need.key}: {need.name} is not there; put it there, or correct the name")
    return Outcome(
        "failed",
        f"{need.key}: {need.name} is neither below {downloads} nor below the working directory; put it there",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
