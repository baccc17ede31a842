"""Documents of a corpus, the files that they come from, recorded by prefetch or put there by hand, and tokenizers."""

import gzip
import hashlib
import json
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.text import Corpus, CorpusFiles, HubCorpus, LibraryCorpus
from implicit_llm_contracts.runs.fetched_files import COMPRESSIONS, Fetched, HubFiles, find_fetched, is_text
from implicit_llm_contracts.runs.places import corpus_digest
from implicit_llm_data.stages import token_shard
from implicit_llm_data.stages import tokenizer as stage
from implicit_llm_data.stages.token_shard import encode, may_be_cut
from implicit_llm_data.stages.tokenizer import TokenizerConfig, make_tokenizer
from implicit_llm_data.text.corpus import PARQUET_ROWS, CorpusError, CorpusShare, DocumentSplit, open_share, reader_of
from implicit_llm_workflow.file_digests import FileDigests
from tests.refusals import refused
from tests.unit.data.text_samples import NEOX, Project, real_file, sentence, write_corpus, write_jsonl

TEXTS = ["one\ntwo", "", "naïve Zoë", "last \U0001f600"]
LINES = "".join(json.dumps({"text": text, "meta": 1}) + "\n" for text in TEXTS).encode()


def compressed(name: str, data: bytes) -> bytes:
    """As the ending of the name says."""
    if name.endswith(".gz"):
        return gzip.compress(data)
    return pyarrow.compress(data, "zstd", asbytes=True) if name.endswith(".zst") else data


def files(*names: str, **changes: Any) -> CorpusFiles:
    return fill(CorpusFiles, {"source": "files", "files": list(names), **changes}, where="corpus")


def texts_of(share: CorpusShare) -> list[str]:
    documents = list(share.documents())
    assert all(document.utf8.decode() == document.text for document in documents)
    return [document.text for document in documents]


def write(path: Path, content: bytes | list[Any], field: str = "text") -> None:
    """Bytes, or a table of one column."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pyarrow.parquet.write_table(pyarrow.table({field: content}), path)


def refusal(config: Corpus, downloads: Path) -> str:
    with refused("", CorpusError) as caught:
        list(open_share(config, downloads).documents())
    return str(caught.value)


@pytest.mark.parametrize("num_members", [1, 2])
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.json.gz"])
def test_json_lines_give_their_field_also_of_compressed_files_with_several_members(
    tmp_path: Path, name: str, num_members: int
) -> None:
    (tmp_path / name).write_bytes(compressed(name, LINES) * num_members)
    share = open_share(files(name), tmp_path)
    assert texts_of(share) == TEXTS * num_members
    assert share.size == (tmp_path / name).stat().st_size
    assert [document.position for document in share.documents()][-1] == share.size


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_documents_of_one_directory_are_on_one_side(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"text {number}", "directory": f"package/{number % 20}"} for number in range(200)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    split = DocumentSplit(0.4, seed=1)
    sides: dict[str | None, set[str]] = {}
    for document in open_share(files(name, split_by="directory"), tmp_path).documents():
        sides.setdefault(document.group, set()).add(split.of(document.split_key))
    assert len(sides) == 20
    assert all(len(side) == 1 for side in sides.values())
    assert set.union(*sides.values()) == {"train", "test"}


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"second\n\nfile"))
    (tmp_path / "a.txt").write_bytes(b"first")
    assert texts_of(open_share(files("*.txt*"), tmp_path)) == ["first", "second\n\nfile"]


def test_a_table_is_read_in_batches_of_rows(tmp_path: Path) -> None:
    texts = [sentence(number) for number in range(3 * PARQUET_ROWS + 1)]
    write(tmp_path / "x.parquet", texts, "content")
    documents = list(open_share(files("x.parquet", field="content"), tmp_path).documents())
    assert [document.text for document in documents] == texts
    size, count = (tmp_path / "x.parquet").stat().st_size, len(texts)
    assert [document.position for document in documents] == [size * read // count for read in range(1, count + 1)]


def test_names_are_looked_up_among_the_downloads_and_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("downloads", "here"):
        write_jsonl(tmp_path / folder / "both.jsonl", [folder])
    write_jsonl(tmp_path / "here" / "sub" / "b.jsonl", ["b"])
    write_jsonl(tmp_path / "here" / "sub" / "a.jsonl", ["a"])
    monkeypatch.chdir(tmp_path / "here")
    share = open_share(files("both.jsonl", "sub/*.jsonl", "sub/a.jsonl"), tmp_path / "downloads")
    assert texts_of(share) == ["downloads", "a", "b"]
    assert [file.name for file in share.files] == ["both.jsonl", "sub/a.jsonl", "sub/b.jsonl"]


def test_every_document_is_in_one_shard(tmp_path: Path) -> None:
    for number in range(5):
        write_jsonl(tmp_path / f"{number}.jsonl", [f"{number}-{k}" for k in range(3)])
    shares = [open_share(files("*.jsonl"), tmp_path, shard, 2) for shard in range(2)]
    assert [[file.name[0] for file in share.files] for share in shares] == [["0", "2", "4"], ["1", "3"]]
    whole = open_share(files("*.jsonl"), tmp_path)
    assert sorted(texts_of(shares[0]) + texts_of(shares[1])) == texts_of(whole)
    with refused(r"num_shards: 6 shards are more than the corpus has files, 5; use at most 5", CorpusError):
        open_share(files("*.jsonl"), tmp_path, 0, 6)


def line(data: bytes) -> bytes:
    return b'{"text": "good"}\n' + data + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", line(b'{"text": "\xff\xfe"}'), "line 2: invalid UTF-8 at byte 10"),
        ("x.jsonl", line(b'{"text": "a'), "line 2: not JSON ("),
        ("x.jsonl", line(b'{"body": "a", "id": 1}'), "line 2: no field 'text' (found: body, id); set corpus.field"),
        ("x.jsonl", line(b'["a"]'), "line 2: no field 'text' (found: none)"),
        ("x.jsonl", line(b'{"text": 7}'), "line 2: 'text' is no text but int"),
        ("x.jsonl", line(b'{"text": null}'), "line 2: 'text' is no text but NoneType"),
        ("x.jsonl", line(b'{"text": "\\ud800"}'), "line 2: character 0 is half a character"),
        (
            "x.jsonl",
            line(b'{"text": "%s"}' % (b"a" * 500)),
            "line 2: the document is longer than max_document_bytes, 400",
        ),
        ("x.txt", b"one\ntwo\nth\xffree", "line 3: invalid UTF-8"),
        ("x.txt", b"a" * 401, "the document is longer than max_document_bytes, 400"),
        ("x.pdf", b"", "its format is not known; name it .jsonl, "),
        ("x.parquet", ["a", None], "row 2: 'text' is no text but NoneType"),
        ("x.parquet", [1, 2], "row 1: 'text' is no text but int"),
        ("x.parquet", ["a", "b" * 500], "row 2: the document is longer"),
        *((name, compressed(name, LINES * 99)[:-40], "cannot be read (") for name in ("x.jsonl.gz", "x.jsonl.zst")),
        *((name, LINES, "") for name in ("x.jsonl.gz", "x.jsonl.zst", "x.parquet")),  # another kind than the name says
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place(
    tmp_path: Path, name: str, content: bytes | list[Any], message: str
) -> None:
    write(tmp_path / name, content)
    assert refusal(files(name, max_document_bytes=400), tmp_path).startswith(f"{tmp_path / name}: {message}")


@pytest.mark.parametrize(
    ("name", "content", "key", "message"),
    [
        *(
            (name, content, key, "no field 'body' (found: ")
            for name, content in (("x.jsonl", LINES), ("x.parquet", ["a"]))
            for key in ("field", "split_by")
        ),
        ("x.txt", b"one text", "split_by", "no field 'body'; remove corpus.split_by"),
    ],
)
def test_a_field_that_is_not_there_is_named(
    tmp_path: Path, name: str, content: bytes | list[Any], key: str, message: str
) -> None:
    write(tmp_path / name, content)
    assert message in refusal(files(name, **{key: "body"}), tmp_path)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b'{"text": "a", "book": "\\ud800"}', "line 2: character 0 is half a character"),
        (b'{"text": "a", "book": %s}' % (b"[" * 100_000), "line 2: not JSON ("),
        (b'{"text": "a", "book": null}', "line 2: 'book' is null; repair or remove it"),
    ],
    ids=["half a character in the group", "a value without end", "no group"],
)
def test_what_is_wrong_beside_the_text_is_named_too(tmp_path: Path, written: bytes, message: str) -> None:
    write(tmp_path / "x.jsonl", b'{"text": "good", "book": "b"}\n' + written)
    assert refusal(files("x.jsonl", split_by="book"), tmp_path).startswith(f"{tmp_path / 'x.jsonl'}: {message}")


def test_a_row_of_a_table_without_a_group_is_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "book": "b"}, {"text": "a", "book": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    message = f"{tmp_path / 'x.parquet'}: row 2: 'book' is null; repair or remove it"
    assert refusal(files("x.parquet", split_by="book"), tmp_path) == message


def test_the_mark_of_byte_order_is_no_part_of_a_text(tmp_path: Path) -> None:
    write(tmp_path / "x.txt", b"\xef\xbb\xbfone text")
    (document,) = open_share(files("x.txt"), tmp_path).documents()
    assert (document.text, document.utf8) == ("one text", b"one text")


def test_a_line_without_end_is_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "')
    os.truncate(tmp_path / "x.jsonl", 1 << 36)  # sparse: takes no room, and would not fit the memory
    assert "line 1: the document is longer" in refusal(files("x.jsonl", max_document_bytes=1000), tmp_path)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with refused(r"nothing matches 'no\*.jsonl' in .* or .*; correct the name, or fetch", CorpusError):
        open_share(files("no*.jsonl"), tmp_path)


def test_the_python_library_is_a_corpus_without_tests_packages_and_machine_facts(tmp_path: Path) -> None:
    share = open_share(LibraryCorpus("python_library"), tmp_path)
    names = [file.name for file in share.files]
    assert {"json/decoder.py", "argparse.py", "pydoc/booleans"} <= set(names)
    assert not [name for name in names if "/test" in name or "site-packages" in name or "sysconfigdata" in name]
    documents = list(share.documents())
    assert sum(len(document.utf8) for document in documents) > 5_000_000
    assert documents[-1].position == share.size
    assert [document.utf8 for document in share.documents()] == [document.utf8 for document in documents]
    assert any("The operator" in document.text and "boolean" in document.text for document in documents)


def test_a_data_set_that_was_not_fetched_says_what_to_type(tmp_path: Path) -> None:
    message = refusal(HubCorpus("hub", dataset="who/what"), tmp_path)
    assert message.startswith(f"who/what: it has not been fetched to {tmp_path / 'hub' / 'who' / 'what'}")
    assert "`implicit-llm prefetch EXPERIMENT`" in message


COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEED = {"kind": "dataset", "name": "who/what", "revision": "v1", "split": "train"}
AGAIN = "type `implicit-llm prefetch EXPERIMENT` where there is a network"


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    """Two files of the split train, as prefetch leaves them, without a record."""
    for number in (1, 0):
        write_jsonl(folder_of(tmp_path) / "data" / f"train-{number}.jsonl", [f"text {number}"])
    (folder_of(tmp_path) / ".cache" / "huggingface").mkdir(parents=True)
    return tmp_path


def folder_of(downloads: Path) -> Path:
    return downloads / "hub" / "who" / "what"


def record(downloads: Path, *names: str, **need: Any) -> Path:
    """The record of a fetch of these files."""
    wanted = HubFiles(**{**NEED, **need})
    sizes = {name: (folder_of(downloads) / name).stat().st_size for name in names}
    Fetched(wanted.revision, COMMIT, sizes).write(wanted.record(downloads))
    return wanted.record(downloads)


def names(downloads: Path, **changes: Any) -> list[str]:
    return [file.name for file in open_share(HubCorpus("hub", dataset="who/what", **changes), downloads).files]


def test_an_unfinished_fetch_is_not_taken_for_the_corpus_and_files_put_there_by_hand_are(downloads: Path) -> None:
    with refused(f"^{folder_of(downloads)}: the split 'train' of the dataset is not among what was fetched; {AGAIN}"):
        names(downloads)
    (folder_of(downloads) / ".cache" / "huggingface").rmdir()
    write_jsonl(folder_of(downloads) / "data" / "test-0.jsonl", ["of another split"])
    assert names(downloads) == ["data/train-0.jsonl", "data/train-1.jsonl"]
    assert find_fetched(HubFiles("dataset", "who/nobody", None, "train"), downloads) is None


@pytest.mark.parametrize("suffix", ["", *COMPRESSIONS])
@pytest.mark.parametrize("kind", [".jsonl", ".ndjson", ".txt"])
def test_every_compressed_text_of_a_data_set_that_can_be_read_is_fetched(kind: str, suffix: str) -> None:
    for name in (f"data/train-0{kind}{suffix}", f"data/TRAIN-0{kind}{suffix}".upper()):
        assert reader_of(Path(name))
        assert is_text(name)
    assert not is_text(f"data/.hidden{kind}{suffix}")


@pytest.mark.parametrize("revision", [None, "v1", COMMIT, COMMIT[:8]])
def test_only_the_recorded_files_are_read_in_the_order_of_their_names(downloads: Path, revision: str | None) -> None:
    record(downloads, "data/train-1.jsonl", "data/train-0.jsonl")
    write_jsonl(folder_of(downloads) / "data" / "train-2.jsonl", ["of another version"])
    assert names(downloads, revision=revision) == ["data/train-0.jsonl", "data/train-1.jsonl"]
    with refused("the split 'test' of the dataset is not among what was fetched"):
        names(downloads, split="test")


@pytest.mark.parametrize("revision", ["v2", "0123"])  # too short for a commit
def test_another_revision_than_the_fetched_one_is_refused(downloads: Path, revision: str) -> None:
    path = record(downloads, "data/train-0.jsonl", revision=None)
    with refused(rf"^{path}: revision main \(commit 0123456789ab\) was fetched, the config names {revision}; {AGAIN}$"):
        names(downloads, revision=revision)


def test_a_file_that_is_gone_or_of_another_size_is_named(downloads: Path) -> None:
    record(downloads, "data/train-0.jsonl", "data/train-1.jsonl")
    path = folder_of(downloads) / "data" / "train-1.jsonl"
    path.write_bytes(b"short")
    with refused(f"^{path}: expected 19 bytes, found 5; {AGAIN}$"):
        names(downloads)
    path.unlink()
    with refused(f"^{path}: expected 19 bytes, found no file; {AGAIN}$"):
        names(downloads)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sizes": [1]}', '{"sizes": {"a": "b"}}', '{"files": []}'])
def test_a_damaged_record_is_named(downloads: Path, text: str) -> None:
    path = record(downloads, "data/train-0.jsonl")
    path.write_text(text)
    with refused(rf"^{path}: no record of a fetch \("):
        names(downloads)


def test_a_fetched_tokenizer_is_of_the_revision_that_the_config_names(tmp_path: Path) -> None:
    folder_of(tmp_path).mkdir(parents=True)
    text = Tokenizer(models.WordLevel({"<|endoftext|>": 0})).to_str()
    (folder_of(tmp_path) / "tokenizer.json").write_text(text)
    pinned = TokenizerConfig("hub", 300, name="who/what", revision="v2")
    assert make_tokenizer(pinned, tmp_path)[0].decode() == text  # put there by hand
    record(tmp_path, "tokenizer.json", kind="tokenizer", split=None)
    with refused(r"revision v1 \(commit 0123456789ab\) was fetched, the config names v2"):
        make_tokenizer(pinned, tmp_path)
    assert make_tokenizer(TokenizerConfig("hub", 300, name="who/what"), tmp_path)[0].decode() == text


TRAINED: dict[str, Any] = {
    "source": "trained",
    "vocab_size": 300,
    "max_bytes": 100_000,
    "test_fraction": 0.2,
    "seed": 1,
}


def make(downloads: Path, **fields: Any) -> str:
    """The text of tokenizer.json."""
    return stage.make_tokenizer(fill(TokenizerConfig, fields, where="x-tokenizer"), downloads)[0].decode()


def tokenizer_refusal(downloads: Path, **fields: Any) -> str:
    with refused("") as caught:
        make(downloads, **fields)
    return str(caught.value)


def write_trained(folder: Path) -> Path:
    """A tokenizer.json in the folder, trained on sentences."""
    path = folder / "small.json"
    path.write_text(make(folder, **TRAINED, corpus=write_corpus(folder)))
    return path


def test_a_trained_tokenizer_has_the_wanted_size_gives_text_back_and_says_which_id_ends_a_text(tmp_path: Path) -> None:
    project = Project(tmp_path)
    work = project.run("x", {"kind": "tokenizer", **TRAINED, "corpus": write_corpus(project.downloads)})
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    text = "the cat sat, naïve \U0001f600\n  12"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the cat").ids) < len("the cat")
    manifest = project.input("x").manifest
    assert manifest.summary == {"num_ids": 300, "vocab_size": 300, "end_of_text_id": 0}
    assert {record.path.rpartition("/")[2] for record in manifest.files} == {"tokenizer.json"}
    assert (project.input("x").dir / "tokenizer.json").read_bytes() == (work / "tokenizer.json").read_bytes()


def test_training_again_gives_equal_bytes(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    # The hash tables inside differ each time.
    assert len({make(tmp_path, **TRAINED, corpus=corpus) for _ in range(4)}) == 1


def test_a_tokenizer_whose_texts_have_changed_since_its_job_was_planned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_DATA", str(tmp_path))
    corpus = write_corpus(tmp_path)
    planned = FileDigests(tmp_path / "digests.json").of_corpus(corpus["files"])
    fields = {**TRAINED, "corpus": corpus, "corpus_sha256": corpus_digest(planned)}
    make(tmp_path, **fields)
    write_jsonl(tmp_path / "part-1.jsonl.gz", ["another text"])
    message = "files: part-*.jsonl.gz have changed since this job was planned; plan it again"
    assert tokenizer_refusal(tmp_path, **fields) == message


def test_training_reads_no_more_than_it_may(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["abab abab abab"])
    (tmp_path / "b.jsonl").write_text("damaged")
    fields = {**TRAINED, "test_fraction": 0.0, "corpus": {"source": "files", "files": ["a.jsonl", "b.jsonl"]}}
    make(tmp_path, **{**fields, "max_bytes": 5})
    assert "b.jsonl: line 1: not JSON" in tokenizer_refusal(tmp_path, **fields)


def test_a_file_is_taken_as_it_is_if_its_digest_is_right(tmp_path: Path) -> None:
    digest = hashlib.sha256(write_trained(tmp_path).read_bytes()).hexdigest()
    fields = {"source": "file", "file": "small.json", "vocab_size": 300}
    assert make(tmp_path, **fields, sha256=digest) == (tmp_path / "small.json").read_text()
    message = tokenizer_refusal(tmp_path, **fields, sha256="0" * 64)
    assert f"sha256 is {digest[:16]}..., expected 0000000000000000..." in message


def test_the_real_tokenizer_fits_the_padded_vocabulary_and_no_smaller_one() -> None:
    folder = real_file(NEOX).parent
    fields = {"source": "file", "file": NEOX}
    digest = "56ac4821e129d2c520fdaba60abd920fa852ada51b45c0dd52bbb6bd8c985ade"
    make(folder, **fields, sha256=digest, vocab_size=50_288)
    assert tokenizer_refusal(folder, **fields, vocab_size=50_000).startswith(
        "vocab_size: 50000 is less than the tokenizer's 50277"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "file", "file": "no.json"}, "tokenizer.file: no.json is neither in"),
        ({"source": "file", "file": "broken.json"}, "no tokenizer.json that `tokenizers` reads"),
        ({"source": "file", "file": "small.json", "end_of_text": "<eos>"}, "end_of_text: the tokenizer has no token"),
        ({"source": "file", "file": "small.json", "vocab_size": 299}, "vocab_size: 299 is less than"),
        ({"source": "file", "test_fraction": -0.1}, "x-tokenizer.test_fraction: -0.1 is not allowed; give a number"),
        ({"source": "hub", "name": "who/nobody"}, "hub/who/nobody; type `implicit-llm prefetch"),
    ],
)
def test_a_tokenizer_that_is_not_usable_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_trained(tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    assert message in tokenizer_refusal(tmp_path, **{"vocab_size": 300, **fields})


# What word borders, white space of all kinds, accents, half-composed letters and special tokens are made of.
PIECES = [
    *(" ", " ", "  ", "     ", "\n", "\n\n", "\t", "\r\n", "\x0b", "\x1c", "\x85"),
    *("\u00a0", "\u2003", "\u3000", "\u200b", "\ufeff", "\x00", "\x7f"),
    *("a", "the", "Don't", "we'LL", "'s", "'", "''ve", "x'd9", "123", "4", "...", "!?", "_", "-"),
    *("<|endoftext|>", "<|end", "\u00e9", "e\u0301", "\u0301", "\u4f60\u597d", "\u0928\u093f"),
    *("\U0001f600", "\u2019t", "\u212b", "\u0660"),
]  # fmt: skip


SPACES = [AddedToken(" " * count, normalized=True) for count in (2, 3, 5)]


@cache
def trained_fields() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    blanks = ["  \n\n x", "\n\n\n y", " \u00a0\n\n z", "!\x1c a", "a\u3000\n b"] * 9
    tokenizer.train_from_iterator([*(sentence(number) for number in range(200)), *blanks], trainer)
    return json.loads(tokenizer.to_str())


def trained(added: Sequence[AddedToken] = (), **changes: Any) -> Tokenizer:
    """With `changes` in its tokenizer.json."""
    tokenizer = Tokenizer.from_str(json.dumps({**trained_fields(), **changes}))
    tokenizer.add_tokens([*added])
    return tokenizer


def random_texts(count: int) -> list[str]:
    source = random.Random(0)
    return ["".join(source.choices(PIECES, k=source.randrange(30))) for _ in range(count)]


def check_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """The encoder gives the ids that the tokenizer gives for whole texts."""
    for text, data in zip(texts, encode(tokenizer, texts), strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert np.frombuffer(data, dtype="<u2").tolist() == ids, repr(text)


@pytest.mark.parametrize("added", [(), SPACES, [AddedToken("x", lstrip=True), AddedToken("the", single_word=True)]])
@pytest.mark.parametrize("piece_characters", [1 << 20, 7])
def test_pieces_give_the_ids_of_the_whole_text(
    added: Sequence[AddedToken], piece_characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_shard, "PIECE_CHARACTERS", piece_characters)
    tokenizer = trained(added)
    assert may_be_cut(tokenizer)
    check_ids(tokenizer, random_texts(2000))


def test_a_long_text_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    whole = token_shard.encode_whole

    def encode_whole(tokenizer: Tokenizer, texts: Sequence[str]) -> list[bytes]:
        given.extend(texts)
        return whole(tokenizer, texts)

    monkeypatch.setattr(token_shard, "PIECE_CHARACTERS", 7)
    monkeypatch.setattr(token_shard, "encode_whole", encode_whole)
    encode(trained(), ["one two three four", "five"])
    assert given == ["one two three", " four", "five"]


def test_pieces_give_the_ids_of_the_real_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_shard, "PIECE_CHARACTERS", 7)
    tokenizer = Tokenizer.from_file(str(real_file(NEOX)))
    assert may_be_cut(tokenizer)
    check_ids(tokenizer, [*random_texts(3000), "Hello world", " Hello world"])
    assert tokenizer.encode("Hello world").ids == [12092, 1533]


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {"added": [AddedToken("a b")]},  # these look beyond a piece
        {"added": [AddedToken("x", rstrip=True)]},
    ],
)
def test_another_kind_of_tokenizer_encodes_whole_documents(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_shard, "PIECE_CHARACTERS", 7)
    tokenizer = trained(**changes)
    assert not may_be_cut(tokenizer)
    check_ids(tokenizer, random_texts(100))
