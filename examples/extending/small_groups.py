"""Groups of word problems: the symmetries of a square from a rule, the quaternions from a file."""

from pathlib import Path

import numpy as np

from implicit_llm_data.groups import register_group

PLUGIN = {"groups": {"D4": 8, "Q8": 8}, "files": ["q8.csv"]}

# Element r + 4 s is s reflections after r quarter turns; turns before a reflection count backwards.
turns, flips = np.arange(8) % 4, np.arange(8) // 4
signs = 1 - 2 * flips
table = (turns[:, None] + signs[:, None] * turns) % 4 + 4 * (flips[:, None] ^ flips)

register_group("D4", table)
register_group("Q8", np.loadtxt(Path(__file__).with_name("q8.csv"), delimiter=",", dtype=int))
