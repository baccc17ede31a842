"""The README: its table, figure, prices and length."""

import json
import re
import runpy

import numpy as np
import pytest
import torch
from rich.console import Console

from implicit_llm_workflow.commands.try_it import accuracy_table, model_and_sequences
from tests.pages import ROOT
from tests.unit.pages.page_texts import TRAINED, WRITTEN, benchmark, blocks_of, read, rounded


def test_the_readme_shows_the_table_that_the_command_prints() -> None:
    kept = json.loads((TRAINED / "s5-state-passing-s0/accuracy_by_position.json").read_text(encoding="utf-8"))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(accuracy_table(np.ones((16, 512), bool), kept))
    printed = [line.rstrip() for line in capture.get().splitlines()]
    (shown,) = blocks_of("README.md", "text")
    assert len(shown.splitlines()) > 2
    assert set(shown.splitlines()) <= set(printed)


def test_the_readme_has_at_most_850_words() -> None:
    assert len(read("README.md").split()) <= 850


def test_the_residuals_of_the_figure_are_those_at_which_the_solver_stops() -> None:
    watch = runpy.run_path(str(ROOT / "docs/images/hero.py"))["watch"]
    model, ids_1L, labels_1L = model_and_sequences(24, 1, 0)
    with torch.inference_mode():
        residual_KL, is_right_KL = watch(model, ids_1L, labels_1L)
        stats = model(ids_1L).solver_stats
    assert len(residual_KL) == stats.num_iter
    assert float(residual_KL[-1].max()) == pytest.approx(float(stats.residual), rel=1e-4)
    assert (residual_KL[-1] < model.solver.tol).all()
    assert not (residual_KL[:-1] < model.solver.tol).all(1).any()
    assert is_right_KL[0].sum() < 4  # the first token, and others by luck
    assert is_right_KL[-1].all()


def test_the_gpu_hours_of_the_readme_are_those_of_the_reports_and_of_the_page_of_the_paper() -> None:
    kept = (f"results/reference/{name}/index.html" for name in WRITTEN["EXPERIMENTS"])
    reports = [read(page) for page in kept if (ROOT / page).exists()]
    took = [re.search(r"training jobs, ([\d.]+) (hour|minute)s", report).groups() for report in reports]
    hours = sum(float(number) / {"hour": 1, "minute": 60}[unit] for number, unit in took)
    whole = re.search(r"([\d,]+) GPU-hours in all", read("docs/paper.md"))[1]
    stated = f"took {hours:.1f} GPU-hours without preliminary runs; the whole paper takes {whole} by estimate"
    assert stated in " ".join(read("README.md").split())


def test_the_step_times_of_the_readme_are_the_measured_ones() -> None:
    ours = {row["row"]: row["ms"] for row in benchmark("training-step")["rows"]}
    theirs = {row["row"]: row["ms"] for row in benchmark("published-code")["training"]}
    rows = "llama3-130m-explicit", "llama3-130m-implicit"
    explicit, implicit = (f"{rounded(ours[row]):.0f}" for row in rows)
    published = " and ".join(f"{theirs[row]:g}" for row in rows)
    page = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", " ".join(read("README.md").split()))
    assert f"takes {explicit} ms explicit and {implicit} ms implicit. The authors' code takes {published} ms" in page
