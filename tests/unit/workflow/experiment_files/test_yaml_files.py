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


def test_merge_keys_may_be_used_with_overrides(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "x: &x {a: 1, b: 1}\ny: {<<: *x, b: 2}\n"))["y"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", r"file\.yaml:\d+: is not valid YAML"),
        (b"- 1", "must be a mapping"),
        (b"", "must be a mapping"),
        (b"a: 1\nb: 2\na: 3\n", r"file\.yaml:3: .*'a' occurs twice"),
        (b"\xff\xfe\x00", "is not valid YAML: 'utf-8' codec can't decode byte 0xff"),
        (b"a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (None, r"file\.yaml: cannot be read"),
    ],
)
def test_what_is_no_mapping_is_refused_in_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "file.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_yaml(tmp_path / "file.yaml")
    assert "\n" not in str(caught.value)
