"""Files and data sets as tables, with the values that were written."""

import csv
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.system.errors import RunError
from rl.system.jsonl import json_object, without_duplicates


def load_table(name: str, split: str, subset: str | None = None) -> Sequence[dict[str, Any]]:
    """Returns the rows of a file that is a table, or of a split of a data set, with the values that
    its files have.

    Cells of CSV files are text: "NA" is no missing value, and 02108 no number. Lines of JSON are
    read as they are: a table would give all rows the keys and the types of each other. Other files,
    such as Parquet, have types of their own.
    """
    import datasets

    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix == ".csv":
            return csv_rows(path)
        return datasets.load_dataset(
            path.suffix[1:], data_files=glob.escape(str(path)), split="train"
        )
    data = datasets.load_dataset(name, subset, split=split)
    kind = getattr(data.info, "builder_name", "")
    if kind == "csv":
        texts = datasets.Features(dict.fromkeys(data.column_names, datasets.Value("string")))
        return datasets.load_dataset(
            name, subset, split=split, features=texts, keep_default_na=False
        )
    if kind == "json":
        files = datasets.load_dataset_builder(name, subset).config.data_files
        lines = datasets.load_dataset("text", data_files=files, split=split)["text"]
        is_array = next((line for line in lines if line.strip()), "").lstrip().startswith("[")
        if not is_array:  # which would be over several lines
            numbered = [
                (line, f"{name}:{split} line {number}")
                for number, line in enumerate(lines, start=1)
                if line.strip()
            ]
            return [json_object(line, where, '{"prompt": ...}') for line, where in numbered]
    return data


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file, whose cells are text. Raises RunError for a file that is
    none, two columns of one name, or a row that has another number of cells than its first."""
    csv.field_size_limit(1_000_000_000)  # answers may be long
    rows = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            without_duplicates([(name, name) for name in reader.fieldnames or () if name])
            for row in reader:
                if None in row or None in row.values():
                    raise RunError(
                        f"{path}:{reader.line_num}: not {len(reader.fieldnames or ())} "
                        "cells, as in the first line; correct it"
                    )
                rows.append(row)
        except (ValueError, csv.Error) as error:
            raise RunError(
                f"{path}: {error}; give CSV in UTF-8, each column with a name of its own"
            ) from None
    return rows
