"""The stage `report`: figures, tables, checked claims and the page, from finished evaluations and training phases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.run_directory import DECLARED
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_report import latex_numbers
from implicit_llm_report.claims import NOT_RUN, judge, load_claims
from implicit_llm_report.config import ReportConfig, ReportError
from implicit_llm_report.downstream import load_suites
from implicit_llm_report.findings import find
from implicit_llm_report.inputs import load_inputs
from implicit_llm_report.page import PageContent, render
from implicit_llm_report.published import load_published
from implicit_llm_report.registry import caption_of
from implicit_llm_report.section import SectionInputs
from implicit_llm_report.sections import build_sections
from implicit_llm_report.svg import file_svg

DEFAULT_TITLE = "Implicit language models are RNNs"


def reads_of_inputs(path: PurePosixPath) -> bool:
    """Whether a report reads this file beside the records: the weights need not be there, nor be hashed again."""
    return path.name == "metrics.json"


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm report`. Raises: UserError."""
    config = fill(ReportConfig, context.config, "report")
    if not context.inputs:
        raise ReportError(
            "report: no inputs; add --input ROLE=DIR with the run directories of evaluations and training phases"
        )
    inputs = load_inputs(context.inputs, config)
    published, suites = load_published(), load_suites()
    given = SectionInputs(inputs, config, published, suites)
    claims = load_claims()
    is_papers = any(config.experiment in claim.scales for claim in claims)
    judgements = [judge(claim, find(claim, given), config.experiment) for claim in claims if is_papers]
    if not config.is_whole:  # a figure for itself does not speak of claims that it says nothing about
        judgements = [judgement for judgement in judgements if judgement.verdict != NOT_RUN]
    sections = build_sections(given)
    if not is_papers and "published" in sections:  # written, and not shown beside an experiment of its own
        sections["published"] = replace(sections["published"], template=None)
    content = PageContent(
        title=config.title or (DEFAULT_TITLE if is_papers else f"Experiment {config.experiment}"),
        config=config,
        words=given.words,
        inputs=inputs,
        judgements=judgements,
        sections=sections,
        published=given.published,
    )
    files = _write(context.work / DECLARED, content)
    context.log.info("page: %s", context.run_dir / "index.html")
    return StageResult(files=files, summary=_summary(content))


def _write(folder: Path, content: PageContent) -> list[Path]:
    claims = {
        "experiment": content.config.experiment,
        "claims": [judgement.to_dict() for judgement in content.judgements],
    }
    texts: dict[str, str | bytes] = {
        "index.html": render(content),
        "claims.json": json.dumps(claims, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n",
    }
    texts[latex_numbers.FILE_NAME] = latex_numbers.latex_numbers(
        content.config.experiment,
        content.inputs.frame,
        content.inputs.sources,
        content.judgements,
        content.config.missing,
    )
    for table, forms in content.files.items():
        texts |= {f"tables/{table}.{suffix}": text for suffix, text in forms.items()}
    for figure in content.figures:
        texts[f"figures/{figure.name}.svg"] = file_svg(figure)
        texts[f"figures/{figure.name}.rst"] = caption_of(figure.name) + "\n"  # for `snakemake --report`
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, text)
    return [folder / name for name in texts]


def _summary(content: PageContent) -> dict[str, Any]:
    return {
        "verdicts": {judgement.claim.id: judgement.verdict for judgement in content.judgements},
        "figures": [figure.name for figure in content.figures],
    }
