"""Define the table of training tasks, which recipes, training, rules and model cards use.

A task is a kind of data. A new built-in task needs an entry here, a class in the driver's
`experiment_files/data_sets.py`, and a module in `implicit_llm_data/stages` for each kind of job that makes its data.
A plugin registers its own task.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from implicit_llm_contracts.config.registry import Registry

WORD_PROBLEM, CATBABI, LANGUAGE_MODEL = "word_problem", "catbabi", "language_model"
LAST_TOKENS = 10  # the published accuracies on word problems are those of the last ten tokens


@dataclass(frozen=True)
class TaskKind:
    """The properties of a training task.

    `labels`: the alignment of the labels in its data, which training must use; None allows both. `accuracy`: the name
    of its accuracy and the number of positions at the end of a sequence that count (None: all). `learns`, `limits`:
    sentences of the model card, in which {group} is the group of a word problem. `protocol`: the evaluation settings
    that are saved with a trained model; an evaluation mode uses them unless it sets its own.
    """

    labels: Literal["aligned", "next_token"] | None
    accuracy: tuple[str, int | None] | None
    learns: str
    limits: str
    protocol: Mapping[str, Any] = field(default_factory=dict)


_BUILTIN = {
    WORD_PROBLEM: TaskKind(
        labels=None,  # both, because the released script shifts its aligned labels by one token
        accuracy=("accuracy_last10", LAST_TOKENS),
        learns="a word problem: each token is an element of {group}, and the answer at each position is the product of "
        "all elements so far",
        limits="It knows one task and no language: tokens are numbers of group elements.",
        protocol={"eval_block_len": 8, "eval_max_iter": 128},
    ),
    CATBABI: TaskKind(
        labels="aligned",
        accuracy=("accuracy", None),
        learns="CatbAbI, bAbI stories one after another, with questions",
        limits="It knows the small world and vocabulary of the bAbI stories, and no other language.",
        protocol={"eval_block_len": 8, "eval_max_iter": 200},
    ),
    LANGUAGE_MODEL: TaskKind(
        labels="next_token",
        accuracy=None,
        learns="text, to predict the next token",
        limits="A base model: it continues text, was tuned neither to follow instructions nor for safety, and repeats "
        "what is wrong or harmful in its training text. It was not tested for bias.",
        protocol={"eval_block_len": 256},
    ),
}
TASKS: Registry[TaskKind] = Registry("task", _BUILTIN)
