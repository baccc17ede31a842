"""The jobs of the picture of the lineage: data sets, and for each run its training phases and evaluations.

Runs are rows, seeds stand side by side in a line. A picture of many jobs has a line for all seeds of a phase or an
evaluation, and one of very many a line for all evaluations of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from implicit_llm_report import style
from implicit_llm_report.config import DataPart, MissingResult, ReportConfig
from implicit_llm_report.config import Job as Known
from implicit_llm_report.inputs import CHECKPOINT, EVALUATE, TRAIN, ReportInputs, Source

MANY_JOBS, VERY_MANY_LINES = 120, 160
SHORT = 8  # digits of a fingerprint or of an MLflow run


@dataclass(frozen=True)
class Job:
    """A finished job, or one that is missing (`state` says how); `part` is its phase or evaluation."""

    role: str
    run: str
    part: str
    seed: str
    fingerprint: str = ""
    mlflow_run_id: str | None = None
    anchor: str | None = None
    state: str = ""
    is_explicit: bool = False

    @property
    def words(self) -> str:
        """Everything about it, for the reader who points at it."""
        if self.state:
            return f"{self.role}: {self.state}"
        return f"{self.role}\nfingerprint {self.fingerprint}\nMLflow run {self.mlflow_run_id or 'not tracked'}"


@dataclass(frozen=True)
class Line:
    """A line of a box: one job, or several that are alike."""

    label: str
    jobs: tuple[Job, ...]

    @property
    def ids(self) -> str:
        """Fingerprint and MLflow run of the first job, and how many more there are."""
        missing = [job for job in self.jobs if job.state]
        if missing:
            rest = len(self.jobs) - len(missing)
            return f"{missing[0].state}" + (f", {rest} there" if rest else "")
        first = self.jobs[0]
        tracked = f" · {first.mlflow_run_id[:SHORT]}" if first.mlflow_run_id else ""
        more = f" +{len(self.jobs) - 1}" if len(self.jobs) > 1 else ""
        return f"{first.fingerprint[:SHORT]}{tracked}{more}"

    @property
    def is_missing(self) -> bool:
        return any(job.state for job in self.jobs)


@dataclass(frozen=True)
class RunRow:
    """One run: what it was trained on, its phases and its evaluations."""

    name: str
    data: str
    training: tuple[Line, ...]
    evaluations: tuple[Line, ...]


@dataclass(frozen=True)
class LineageJobs:
    """`data`: the lines of each group of data sets; `rows`: the runs, those on the same data together."""

    data: Mapping[str, tuple[Line, ...]]
    rows: tuple[RunRow, ...]
    num_jobs: int


def lineage_jobs(inputs: ReportInputs, config: ReportConfig) -> LineageJobs:
    """The jobs behind a report, arranged."""
    jobs = [_job(source) for source in sorted(inputs.sources.values(), key=_order)]
    jobs += [
        _missing_result(item, config.jobs[item.role]) for item in config.missing if item.role not in inputs.sources
    ]
    groups = _data_groups(inputs, config.data)
    data_of = {source.job.run: group for source in inputs.sources.values() for group in _groups_of(source, groups)}
    num_jobs = len(jobs) + len({item for lines in groups.values() for item in lines})
    has_many = num_jobs > MANY_JOBS
    rows = [_row(name, mine, data_of.get(name, ""), has_many) for name, mine in _by_run(jobs).items()]
    if sum(max(len(row.training), len(row.evaluations)) for row in rows) > VERY_MANY_LINES:
        rows = [RunRow(row.name, row.data, row.training, _as_one(row.evaluations)) for row in rows]
    rows.sort(key=lambda row: (row.data, row.name))
    shown = {row.data for row in rows}
    lines = {
        group: tuple(Line(name.removeprefix(f"{group}-"), (job,)) for name, job in items.items())
        for group, items in groups.items()
        if group in shown
    }
    return LineageJobs(lines, tuple(rows), num_jobs)


def _order(source: Source) -> tuple:
    """Phases as they follow one another, else by role."""
    phase = source.config.get("phase") or {}
    return (phase.get("start_step", 0), phase.get("end_step", 0), source.role)


def _job(source: Source) -> Job:
    return Job(
        source.role,
        source.job.run,
        "imported" if source.stage == CHECKPOINT else _part(source.job),
        _seed(source.job),
        source.fingerprint,
        source.provenance.get("mlflow_run_id"),
        source.anchor,
        is_explicit=source.stage == TRAIN and source.job.solver is None,
    )


def _missing_result(item: MissingResult, known: Known) -> Job:
    return Job(item.role, known.run, _part(known), _seed(known), state=item.state, is_explicit=known.solver is None)


def _seed(known: Known) -> str:
    return "" if known.seed is None else str(known.seed)


def _part(known: Known) -> str:
    """ "free" for training, "word-problem (free)" for an evaluation."""
    return f"{known.evaluation} ({known.phase})" if known.evaluation else known.phase or ""


def _by_run(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.run, []).append(job)
    return found


def _row(name: str, jobs: Sequence[Job], data: str, has_many: bool) -> RunRow:
    evaluations = [job for job in jobs if job.role.startswith(f"{EVALUATE}:")]
    training = [job for job in jobs if job not in evaluations]
    return RunRow(name, data, _lines(training, has_many), _lines(evaluations, has_many))


def _lines(jobs: Sequence[Job], has_many: bool) -> tuple[Line, ...]:
    by_part: dict[str, list[Job]] = {}
    for job in jobs:
        by_part.setdefault(job.part, []).append(job)
    if has_many:
        return tuple(Line(_with_seeds(part, mine), tuple(mine)) for part, mine in by_part.items())
    has_seeds = len({job.seed for job in jobs}) > 1
    return tuple(
        Line(f"{part}, seed {job.seed}" if has_seeds and job.seed else part, (job,))
        for part, mine in by_part.items()
        for job in mine
    )


def _with_seeds(part: str, jobs: Sequence[Job]) -> str:
    return f"{part}, {len(jobs)} seeds" if len(jobs) > 1 else part


def _as_one(lines: Sequence[Line]) -> tuple[Line, ...]:
    jobs = tuple(job for line in lines for job in line.jobs)
    return (Line(f"{len(jobs)} evaluations", jobs),) if len(lines) > 1 else tuple(lines)


def _data_groups(inputs: ReportInputs, parts: Mapping[str, DataPart]) -> dict[str, dict[str, Job]]:
    """By data set its parts by name; one that is gone by its fingerprint."""
    groups: dict[str, dict[str, Job]] = {}
    for source in inputs.sources.values():
        for role, fingerprint in source.upstream.items():
            if role in ("model", "start") or (source.stage != TRAIN and source.stage != EVALUATE):
                continue
            known = inputs.data.get(fingerprint)
            name = known.name if known else role if role != "data" else f"data {fingerprint[:SHORT]}"
            tracked = known.provenance.get("mlflow_run_id") if known else None
            job = Job(f"data:{name}", "", name, "", fingerprint, tracked)
            groups.setdefault(parts.get(name, DataPart(name)).data or name, {}).setdefault(name, job)
    return {group: dict(sorted(items.items())) for group, items in sorted(groups.items())}


def _groups_of(source: Source, groups: Mapping[str, Mapping[str, Job]]) -> list[str]:
    """The group that a run reads; training comes after evaluations here, and decides."""
    read = set(source.upstream.values())
    return [group for group, items in groups.items() if any(job.fingerprint in read for job in items.values())]


LINE_PX, HEAD_PX, PAD_PX, GAP_PX = 15, 19, 6, 12
# Left edge and width of the columns of boxes.
DATA, TRAINING, EVALUATIONS, REPORT = (0, 220), (262, 280), (584, 356), (986, 130)
WIDTH_PX = REPORT[0] + REPORT[1]
TOP_PX = 26
LETTER_PX, MONO_PX = 6.1, 6.3
_SANS = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"'
_MONO = 'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"'
# The looks of texts: of a column, a box, a line and the ids at its end.
HEADING, TITLE, LABEL = (
    f'{_SANS} font-size="12"',
    f'{_SANS} font-size="11.5" font-weight="600"',
    f'{_SANS} font-size="10.5"',
)
IDS, IDS_AT_END = f'{_MONO} font-size="10.5"', f'{_MONO} font-size="10.5" text-anchor="end"'


@dataclass(frozen=True)
class Box:
    """A titled box of lines, `left` and `width` those of its column."""

    column: tuple[int, int]
    top: float
    title: str
    lines: Sequence[Line]
    color: str

    @property
    def height(self) -> int:
        return _height(len(self.lines), has_title=bool(self.title))

    @property
    def middle(self) -> float:
        return self.top + self.height / 2

    @property
    def right(self) -> int:
        return self.column[0] + self.column[1]


def lineage_svg(jobs: LineageJobs, report: str, *, is_page: bool) -> str:
    """The picture; `report` is what the last box says. On the page lines lead to the runs, and colours follow it."""
    boxes, edges, height = _placed(jobs)
    last = Box(REPORT, max(TOP_PX, height / 2 - HEAD_PX), "report", (), style.INK)
    edges += [(box, last) for box in boxes if box.column == EVALUATIONS]
    parts = [_edge(first, second) for first, second in edges]
    parts += [_box(box, is_page) for box in (*boxes, last)]
    parts.append(_text(last.column[0] + PAD_PX, last.top + HEAD_PX + 12, report, style.MUTED, IDS))
    heads = ("data sets", "training phases", "evaluations", "")
    columns = (DATA, TRAINING, EVALUATIONS, REPORT)
    parts += [_text(column[0], 12, head, style.MUTED, HEADING) for head, column in zip(heads, columns, strict=True)]
    title = f"{jobs.num_jobs} jobs: data sets, training phases, evaluations and the report, each with its fingerprint"
    size = "" if is_page else f' width="{WIDTH_PX}" height="{height:g}"'
    background = "" if is_page else f'<rect width="100%" height="100%" fill="{style.PAPER}"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 0 {WIDTH_PX + 2} {height:g}" role="img"{size}>'
    text = "\n".join([head, f"<title>{title}</title>{background}", *parts, "</svg>"])
    return _in_page_colors(text) if is_page else text + "\n"


def _placed(jobs: LineageJobs) -> tuple[list[Box], list[tuple[Box, Box]], float]:
    """Boxes and edges but those to the report, and the height of all."""
    boxes: list[Box] = []
    edges: list[tuple[Box, Box]] = []
    top = float(TOP_PX)
    for group in dict.fromkeys(row.data for row in jobs.rows):
        rows = [row for row in jobs.rows if row.data == group]
        lines = jobs.data.get(group, ())
        start, placed = top, []
        for row in rows:
            placed += list(_row_boxes(row, top, edges))
            top += _row_height(row) + GAP_PX
        if lines:
            height = top - start - GAP_PX
            data = Box(DATA, start + max(0, (height - _height(len(lines))) / 2), group, lines, style.GREEN)
            edges += [(data, box) for box in placed if box.column == TRAINING]
            boxes.append(data)
            top = max(top, data.top + data.height + GAP_PX)
        boxes += placed
        top += GAP_PX
    return boxes, edges, top


def _row_boxes(row: RunRow, top: float, edges: list[tuple[Box, Box]]) -> Iterator[Box]:
    height = _row_height(row)
    is_explicit = all(job.is_explicit for line in row.training for job in line.jobs)
    color = style.VERMILION if is_explicit else style.BLUE
    first = None
    if row.training:
        first = Box(TRAINING, top + (height - _height(len(row.training))) / 2, row.name, row.training, color)
        yield first
    if row.evaluations:
        title = "" if first else row.name
        box = Box(EVALUATIONS, top, title, row.evaluations, style.PURPLE)
        box = replace(box, top=top + (height - box.height) / 2)
        if first:
            edges.append((first, box))
        yield box


def _row_height(row: RunRow) -> int:
    evaluations = _height(len(row.evaluations), has_title=not row.training) if row.evaluations else 0
    return max(_height(len(row.training)) if row.training else 0, evaluations)


def _height(num_lines: int, *, has_title: bool = True) -> int:
    return (HEAD_PX if has_title else PAD_PX) + num_lines * LINE_PX + PAD_PX


def _edge(first: Box, second: Box) -> str:
    """From the right side of one box to the left side of another."""
    start, end = first.right, second.column[0]
    bend = (end - start) / 2
    return (
        f'<path d="M{start} {first.middle:g}C{start + bend:g} {first.middle:g} {end - bend:g} {second.middle:g} '
        f'{end} {second.middle:g}" fill="none" stroke="{style.MUTED}" stroke-width="1" stroke-opacity=".5"/>'
    )


def _box(box: Box, is_page: bool) -> str:
    left, width = box.column
    height = box.height if box.lines else 2 * HEAD_PX
    parts = [
        f'<rect x="{left}" y="{box.top:g}" width="{width}" height="{height}" rx="5" fill="{style.BAND}" '
        f'stroke="{style.GRID}"/>',
        f'<rect x="{left}" y="{box.top:g}" width="3" height="{height}" fill="{box.color}"/>',
        _text(left + PAD_PX + 3, box.top + 14, _cut(box.title, width - 14), style.INK, TITLE),
    ]
    first = box.top + (HEAD_PX if box.title else PAD_PX) + 11
    for index, line in enumerate(box.lines):
        parts.append(_line(box, line, first + index * LINE_PX, is_page))
    return "".join(parts)


def _line(box: Box, line: Line, baseline: float, is_page: bool) -> str:
    left, width = box.column
    ids_px = len(line.ids) * MONO_PX
    color = style.AMBER if line.is_missing else style.INK
    label = _text(left + PAD_PX + 3, baseline, _cut(line.label, width - ids_px - 22), color, LABEL)
    faint = style.AMBER if line.is_missing else style.MUTED
    ids = _text(left + width - PAD_PX, baseline, line.ids, faint, IDS_AT_END)
    body = f"<g><title>{escape(_words(line.jobs))}</title>{label}{ids}</g>"
    anchor = line.jobs[0].anchor
    return f'<a href="#{anchor}">{body}</a>' if is_page and anchor else body


def _words(jobs: Sequence[Job]) -> str:
    return "\n\n".join(job.words for job in jobs)


def _cut(text: str, width_px: float) -> str:
    letters = max(4, int(width_px / LETTER_PX))
    return text if len(text) <= letters else text[: letters - 1] + "…"


def _text(x: float, y: float, text: str, color: str, look: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" {look}>{escape(text)}</text>'


def _in_page_colors(svg: str) -> str:
    for name, light, _ in style.THEME:
        svg = svg.replace(f'"{light}"', f'"var(--{name})"')
    return svg
