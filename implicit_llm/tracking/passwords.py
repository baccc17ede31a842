"""Keeping the passwords of store addresses out of logs. The driver loads this one file."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"(?<=://)[^\s/@]+@")


def without_password(text: str) -> str:
    """The text with `***@` for the user and password of each address in it, such as `http://me:secret@host:5000`."""
    return _USER_INFO.sub("***@", text)
