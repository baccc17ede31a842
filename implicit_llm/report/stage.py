"""The stage `report`: figures, tables, checked claims and the page, from finished evaluations and training phases."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from implicit_llm.report.accuracy_figures import accuracy_by_length, accuracy_by_mode, accuracy_by_position
from implicit_llm.report.babi_figures import accuracy_by_babi_task
from implicit_llm.report.babi_results import BabiResults
from implicit_llm.report.babi_tables import babi_csv, babi_latex, babi_tables
from implicit_llm.report.claims import Judgement, judge, load_claims
from implicit_llm.report.config import ReportConfig, ReportError
from implicit_llm.report.inputs import load_inputs
from implicit_llm.report.loss_figures import loss_by
from implicit_llm.report.page import PageContent, Tables, render
from implicit_llm.report.pair_claims import judge_pair
from implicit_llm.report.perplexity_figures import perplexity_by_length
from implicit_llm.report.perplexity_results import PerplexityResults
from implicit_llm.report.perplexity_tables import perplexity_csv, perplexity_latex, perplexity_tables
from implicit_llm.report.published import Published, load_published
from implicit_llm.report.results import Results
from implicit_llm.report.svg import Figure, file_svg
from implicit_llm.report.tables import accuracy_tables, to_csv, to_latex
from implicit_llm.report.training_figures import solver_health, training_curves
from implicit_llm.report.training_runs import FLOPS, TOKENS
from implicit_llm.runs.atomic import write_atomic
from implicit_llm.runs.fill import fill
from implicit_llm.runs.run_directory import DECLARED
from implicit_llm.runs.stage import StageContext, StageResult

# What it reads of its inputs beside their records. Their weights need not be there, nor be hashed again.
INPUT_NAMES = frozenset({"metrics.json"})
DEFAULT_TITLE = "Implicit language models are RNNs"


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm report`; the runtime option `assets` is the folder workflow/report. Raises: UserError."""
    config = fill(ReportConfig, context.config, "report")
    assets = Path(context.runtime.get("assets") or Path(__file__).parents[2] / "workflow" / "report")
    check_assets(assets, config.assets or {})
    inputs = load_inputs(context.inputs)
    if not inputs.sources:
        raise ReportError(
            "report: no inputs; add --input ROLE=DIR with the run directories of evaluations and training phases"
        )
    published = load_published(assets / "published.yaml")
    results = Results(inputs.points, config.headline_mode)
    perplexities = PerplexityResults(inputs.perplexities, inputs.training, config.headline_mode)
    babi = BabiResults(inputs.babi, config.headline_mode)
    judgements = [
        judge(claim, results, config.experiment)
        if claim.compare is None
        else judge_pair(claim, perplexities, babi, config.experiment)
        for claim in load_claims(assets / "claims.yaml")
    ]
    drawn = [
        accuracy_by_length(results, published.numbers),
        accuracy_by_position(results),
        accuracy_by_mode(results),
        perplexity_by_length(perplexities),
        loss_by(TOKENS, inputs.training, perplexities.groups),
        loss_by(FLOPS, inputs.training, perplexities.groups),
        accuracy_by_babi_task(babi),
        training_curves(inputs.training, results, perplexities.groups),
        solver_health(inputs.training),
    ]
    figures = [figure for figure in drawn if figure is not None]
    content = PageContent(
        title=config.title or DEFAULT_TITLE,
        experiment=config.experiment,
        results=results,
        inputs=inputs,
        judgements=judgements,
        figures=figures,
        tables=_tables(results, perplexities, babi, published),
        published=published,
    )
    files = _write(context.work / DECLARED, content, assets)
    context.log.info("page: %s", context.run_dir / "index.html")
    return StageResult(files=files, summary=_summary(judgements, figures))


def _tables(results: Results, perplexities: PerplexityResults, babi: BabiResults, published: Published) -> Tables:
    """The tables of what was evaluated; a kind that was not has no file."""
    of_accuracy = accuracy_tables(results, published)
    of_perplexity = perplexity_tables(perplexities, perplexities.training, published)
    of_babi = babi_tables(babi)
    files = {}
    if of_accuracy:
        files["accuracy"] = {"csv": to_csv(results, published), "tex": to_latex(of_accuracy)}
    if of_perplexity:
        files["perplexity"] = {"csv": perplexity_csv(of_perplexity), "tex": perplexity_latex(of_perplexity)}
    if of_babi:
        files["babi"] = {"csv": babi_csv(of_babi, published), "tex": babi_latex(of_babi, published)}
    return Tables(of_accuracy, of_perplexity, of_babi, files)


def check_assets(assets: Path, digests: Mapping[str, str]) -> None:
    """Compare files of workflow/report with their digests. Raises: ReportError for the first that differs."""
    for name, wanted in sorted(digests.items()):
        path = assets / name
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        if found != wanted:
            what = "is missing" if found is None else "changed after the workflow was planned"
            raise ReportError(f"{path}: {what}; run the workflow again")


def _write(folder: Path, content: PageContent, assets: Path) -> list[Path]:
    claims = {"experiment": content.experiment, "claims": [judgement.to_dict() for judgement in content.judgements]}
    texts: dict[str, str | bytes] = {
        "index.html": render(content, assets),
        "claims.json": json.dumps(claims, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n",
    }
    for table, forms in content.tables.files.items():
        texts |= {f"tables/{table}.{suffix}": text for suffix, text in forms.items()}
    texts |= {f"figures/{figure.name}.svg": file_svg(figure) for figure in content.figures}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, text)
    return [folder / name for name in texts]


def _summary(judgements: list[Judgement], figures: list[Figure]) -> dict[str, Any]:
    return {
        "verdicts": {judgement.claim.id: judgement.verdict for judgement in judgements},
        "figures": [figure.name for figure in figures],
    }
