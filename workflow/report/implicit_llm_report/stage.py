"""Run the stage `report`: make figures, tables, checked claims and pages from finished evaluations and training."""

import json
from pathlib import Path, PurePosixPath

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.run_directory import DECLARED
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_report.claims.claims import NOT_RUN, judge, load_claims
from implicit_llm_report.config import ReportConfig, ReportError
from implicit_llm_report.figures.svg import drawn, file_svg
from implicit_llm_report.inputs.frame import metrics_of
from implicit_llm_report.inputs.sources import load_inputs
from implicit_llm_report.page import latex_numbers
from implicit_llm_report.page.page import PageContent, render
from implicit_llm_report.registry import figures_with
from implicit_llm_report.sections import figures_of, missing_files, published_files, published_rows, sections_of
from implicit_llm_report.tables import files_of

DEFAULT_TITLE = "Implicit language models are RNNs"


def reads_of_inputs(path: PurePosixPath) -> bool:
    """Return whether a report needs this file of an input's manifest; other files, such as weights, are not hashed."""
    return path.name == "metrics.json"


def run(context: StageContext) -> StageResult:
    """Do the work of `implicit-llm report`, which writes its files below `work/declared`. Raises: UserError."""
    config = context.settings(ReportConfig)
    if not context.inputs:
        raise ReportError(
            "report: no inputs; add the run directories of evaluations and training phases to `inputs` of the identity"
        )
    given = load_inputs(context.inputs, config, context.kinds)
    claims = load_claims()
    is_papers = any(config.experiment in claim.scales for claim in claims)
    judgements = [judge(claim, given.frame, config.experiment) for claim in claims if is_papers]
    if not config.is_whole:  # a page of some figures or tables shows only claims for which it has results
        judgements = [judgement for judgement in judgements if judgement.verdict != NOT_RUN]
    sections = sections_of(given)
    published = published_rows(given) if config.shows("tables", "published") else []
    tables = {
        **{name: files_of(found, given.published, metrics_of(context.kinds)) for name, found in sections.items()},
        **({"published": published_files(published)} if published else {}),
        **({"missing": missing_files(given)} if config.missing else {}),
    }
    content = PageContent(
        title=config.title or (DEFAULT_TITLE if is_papers else f"Experiment {config.experiment}"),
        given=given,
        judgements=judgements,
        sections=sections,
        figures=[drawn(figure) for figure in figures_of(given)],
        published=published if is_papers else [],  # an experiment that no claim names only writes them to files
        files=tables,
    )
    files = _write(context.work / DECLARED, content)
    context.log.info("page: %s", context.run_dir / "index.html")
    verdicts = {judgement.claim.id: judgement.verdict for judgement in judgements}
    return StageResult(
        files=files, summary={"verdicts": verdicts, "figures": [one.figure.name for one in content.figures]}
    )


def _write(folder: Path, content: PageContent) -> list[Path]:
    experiment, figures = content.given.config.experiment, figures_with(content.given.kinds)
    claims = {"experiment": experiment, "claims": [judgement.to_dict() for judgement in content.judgements]}
    texts: dict[str, str | bytes] = {
        **render(content),
        "claims.json": json.dumps(claims, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n",
        latex_numbers.FILE_NAME: latex_numbers.latex_numbers(content.given, content.judgements),
        **{f"tables/{name}.{form}": text for name, forms in content.files.items() for form, text in forms.items()},
    }
    for figure in (one.figure for one in content.figures):
        texts[f"figures/{figure.name}.svg"] = file_svg(figure)
        texts[f"figures/{figure.name}.rst"] = figures[figure.name].caption + "\n"  # for `snakemake --report`
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, text)
    return [folder / name for name in texts]
