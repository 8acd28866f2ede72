"""Data sets of the Hugging Face Hub as tables."""

from typing import Any


def load_table(name: str, split: str, subset: str | None = None) -> Any:
    """Returns a split of a data set. Cells of CSV files are text as written: "NA" is no missing value, and 02108 no number."""
    import datasets

    data = datasets.load_dataset(name, subset, split=split)
    if getattr(data.info, "builder_name", "") != "csv":
        return data
    texts = datasets.Features(dict.fromkeys(data.column_names, datasets.Value("string")))
    return datasets.load_dataset(name, subset, split=split, features=texts, keep_default_na=False)
