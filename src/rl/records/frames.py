"""Converts columns to a table of pandas or polars."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl.system.errors import RunError

KINDS = ("pandas", "polars")


def frame(columns: Mapping[str, np.ndarray], kind: str | None = None) -> Any:
    """The columns as a table of `pandas` or `polars`, or as a dict of numpy arrays (`columns`).

    kind: one of these; None takes the first that is available. Raises RunError if the library is not installed.
    """
    installed = [name for name in KINDS if importlib.util.find_spec(name)]
    if kind not in (None, "columns", *installed):
        raise RunError(f"{kind}: is not installed; available: {', '.join([*installed, 'columns'])}")
    kind = kind or next(iter(installed), "columns")
    if kind == "pandas":
        import pandas

        return pandas.DataFrame(dict(columns), copy=False)
    if kind == "polars":
        import polars  # ty: ignore[import-not-found] - optional, installed by users who want its frames

        return polars.DataFrame(dict(columns))
    return dict(columns)
