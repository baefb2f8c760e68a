"""Mistakes of the person at the keyboard: one clear line, no traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(Exception):
    """What the user gave cannot be used; the message is a single line that says what to do."""


def choose(what: str, name: str, names: Iterable[str]) -> str:
    """``name``, if it is one of ``names``; InputError with a suggestion otherwise."""
    known = list(names)
    if name in known:
        return name
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise InputError(f"unknown {what} {name!r}: it may be {', '.join(known)}{hint}")
