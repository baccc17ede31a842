"""What an experiment needs from outside and what is said of it; the real client of the hub against a small hub here."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from implicit_llm_contracts.config.text import HubCorpus
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.runs.fetched_files import FetchedFilesError, HubFiles, find_fetched
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_data.babi import archive as babi_archive
from implicit_llm_data.text.corpus import open_share
from implicit_llm_workflow import prefetch
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.prefetch import (
    BABI_NAME,
    BabiArchive,
    EvaluationData,
    FetchError,
    LocalFile,
    OnHub,
    fetch_hub_files,
    needs_of,
    wanted_files,
)
from tests.unit.workflow.experiments import PEER, ExperimentFile, output
from tests.unit.workflow.prefetching.file_server import FileServer, serving

MEMBERS = {"en-valid/qa1_train.txt": b"1 Mary sat.\n", "en-valid-10k/qa3_train.txt": b"1 John ran.\n"}
URL_PATH = f"/{BABI_NAME}"


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
        "mine": ("checkpoint", {"path": "models/mine", "sha256": {}}),
        "words-train": ("data", {"kind": "word_problem", "file": "words/train_A5_L256_P090.bin"}),
        "drawn-train": ("data", {"kind": "word_problem"}),
        "gpt2-s0/lm-eval": ("evaluate", {"kind": "lm_eval", "tasks": ["arc_easy", "piqa"]}),
    }
    plan = tiny.plan()
    plan.nodes = {name: Node(stage, name, config) for name, (stage, config) in configs.items()}
    assert needs_of(plan) == [
        BabiArchive(("en-valid/qa1_test.txt",)),
        LocalFile("neox.json", "tokenizer.file"),
        OnHub(HubFiles("tokenizer", "owner/tokens", None)),
        OnHub(HubFiles("dataset", "owner/texts", "v1", "train")),
        LocalFile("more/*.txt", "corpus.files"),
        OnHub(HubFiles("model", "owner/gpt2", COMMIT)),
        OnHub(HubFiles("model", "owner/other", None), "other"),
        LocalFile("models/mine/config.json", "peers.mine.checkpoint.path"),
        LocalFile("words/train_A5_L256_P090.bin", "folder"),
        EvaluationData("allenai/ai2_arc", "ARC-Easy", None),
        EvaluationData("baber/piqa", None, None),
    ]


@pytest.mark.usefixtures("small_babi")
def test_the_babi_archive_is_fetched_once_and_checked(hub: FileServer, tmp_path: Path) -> None:
    need = BabiArchive((), hub.url + URL_PATH)
    satisfy(need, tmp_path)
    is_there(need, tmp_path, hub)
    assert (tmp_path / BABI_NAME).read_bytes() == hub.files[URL_PATH]


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
    hub: FileServer, tmp_path: Path, content: bytes, reason: str
) -> None:
    hub.files[URL_PATH] = content
    what = satisfy(BabiArchive((), hub.url + URL_PATH), tmp_path, "failed")
    assert reason in what
    assert f"put it at {tmp_path / BABI_NAME}" in what
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_babi")
def test_an_archive_with_fewer_files_serves_experiments_that_do_without_them(hub: FileServer, tmp_path: Path) -> None:
    url, first = hub.url + URL_PATH, "en-valid/qa1_train.txt"
    (tmp_path / "babi_en_valid_10k.tar.gz").write_bytes(archive({first: MEMBERS[first]}))
    satisfy(BabiArchive(("en-valid-10k/qa3_train.txt",), url), tmp_path, "there")
    satisfy(BabiArchive((), url), tmp_path, "fetched")


@pytest.mark.skipif("IMPLICIT_LLM_DATA" not in os.environ, reason="IMPLICIT_LLM_DATA is unset: the real archive")
def test_the_real_archive_is_found_whole_but_for_one_file() -> None:
    need = BabiArchive(("en-valid-10k/qa3_train.txt",), "http://127.0.0.1:9/")
    satisfy(need, Path(os.environ["IMPLICIT_LLM_DATA"]), "there")


def test_the_downloads_folder_is_that_of_the_data_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("IMPLICIT_LLM_DATA", raising=False)
    assert downloads_folder() == Path("results/downloads")
    monkeypatch.setenv("IMPLICIT_LLM_DATA", str(tmp_path))
    assert downloads_folder() == tmp_path
    assert downloads_folder(Path("elsewhere")) == Path("elsewhere")


def test_an_experiment_without_needs_says_so(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> None:
    assert output(capsys, "prefetch", "--config", str(tiny.path)) == "tiny needs nothing from the network\n"


def test_a_target_needs_what_its_jobs_and_those_before_them_read(
    capsys: pytest.CaptureFixture[str], language: ExperimentFile
) -> None:
    language.edit("      families: [2, 1]\n      stories: {train: 8, valid: 4, test: 4}\n", "")
    plan = language.edit("source: simulated", "source: archive").add(PEER).plan()
    assert needs_of(plan) == [BabiArchive(()), OnHub(HubFiles("model", "owner/other", None), "other")]
    assert needs_of(plan, plan.with_inputs(["evaluate/babi-s0/explicit/questions"])) == [BabiArchive(())]
    said = output(capsys, "prefetch", str(language.path), "train/flat-s0/explicit", "train/trunk-*")
    assert said == "train/flat-s0/explicit, train/trunk-* needs nothing from the network\n"
    assert output(capsys, "prefetch", "paper", "figure_1_right") == "figure_1_right needs nothing from the network\n"


def test_the_command_reports_every_need_and_fails_for_one_that_cannot_be_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: ExperimentFile, tmp_path: Path
) -> None:
    (tmp_path / "here.json").touch()
    needs = [LocalFile("gone.json", "tokenizer.file"), LocalFile("here.json", "tokenizer.file")]
    monkeypatch.setattr("implicit_llm_workflow.commands.experiments.needs_of", lambda *_: needs)
    out = output(capsys, "prefetch", "--config", str(tiny.path), "--downloads", str(tmp_path), code=1)
    assert [line.split()[0] for line in out.splitlines()] == ["failed", "there", "1"]


def test_a_file_that_only_the_user_has_is_looked_for_by_name_or_pattern(tmp_path: Path) -> None:
    what = satisfy(LocalFile("more/*.txt", "corpus.files"), tmp_path, "failed")
    assert what.startswith("corpus.files: more/*.txt is neither below")
    (tmp_path / "more" / "deep").mkdir(parents=True)
    (tmp_path / "more" / "deep" / "a[1].txt").touch()
    for name in ("more/*/*.txt", "**/*.txt", "more/deep/a[[]1].txt", "more/deep/a[1].txt"):
        satisfy(LocalFile(f"{tmp_path}/{name}", "corpus.files"), Path("elsewhere"), "there")
        satisfy(LocalFile(name, "corpus.files"), tmp_path, "there")
    what = satisfy(LocalFile(f"{tmp_path}/*/*.txt", "corpus.files"), tmp_path, "failed")
    assert what.startswith(f"corpus.files: {tmp_path}/*/*.txt is neither")


COMMIT = "0123456789abcdef0123456789abcdef01234567"
DATASET = HubFiles("dataset", "owner/texts", None, "train")
TOKENIZER = HubFiles("tokenizer", "owner/tokens", None)
TEXTS = {
    "README.md": b"# texts",
    "data/train-00000-of-00002.jsonl": b'{"text": "one"}\n' * 5000,
    "data/train-00001-of-00002.jsonl": b'{"text": "two"}\n' * 5000,
    "data/test-00000-of-00001.jsonl": b'{"text": "three"}\n',
}
IN_LARGE_FILE_STORAGE = "data/train-00000-of-00002.jsonl"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serving() as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        template = f"{state.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        state.files[URL_PATH] = archive(MEMBERS)
        publish(state, "datasets", DATASET.name, TEXTS)
        publish(state, "models", TOKENIZER.name, {"tokenizer.json": b"{}", "model.safetensors": b"weights"})
        yield state


def publish(state: FileServer, kind: str, name: str, files: dict[str, bytes], commit: str = COMMIT) -> None:
    """A repository as the hub's interface shows it; this is its newest commit."""
    tree, prefix = [], "" if kind == "models" else f"/{kind}"
    for path, content in files.items():
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": blob}
        if path == IN_LARGE_FILE_STORAGE:
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
        tree.append(entry)
        for at in (commit, "main"):
            url = f"{prefix}/{name}/resolve/{at}/{path}"
            state.files[url], state.headers[url] = content, {"X-Repo-Commit": commit}
    api = f"/api/{kind}/{name}"
    about = {"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
    answers: dict[str, object] = dict.fromkeys((api, f"{api}/revision/main", f"{api}/revision/{commit}"), about)
    for at in ("", "/data"):
        answers[f"{api}/tree/{commit}{at}"] = [entry for entry in tree if str(entry["path"]).startswith(at[1:])]
    for url, value in answers.items():
        state.files[url], state.headers[url] = json.dumps(value).encode(), {"Content-Type": "application/json"}


def satisfy(need: Any, downloads: Path, state: str = "fetched") -> str:
    """What is said of a need, or of files of the hub, that ends in this state."""
    ended, what = prefetch.satisfy(OnHub(need) if isinstance(need, HubFiles) else need, downloads)
    assert ended == state, what
    return what


def is_there(need: Any, downloads: Path, hub: FileServer) -> None:
    """The need is satisfied without a request."""
    hub.requests.clear()
    satisfy(need, downloads, "there")
    assert hub.requests == []


def names_in(folder: Path) -> set[str]:
    """Of the files, without the client's own."""
    return {path.name for path in folder.iterdir() if path.is_file() and path.name != ".fetched"}


def test_the_files_of_the_split_are_fetched_checked_and_recorded(hub: FileServer, tmp_path: Path) -> None:
    assert satisfy(DATASET, tmp_path).endswith(f"; to pin it, write corpus.revision: {COMMIT}")
    folder = tmp_path / "hub" / "owner" / "texts"
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.jsonl")}
    assert found == {path for path in TEXTS if "train" in path}
    fetched = find_fetched(DATASET, tmp_path)
    assert (fetched.commit, fetched.sizes) == (COMMIT, {path: len(TEXTS[path]) for path in found})
    assert "2 files" in str(fetched)
    is_there(DATASET, tmp_path, hub)
    (folder / IN_LARGE_FILE_STORAGE).unlink()
    satisfy(DATASET, tmp_path)
    gets = {path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path}
    assert gets == {"train-00000-of-00002.jsonl"}


def test_a_fetch_that_was_cut_goes_on_where_it_ended(hub: FileServer, tmp_path: Path) -> None:
    content = TEXTS[IN_LARGE_FILE_STORAGE] * 150  # the client writes 10 MiB at a time
    publish(hub, "datasets", DATASET.name, {IN_LARGE_FILE_STORAGE: content})
    url = f"/datasets/{DATASET.name}/resolve/{COMMIT}/{IN_LARGE_FILE_STORAGE}"
    hub.cuts[url] = [11_000_000]
    satisfy(DATASET, tmp_path)
    ranges = [asked for method, path, asked in hub.requests if (method, path) == ("GET", url)]
    assert ranges == ["", f"bytes={10 * 2**20}-"]


def test_offline_what_was_fetched_is_there_and_the_rest_is_one_line(
    hub: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    satisfy(TOKENIZER, tmp_path)
    assert names_in(tmp_path / "hub" / "owner" / "tokens") == {"tokenizer.json"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    is_there(TOKENIZER, tmp_path, hub)
    what = satisfy(DATASET, tmp_path, "failed")
    assert ("dataset owner/texts: " in what, "\n" in what, hub.requests) == (True, False, [])


@pytest.mark.parametrize("path", [IN_LARGE_FILE_STORAGE, "data/train-00001-of-00002.jsonl"])
def test_content_that_differs_from_the_digest_of_the_hub_is_removed(hub: FileServer, tmp_path: Path, path: str) -> None:
    url = f"/datasets/{DATASET.name}/resolve/{COMMIT}/{path}"
    hub.files[url] = hub.files[url].replace(b"text", b"test", 1)
    said = f"{path}: did not have the digest that the hub gives; removed"
    assert said in satisfy(DATASET, tmp_path, "failed")
    assert not (tmp_path / "hub" / "owner" / "texts" / path).exists()
    with pytest.raises(FetchedFilesError):
        find_fetched(DATASET, tmp_path)


def test_the_jobs_read_what_was_fetched_split_by_split(hub: FileServer, tmp_path: Path) -> None:
    for split in ("train", "test"):
        satisfy(replace(DATASET, split=split), tmp_path)
    for split, count in (("train", 2), ("test", 1)):
        corpus = HubCorpus("hub", dataset=DATASET.name, split=split, revision=COMMIT)
        assert [file.name for file in open_share(corpus, tmp_path).files] == [name for name in TEXTS if split in name]
        assert f"{count} files" in str(find_fetched(replace(DATASET, split=split), tmp_path))


def test_while_another_commit_is_fetched_the_record_of_the_last_one_is_gone(hub: FileServer, tmp_path: Path) -> None:
    satisfy(DATASET, tmp_path)
    newer = COMMIT[::-1]
    publish(hub, "datasets", DATASET.name, {**TEXTS, "data/train-00002-of-00002.jsonl": b"x"}, newer)
    hub.files.pop(f"/datasets/{DATASET.name}/resolve/{newer}/data/train-00002-of-00002.jsonl")
    satisfy(replace(DATASET, revision=newer), tmp_path, "failed")
    with pytest.raises(FetchedFilesError, match=r"is not among what was fetched"):
        open_share(HubCorpus("hub", dataset=DATASET.name), tmp_path)


def test_a_pretrained_model_is_fetched_at_its_commit_without_its_pickles_and_checked(
    hub: FileServer, tmp_path: Path
) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"w", "pytorch_model.bin": b"p"}
    publish(hub, "models", "owner/model", files)
    pinned = HubFiles("model", "owner/model", COMMIT)
    url = f"/owner/model/resolve/{COMMIT}/model.safetensors"
    hub.files[url] = b"W"
    assert "model.safetensors: did not have the digest that the hub gives" in satisfy(pinned, tmp_path, "failed")
    hub.files[url] = b"w"
    satisfy(pinned, tmp_path)
    assert names_in(tmp_path / "models" / "owner" / "model" / COMMIT) == {"config.json", "model.safetensors"}
    satisfy(pinned, tmp_path, "there")
    publish(hub, "models", "owner/model", files, commit="f" * 40)
    satisfy(replace(pinned, revision="f" * 40), tmp_path)


def test_more_than_fits_the_disk_is_refused_before_it_is_fetched(
    hub: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    said = f"2 files of dataset {DATASET.name} need 0.2 MiB more and 0.1 MiB are free"
    assert said in satisfy(DATASET, tmp_path, "failed")
    there = tmp_path / "hub" / "owner" / "texts" / IN_LARGE_FILE_STORAGE
    there.parent.mkdir(parents=True)
    there.write_bytes(TEXTS[IN_LARGE_FILE_STORAGE])
    assert len(fetch_hub_files(DATASET, tmp_path).sizes) == 2


def test_a_repository_that_is_not_there_is_one_line_with_advice(hub: FileServer, tmp_path: Path) -> None:
    what = satisfy(HubFiles("dataset", "owner/nothing", None, "train"), tmp_path, "failed")
    assert re.match(rf"dataset owner/nothing: .*put them into {tmp_path}/hub/owner/nothing", what)
    assert "\n" not in what


def test_files_put_there_by_hand_are_accepted_without_a_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "owner" / "texts"
    folder.mkdir(parents=True)
    satisfy(DATASET, tmp_path, "failed")
    (folder / "part-0.jsonl.zst").write_bytes(b"")
    assert "put there by hand (1 files)" in satisfy(DATASET, tmp_path, "there")
    (folder / ".cache" / "huggingface").mkdir(parents=True)  # of a fetch that was interrupted
    satisfy(DATASET, tmp_path, "failed")


MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "tokenizer.json": b"{}",
    "modeling.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same again",
}


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_of_a_peer_the_safetensors_and_no_code_are_fetched(
    hub: FileServer, tmp_path: Path, revision: str | None
) -> None:
    publish(hub, "models", "owner/model", MODEL)
    peer = OnHub(HubFiles("model", "owner/model", revision), "mine")
    what = satisfy(peer, tmp_path)
    found = names_in(tmp_path / "models" / "owner" / "model" / (revision or "main"))
    assert found == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (f"peers.mine.checkpoint.revision: {COMMIT}" in what) == (revision != COMMIT)
    is_there(peer, tmp_path, hub)


def test_a_pickle_waits_for_its_digest_in_the_experiment_and_is_not_trained(hub: FileServer, tmp_path: Path) -> None:
    publish(hub, "models", "owner/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    files = HubFiles("model", "owner/old", COMMIT)
    what = satisfy(OnHub(files, "old"), tmp_path, "failed")
    digest = hashlib.sha256(b"pickle").hexdigest()
    assert f"peers.old.checkpoint.sha256: {{pytorch_model.bin: {digest}}}" in what
    satisfy(OnHub(files, "old", is_vouched=True), tmp_path, "there")
    said = "owner/old: is a pickle on the hub, and training reads safetensors only; name another"
    assert said in satisfy(files, tmp_path, "failed")


WEIGHTS = HubFiles("model", "owner/model", None)
SHARDS = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("need", "wanted", "others", "message"),
    [
        (
            DATASET,
            ["a.parquet", "b.txt.gz"],
            ["weights.bin", ".hidden.txt"],
            "dataset owner/texts: has no file of text",
        ),
        (WEIGHTS, SHARDS, ["onnx/model.safetensors"], r"owner/model: has no config\.json with"),
    ],
    ids=["without a split in any name all texts", "shards of a model with their index"],
)
def test_what_is_fetched_is_chosen_by_name(need: HubFiles, wanted: list[str], others: list[str], message: str) -> None:
    assert [*wanted_files(need, dict.fromkeys([*wanted, *others], 1))] == wanted
    with pytest.raises(FetchError, match=message):
        wanted_files(need, dict.fromkeys(others, 1))


NAME, DATA = "owner/questions", "data/test.jsonl"
CARD = f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path: {DATA}\n---\n"
TASK = (
    f"task: far\ndataset_path: {NAME}\noutput_type: loglikelihood\ntest_split: test\n"
    "doc_to_text: '{{text}}'\ndoc_to_target: ' end'\nmetadata: {version: 1.0}\n"
)
# In a process of its own, since the client reads the environment once: before the data is there, and after it.
FETCH = """
import json, pathlib, sys
from implicit_llm_workflow.prefetch import EvaluationData, satisfy
print(json.dumps(satisfy(EvaluationData(sys.argv[1]), pathlib.Path())))
"""
LOAD = """
import sys
from implicit_llm_contracts.config.evaluation import LmEvalConfig
from implicit_llm.evaluation.kinds.lm_eval import load_tasks
config = LmEvalConfig("lm_eval", (), ("far",), task_path=sys.argv[1])
try:
    load_tasks(config)
except Exception as error:
    print(error, flush=True)
input()
tasks = load_tasks(config)
print(len(tasks["far"].eval_docs), tasks["far"].eval_docs[1]["text"])
"""


def test_a_task_reads_what_was_fetched_without_a_network(hub: FileServer, tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": f"question {index}"}).encode() + b"\n" for index in range(5))
    publish(hub, "datasets", NAME, {"README.md": CARD.encode(), DATA: lines})
    (tmp_path / "far.yaml").write_text(TASK)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {**inherited, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    online = {**environment, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environment) as job:
        assert re.search("task far: its data cannot be read.*run `implicit-llm prefetch", job.stdout.readline())
        fetched = subprocess.check_output([sys.executable, "-c", FETCH, NAME], env=online, text=True)
        assert json.loads(fetched.splitlines()[-1]) == ["fetched", f"data set {NAME} in the cache of datasets"]
        asked = len(hub.requests)
        assert job.communicate("\n", timeout=120)[0] == "5 question 1\n"
    assert len(hub.requests) == asked


def test_a_data_set_that_cannot_be_had_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no network\nhere")

    monkeypatch.setattr("datasets.load_dataset", fail)
    said = r"data set owner/none \(easy\): no network; .*with the same HF_HOME, or copy that folder from there"
    assert re.fullmatch(said, satisfy(EvaluationData("owner/none", "easy"), tmp_path, "failed"))


MODES = "modes: [{name: blockwise, eval_mode: blockwise}]"


@pytest.mark.parametrize(
    ("tasks", "data_sets"),
    [
        ("local, task_path: local", []),
        (
            "paper",
            [
                "EleutherAI/lambada_openai",
                "Rowan/hellaswag",
                "baber/piqa",
                "allenai/ai2_arc",
                "allenai/ai2_arc",
                "allenai/winogrande",
                "allenai/openbookqa",
            ],
        ),
    ],
)
def test_a_suite_needs_the_data_of_its_tasks(language: ExperimentFile, tasks: str, data_sets: list[str]) -> None:
    language.edit("evaluations:\n", f"evaluations:\n  downstream: {{kind: lm_eval, tasks: {tasks}, {MODES}}}\n")
    needs = needs_of(language.plan())
    assert [need.dataset for need in needs if isinstance(need, EvaluationData)] == data_sets


def test_a_misspelt_key_in_the_file_of_evaluation_data_is_one_line(
    language: ExperimentFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    language.edit("evaluations:\n", f"evaluations:\n  downstream: {{kind: lm_eval, tasks: [piqa], {MODES}}}\n")
    (tmp_path / "data.yaml").write_text("tasks:\n  piqa: {datset: baber/piqa}\n")
    monkeypatch.setattr("implicit_llm_workflow.prefetch.EVALUATION_DATA_FILE", tmp_path / "data.yaml")
    with pytest.raises(ConfigError, match=r"data.yaml: tasks.piqa: unknown key 'datset'; did you mean 'dataset'"):
        list(needs_of(language.plan()))
