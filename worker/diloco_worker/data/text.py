"""Text as sequences of tokens: documents, tokenizer, one long array, cut into equal sequences.

A document is a file of plain text, or a record's field in a file of records (records.py). All documents are tokenised
in order, a separator between them, into one array of the smallest unsigned type that holds the vocabulary. Sequence i
is tokens i·L .. (i+1)·L of it, L being ``training.data.sequenceLength``; what is left at the end is not used. Labels
are the inputs: the models shift them themselves, so a sequence of L tokens has L - 1 predictions.

Tokenizer ``bytes`` takes each byte as a token (vocabulary 256, the byte 0 between documents). Any other name is a
transformers tokenizer, a directory or a name on Hugging Face, with its end-of-text token between documents.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from diloco_protocol.common.data.data_files import (
    HEAD_BYTES,
    RecordFormat,
    appearance,
    binary_kind,
    is_utf8,
    record_format,
)
from diloco_protocol.common.data.local_files import NothingThere, local_files
from diloco_protocol.spec.load import JobError
from diloco_protocol.spec.training import DataSpec
from diloco_worker.data import cache, records, tables
from diloco_worker.data.corpus import BUILT_IN, FIELD, Document, documents
from diloco_worker.data.directories import directory_or_name
from diloco_worker.data.found import Found
from diloco_worker.data.split import LoadOptions, Part
from diloco_worker.errors import job_error, one_line

log = logging.getLogger(__name__)

NAME = "spec.training.data.name"
# A document longer than this is tokenised in pieces, so that memory stays bounded.
PIECE_CHARACTERS = 1_000_000
# Of a corpus, before a job is started.
LOOK_BYTES = 4_000_000
LOOK_FILES = 20_000


class Tokenizer(Protocol):
    """Turns a document into tokens. ``identity`` changes whenever its output may; every token is below
    ``vocabulary``."""

    identity: str
    vocabulary: int

    def tokens(self, document: bytes | str) -> NDArray[np.generic]: ...


class ByteTokenizer:
    """Each byte is its token; documents end with byte 0."""

    identity = "bytes"
    vocabulary = 256

    def tokens(self, document: bytes | str) -> NDArray[np.generic]:
        return np.frombuffer((document if isinstance(document, bytes) else document.encode()) + b"\0", np.uint8)


class HubTokenizer:
    """A transformers tokenizer; documents end with its end-of-text token if it has one."""

    def __init__(self, name: str) -> None:
        """Raises JobError if ``name`` is neither a directory with a tokenizer nor one on Hugging Face."""
        from transformers import AutoTokenizer

        source = directory_or_name(name, "spec.training.data.tokenizer")
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as e:
            raise job_error(
                "spec.training.data.tokenizer",
                name,
                f"no tokenizer could be loaded ({one_line(e)}); use `bytes`, a directory that "
                "`save_pretrained` wrote, or a name on Hugging Face",
            ) from e
        # Ids may have holes, and be more than the number of tokens.
        self.vocabulary = max(len(self.inner), 1 + max(self.inner.get_vocab().values(), default=-1))
        backend = getattr(self.inner, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else repr(sorted(self.inner.get_vocab().items()))
        self.identity = hashlib.sha256(content.encode()).hexdigest()
        end = self.inner.eos_token_id
        self._end = np.array([] if end is None else [end], np.uint32)

    def tokens(self, document: bytes | str) -> NDArray[np.generic]:
        text = document if isinstance(document, str) else document.decode("utf-8", "replace")
        pieces = [
            np.array(self.inner(piece, add_special_tokens=False, verbose=False)["input_ids"], np.uint32)
            for piece in _pieces(text)
        ]
        return np.concatenate([*pieces, self._end])


@functools.lru_cache(maxsize=4)
def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of ``training.data.tokenizer``. Raises JobError if there is none of that name."""
    return ByteTokenizer() if name == "bytes" else HubTokenizer(name)


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of whole lines, each at most PIECE_CHARACTERS long unless one line is longer."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1
        if end <= start:
            end = start + PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def token_dtype(vocabulary: int) -> np.dtype[np.generic]:
    """The smallest unsigned type for token ids below ``vocabulary``."""
    return np.dtype(np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32)


@dataclass(frozen=True, slots=True)
class TokenSequences:
    """A map-style data set of token sequences: ``self[k]`` is {"input_ids", "labels"}, int64 [length], the k-th
    sequence of one ``part`` of ``tokens`` (unsigned integers, [n]). ``found``: what they were read from."""

    tokens: NDArray[np.generic]
    length: int
    part: Part
    found: Found = field(default_factory=Found)

    compared_items = 256  # each is some hundred bytes of a mapped file

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        start = self.part[int(k)] * self.length
        ids = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def _naming_field(data: DataSpec) -> tuple[str, Any]:
    """The field in which the job names its data, and its value."""
    return (FIELD, data.paths) if data.source == "text" else (NAME, data.name)


def load(data: DataSpec, options: LoadOptions) -> TokenSequences:
    """The sequences of the documents that ``data.paths`` names, or of the one file that ``data.name`` does. Raises
    JobError naming the field."""
    paths = data.paths if data.source == "text" else [data.name or ""]
    listed = tables.without_bookkeeping(documents(paths, options.directory), data.split)
    tables.check_installed(listed)
    words = tokenizer(data.tokenizer)

    def produce(found: Found) -> Iterator[NDArray[np.generic]]:
        for document in listed:
            for text in texts(document, data, found):
                yield words.tokens(text)
        if sum(count for count, _ in found.left_out.values()) == found.files:
            raise job_error(*_naming_field(data), f"holds no text: {found.left_out_text}")

    origin: list[object] = ["text", words.identity, [_origin(d, data.text_field) for d in listed]]
    return pack(produce, origin, data, options, unread=Found(files=len(listed)))


def _origin(document: Document, text_field: str) -> tuple[object, ...]:
    """What says which tokens a document gives. That of plain text is the same as ever, so that its token files are
    still found."""
    kept = (document.uri, document.size, document.stamp)
    format = record_format(document.uri)
    return kept if format is None else (*kept, format.value, text_field)


def summarise_data(data: DataSpec, directory: Path) -> tuple[str, bool]:
    """What the files of ``data`` hold, as learners would count it, and whether only a part was looked at: of more than
    LOOK_BYTES the first are read, and more than LOOK_FILES are not opened. Empty where that cannot be said: files
    elsewhere, or with something wrong."""
    paths = data.paths if data.source == "text" else [data.name or ""] * (record_format(data.name or "") is not None)
    if not paths or any("://" in path for path in paths):
        return "", False
    found, words, tokens, seen = Found(), tokenizer(data.tokenizer), 0, 0
    try:
        here = itertools.chain.from_iterable(local_files(path, directory) for path in paths if path != BUILT_IN)
        if next(itertools.islice(here, LOOK_FILES, None), None) is not None:
            return f"more than {LOOK_FILES:,} files", True
        listed = tables.without_bookkeeping(documents(paths, directory), data.split)
        tables.check_installed(listed)
        whole = sum(document.size for document in listed)
        for document in listed:
            for text in texts(document, data, found, LOOK_BYTES - seen):
                tokens += len(words.tokens(text))
                seen += len(text)
                if seen >= LOOK_BYTES:
                    break
            if seen >= LOOK_BYTES:
                break
    except (JobError, NothingThere):
        return "", False
    if seen < LOOK_BYTES:
        return found.line(tokens, data.sequence_length) if listed else "", False
    left_out = f", {found.left_out_text}" if found.left_out else ""
    files = f"{len(listed):,} file{'s' * (len(listed) != 1)} of {whole:,} bytes{left_out}"
    return f"{files}; the first {seen:,} bytes of text are {tokens:,} tokens", True


def texts(document: Document, data: DataSpec, found: Found, most: int | None = None) -> Iterator[bytes | str]:
    """The texts of one file, counted in ``found``: of records one each, of plain text all its bytes (or the first
    ``most``). Of a file that holds no text there are none; raises JobError if the job names that very file."""
    found.files += 1
    format = record_format(document.uri)
    remark = ""
    if format is RecordFormat.JSON:
        is_records, remark = records.is_records(document, data.text_field)
        format = format if is_records else None
    if format is None:
        head = document.read(HEAD_BYTES)
        if binary := binary_kind(head):
            if document.chosen:
                name = posixpath.basename(document.uri)
                raise job_error(FIELD, document.uri, f"{name} looks like something else than text: {binary}")
            found.leave_out(binary, document.uri)
            return
        if data.tokenizer != "bytes" and not is_utf8(head):
            remark = (
                remark or "text that is not UTF-8, of which the tokenizer gets replacement characters: save it as UTF-8"
            )
        found.add_look(remark or appearance(head), document.uri)
        yield (head if len(head) < HEAD_BYTES else document.read(most))[:most]
        return
    found.record_files += 1
    for text in records.texts(document, format, data.text_field):
        found.records += 1
        yield text


def pack(
    produce: Callable[[Found], Iterable[NDArray[np.generic]]],
    origin: object,
    data: DataSpec,
    options: LoadOptions,
    unread: Found,
) -> TokenSequences:
    """Tokens that ``produce`` yields, as sequences; ``origin`` names the cached file. ``produce`` counts what it reads
    in what it is given; ``unread`` is said where nobody counted.

    Raises JobError on the field that names the data if there is not even one sequence."""
    vocabulary, length = tokenizer(data.tokenizer).vocabulary, data.sequence_length
    cache_directory = options.cache_directory
    dtype = token_dtype(vocabulary)
    key = cache.digest(origin)
    counted: Found | None = None

    def counting() -> Iterator[NDArray[np.generic]]:
        nonlocal counted
        found = Found()
        for piece in produce(found):
            if piece.size and piece.max() >= vocabulary:  # it would be another token once it is cast
                raise job_error(
                    "spec.training.data.tokenizer",
                    data.tokenizer,
                    f"gives the token {piece.max()}, and its vocabulary ends at {vocabulary - 1}: save it anew with "
                    "a vocabulary that has all of its tokens",
                )
            yield piece
        counted = found
        if cache_directory is not None:  # before the tokens have their name, so that who finds them finds this too
            found.save(cache.facts_path(cache_directory, key))

    try:
        tokens = cache.token_array(counting, dtype, cache_directory, key)
    except cache.CacheError as e:
        raise job_error(*_naming_field(data), str(e)) from e
    if counted is None and cache_directory is not None:
        counted = Found.read(cache.facts_path(cache_directory, key))
    if len(tokens) < length:
        raise job_error(
            *_naming_field(data),
            f"holds {len(tokens)} tokens, which is less than one sequence of "
            f"training.data.sequenceLength = {length}: name more data, or shorten it",
        )
    return TokenSequences(tokens, length, options.choose_part(len(tokens) // length), counted or unread)
