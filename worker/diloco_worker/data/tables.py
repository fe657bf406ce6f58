"""One column of a Parquet or Arrow file, by the package pyarrow, and the folders that ``save_to_disk`` writes.

Such a folder holds ``dataset_info.json`` and ``state.json``, which names its Arrow files in order; with several splits
it holds ``dataset_dict.json`` and such a folder for each. Tables are read batch by batch.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Sequence
from typing import IO, Any

from diloco_protocol.common.data.data_files import TABLES, RecordFormat, record_format
from diloco_worker.data.corpus import Document, words_of
from diloco_worker.errors import job_error

DATA = "spec.training.data"
TEXT_FIELD = "spec.training.data.textField"
SPLIT = "spec.training.data.split"
ROWS_AT_ONCE = 1000


def check_installed(documents: Sequence[Document]) -> None:
    """Raise JobError if one of these is a table and pyarrow is not installed."""
    table = next((d for d in documents if record_format(d.uri) in TABLES), None)
    if table is None:
        return
    try:
        import pyarrow  # noqa: F401
    except ImportError as e:
        raise job_error(
            DATA,
            table.uri,
            f"{posixpath.basename(table.uri)} is read by the package pyarrow, which is not installed: "
            "pip install 'decoupled-diloco[datasets]'",
        ) from e


def column(file: IO[bytes], uri: str, format: RecordFormat, name: str) -> Iterator[Any]:
    """The values of one column, as Python has them (null is None). Raises JobError."""
    import pyarrow as pa

    try:
        for batch in _batches(file, format, name, uri):
            yield from batch.column(name).to_pylist()
    except (pa.ArrowException, OSError) as e:
        raise job_error(DATA, uri, f"cannot be read as {format.value}: {words_of(e)}") from e


def column_names(document: Document) -> list[str]:
    """The columns of a Parquet file. Raises JobError."""
    check_installed([document])
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with document.open() as file:
            return list(pq.ParquetFile(file).schema_arrow.names)
    except (pa.ArrowException, OSError) as e:
        raise job_error(DATA, document.uri, f"cannot be read as Parquet: {words_of(e)}") from e


def _batches(file: IO[bytes], format: RecordFormat, name: str, uri: str) -> Iterator[Any]:
    if format is RecordFormat.PARQUET:
        import pyarrow.parquet as pq

        table = pq.ParquetFile(file)
        _check_column(table.schema_arrow.names, name, uri)
        yield from table.iter_batches(batch_size=ROWS_AT_ONCE, columns=[name])
        return
    import pyarrow as pa

    try:
        stream: Any = pa.ipc.open_stream(file)  # what save_to_disk writes
    except pa.ArrowInvalid:
        file.seek(0)
        whole = pa.ipc.open_file(file)
        _check_column(whole.schema.names, name, uri)
        yield from (whole.get_batch(i) for i in range(whole.num_record_batches))
        return
    _check_column(stream.schema.names, name, uri)
    yield from stream


def _check_column(names: Sequence[str], name: str, uri: str) -> None:
    if name not in names:
        raise job_error(
            TEXT_FIELD, name, f"{uri}: there is no such column; name the one that holds the text: {', '.join(names)}"
        )


# ------------------------------------------------------------------ folders of save_to_disk


def without_bookkeeping(documents: Sequence[Document], split: str) -> list[Document]:
    """The documents with those of each folder that ``save_to_disk`` wrote in its own order, without the files about
    them; of one with several splits those of ``split``. Raises JobError if it has none of that name."""
    by_uri = {document.uri: document for document in documents}
    dropped: set[str] = set()
    order: dict[str, list[str]] = {}  # the first Arrow file of a folder -> all of them
    for document in documents:
        folder, _, name = document.uri.rpartition("/")
        if name == "dataset_dict.json":
            splits = [str(s) for s in _read_json(document).get("splits", [])]
            if split not in splits:
                raise job_error(SPLIT, split, f"{folder} has no such split; it has {', '.join(splits)}")
            others = [f"{folder}/{s}/" for s in splits if s != split]
            dropped |= {document.uri, *(u for u in by_uri if u.startswith(tuple(others)))}
        elif name == "state.json" and f"{folder}/dataset_info.json" in by_uri:
            files = [f"{folder}/{f['filename']}" for f in _read_json(document).get("_data_files", [])]
            if missing := [f for f in files if f not in by_uri]:
                raise job_error(DATA, folder, f"lacks {missing[0]}, which its state.json names")
            dropped |= {document.uri, f"{folder}/dataset_info.json"}
            dropped |= {u for u in by_uri if u.rpartition("/")[0] == folder and u.endswith(".arrow")} - set(files)
            if files:
                order[min(files)] = files
    kept: dict[str, Document] = {}
    for document in documents:
        if document.uri not in dropped:
            for uri in order.get(document.uri, [document.uri]):
                kept.setdefault(uri, by_uri[uri])
    return list(kept.values())


def _read_json(document: Document) -> dict[str, Any]:
    try:
        found = json.loads(document.read())
    except ValueError as e:
        raise job_error(DATA, document.uri, f"is damaged: {e}") from e
    return found if isinstance(found, dict) else {}
