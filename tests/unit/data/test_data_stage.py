from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from implicit_llm_contracts.runs.stage_context import StageContext
from implicit_llm_data.shards import open_dataset
from implicit_llm_data.stages import word_problem as stage
from implicit_llm_data.stages.word_problem import WordProblemConfig, generate
from tests.refusals import refused
from tests.unit.data import text_samples
from tests.unit.data.text_samples import contents, run_until_killed

CONFIG: dict[str, Any] = {
    "kind": "word_problem",
    "group": "S3",
    "monoid": "none",
    "hard_fraction": [0.2, 1.0],
    "length": 6,
    "num_samples": 10,
    "split": "train",
    "seed": 3,
    "shard_samples": 4,
}


def context_in(work: Path, **changes: Any) -> StageContext:
    return text_samples.context_in(work, {**CONFIG, **changes}, name="s3-train")


def test_the_stage_writes_the_data_set_of_its_configuration(tmp_path: Path) -> None:
    result = stage.run(context_in(tmp_path))
    dataset = open_dataset(tmp_path)
    config = context_in(tmp_path).settings(WordProblemConfig)
    shards = [generate(config, shard) for shard in range(3)]
    batch = dataset.fetch(np.arange(10))
    np.testing.assert_array_equal(batch["input_ids"], np.concatenate([inputs for inputs, _ in shards]))
    np.testing.assert_array_equal(batch["labels"], np.concatenate([targets for _, targets in shards]))
    assert dataset.source == CONFIG
    assert result.summary == {"num_samples": 10, "num_tokens": 60, "num_shards": 3, "vocab_size": 6}
    listed = {str(Path(path).relative_to(tmp_path)) for path in result.files}
    assert listed == {path for path in contents(tmp_path) if path == "index.json" or path.endswith(".npy")}


@pytest.mark.parametrize("damage", ["missing", "flipped", "no record"])
def test_only_the_damaged_shard_is_made_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.run(context_in(tmp_path))
    undisturbed = contents(tmp_path)
    array, record = tmp_path / "shards" / "labels-00001.npy", tmp_path / "shards" / "00001.json"
    if damage == "missing":
        array.unlink()
    elif damage == "flipped":
        array.write_bytes(array.read_bytes()[:-1] + b"\x07")
    else:
        record.write_text(record.read_text()[:20])
    made = []
    monkeypatch.setattr(stage, "generate", lambda config, shard: made.append(shard) or generate(config, shard))
    with caplog.at_level(logging.INFO):
        stage.run(context_in(tmp_path))
    assert made == [1]
    assert "kept 2 of 3 shards" in caplog.text
    assert contents(tmp_path) == undisturbed


def test_shards_of_another_configuration_are_not_kept(tmp_path: Path) -> None:
    stage.run(context_in(tmp_path, seed=4))
    stage.run(context_in(tmp_path))
    stage.run(context_in(tmp_path.with_name("fresh")))
    assert contents(tmp_path) == contents(tmp_path.with_name("fresh"))


@pytest.mark.parametrize(
    "point", ["shard.before_file", "shard.before_record", "dataset.before_index", "atomic.mid_write"]
)
def test_a_killed_stage_goes_on_and_ends_with_the_same_data_set(tmp_path: Path, point: str) -> None:
    stage.run(context_in(tmp_path / "undisturbed"))
    hit = 1 if point == "dataset.before_index" else 2
    run_until_killed(stage.run, context_in(tmp_path / "killed"), f"{point}:kill9@{hit}")
    assert not (tmp_path / "killed" / "index.json").exists()
    stage.run(context_in(tmp_path / "killed"))
    left = {path: data for path, data in contents(tmp_path / "killed").items() if not path.endswith(".tmp")}
    assert left == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hard_fraction": 1.2}, "hard_fraction: expected a number from 0 to 1"),
        ({"length": 0}, "length: 0 is not allowed; give an integer of at least 1"),
        ({"group": "D4"}, "use one of S1 to S7"),
        ({"group": "S7", "monoid": "aperiodic"}, "monoid: none"),
        ({"lenght": 3}, "length"),
    ],
)
def test_a_wrong_configuration_leaves_nothing_behind(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with refused(f"^s3-train.*{re.escape(message)}"):
        stage.run(context_in(tmp_path, **changes))
    assert not list(tmp_path.iterdir())
