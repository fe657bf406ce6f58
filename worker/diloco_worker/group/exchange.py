"""How values go between the ranks of a learner and its leader.

Theory of operation
-------------------
Ranks on the leader's host share memory with it: an *area* of two halves, in a file that has no name any more. Each
writes there what it gives of a vector, its own rows, and reads what it holds. Ranks on other hosts send and receive
those elements alone, packed, through the group's connections. So no rank but the leader holds a whole vector, and on no
host is one kept twice.

A fragment is one such vector. Larger things, an optimizer's state or the frozen parameters, go window by window: while
the leader reads one half, the ranks write into the other.

What is still wrong with it: on a GPU each rank waits until its rows are copied, where a learner of one process does
not; and of replicas on another host each receives what it reads by itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diloco_protocol.arrays.kernels import Bytes
from diloco_worker.core.parts import Place, TensorPart
from diloco_worker.group.ranks import Group
from diloco_worker.settings import ConfigurationError

_LEAST_BYTES = 1 << 20  # of a half
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a whole tensor, in elements, and where it begins in a vector, in the vector's units."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a tensor in a process's memory, ``mine``, and in a vector, ``there``."""

    name: str
    mine: Place
    there: Place


class Form(NamedTuple):
    """Of a tensor that travels in bytes: its label, the parameter whose part of it each rank has (empty: all hold it
    whole), its elements and the bytes of each."""

    label: str
    parameter: str
    elements: int
    size: int


def find_runs(
    parts: Mapping[str, TensorPart], spans: Iterable[Span], bytes_each: Mapping[str, int] | None = None
) -> list[Run]:
    """What a process holds of a vector that is made of ``spans``. ``bytes_each``: of an element of each tensor, where
    places are to be in bytes; None: in elements."""
    runs = []
    for span in spans:
        if span.name not in parts:
            continue  # another rank has it
        factor = 1 if bytes_each is None else bytes_each[span.name]
        for mine, there in parts[span.name].cut(span.start, span.stop):
            there = there.scaled(factor).shifted(span.offset)
            runs.append(Run(span.name, mine.scaled(factor), there))
    return runs


def pack_runs(runs: Iterable[Run], dtype: torch.dtype) -> tuple[list[Run], torch.Tensor]:
    """The same runs one after the other in a vector of their own, and that vector, without values yet."""
    packed, at = [], 0
    for run in runs:
        packed.append(Run(run.name, run.mine, run.there.packed(at)))
        at += run.there.elements
    return packed, torch.empty(at, dtype=dtype)


class Exchange:
    """One per process of a group; every rank makes it at the same place. ``parts``: what this rank holds of each
    parameter; ``half_bytes``: the longest vector. Raises ConfigurationError if there is no room for the area."""

    def __init__(self, group: Group, parts: Mapping[str, TensorPart], half_bytes: int) -> None:
        self.group = group
        self.parts = dict(parts)
        self.half_bytes = max(_LEAST_BYTES, half_bytes)
        self._halves = self._map_area()
        here = {name: asdict(part) for name, part in self.parts.items()}
        found = group.gather_texts(json.dumps([self.is_near, {} if self.is_near else here]))
        # By rank, of those on other hosts: what each of them holds.
        self._far: dict[int, dict[str, TensorPart]] = {}
        for rank, text in enumerate(found):
            near, rows = json.loads(text)
            if not near:
                self._far[rank] = {name: TensorPart(**row) for name, row in rows.items()}

    @property
    def is_near(self) -> bool:
        """Whether this rank shares memory with the leader."""
        return bool(self._halves)

    def half(self, index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A half of the area that this rank shares with the leader, as a flat tensor; empty: it shares none."""
        return self._halves[index].view(dtype) if self.is_near else torch.empty(0, dtype=dtype)

    # ------------------------------------------------------- vectors

    def collect(self, vector: torch.Tensor, spans: Sequence[Span], write: Callable[[Run, torch.Tensor], None]) -> None:
        """Have every rank put what it gives into the leader's ``vector``, a part of the area; of other hosts' ranks a
        vector of their own is packed and sent. ``write(run, target)`` copies one run. Every rank calls it."""
        self._collect(vector, lambda parts: find_runs(_giving(parts), spans), write)
        self.group.wait_for_all()

    def spread(self, vector: torch.Tensor, spans: Sequence[Span]) -> tuple[torch.Tensor, list[Run]]:
        """Give every rank what it holds of the leader's ``vector``: the vector to read from, and the runs in it. Every
        rank calls it, and ``group.wait_for_all`` when it has read."""
        return self._spread(vector, lambda parts: find_runs(parts, spans))

    def _collect(
        self,
        vector: torch.Tensor,
        find: Callable[[Mapping[str, TensorPart]], list[Run]],
        write: Callable[[Run, torch.Tensor], None],
    ) -> None:
        runs = find(self.parts)
        if self.is_near:
            for run in runs:
                write(run, run.there.of(vector))
        else:
            packed, sent = pack_runs(runs, vector.dtype)
            for run in packed:
                write(run, run.there.of(sent))
            self.group.send(sent, 0)
        if not self.group.leads:
            return
        for rank, parts in self._far.items():
            runs = find(parts)
            packed, got = pack_runs(runs, vector.dtype)
            self.group.receive(got, rank)
            for run, place in zip(runs, packed, strict=True):
                run.there.of(vector).copy_(place.there.of(got))

    def _spread(
        self, vector: torch.Tensor, find: Callable[[Mapping[str, TensorPart]], list[Run]]
    ) -> tuple[torch.Tensor, list[Run]]:
        if self.group.leads:
            for rank, parts in self._far.items():
                runs = find(parts)
                packed, sent = pack_runs(runs, vector.dtype)
                for run, place in zip(runs, packed, strict=True):
                    place.there.of(sent).copy_(run.there.of(vector))
                self.group.send(sent, rank)
        runs = find(self.parts)
        if self.is_near:
            return vector, runs
        packed, got = pack_runs(runs, vector.dtype)
        self.group.receive(got, 0)
        return got, packed

    # ------------------------------------------------------- larger things

    def collect_bytes(
        self, tensors: Mapping[str, torch.Tensor], forms: Sequence[Form], into: Bytes | None = None
    ) -> None:
        """Bring whole tensors to the leader, one after the other, window by window. Every rank calls it.

        ``tensors``: by label, this rank's own part of each. ``into``: as the leader, the bytes that they become, one
        after the other. What all ranks hold whole only the leader gives."""
        flat = {label: own.detach().reshape(-1).view(torch.uint8) for label, own in tensors.items()}

        def write(run: Run, target: torch.Tensor) -> None:
            target.copy_(run.mine.of(flat[run.name]))

        for turn, (at, size, spans) in enumerate(_windows(forms, self.half_bytes)):
            window = self.half(turn % 2, torch.uint8)[:size]
            self._collect(window, functools.partial(self._runs_to_give, spans, forms), write)
            self.group.wait_for_all()
            if into is not None:
                into[at : at + size] = window.numpy()
        self.group.wait_for_all()

    def spread_bytes(
        self, tensors: Mapping[str, torch.Tensor], forms: Sequence[Form], whole: Mapping[str, torch.Tensor] | None
    ) -> None:
        """The reverse: every rank copies its own part of the leader's tensors into ``tensors``. ``whole``: as the
        leader, by label, all of each, on the CPU."""
        flat = {label: own.detach().view(-1).view(torch.uint8) for label, own in tensors.items()}
        given = {label: one.contiguous().view(-1).view(torch.uint8) for label, one in (whole or {}).items()}
        sizes = {form.label: form.size for form in forms}
        for turn, (_, size, spans) in enumerate(_windows(forms, self.half_bytes)):
            window = self.half(turn % 2, torch.uint8)[:size]
            for span in spans if whole is not None else ():
                part = given[span.name][span.start * sizes[span.name] : span.stop * sizes[span.name]]
                window[span.offset : span.offset + part.numel()].copy_(part)
            self.group.wait_for_all()
            got, runs = self._spread(window, functools.partial(self._runs, spans, forms))
            for run in runs:
                run.mine.of(flat[run.name]).copy_(run.there.of(got))
        self.group.wait_for_all()

    def _runs(
        self, spans: Sequence[Span], forms: Sequence[Form], parts: Mapping[str, TensorPart], plain: bool = True
    ) -> list[Run]:
        """In bytes. ``plain``: with what has no parameter's part."""
        known = {form.label: form for form in forms}
        held: dict[str, TensorPart] = {}
        for span in spans:
            form = known[span.name]
            if form.parameter in parts:
                held[span.name] = parts[form.parameter]
            elif not form.parameter and plain:
                held[span.name] = TensorPart.whole(form.elements)
        sizes = {label: known[label].size for label in held}
        return find_runs(held, spans, sizes)

    def _runs_to_give(self, spans: Sequence[Span], forms: Sequence[Form], parts: Mapping[str, TensorPart]) -> list[Run]:
        """What all ranks hold whole the leader gives."""
        return self._runs(spans, forms, _giving(parts), plain=self.group.leads and parts is self.parts)

    # ------------------------------------------------------- the area

    def _map_area(self) -> list[torch.Tensor]:
        """The two halves; none on another host than the leader's."""
        size = 2 * self.half_bytes + _TOKEN_BYTES
        path = token = ""
        if self.group.leads:
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
            path, token = os.path.join(folder, f"diloco-{secrets.token_hex(16)}"), secrets.token_hex(_TOKEN_BYTES // 2)
            problem = _make_file(path, size, token)
        else:
            problem = ""
        path, token, problem = json.loads(self.group.gather_texts(json.dumps([path, token, problem]))[0])
        if problem:
            raise ConfigurationError(problem)
        memory: Any = None
        try:
            with contextlib.suppress(OSError), open(path, "r+b") as file:
                if os.fstat(file.fileno()).st_size == size:
                    memory = mmap.mmap(file.fileno(), size)
        finally:
            self.group.wait_for_all()
            if self.group.leads:
                Path(path).unlink(missing_ok=True)
        if memory is None or memory[-_TOKEN_BYTES:] != token.encode():
            return []
        area = torch.frombuffer(memory, dtype=torch.uint8)
        return [area[: self.half_bytes], area[self.half_bytes : 2 * self.half_bytes]]


def _giving(parts: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
    return {name: part for name, part in parts.items() if part.gives}


def _make_file(path: str, size: int, token: str) -> str:
    """Make the area's file, readable by this user alone; what is wrong, or nothing."""
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            file.seek(size - len(token))
            file.write(token.encode())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return (
            f"no room for {size} bytes in {os.path.dirname(path)}, through which the ranks of a learner exchange "
            f"fragments: {error.strerror}. Give the container a larger /dev/shm, or cut the model into more fragments "
            "(sync.fragments)"
        )
    return ""


def _windows(forms: Sequence[Form], most: int) -> Iterator[tuple[int, int, list[Span]]]:
    """Cut tensors that follow each other into windows of at most ``most`` bytes: where each begins, its bytes, and what
    is in it. No element is cut."""
    at = filled = begin = 0
    spans: list[Span] = []
    for label, _, elements, size in forms:
        start = 0
        while start < elements:
            room = (most - filled) // size
            if not room:
                yield begin, filled, spans
                begin, filled, spans = at, 0, []
                continue
            stop = min(elements, start + room)
            spans.append(Span(label, start, stop, filled))
            filled += (stop - start) * size
            at += (stop - start) * size
            start = stop
    if spans:
        yield begin, filled, spans
