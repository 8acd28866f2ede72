"""A package that lacks something."""

raise KeyError("SOME_KEY")
