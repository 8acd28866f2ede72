"""Columns as a table of pandas or polars."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl.system.errors import RunError

KINDS = ("pandas", "polars")


def frame(columns: Mapping[str, np.ndarray], kind: str | None = None) -> Any:
    """The columns as a table of `pandas` or `polars`; without a `kind`, of the first that is installed, else as a dict of numpy arrays.

    kind: also `columns`, for that dict. Raises RunError for a library that is not installed.
    """
    installed = [name for name in KINDS if importlib.util.find_spec(name)]
    if kind not in (None, "columns", *installed):
        raise RunError(f"{kind}: is not installed; there are: {', '.join([*installed, 'columns'])}")
    kind = kind or next(iter(installed), "columns")
    if kind == "pandas":
        import pandas

        return pandas.DataFrame(dict(columns), copy=False)
    if kind == "polars":
        import polars

        return polars.DataFrame(dict(columns))
    return dict(columns)
