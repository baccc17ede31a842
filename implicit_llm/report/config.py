"""What the report shows: identity, since it changes the page."""

from __future__ import annotations

from dataclasses import dataclass

from implicit_llm.runs.errors import UserError


class ReportError(UserError):
    """The report cannot be made from what it was given."""


@dataclass(frozen=True)
class ReportConfig:
    """`experiment` (demo, miniature, h200, paper, ...) says which claims can be judged.

    `headline_mode` is the evaluation mode that speaks for an implicit model; None takes blockwise, sequential,
    simultaneous or published, the first that was run. `assets` are sha256 digests of files of
    workflow/report by their path in it; those given are checked, so that a changed claim is a changed report.
    """

    experiment: str
    title: str | None = None
    headline_mode: str | None = None
    assets: dict[str, str] | None = None
