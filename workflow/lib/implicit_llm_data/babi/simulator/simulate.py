"""Simulated bAbI files: eleven families of stories of any length, with the task numbers and the format of bAbI.

Written from the description of the tasks in Weston et al. 2015 (arXiv:1502.05698).
"""

import re
from collections.abc import Mapping

from implicit_llm_contracts.config.text import SimulatedText
from implicit_llm_data.babi.simulator import households, relations
from implicit_llm_data.babi.simulator.telling import YES_NO, Dice, World
from implicit_llm_data.babi.stories import SPLITS, Story

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


def simulate(config: SimulatedText, family: int, split: str) -> list[Story]:
    """The stories of one file."""
    numbers = range(getattr(config.stories, split))
    all_dice = (Dice(config.seed, family, SPLITS.index(split), number) for number in numbers)
    return [FAMILIES[family](dice, config.story_length).story() for dice in all_dice]


def all_words() -> set[str]:
    """Every word that a story can hold, in lower case, with the marks "." and "?".

    They are the same for every seed, family and story length.
    """
    texts = [*YES_NO, *households.TEXTS, *relations.TEXTS]
    return {".", "?"}.union(*(re.sub(r"{\w+}|[.?]$", " ", text).lower().split() for text in texts))
