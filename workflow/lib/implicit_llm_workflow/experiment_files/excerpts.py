"""Excerpts of the report: single figures and tables of the paper, each a target with only the jobs that it needs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from implicit_llm_contracts.config.values import DISTINCT, SOME, Text
from implicit_llm_workflow.experiment_files.yaml_files import check_keys, matches
from implicit_llm_workflow.node import Node

STAGE = "excerpt"


_Shown = Annotated[tuple[Text, ...], DISTINCT]


@dataclass(frozen=True)
class Origin:
    """The source of an excerpt's numbers: these evaluations of these models, both as patterns of names.

    Without evaluations it is the training of the runs itself.
    """

    evaluations: tuple[Text, ...]
    runs: Annotated[tuple[Text, ...], SOME] = ("*",)

    def has(self, run: str, evaluation: str | None) -> bool:
        """Whether it takes this evaluation of this model, or (None) its training."""
        is_mine = matches(evaluation, self.evaluations) if evaluation is not None else not self.evaluations
        return is_mine and matches(run, self.runs)


@dataclass(frozen=True)
class Excerpt:
    """`title`: what it is in the paper; `figures` and `tables`: what it shows of the report, by their names there.

    `from`: where its numbers come from. The models behind them and their training come along.
    """

    name: str
    title: Text
    from_: Annotated[tuple[Origin, ...], SOME]
    figures: _Shown = ()
    tables: _Shown = ()

    def node(self, report: Node, nodes: Mapping[str, Node]) -> Node:
        """Its job: that of the report with fewer inputs."""
        jobs = report.config["jobs"]
        wanted = [
            key
            for role, key in report.upstream.items()
            if any(origin.has(jobs[role]["run"], jobs[role].get("evaluation")) for origin in self.from_)
        ]
        behind = {found for key in wanted for found in _with_models(key, nodes)}
        upstream = {role: key for role, key in report.upstream.items() if key in behind}
        shown = {"title": self.title, "figures": list(self.figures), "tables": list(self.tables)}
        mine = {role: job for role, job in jobs.items() if role in upstream}
        return Node(STAGE, self.name, {**report.config, **shown, "jobs": mine}, upstream)


def check_shown(excerpts: Iterable[Excerpt], figures: Sequence[str], tables: Sequence[str], source: str) -> None:
    """Refuse what the report of the experiment does not have. Raises: ConfigError that names the nearest."""
    for excerpt in excerpts:
        at = f"{source}: excerpts.{excerpt.name}"
        check_keys(excerpt.figures, figures, f"{at}.figures")
        check_keys(excerpt.tables, tables, f"{at}.tables")


def _with_models(key: str, nodes: Mapping[str, Node]) -> Iterator[str]:
    """A job, and the models that it evaluates or goes on from with all phases of their training."""
    yield key
    for role in ("model", "start"):
        if role in nodes[key].upstream:
            yield from _with_models(nodes[key].upstream[role], nodes)
