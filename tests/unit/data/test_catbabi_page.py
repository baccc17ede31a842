"""What docs/catbabi.md says is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from implicit_llm_data.stages import babi_text, catbabi
from tests.pages import ROOT
from tests.unit.data.babi_runs import context_in

PAGE = (ROOT / "docs" / "catbabi.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return found


def test_the_script_of_the_page_prints_the_batches_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = yaml.safe_load(block("yaml"))["data"]["babi"]
    text, train = tmp_path / "babi-text", tmp_path / "babi-train"
    babi_text.run(context_in(text, {"kind": "babi_text", **experiment.pop("text")}))
    upstream = SimpleNamespace(work=text)
    result = catbabi.run(context_in(train, {**experiment, "split": "train"}, inputs={"text": upstream}))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(block("python"), "docs/catbabi.md", "exec"), {})
    assert capsys.readouterr().out == block("text")
    assert f"{result.summary['vocab_size_of_text']} for the simulator" in PAGE
