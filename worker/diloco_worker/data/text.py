"""Text as sequences of tokens: documents, tokenizer, one long array, cut into equal sequences.

All documents are tokenised in order, a separator between them, into one array of the smallest unsigned type that
holds the vocabulary. Sequence i is tokens i·L .. (i+1)·L of it, L being ``training.data.sequenceLength``; what is left
at the end is not used. Labels are the inputs: the models shift them themselves, so a sequence of L tokens has L - 1
predictions.

Tokenizer ``bytes`` takes each byte as a token (vocabulary 256, the byte 0 between documents). Any other name is a
transformers tokenizer, a directory or a name on Hugging Face, with its end-of-text token between documents.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from diloco_protocol.spec.training import DataSpec
from diloco_worker.data import cache
from diloco_worker.data.corpus import documents
from diloco_worker.data.split import Part
from diloco_worker.errors import job_error, one_line

log = logging.getLogger(__name__)

# A document longer than this is tokenised in pieces, so that memory stays bounded.
PIECE_CHARACTERS = 1_000_000


class Tokenizer(Protocol):
    """Turns a document into tokens. ``identity`` changes whenever its output may."""

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

        try:
            self.inner: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as e:
            raise job_error(
                "spec.training.data.tokenizer",
                name,
                f"no tokenizer could be loaded ({one_line(e)}); use `bytes`, a directory that "
                "`save_pretrained` wrote, or a name on Hugging Face",
            ) from e
        self.vocabulary = len(self.inner)
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
    sequence of one ``part`` of ``tokens`` (unsigned integers, [n])."""

    tokens: NDArray[np.generic]
    length: int
    part: Part

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        start = self.part[int(k)] * self.length
        ids = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def load(
    data: DataSpec, fraction: float, held_out: bool, directory: Path, cache_directory: Path | None
) -> TokenSequences:
    """The sequences of the documents that ``data.paths`` names; relative paths start at ``directory``.

    ``fraction`` of them is held out (split.py). Raises JobError naming the field."""
    found = documents(data.paths, directory)
    words = tokenizer(data.tokenizer)

    def produce() -> Iterator[NDArray[np.generic]]:
        for document in found:
            yield words.tokens(document.read())

    origin = ["text", words.identity, [(d.uri, d.size, d.stamp) for d in found]]
    return pack(produce, origin, data, fraction, held_out, cache_directory, "spec.training.data.paths", data.paths)


def pack(
    produce: Callable[[], Iterable[NDArray[np.generic]]],
    origin: object,
    data: DataSpec,
    fraction: float,
    held_out: bool,
    cache_directory: Path | None,
    field: str,
    value: object,
) -> TokenSequences:
    """Tokens that ``produce`` yields, as sequences; ``origin`` names the cached file.

    Raises JobError on ``field`` with its ``value`` if there is not even one sequence."""
    dtype, length = token_dtype(tokenizer(data.tokenizer).vocabulary), data.sequence_length
    try:
        tokens = cache.token_array(produce, dtype, cache_directory, cache.digest(origin))
    except cache.CacheError as e:
        raise job_error(field, value, str(e)) from e
    if len(tokens) < length:
        raise job_error(
            field,
            value,
            f"holds {len(tokens)} tokens, which is less than one sequence of "
            f"training.data.sequenceLength = {length}: name more data, or shorten it",
        )
    return TokenSequences(tokens, length, Part.of(len(tokens) // length, fraction, held_out))
