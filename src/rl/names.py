"""Names that become parts of paths: of runs and of environments. None of them leads out of the run directory."""

import unicodedata

MAX_RUN_NAME, MAX_LABEL = 200, 100
"""Bytes. A file name has 255, and ours put something before and behind."""


def name_fault(name: str, longest: int) -> str | None:
    """What is wrong with a name as one part of a path, in words; None if nothing is."""
    if not name or name in (".", ".."):
        return "is no name for a file"
    if "/" in name or name.startswith("."):
        return "no slash, no leading dot"
    if "\\" in name or name.startswith("-") or name != name.strip():
        return "no backslash, no dash in front, no space at its ends"
    if not name.isprintable() or unicodedata.normalize("NFKC", name) != name:
        return "only letters that can be seen and told apart: no control characters, no look-alikes"
    if (size := len(name.encode(errors="replace"))) > longest:
        return f"{size} bytes long, {longest} are allowed"
    return None


def text_fault(text: str) -> str | None:
    """What makes a text unfit for any file of ours."""
    if "\0" in text:
        return "has a NUL character in it; remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid UTF-8; spell it in UTF-8"
    return None
