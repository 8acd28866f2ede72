"""Flags of a command line, several in a text."""


def flags(*args: object) -> list[str]:
    """The words of these arguments; one that begins with a flag may hold several."""
    return [
        word for arg in map(str, args) for word in (arg.split() if arg.startswith("--") else [arg])
    ]
