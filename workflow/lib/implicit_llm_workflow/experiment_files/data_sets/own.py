"""Data sets of a plugin's task: a training set and test sets by name, each with settings of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.config.values import SOME, Name, Seed, VocabSize
from implicit_llm_contracts.plugins import OwnTask, settings_class
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_workflow.experiment_files.values import as_config
from implicit_llm_workflow.node import Node


@dataclass(frozen=True)
class OwnData:
    """`train`, and `test` by the name of each test set: settings of the task, by default those that it declares."""

    name: str
    kind: str
    vocab_size: VocabSize
    train: dict[str, Any]
    test: Annotated[dict[Name, dict[str, Any]], SOME]
    seed: Seed = 0

    def nodes(self) -> Iterator[Node]:
        yield self.train_node()
        yield from self.test_nodes()

    def train_node(self) -> Node:
        return self._node("train", self.train, "train")

    def test_nodes(self) -> Iterator[Node]:
        for name, settings in self.test.items():
            yield self._node("test", settings, f"test-{name}")

    def _node(self, split: str, given: Mapping[str, Any], name: str) -> Node:
        task = TASKS[self.kind]
        assert isinstance(task, OwnTask)
        settings: Any = fill(settings_class(self.kind, task.settings, []), given, f"data.{self.name}.{name}")
        config = {"kind": self.kind, "split": split, "vocab_size": self.vocab_size, "seed": self.seed}
        return Node("data", f"{self.name}-{name}", config | as_config(settings))
