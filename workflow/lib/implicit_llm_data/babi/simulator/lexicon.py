"""All words and sentences of the simulator. None is taken from bAbI, only the kinds of questions are.

The vocabulary comes from these lists alone, so that it is the same for every seed, family and story length.
"""

import itertools
import re

# Households: families 1, 2, 3, 6, 7, 8, 11, 12.
PRONOUNS = {"Nora": "she", "Pavel": "he", "Iris": "she", "Tomas": "he"}
PERSONS = tuple(PRONOUNS)
ROOMS = ("attic", "cellar", "library", "workshop", "balcony", "pantry")
THINGS = ("lantern", "compass", "kettle", "scarf")
MOVES = tuple(f"{{who}} {verb} into the {{room}}." for verb in ("walked", "hurried", "stepped", "strolled"))
TAKES = ("{who} fetched the {thing}.", "{who} lifted up the {thing}.")
PUTS = ("{who} parted with the {thing}.", "{who} set the {thing} aside.")
GIVES = ("{who} entrusted {to} with the {thing}.", "{who} lent the {thing} to {to}.")
MOVES_TOGETHER = tuple(f"{{who}} and {{other}} {verb} into the {{room}}." for verb in ("walked", "hurried", "strolled"))
MOVES_AGAIN = ("Soon {pronoun} walked into the {room}.", "Next {pronoun} hurried into the {room}.")
ASK_ROOM_OF_PERSON = "In which room is {who}?"
ASK_ROOM_OF_THING = "In which room is the {thing}?"
ASK_ROOM_BEFORE = "In which room was the {thing} until it came into the {room}?"
ASK_IS_IN = "Would one find {who} in the {room}?"
ASK_COUNT = "How many things does {who} hold?"
ASK_LIST = "Which things does {who} hold?"
COUNTS = ("none", "one", "two", "three")
NOTHING = "nothing"
YES_NO = ("no", "yes")  # by whether it is true
MOST_LISTED = 2

# Deduction: family 15.
MEMBERS = ("Pip", "Quill", "Rusk", "Sorrel", "Tansy", "Umber", "Vesper", "Wren")
KINDS = ("baker", "miner", "tailor", "sailor", "painter", "farmer", "piper", "weaver")
RULES = ("Every {kind} greets the {other}.",)
MEMBERSHIPS = ("{who} works as {kind}.",)
CHANGES = ("{who} now works as {kind}.",)
ASK_GREETED = "Whom does {who} greet?"

# Sizes: family 18; the first of a sentence's two is the larger one in LARGER, the smaller one in SMALLER.
CONTAINERS = ("crate", "flask", "basket", "barrel", "drawer", "pouch", "trunk", "jar", "wagon", "purse", "tub", "vase")
LARGER = ("The {first} is roomier than the {second}.",)
SMALLER = ("The {first} goes inside the {second}.",)
ASK_LARGER = "Is the {first} roomier than the {second}?"
ASK_SMALLER = "Can the {first} go inside the {second}?"

# Path finding: family 19; directions by their step on the map.
SITES = (
    *("mill", "inn", "chapel", "market", "harbour", "bakery", "school", "fountain"),
    *("stable", "tower", "bridge", "orchard"),
)
DIRECTIONS = {(0, 1): "north", (1, 0): "east", (0, -1): "south", (-1, 0): "west"}
NEIGHBOURS = ("The {first} lies {direction} of the {second}.",)
ASK_PATH = "Which way leads from the {first} to the {second}?"

_SENTENCES = (
    *(*MOVES, *TAKES, *PUTS, *GIVES, *MOVES_TOGETHER, *MOVES_AGAIN, *RULES, *MEMBERSHIPS, *CHANGES, *LARGER, *SMALLER),
    *(*NEIGHBOURS, ASK_ROOM_OF_PERSON, ASK_ROOM_OF_THING, ASK_ROOM_BEFORE, ASK_IS_IN, ASK_COUNT, ASK_LIST),
    *(ASK_GREETED, ASK_LARGER, ASK_SMALLER, ASK_PATH),
)


def listed(items: list[str] | tuple[str, ...]) -> str:
    """An answer of several words as one."""
    return ",".join(items)


def all_words() -> set[str]:
    """Every word that a story can hold, in lower case, with the marks "." and "?"."""
    in_sentences = {word for sentence in _SENTENCES for word in re.sub(r"{\w+}", " ", sentence[:-1]).lower().split()}
    names = {word.lower() for word in (*PERSONS, *MEMBERS)} | set(PRONOUNS.values())
    nouns = {*ROOMS, *THINGS, *KINDS, *CONTAINERS, *SITES, *DIRECTIONS.values(), *COUNTS, NOTHING, *YES_NO}
    lists = {listed(pair) for pair in itertools.permutations(THINGS, MOST_LISTED)}
    paths = {
        listed((DIRECTIONS[first], DIRECTIONS[second]))
        for first, second in itertools.product(DIRECTIONS, repeat=2)
        if (first[0] + second[0], first[1] + second[1]) != (0, 0)
    }
    return in_sentences | names | nouns | lists | paths | {".", "?"}
