"""Text that may hold anything, such as a table's name, made fit for a terminal, a log and a page: nothing in it acts on what shows it."""

import re

# What a terminal acts on, what ends a line, what turns the direction of writing round, and halves of characters that cannot be encoded.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` in one line, everything that would act on a terminal written out, an escape as a backslash and `x1b`."""
    return _ACTS.sub(lambda found: _written_out(ord(found[0])), text)


def distinct(text: str) -> str:
    """As `printable`, and no two texts become one: where there is a backslash, it is doubled."""
    return printable(text.replace("\\", "\\\\"))


def code_span(text: str) -> str:
    """`text` as it is, in Markdown: nothing in it becomes a link, a picture or a tag."""
    shown = printable(text)
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    # One space on each side is taken off again, so that a backtick may come first or last.
    pad = " " if shown.startswith("`") or shown.endswith("`") or (shown.strip() and shown[0] == shown[-1] == " ") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _written_out(number: int) -> str:
    return {9: "\\t", 10: "\\n", 13: "\\r"}.get(number, f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")
