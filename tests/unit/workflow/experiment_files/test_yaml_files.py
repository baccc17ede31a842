from __future__ import annotations

from pathlib import Path

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.yaml_files import plain, read_yaml


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "1.e-3", ".1e-2", "+1e-3"])
def test_every_way_of_writing_a_thousandth_is_a_number(tmp_path: Path, text: str) -> None:
    assert read_yaml(written(tmp_path, f"value: {text}")) == {"value": 0.001}


@pytest.mark.parametrize("text", ["e3", "1e", "a1e3", "1e3x", "1-3"])
def test_text_that_only_looks_like_a_number_stays_text(text: str) -> None:
    assert plain({"value": [text]}) == {"value": [text]}


def test_a_key_that_occurs_twice_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file\.yaml:3: .*'a' occurs twice"):
        read_yaml(written(tmp_path, "a: 1\nb: 2\na: 3\n"))


def test_merge_keys_may_be_used_with_overrides(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "x: &x {a: 1, b: 1}\ny: {<<: *x, b: 2}\n"))["y"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", r"file\.yaml:\d+: is not valid YAML"), ("- 1", "must be a mapping"), ("", "must be a mapping")],
)
def test_what_is_no_mapping_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_yaml(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read"):
        read_yaml(tmp_path / "nothing.yaml")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid YAML: 'utf-8' codec can't decode byte 0xff"):
        read_yaml(path)


def test_objects_cannot_be_made_by_a_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(written(tmp_path, "a: !!python/object/apply:os.getcwd []"))
