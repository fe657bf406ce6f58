"""Data of a Hugging Face data set: by name from the hub, from a directory that ``save_to_disk`` wrote, or from a file
of records (JSON lines, CSV, TSV, Parquet), whose text needs no library of theirs.

What the rows hold decides what they become:

* a column of text (``training.data.textField``): tokenised, packed and cached as text.py does;
* a column ``input_ids`` (tokenised before) or ``pixel_values`` with ``labels``: taken row by row as they are.

Held out are rows or sequences by split.py's rule, so that any one split serves both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diloco_protocol.common.data.data_files import RecordFormat, record_format
from diloco_protocol.spec.training import DataSpec
from diloco_worker.data.corpus import Document
from diloco_worker.data.found import Found
from diloco_worker.data.split import LoadOptions, Part
from diloco_worker.data.tables import ROWS_AT_ONCE, column_names
from diloco_worker.data.text import NAME, TokenSequences, pack, tokenizer
from diloco_worker.data.text import load as load_text
from diloco_worker.errors import job_error, one_line


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows taken as they are: ``self[k]`` maps each of ``columns`` to its tensor.

    Floating-point columns come as float32, whole numbers as int64; without a column ``labels``, the labels are the
    ``input_ids``.
    """

    table: Any
    columns: tuple[str, ...]
    part: Part

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        row = self.table[self.part[int(k)]]
        item = {name: _tensor(row[name]) for name in self.columns}
        if "labels" not in item:
            item["labels"] = item["input_ids"]
        return item


def load(data: DataSpec, options: LoadOptions) -> TokenSequences | Rows:
    """The data set of ``training.data`` with source ``datasets``.

    Raises JobError naming the field if the library, the data set, the split or the column is not there."""
    if _is_text_file(data, options.directory):
        return load_text(data, options)
    table = _table(data, options.directory)
    names = list(table.column_names)
    if len(table) == 0:
        raise job_error(NAME, data.name, f"its split {data.split} has no rows")
    if data.text_field in names:
        return _text(data, table, options)
    for columns in (("input_ids", "labels"), ("input_ids",), ("pixel_values", "labels")):
        if set(columns) <= set(names):
            return Rows(table, columns, options.choose_part(len(table)))
    raise job_error(
        "spec.training.data.textField",
        data.text_field,
        f"{data.name} has no such column, nor input_ids, nor pixel_values with labels; "
        f"its columns are {', '.join(names)}",
    )


def _is_text_file(data: DataSpec, directory: Path) -> bool:
    """Whether the name is that of a file of records with text. A Parquet file may also hold rows to be taken as they
    are, which the library reads."""
    file = directory / Path(data.name or "").expanduser()
    format = record_format(file.name)
    if format is None or not os.path.isfile(file):
        return False
    if format is not RecordFormat.PARQUET:
        return True
    names = column_names(Document(str(file), 0, ""))
    return data.text_field in names or not {"input_ids", "pixel_values"} & set(names)


def _table(data: DataSpec, directory: Path) -> Any:
    try:
        import datasets
    except ImportError as e:
        raise job_error(
            "spec.training.data.source",
            data.source,
            "the package `datasets` is not installed: pip install 'decoupled-diloco[datasets]'",
        ) from e
    assert data.name is not None  # a rule of the job spec
    local = directory / Path(data.name).expanduser()
    try:
        if local.is_dir() and any((local / n).is_file() for n in ("state.json", "dataset_dict.json")):
            table = datasets.load_from_disk(str(local))
        elif local.is_file():  # _is_text_file let it pass: Parquet with rows
            table = datasets.load_dataset("parquet", data_files=str(local), split="train")
        else:
            where = str(local) if local.is_dir() else data.name
            table = datasets.load_dataset(where, data.subset, split=data.split, revision=data.revision)
    except ValueError as e:
        field = "spec.training.data.split" if "split" in str(e).lower() else NAME
        raise job_error(field, data.split if field != NAME else data.name, one_line(e)) from e
    except Exception as e:  # the library raises a class of its own for each way to fail
        raise job_error(
            NAME,
            data.name,
            f"could not be loaded ({one_line(e)}); name a data set of the hub, a file of records "
            "(.jsonl, .json, .csv, .tsv, .parquet), or a directory that save_to_disk wrote",
        ) from e
    if isinstance(table, datasets.DatasetDict):
        if data.split not in table:
            raise job_error(
                "spec.training.data.split",
                data.split,
                f"{data.name} has no such split; it has {', '.join(map(str, table))}",
            )
        table = table[data.split]
    return table


def _text(data: DataSpec, table: Any, options: LoadOptions) -> TokenSequences:
    words = tokenizer(data.tokenizer)
    column = table.select_columns([data.text_field])

    def produce(found: Found) -> Iterator[NDArray[np.generic]]:
        found.records = len(column)
        for start in range(0, len(column), ROWS_AT_ONCE):
            for text in column[start : start + ROWS_AT_ONCE][data.text_field]:
                if not isinstance(text, str):
                    raise job_error(
                        "spec.training.data.textField",
                        data.text_field,
                        f"must hold text, but a row holds {type(text).__name__}",
                    )
                yield words.tokens(text)

    # The fingerprint covers where the table came from and what was done to it.
    origin = ["datasets", words.identity, data.name, data.subset, data.split, table._fingerprint, data.text_field]
    return pack(produce, origin, data, options, unread=Found(records=len(column)))


def _tensor(value: Any) -> torch.Tensor:
    array = np.asarray(value)
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))
