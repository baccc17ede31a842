"""Reading CatbAbI as one long row, with the state carried from window to window and from story to story."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from implicit_llm.evaluation.answers import Evaluation, EvaluationJob
from implicit_llm.evaluation.batch_size import BatchSize
from implicit_llm.evaluation.catbabi import evaluate_catbabi
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.causal_lm import ImplicitMamba2ForCausalLM
from implicit_llm_data.babi.story_batches import StoryBatcher, StoryStream


def carries_state(model: nn.Module) -> bool:
    """Whether the model has a state of fixed size, however much it has read."""
    return isinstance(model, ImplicitMamba2ForCausalLM)


class StoriesInOrder:
    """The stories of the data set in `directory`, in the order of the file, `length` words at a time."""

    def __init__(self, directory: Path, length: int, vocab_size: int) -> None:
        self.length = length
        self.vocab_size = vocab_size
        self._batcher = StoryBatcher(StoryStream.open(directory), batch_size=1, length=length, order="file")

    def __len__(self) -> int:
        return self._batcher.num_batches(0)

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The first window that is asked for, (1, length); the last one is as short as it comes out."""
        batch = self._batcher.batch(0, int(indices[0]))
        end = int(batch.num_tokens_B[0])
        return {name: getattr(batch, name)[:, :end] for name in ("input_ids", "labels", "task")}


class StateCarrier(nn.Module):
    """A model whose every pass goes on where the one before it ended."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.solver = model.solver
        self._cache = ConvergedStateCache()

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids=input_ids, past_key_values=self._cache)


def evaluate_carried(job: EvaluationJob, question_id: int) -> Evaluation:
    """As `evaluate_catbabi`, over windows in their order, one at a time. Raises: EvaluationOutOfMemory."""
    carried = replace(job, model=StateCarrier(job.model), batch_size=BatchSize(1, is_fixed=True))
    return evaluate_catbabi(carried, question_id)
