"""Data sets of the Hugging Face Hub as tables."""

import json
from collections.abc import Sequence
from typing import Any


def load_table(name: str, split: str, subset: str | None = None) -> Sequence[dict[str, Any]]:
    """Returns the rows of a split of a data set, with the values that its files have.

    Cells of CSV files are text: "NA" is no missing value, and 02108 no number. Lines of JSON are read as they are: a table would give all
    rows the keys and the types of each other. Other files, such as Parquet, have types of their own.
    """
    import datasets

    data = datasets.load_dataset(name, subset, split=split)
    kind = getattr(data.info, "builder_name", "")
    if kind == "csv":
        texts = datasets.Features(dict.fromkeys(data.column_names, datasets.Value("string")))
        return datasets.load_dataset(name, subset, split=split, features=texts, keep_default_na=False)
    if kind == "json":
        files = datasets.load_dataset_builder(name, subset).config.data_files
        lines = datasets.load_dataset("text", data_files=files, split=split)["text"]
        try:
            rows = [json.loads(line) for line in lines if line.strip()]
        except ValueError:  # one array, over several lines
            return data
        if all(isinstance(row, dict) for row in rows):
            return rows
    return data
