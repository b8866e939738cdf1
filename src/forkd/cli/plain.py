"""Text of others, made harmless for a terminal: a guest must not be able to move our cursor or rename our window."""

from __future__ import annotations


def render_plain(text: str) -> str:
    """Control characters and lone surrogates as escapes; what can be printed, as it is."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\t" else ascii(each)[1:-1] for each in text)
