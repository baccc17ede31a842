"""The pages that are written from the program: the command line and the keys of the YAML files.

python docs/generated_pages.py      # after a changed option or key
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import typer

from implicit_llm_contracts.config import text
from implicit_llm_contracts.config.checkpoint import CheckpointConfig
from implicit_llm_contracts.config.evaluation import (
    CatbabiEvaluation,
    DualityConfig,
    EvaluateConfig,
    JacobianConfig,
    LmEvalConfig,
    ModeConfig,
    PerplexityConfig,
    SweepConfig,
)
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.config.training import OptimizerConfig, ScheduleConfig, TaskConfig
from implicit_llm_contracts.runs.metrics import METRICS
from implicit_llm_report.config import Front, MinimumLayersConfig
from implicit_llm_workflow.console import app
from implicit_llm_workflow.experiment_files import curricula, data_sets, evaluations, experiment, models, runs

EVALUATIONS = [
    ModeConfig,
    SweepConfig,
    EvaluateConfig,
    PerplexityConfig,
    CatbabiEvaluation,
    LmEvalConfig,
    DualityConfig,
    JacobianConfig,
]
SECTIONS: dict[str, list[type]] = {
    "Experiment": [experiment.ExperimentFile, runs.RunEntry, runs.Axis, runs.Override, Front, MinimumLayersConfig],
    "Word problems": [data_sets.WordProblem, data_sets.TrainSplit, data_sets.TestSplit, data_sets.ValidationSplit],
    "CatbAbI": [data_sets.Catbabi, text.SimulatedText, text.ArchiveText, text.Stories],
    "Text": [
        data_sets.LanguageModel,
        text.LibraryCorpus,
        text.CorpusFiles,
        text.HubCorpus,
        text.TokenizerFile,
        text.HubTokenizer,
        text.TrainedTokenizer,
        data_sets.TrainText,
        data_sets.TestLengths,
        data_sets.ValidationText,
    ],
    "Models": [models.ConfiguredModel, models.PretrainedModel],
    "Tasks": [TaskConfig, OptimizerConfig, ScheduleConfig],
    "Curricula": [curricula.CurriculumFile, curricula.PhaseEntry, SolverConfig],
    "Evaluations": EVALUATIONS,
    "Peers and excerpts": [
        evaluations.Peer,
        CheckpointConfig,
        experiment.Excerpt,
        experiment.Origin,
    ],
}
# Entries whose field `name` is the key above them.
NAMED = (
    runs.RunEntry,
    data_sets.WordProblem,
    data_sets.Catbabi,
    data_sets.LanguageModel,
    evaluations.Peer,
    experiment.Excerpt,
)


MARK = "<!-- What follows is written by `python docs/generated_pages.py`. -->\n"


def generated_pages() -> dict[Path, str]:
    """Return the pages by path: each has its own head, followed by text from the program."""
    bodies = {
        "reference/cli.md": cli(typer.main.get_command(app)),
        "reference/experiment.md": keys(),
        "metrics.md": training_metrics(),
    }
    found = {}
    for name, lines in bodies.items():
        path = Path(__file__).parent / name
        head, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
        found[path] = head + mark + "\n" + "\n".join(lines).rstrip() + "\n"
    return found


def cli(command: Any, name: str = "implicit-llm", depth: int = 2) -> Iterator[str]:
    """A section for the command and one for each command below it."""
    yield from ("#" * min(depth, 4) + f" `{name}`", "", inspect.cleandoc(command.help or ""), "")
    shown = [item for item in command.params if not getattr(item, "hidden", False)]
    if shown and depth > 2:
        yield from ("| option | meaning |", "|---|---|")
        for item in shown:
            names = ", ".join(f"`{word}`" for word in [*item.opts, *item.secondary_opts])
            default = f" Default `{item.default}`." if isinstance(item.default, str) and item.default else ""
            yield f"| {names} | {cell(getattr(item, 'help', None) or '')}{default} |"
        yield ""
    for below in getattr(command, "commands", {}).values():
        if not below.hidden:
            yield from cli(below, f"{name} {below.name}", depth + 1)


def keys() -> Iterator[str]:
    """A section for each part of an experiment, with a table for each class that its keys fill."""
    for title, classes in SECTIONS.items():
        yield from (f"## {title}", "")
        for cls in classes:
            yield from (f"### {title}: {cls.__name__}", "", inspect.cleandoc(cls.__doc__ or "").replace("<", "\\<"), "")
            yield from ("| key | type | default |", "|---|---|---|")
            hints = get_type_hints(cls)
            for item in fields(cls):
                if item.name != "name" or cls not in NAMED:
                    yield f"| `{item.name.rstrip('_')}` | `{type_of(hints[item.name])}` | {default_of(item)} |"
            yield ""


def training_metrics() -> Iterator[str]:
    yield from ("| key in MLflow | meaning |", "|---|---|")
    for metric in METRICS.values():
        yield f"| `{metric.mlflow_key}` | {metric.meaning} |"


def type_of(hint: Any) -> str:
    """A type without its checks and the modules of its parts."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(type_of, get_args(hint)))
    shown = str(hint) if get_args(hint) else hint.__name__
    return re.sub(r"\w+\.(?=\w)", "", shown).replace("|", "or").removesuffix("Type")


def default_of(item: Field[Any]) -> str:
    if item.default is not MISSING:
        return f"`{item.default!r}`".replace("|", "\\|")
    if item.default_factory is MISSING:
        return "required"
    value = item.default_factory()
    return "`{}`" if is_dataclass(value) else f"`{value!r}`"


def cell(text: str) -> str:
    """A text on one line of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    for path, content in generated_pages().items():
        path.write_text(content, encoding="utf-8")
