"""Simulated bAbI files: eleven families of stories of any length, with the task numbers and the format of bAbI.

Written from the description of the tasks in Weston et al. 2015 (arXiv:1502.05698).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from implicit_llm_contracts.config.values import DISTINCT, Count, Number
from implicit_llm_contracts.runs.fill import Only
from implicit_llm_data.babi.simulator.carrying import Counting, Lists, RoomBefore, RoomOfThing
from implicit_llm_data.babi.simulator.people import Conjunction, Coreference, Walks, YesOrNo
from implicit_llm_data.babi.simulator.relations import Deduction, Sizes, Village
from implicit_llm_data.babi.simulator.telling import Dice, World, tell_story
from implicit_llm_data.babi.stories import SPLITS, Story

# By task number of bAbI. The second argument is the number of statements.
FAMILIES: Mapping[int, Callable[[Dice, int], World]] = {
    1: Walks,
    2: RoomOfThing,
    3: RoomBefore,
    6: YesOrNo,
    7: Counting,
    8: Lists,
    11: Coreference,
    12: Conjunction,
    15: Deduction,
    18: Sizes,
    19: Village,
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
    length = config.story_length
    all_dice = (Dice(config.seed, family, SPLITS.index(split), number) for number in range(config.stories[split]))
    return [tell_story(FAMILIES[family](dice, length), dice, length) for dice in all_dice]
