"""Requests to the Hugging Face hub, and data sets as tables with the values that were written.

`python -m rl.models.hub NAME` prints how many bytes of a model's files a start downloads.
"""

import csv
import glob
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl.system.errors import RunError
from rl.system.jsonl import json_object, without_duplicates

TIMEOUT_S = 10.0


@contextmanager
def hub_or_cache(name: str) -> Iterator[str]:
    """Yields why the hub, the source of the data set `name`, cannot be reached; an empty text if it
    answers, or if `name` is a local path.

    Meanwhile `datasets` reads only from the cache if the hub cannot be reached: otherwise it would
    retry for half a minute.
    """
    import datasets
    from huggingface_hub import constants

    fault = "" if Path(name).expanduser().exists() else hub_fault()
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if fault:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield fault
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def hub_fault() -> str:
    """Why the hub cannot be reached; empty if it gives any answer within TIMEOUT_S."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        return f"{constants.ENDPOINT} does not answer ({error or type(error).__name__})"
    return ""


def main() -> None:
    """Prints the bytes; exit code 1 with one line if the hub does not have the model or does not
    answer."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import filter_repo_objects

    # not with the rest of this module, which homes of environments import
    from rl.models.folder import HUB_COPIES, HUB_FILES

    if fault := hub_fault():
        raise SystemExit(fault)
    try:
        files = model_info(sys.argv[1], files_metadata=True, timeout=TIMEOUT_S).siblings or []
    except (HfHubHTTPError, OSError) as error:
        raise SystemExit(str(error).splitlines()[0]) from None
    files = filter_repo_objects(
        files, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES, key=lambda file: file.rfilename
    )
    print(sum(file.size or 0 for file in files))


if __name__ == "__main__":
    main()


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
        files = glob.escape(str(path))
        return datasets.load_dataset(path.suffix[1:], data_files=files, split="train")
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
