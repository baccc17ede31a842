import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from implicit_llm_contracts.config.text import SIMULATED_FAMILIES, SimulatedText, Stories
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_data.babi.simulator.households import THINGS
from implicit_llm_data.babi.simulator.relations import CONTAINERS
from implicit_llm_data.babi.simulator.simulate import FAMILIES, all_words, simulate
from implicit_llm_data.babi.stories import SPLITS, Line, Story, format_stories, parse_stories, words_of
from tests.refusals import refused
from tests.unit.data.babi_answers import Contradiction, answer

LENGTHS = (1, 2, 3, 5, 10, 25, 60)
NUM_FACTS = {1: 1, 6: 1, 12: 1, 2: 2, 11: 2, 15: 2, 18: 2, 19: 2, 3: 3}  # 18: at least
ROOMS = {"attic", "cellar", "library", "workshop", "balcony", "pantry"}
PAIRS = {f"{first},{second}" for first in THINGS for second in THINGS if first != second}
TURNS = {
    f"{first},{second}"
    for first in ("north", "east", "south", "west")
    for second in ("north", "east", "south", "west")
    if {first, second} not in ({"north", "south"}, {"east", "west"})
}
ANSWERS = {
    **dict.fromkeys((1, 2, 3, 11, 12), ROOMS),
    6: {"yes", "no"},
    7: {"none", "one", "two", "three"},
    8: {"nothing", *THINGS, *PAIRS},
    15: {"baker", "miner", "tailor", "sailor", "painter", "farmer", "piper", "weaver"},
    18: {"yes", "no"},
    19: TURNS,
}


@cache
def stories(family: int, length: int, count: int = 40, seed: int = 0, split: str = "train") -> list[Story]:
    """Stories that went through a file, so that what is checked is what a reader sees."""
    config = SimulatedText("simulated", SIMULATED_FAMILIES, Stories(count, count, count), seed, length)
    return parse_stories(format_stories(simulate(config, family, split)).encode())


def asked(family: int, length: int, count: int = 40) -> Iterator[tuple[dict[int, str], Line]]:
    """Each question, with the statements before it by their number."""
    for story in stories(family, length, count):
        for index, question in enumerate(story):
            if question.answer is not None:
                yield {line.number: line.text for line in story[:index] if line.answer is None}, question


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_follows_from_the_text_and_from_the_supporting_lines_alone(family: int, length: int) -> None:
    for told, question in asked(family, length):
        assert answer([*told.values()], question.text) == question.answer, (told, question)
        proof = [told[number] for number in sorted(question.supports)]
        assert answer(proof, question.text, is_strict=False) == question.answer, (proof, question)
        assert len(set(question.supports)) == len(question.supports) >= NUM_FACTS.get(family, 1)
        assert family == 18 or len(proof) == NUM_FACTS.get(family, len(proof))


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {7, 8}))  # a count or a list may stay right by chance
def test_without_any_one_of_its_supporting_lines_an_answer_is_not_proved(family: int) -> None:
    for told, question in asked(family, 10):
        for left_out in question.supports:
            proof = [told[number] for number in sorted(question.supports) if number != left_out]
            try:
                found = answer(proof, question.text, is_strict=False)
            except Contradiction:
                continue
            assert found != question.answer, (proof, question)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_story_has_the_wanted_length_questions_in_between_and_one_at_the_end(family: int, length: int) -> None:
    for story in stories(family, length):
        kinds = [line.answer is not None for line in story]
        num_statements = kinds.count(False)
        assert num_statements >= length
        if length >= {2: 10, 3: 25, 7: 10, 8: 10}.get(family, 3):
            assert num_statements <= length + (family == 11)
        assert kinds[-1]
        assert not any(first and second for first, second in itertools.pairwise(kinds))
        if length >= 25:
            assert kinds.count(True) >= length // 5


@pytest.mark.parametrize("length", [10, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_of_a_family_occurs_and_none_is_a_safe_guess(family: int, length: int) -> None:
    count = 400 if family in (8, 19) else 150
    found = Counter(line.answer for story in stories(family, length, count) for line in story if line.answer)
    assert set(found) == ANSWERS[family]
    share = max(found.values()) / found.total()
    if ANSWERS[family] == {"yes", "no"}:
        assert share < 0.5 + 2.5 / found.total() ** 0.5  # five standard deviations of a fair coin
    else:
        assert share < (0.6 if family == 7 else 0.45 if family == 8 else 2.0 / len(ANSWERS[family]))


@pytest.mark.parametrize("family", [6, 18])
def test_yes_and_no_do_not_depend_on_the_form_of_the_question(family: int) -> None:
    by_form: dict[str, Counter[str]] = {}
    for _, question in asked(family, 10, 400):
        by_form.setdefault(question.text.split()[0], Counter())[str(question.answer)] += 1
    for found in by_form.values():
        assert abs(found["yes"] / found.total() - 0.5) < 2.5 / found.total() ** 0.5


def test_a_question_on_sizes_is_never_answered_by_one_statement() -> None:
    for told, question in asked(18, 16):
        pairs = [set(CONTAINERS) & set(text[:-1].split()) for text in (question.text, *told.values())]
        assert pairs[0] not in pairs[1:]


def test_the_vocabulary_is_all_that_the_stories_use_and_nothing_more() -> None:
    used = {
        word
        for family in FAMILIES
        for length, count in ((10, 400 if family in (8, 19) else 150), (40, 400 if family in (8, 19) else 150))
        for story in stories(family, length, count)
        for word in words_of(story)
    }
    assert used == all_words()
    assert len(used) + 2 <= 192  # with <pad> and <eos> it fits the model of the real CatbAbI


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_and_seeds_have_other_stories(family: int) -> None:
    train = {format_stories([story]) for story in stories(family, 10)}
    for other in (stories(family, 10, split="valid"), stories(family, 10, split="test"), stories(family, 10, seed=1)):
        assert not train & {format_stories([story]) for story in other}


def test_more_stories_leave_the_first_ones_as_they_are() -> None:
    assert stories(3, 10, 12)[:5] == stories(3, 10, 5)


def test_stories_of_a_seed_never_change() -> None:
    text = "".join(
        format_stories(stories(family, length, 20, seed=7, split="test")) for family in FAMILIES for length in (5, 30)
    )
    # A new value here means that every simulated data set of a seed is another one: do not change it lightly.
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "6af297a718b482e2124f39a7cc8512230ccff7099544cbfc76126901df3b5e17"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("families", [], "; give "),
        ("families", [1, 4], "; give "),
        ("families", [1, 1], "; give "),
        ("stories", {"train": 3, "valid": 3}, "'test' is missing"),
        ("stories", {"train": 3, "valid": 3, "test": 0}, "; give "),
        ("story_length", 0, "; give "),
        ("seed", -1, "; give "),
        ("story_lenght", 5, "did you mean 'story_length'"),
    ],
)
def test_a_wrong_configuration_gives_one_line_that_names_the_key_and_the_fix(
    key: str, value: Any, message: str
) -> None:
    given = {"source": "simulated", "seed": 0, "families": [1], "stories": dict.fromkeys(SPLITS, 3), "story_length": 5}
    with refused(rf"^babi-text.*{key}.*{message}"):
        fill(SimulatedText, given | {key: value}, where="babi-text")


@pytest.mark.parametrize(
    ("lines", "question"),
    [
        (["Nora walked into the attic.", "Nora walked into the attic."], "In which room is Nora?"),
        (["Nora fetched the scarf."], "Which things does Nora hold?"),
        (["Nora walked into the attic."], "In which room is Iris?"),
        (["The jar is roomier than the tub.", "The tub is roomier than the jar."], "Is the jar roomier than the tub?"),
        (
            ["The inn lies north of the mill.", "The mill lies east of the inn."],
            "Which way leads from the inn to the mill?",
        ),
        (["Every miner greets the baker."], "Whom does Pip greet?"),
    ],
)
def test_the_checker_refuses_a_story_that_does_not_answer(lines: list[str], question: str) -> None:
    with pytest.raises(Contradiction):
        answer(lines, question)
