"""The data sets of an experiment file: a module for each kind, with its fields, their defaults and its jobs."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from implicit_llm_contracts.config.tasks import CATBABI, LANGUAGE_MODEL, TASKS, WORD_PROBLEM
from implicit_llm_workflow.experiment_files.data_sets.catbabi import Catbabi
from implicit_llm_workflow.experiment_files.data_sets.language_model import LanguageModel
from implicit_llm_workflow.experiment_files.data_sets.own import OwnData
from implicit_llm_workflow.experiment_files.data_sets.word_problem import WordProblem
from implicit_llm_workflow.experiment_files.values import fill_entry, selected
from implicit_llm_workflow.node import Node


class DataSet(Protocol):
    """A data set of any kind."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def nodes(self) -> Iterator[Node]:
        """All its jobs, every one after those it reads from."""

    def train_node(self) -> Node:
        """The job of the training set."""

    def test_nodes(self) -> Iterator[Node]:
        """The jobs of the held-out sets: what its models are evaluated on."""


KINDS: dict[str, type[DataSet]] = {
    WORD_PROBLEM: WordProblem,
    CATBABI: Catbabi,
    LANGUAGE_MODEL: LanguageModel,
}


def build_data_set(name: str, item: Mapping[str, Any], source: str) -> DataSet:
    """A data set from its values. Raises: ConfigError that starts with `source`, the file."""
    at = f"{source}: data.{name}"
    selected(TASKS, "kind", item, at)
    return fill_entry(KINDS.get(item["kind"], OwnData), name, item, at)
