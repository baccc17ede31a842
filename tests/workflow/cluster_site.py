"""The cluster profile with the block that a site edits replaced, as a new site would."""

import re
from pathlib import Path

_BLOCK = re.compile(r"(?<=# ---- A new site edits from here)(.*?)(?=# ---- to here)", re.DOTALL)


def edit_site(profile: Path, block: str) -> None:
    """Put `block`, the value of __variables__, into the profile; two spaces before each line of it."""
    text = profile.read_text()
    assert len(_BLOCK.findall(text)) == 1
    profile.write_text(_BLOCK.sub(lambda match: f"\n__variables__:\n{block.rstrip()}\n", text))
