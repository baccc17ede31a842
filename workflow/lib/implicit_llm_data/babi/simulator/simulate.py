"""Simulated bAbI files: eleven families of stories of any length, with the task numbers and the format of bAbI.

Written from the description of the tasks in Weston et al. 2015 (arXiv:1502.05698).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from implicit_llm_contracts.config.values import DISTINCT, Count, Number
from implicit_llm_contracts.runs import Only
from implicit_llm_data.babi.simulator import households, relations
from implicit_llm_data.babi.simulator.telling import YES_NO, Dice, World
from implicit_llm_data.babi.stories import SPLITS, Story

# By task number of bAbI.
FAMILIES: Mapping[int, type[World]] = {
    1: households.Walks,
    2: households.RoomOfThing,
    3: households.RoomBefore,
    6: households.YesOrNo,
    7: households.Counting,
    8: households.Lists,
    11: households.Coreference,
    12: households.Conjunction,
    15: relations.Deduction,
    18: relations.Sizes,
    19: relations.Village,
}

Family = Annotated[int, Only(FAMILIES.__contains__, f"some of {', '.join(map(str, FAMILIES))}")]
Stories = Annotated[dict[str, Count], Only(lambda stories: set(stories) == set(SPLITS), "train, valid and test")]


@dataclass(frozen=True)
class SimulatorConfig:
    """families: task numbers; stories: how many for each split, in each family; story_length: statements of a story.

    A story of family 11 can be one statement longer, and very short ones longer by what their first question needs.
    Every story has a random stream of its own, so that the splits are independent and more stories leave the first
    ones as they are; very short stories can still be equal by chance.
    """

    seed: Number
    families: Annotated[tuple[Family, ...], DISTINCT]
    stories: Stories
    story_length: Count


def simulate(config: SimulatorConfig, family: int, split: str) -> list[Story]:
    """The stories of one file."""
    all_dice = (Dice(config.seed, family, SPLITS.index(split), number) for number in range(config.stories[split]))
    return [FAMILIES[family](dice, config.story_length).story() for dice in all_dice]


def all_words() -> set[str]:
    """Every word that a story can hold, in lower case, with the marks "." and "?".

    They are the same for every seed, family and story length.
    """
    texts = [*YES_NO, *households.TEXTS, *relations.TEXTS]
    return {".", "?"}.union(*(re.sub(r"{\w+}|[.?]$", " ", text).lower().split() for text in texts))
