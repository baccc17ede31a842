"""What an experiment needs from outside, and what is said of it."""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.fetched_files import HubFiles
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_data.babi import archive as babi_archive
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.prefetch import (
    BABI_NAME,
    BabiArchive,
    EvaluationData,
    HubCheckpoint,
    LocalFile,
    needs_of,
    satisfy,
)
from tests.unit.workflow.console_calls import output
from tests.unit.workflow.experiments import ExperimentFile
from tests.unit.workflow.prefetching.file_server import FileServer, serving

MEMBERS = {"en-valid/qa1_train.txt": b"1 Mary sat.\n", "en-valid-10k/qa3_train.txt": b"1 John ran.\n"}
URL_PATH = f"/{BABI_NAME}"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving() as state:
        state.files[URL_PATH] = archive(MEMBERS)
        yield state


@pytest.fixture
def small_babi(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bAbI of two files, which are not the official ones."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in MEMBERS.items()}
    monkeypatch.setattr(babi_archive, "official_files", lambda: digests)


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"tasks_1-20_v1-2/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_needs_are_read_from_the_jobs_each_once(tiny: ExperimentFile) -> None:
    corpus = {"source": "hub", "dataset": "owner/texts", "revision": "v1"}
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "babi-text": ("data", {"kind": "babi_text", "source": "archive", "missing_files": ["en-valid/qa1_test.txt"]}),
        "simulated-text": ("data", {"kind": "babi_text", "source": "simulated"}),
        "a-tokenizer": ("data", {"kind": "tokenizer", "source": "file", "file": "neox.json"}),
        "b-tokenizer": ("data", {"kind": "tokenizer", "source": "hub", "name": "owner/tokens", "revision": None}),
        "c-tokenizer": ("data", {"kind": "tokenizer", "source": "trained", "corpus": corpus}),
        "c-shard-00000": ("data", {"kind": "token_shard", "corpus": corpus}),
        "c-shard-00001": ("data", {"kind": "token_shard", "corpus": corpus}),
        "d-shard-00000": ("data", {"kind": "token_shard", "corpus": {"source": "files", "files": ["more/*.txt"]}}),
        "e-shard-00000": ("data", {"kind": "token_shard", "corpus": {"source": "python_library"}}),
        "gpt2-s0/explicit": ("train", {"model": {"pretrained": "owner/gpt2", "revision": COMMIT}}),
        "local-s0/explicit": ("train", {"model": {"pretrained": str(tiny.path.parent)}}),
        "other": ("checkpoint", {"hub": "owner/other", "revision": None, "sha256": {}}),
        "gpt2-s0/lm-eval": ("evaluate", {"kind": "lm_eval", "tasks": ["arc_easy", "piqa"]}),
    }
    plan = tiny.plan()
    plan.nodes = {name: Node(stage, name, config) for name, (stage, config) in configs.items()}
    assert needs_of(plan) == [
        BabiArchive(("en-valid/qa1_test.txt",)),
        LocalFile("neox.json", "tokenizer.file"),
        HubFiles("tokenizer", "owner/tokens", None),
        HubFiles("dataset", "owner/texts", "v1", "train"),
        LocalFile("more/*.txt", "corpus.files"),
        HubFiles("model", "owner/gpt2", COMMIT),
        EvaluationData("allenai/ai2_arc", "ARC-Easy", None),
        EvaluationData("baber/piqa", None, None),
        HubCheckpoint("other", HubFiles("model", "owner/other", None), is_vouched=False),
    ]


@pytest.mark.usefixtures("small_babi")
def test_the_babi_archive_is_fetched_once_and_checked(server: FileServer, tmp_path: Path) -> None:
    states = [satisfy(BabiArchive(()), tmp_path, babi_url=server.url + URL_PATH).state for _ in range(2)]
    assert (states, len(server.requests)) == (["fetched", "there"], 1)
    assert (tmp_path / BABI_NAME).read_bytes() == server.files[URL_PATH]


@pytest.mark.usefixtures("small_babi")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (archive({**MEMBERS, "en-valid/qa1_train.txt": b"1 Mary ran.\n"}), "en-valid/qa1_train.txt is damaged"),
        (archive({"en-valid/qa1_train.txt": MEMBERS["en-valid/qa1_train.txt"]}), "qa3_train.txt is not in the archive"),
        (b"<html>log in first</html>", "truncated or damaged"),
    ],
)
def test_something_else_than_babi_is_refused_and_leaves_nothing(
    server: FileServer, tmp_path: Path, content: bytes, reason: str
) -> None:
    server.files[URL_PATH] = content
    outcome = satisfy(BabiArchive(()), tmp_path, babi_url=server.url + URL_PATH)
    assert outcome.state == "failed"
    assert reason in outcome.what
    assert f"put it at {tmp_path / BABI_NAME}" in outcome.what
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_babi")
def test_an_archive_with_fewer_files_serves_experiments_that_do_without_them(
    server: FileServer, tmp_path: Path
) -> None:
    url, first = server.url + URL_PATH, "en-valid/qa1_train.txt"
    (tmp_path / "babi_en_valid_10k.tar.gz").write_bytes(archive({first: MEMBERS[first]}))
    assert satisfy(BabiArchive(("en-valid-10k/qa3_train.txt",)), tmp_path, babi_url=url).state == "there"
    assert satisfy(BabiArchive(()), tmp_path, babi_url=url).state == "fetched"


@pytest.mark.skipif("IMPLICIT_LLM_DATA" not in os.environ, reason="IMPLICIT_LLM_DATA is unset: the real archive")
def test_the_real_archive_is_found_whole_but_for_one_file() -> None:
    downloads = Path(os.environ["IMPLICIT_LLM_DATA"])
    need = BabiArchive(("en-valid-10k/qa3_train.txt",))
    assert satisfy(need, downloads, babi_url="http://127.0.0.1:9/").state == "there"


def test_the_downloads_folder_is_that_of_the_data_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("IMPLICIT_LLM_DATA", raising=False)
    assert downloads_folder() == Path("results/downloads")
    monkeypatch.setenv("IMPLICIT_LLM_DATA", str(tmp_path))
    assert downloads_folder() == tmp_path
    assert downloads_folder(Path("elsewhere")) == Path("elsewhere")


def test_an_experiment_without_needs_says_so(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> None:
    assert output(capsys, "prefetch", "--config", str(tiny.path)) == "tiny needs nothing from the network\n"


def test_the_command_reports_every_need_and_fails_for_one_that_cannot_be_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: ExperimentFile, tmp_path: Path
) -> None:
    (tmp_path / "here.json").touch()
    needs = [LocalFile("gone.json", "tokenizer.file"), LocalFile("here.json", "tokenizer.file")]
    monkeypatch.setattr("implicit_llm_workflow.prefetch.needs_of", lambda _: needs)
    out = output(capsys, "prefetch", "--config", str(tiny.path), "--downloads", str(tmp_path), code=1)
    assert [line.split()[0] for line in out.splitlines()] == ["failed", "there", "1"]


def test_a_file_that_only_the_user_has_is_looked_for_by_name_or_pattern(tmp_path: Path) -> None:
    missing = satisfy(LocalFile("more/*.txt", "corpus.files"), tmp_path)
    assert (missing.state, missing.what.startswith("corpus.files: more/*.txt is neither below")) == ("failed", True)
    (tmp_path / "more" / "deep").mkdir(parents=True)
    (tmp_path / "more" / "deep" / "a[1].txt").touch()
    for name in ("more/*/*.txt", "**/*.txt", "more/deep/a[[]1].txt", "more/deep/a[1].txt"):
        assert satisfy(LocalFile(f"{tmp_path}/{name}", "corpus.files"), Path("elsewhere")).state == "there"
        assert satisfy(LocalFile(name, "corpus.files"), tmp_path).state == "there"
    missing = satisfy(LocalFile(f"{tmp_path}/*/*.txt", "corpus.files"), tmp_path)
    assert (missing.state, missing.what.startswith(f"corpus.files: {tmp_path}/*/*.txt is neither")) == ("failed", True)
