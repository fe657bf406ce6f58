"""Whether text looks like delimiter-separated rows under a header, as CSV and TSV are.

Prose has commas too, so every row must have as many cells as the header, and the header must look like names of
columns: short, different, and without a space beside the delimiter, where prose has one.
"""

from __future__ import annotations

import csv
import io
import itertools
import re

LEAST_ROWS = 2
"""Under the header: with fewer, two lines of prose that have a comma each would do."""
MOST_ROWS = 20
_COLUMN_NAME = re.compile(r"[^\W\d][\w.()/-]*(?: [\w.()/-]+){0,2}")
_MOST_CHARACTERS = 40  # of a column's name


def has_header_and_rows(text: str, delimiter: str, cut: bool) -> bool:
    """Whether the first rows of ``text`` are a header and LEAST_ROWS rows or more. ``cut``: the file goes beyond
    ``text``, so its last row may lack its end."""
    rows: list[list[str]] = []
    complete = not cut
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in itertools.islice(filter(None, reader), MOST_ROWS + 1):
            rows.append(row)
            if len(rows) == 1 and not _is_header(row):
                return False
        complete = complete or len(rows) > MOST_ROWS
    except csv.Error:
        if not cut:
            return False
    if not complete:
        rows = rows[:-1]
    return len(rows) > LEAST_ROWS and all(len(row) == len(rows[0]) for row in rows)


def _is_header(cells: list[str]) -> bool:
    return (
        len(cells) > 1
        and len(set(cells)) == len(cells)
        and all(len(cell) <= _MOST_CHARACTERS and _COLUMN_NAME.fullmatch(cell) for cell in cells)
    )
