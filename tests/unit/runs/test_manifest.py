"""The identity of a run, and the manifest over its files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.identity import Identity, canonical_json, compute_fingerprint, run_and_phase
from implicit_llm_contracts.runs.manifest import FileRecord, Level, Manifest, ManifestError
from tests.refusals import refused

FINGERPRINT = "ab" * 32


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    (run_dir / "work").mkdir(parents=True)
    for name in ("b", "a"):
        (run_dir / "work" / name).write_text(f"content of {name}")
    return run_dir


@pytest.fixture
def manifest(run_dir: Path) -> Manifest:
    files = tuple(FileRecord.of(run_dir / "work" / name, run_dir) for name in ("b", "a"))
    return Manifest("train", "x/free", FINGERPRINT, {"z": 1, "a": [1.5, None]}, "c", {}, files, {"loss": 0.25})


def test_reading_gives_what_was_written_with_the_files_in_the_order_of_their_paths(
    manifest: Manifest, run_dir: Path
) -> None:
    manifest.write(run_dir / "manifest.json")
    read = Manifest.read(run_dir / "manifest.json")
    assert [record.path for record in read.files] == ["work/a", "work/b"]
    assert read == replace(manifest, files=manifest.files[::-1])


def test_equal_manifests_give_equal_bytes_whatever_the_order(manifest: Manifest) -> None:
    config = dict(reversed(list(manifest.config.items())))
    other = replace(manifest, config=config, files=manifest.files[::-1])
    assert other.to_bytes() == manifest.to_bytes()
    assert manifest.to_bytes().endswith(b"}\n")


def test_numbers_that_are_not_finite_become_null() -> None:
    summary = {"loss": math.nan, "list": [math.inf, 1], "deep": {"x": -math.inf}}
    written = json.loads(Manifest("s", "n", FINGERPRINT, {}, "c", {}, (), summary).to_bytes())
    assert written["summary"] == {"loss": None, "list": [None, 1], "deep": {"x": None}}


def test_a_summary_that_is_not_json_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="object"):
        Manifest("s", "n", FINGERPRINT, {}, "c", {}, (), {"model": object()}).to_bytes()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "found an empty file"),
        (b'{"format": 1, "sta', "found no JSON"),
        (b"\xff\xfe", "found no JSON"),
        (b"[]", "expected a manifest of format 1, found 'list'"),
        (b'{"format": 2}', "expected a manifest of format 1, found 2"),
        (b'{"format": 1, "stage": 3}', "stage: expected a string, found 3"),
    ],
)
def test_a_damaged_manifest_is_absent_for_find_and_a_one_line_error_for_read(
    tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    assert Manifest.find(path) is None
    with refused(f"^{path}: .*{found}.*type `rm -f {path}` and run the workflow again", ManifestError):
        Manifest.read(path)


def test_a_missing_manifest_names_the_path_and_nothing_to_remove(tmp_path: Path) -> None:
    assert Manifest.find(tmp_path / "manifest.json") is None
    with refused(r"manifest\.json: no manifest there; give the directory((?!rm -f).)*\Z", ManifestError):
        Manifest.read(tmp_path / "manifest.json")


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/a"])
def test_a_path_that_leads_out_of_the_run_directory_is_refused(tmp_path: Path, path: str) -> None:
    Manifest.of(Identity("s", "n", {}, "", {}), (FileRecord(path, 1, "0"),), {}).write(tmp_path / "manifest.json")
    with pytest.raises(ManifestError, match="leads out of the run directory"):
        Manifest.read(tmp_path / "manifest.json")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, r"work/a: expected 12 bytes, found no file; type `rm -f"),
        ("short", "work/a: expected 12 bytes, found 5"),
        ("content of A", r"work/a: expected sha256 [0-9a-f]{16}, found [0-9a-f]{16}"),  # found by its digest alone
    ],
)
@pytest.mark.parametrize("level", ["size", "sha256"])
def test_a_file_that_is_missing_or_not_as_recorded_is_named(
    manifest: Manifest, run_dir: Path, content: str | None, error: str, level: Level
) -> None:
    manifest.verify(run_dir, level)
    path = run_dir / "work" / "a"
    path.unlink()
    if content is not None:
        path.write_text(content)
    if level == "size" and "sha256" in error:
        manifest.verify(run_dir, level)
        return
    with pytest.raises(ManifestError, match=error) as caught:
        manifest.verify(run_dir, level)
    assert caught.value.path == path


def test_only_the_files_that_are_read_are_checked(manifest: Manifest, run_dir: Path) -> None:
    (run_dir / "work" / "b").unlink()
    manifest.verify(run_dir, "sha256", reads=lambda path: path.name == "a")
    with pytest.raises(ManifestError, match="found no file"):
        manifest.verify(run_dir, "sha256", reads=lambda path: path.name in ("a", "b"))


PARTS: dict[str, Any] = {"stage": "data", "config": {"length": 16, "p": 0.2}, "code": "c0de", "upstream": {}}
VALUES = {**PARTS, "name": "a5-train", "fingerprint": compute_fingerprint(**PARTS)}


def test_text_and_file_give_the_same_identity(tmp_path: Path) -> None:
    text = json.dumps(VALUES)
    (tmp_path / "identity.json").write_text(text)
    assert Identity.parse(text) == Identity.parse(f"@{tmp_path / 'identity.json'}")
    assert Identity.parse(text).config == {"length": 16, "p": 0.2}


def test_the_fingerprint_depends_on_every_part_and_on_nothing_else() -> None:
    changed = [{"stage": "train"}, {"config": {"length": 17, "p": 0.2}}, {"code": "x"}, {"upstream": {"data": "f"}}]
    assert len({compute_fingerprint(**{**PARTS, **change}) for change in [{}, *changed]}) == 5
    assert Identity.parse(json.dumps({**VALUES, "name": "other"})).fingerprint == VALUES["fingerprint"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"length": 17, "p": 0.2}}, r"fingerprint [0-9a-f]{16} does not belong to the rest"),
        ({"code": None}, "code: expected a string, found null"),
        ({"config": []}, "config: expected a mapping, found a list"),
        ({"name": "../../etc"}, "lead out of the folder"),
        ({"upstream": {"data": 3}}, "upstream.data: expected a string, found 3"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_a_wrong_identity_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with refused(message):
        Identity.parse(json.dumps({**VALUES, **change}))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not JSON"), ("[1]", "mapping"), ("{", "not JSON"), ("{}", "missing"), ("@/nowhere/i.json", "cannot read")],
)
def test_what_is_no_identity_is_refused(text: str, message: str) -> None:
    with refused(message):
        Identity.parse(text)


def test_fingerprints_are_of_sorted_json_in_plain_letters() -> None:
    assert canonical_json({"b": "ä", "a": [1, 2.5, None]}) == '{"a":[1,2.5,null],"b":"ä"}'


def test_a_training_job_names_its_run_without_the_seed_and_its_phase_if_it_has_one() -> None:
    assert run_and_phase("s5-implicit-s3/free", {"seed": 3}) == ("s5-implicit", "free")
    assert run_and_phase("s5-implicit-s3", {"seed": 3}) == ("s5-implicit", None)
