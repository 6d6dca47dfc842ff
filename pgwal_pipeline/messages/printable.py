"""Escape text from outside, such as a table's name, so that it is safe to show in a terminal, a log and a web page."""

import re

# Control characters, line ends, characters that change the writing direction, and lone surrogates, which cannot be encoded.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_MARKS = re.compile(r"[\\`*_{}\[\]<>#|~&]")  # what Markdown gives a meaning anywhere in a line
_STARTS_BLOCK = re.compile(r"^(\d*)([-+=.)])")  # … and at its start: a list, a line below a heading


def printable(text: str) -> str:
    """Return `text` in one line with control characters escaped: the escape character becomes a backslash and `x1b`."""
    return _ACTS.sub(lambda found: _written_out(ord(found[0])), text)


def distinct(text: str) -> str:
    """Return `text` as `printable` does, but with backslashes doubled, so that different texts stay different."""
    return printable(text.replace("\\", "\\\\"))


def code_span(text: str) -> str:
    """Return `text` as a Markdown code span: nothing in it becomes a link, a picture or a tag."""
    shown = printable(text)
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    # Markdown removes one space on each side; with it the text may begin or end with a backtick.
    pad = " " if shown.startswith("`") or shown.endswith("`") or (shown.strip() and shown[0] == shown[-1] == " ") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def plain_markdown(text: str) -> str:
    """Return Markdown that shows `text` as it is, line by line: nothing in it becomes a link, a picture, a tag or a heading."""
    lines = (_STARTS_BLOCK.sub(r"\1\\\2", _MARKS.sub(r"\\\g<0>", printable(line.strip()))) for line in text.splitlines())
    return "  \n".join(lines)


def _written_out(number: int) -> str:
    return {9: "\\t", 10: "\\n", 13: "\\r"}.get(number, f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")
