import json
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.identity import (
    Identity,
    canonical_json,
    compute_fingerprint,
    run_and_phase,
)
from tests.refusals import refused

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
