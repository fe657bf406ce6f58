"""What learners and the syncer tell each other, as plain data; both sides' cores think in these records.

A record has the fields of its message in sync.proto, under the same names. A field's type says what may
come from the network, by a check of ``limits``: a ``Count`` is at most 2**62, ``Seconds`` are not negative.
``convert`` turns records into messages, and messages into records with all of these checks.

There is no protobuf here. Units: seconds, tokens, nats per token; ``version`` and ``epoch`` are the syncer's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from diloco_protocol.vocabulary import MAX_FRAGMENTS
from diloco_protocol.wire import limits

Count = Annotated[int, limits.check_count]
Seconds = Annotated[float, limits.check_seconds]
Sequences = Annotated[int, limits.check_most(limits.MAX_SEQUENCES, f"a data set has at most {limits.MAX_SEQUENCES}")]
Share = Annotated[float, limits.check_share]
Loss = Annotated[float, limits.check_loss]  # not a number: none
Hex = Annotated[str, limits.check_pattern(r"[0-9a-f]{0,128}", "at most 128 hex digits")]
ProcessId = Annotated[str, limits.check_pattern(r"[0-9a-f]{1,64}", "1 to 64 hex digits")]
RegionName = Annotated[
    str,
    limits.cut_text(limits.MAX_NAME_CHARS),
    limits.check_pattern(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "a region's name"),
]


# ------------------------------------------------------------------ reports


@dataclass(frozen=True, slots=True)
class FragmentReport:
    """One fragment's row of a report; tokens and steps, cumulative per tenure.

    ``steps`` and ``tokens`` are above the base, ``confirmed_tokens`` of pushes that the learner knows were merged.
    """

    epoch: Count
    base_version: Count
    steps: Count
    tokens: Count
    confirmed_tokens: Count = 0
    dropped_overlap: Count = 0
    dropped_stale: Count = 0


class LeaseCursor(NamedTuple):
    """How far a lease was trained: ``position`` is the next of its block."""

    lease: Count
    position: Count


@dataclass(frozen=True, slots=True)
class Link:
    """A learner's link as the learner measured it; 0: not measured (yet). The syncer judges what makes sense."""

    down_bytes_per_second: float = 0.0
    round_trip_seconds: float = 0.0
    missing_fragments: Count = 0


@dataclass(frozen=True, slots=True)
class RanksReport:
    """The ranks of a learner of several: how many they are, which comes last to the ends of its steps, and how long
    after the first, the mean of the last steps."""

    count: Count
    slowest: Count
    late_seconds: Seconds


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a learner says after a step (message Report); without rows of fragments it is a mere heartbeat.

    ``slot_step``: of the slot, over all processes; ``trained_*``: of the tenure. ``step_seconds``: moving
    median. ``paused``: alone beyond staleness.maxSteps. ``link``, ``echo`` and ``ranks`` are of a session's reports
    only; an ``echo`` above 0 asks for an answer. ``diverged``: the last step's loss is NaN or infinite. ``tenure``: the
    seat's, in which all this was counted; 0: not said, and taken for the open one. ``young_optimizer``: the inner
    optimizer began fresh within the job, and is not beyond its warm-up. ``batches``: that the loop was given since its
    last step. ``fresh_optimizer``: why the inner optimizer began fresh in this tenure; empty: it did not.
    """

    slot_step: Count = 0
    trained_steps: Count = 0
    trained_tokens: Count = 0
    fragments: Annotated[tuple[FragmentReport, ...], limits.check_length(MAX_FRAGMENTS)] = ()
    compute_seconds: Seconds = 0.0
    stalled_seconds: Seconds = 0.0
    loss: Loss = math.nan
    step_seconds: Seconds = 0.0
    cursors: Annotated[tuple[LeaseCursor, ...], limits.check_length(limits.MAX_CURSORS)] = ()
    paused: bool = False
    link: Link | None = None
    echo: int = 0
    diverged: bool = False
    tenure: Count = 0
    young_optimizer: bool = False
    batches: Count = 0
    fresh_optimizer: Annotated[str, limits.cut_text(256)] = ""
    ranks: RanksReport | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluator's score: ``loss`` of the model with ``sum_versions`` merges in it, at ``tokens`` of the job."""

    tokens: Count
    loss: Loss
    sum_versions: Count
    final: bool


# ------------------------------------------------------------------ pushes


@dataclass(frozen=True, slots=True)
class PushPlan:
    """What a push carries; ``round`` 0: an offer.

    Steps ``first_step..last_step`` are slot steps, both carried. ``oldest_version`` is the one on which the
    oldest of them was made.
    """

    fragment: int
    sequence: Count
    round: Count
    epoch: Count
    base_version: Count
    oldest_version: Count
    first_step: Count
    last_step: Count
    steps: Count
    tokens: Count
    compute_seconds: Seconds


@dataclass(frozen=True, slots=True)
class PushHeader(PushPlan):
    """A push without its bytes (message Push), with slot and incarnation of the UploadHeader around it."""

    encoding: Annotated[str, limits.cut_text(32)]
    layout_digest: Annotated[str, limits.cut_text(128)]
    report: StepReport
    slot: int
    incarnation: Count

    @property
    def id(self) -> tuple[int, int, int, int]:
        return (self.slot, self.incarnation, self.fragment, self.sequence)


@dataclass(frozen=True, slots=True)
class Pull:
    """The syncer asks for a push of the fragment in this round; ``version`` is the fragment's v_p."""

    round: Count
    fragment: int
    epoch: Count
    version: Count


# ------------------------------------------------------------------ seats and data


class Held(NamedTuple):
    """The newest version of a fragment that a process has. ``settled``: what its announcement said of the lineage."""

    epoch: Count
    version: Count
    settled: Count = 0


class DataSample(NamedTuple):
    """The digest of so many ``items`` of a data set, from ``first`` on."""

    first: Count
    items: Count
    digest: Hex


@dataclass(frozen=True, slots=True)
class Join:
    """A process opens a session. ``connection`` and ``evaluator`` are what the syncer calls it.

    ``held``: per fragment; empty: nothing. ``tenure``: the incarnation under which its newest tenure began, in the slot
    ``slot``; 0: it had none. ``previous_incarnation`` 0: this program holds no slot's work, whatever its process id.
    ``idle``: a learner that is done; it takes no slot and only hears the phase. ``pod``: UID of its pod; empty: none.
    ``data_samples``: of its data set's content; empty: the content is not compared.
    """

    connection: int
    process: ProcessId
    region: RegionName
    ordinal: int
    evaluator: bool
    layout_digest: Hex
    digests: Annotated[dict[str, str], limits.check_digests]
    sequences: Sequences
    held: Annotated[tuple[Held, ...], limits.check_length(MAX_FRAGMENTS)]
    previous_incarnation: Count = 0
    idle: bool = False
    pod: Hex = ""
    tenure: Count = 0
    slot: int = -1
    data_samples: Annotated[tuple[DataSample, ...], limits.check_length(limits.MAX_DATA_SAMPLES)] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """Positions ``start`` to ``end`` of ``block``, in the block's own order. Block b holds the sequences from
    b * ``block_size`` on."""

    lease: Count
    data_epoch: Count
    block: Count
    start: Count
    end: Count
    block_size: Count


@dataclass(frozen=True, slots=True)
class Seat:
    """A process holds a slot. ``continuing``: its tenure goes on. ``slot_step`` and ``slot_tokens``: how far the
    slot was when the tenure began. ``tenure``: the incarnation under which it began; its reports name it."""

    slot: int
    incarnation: Count
    continuing: bool
    slot_step: Count
    slot_tokens: Count
    leases: tuple[Lease, ...]
    tenure: Count = 0


# ------------------------------------------------------------------ versions


@dataclass(frozen=True, slots=True)
class Payload:
    """A broadcast's bytes; ``checksum`` is their xxh3-64."""

    encoding: Annotated[str, limits.cut_text(32)]
    bytes: Count
    checksum: int


@dataclass(frozen=True, slots=True)
class Announcement:
    """A version as one learner is told of it.

    ``merged_sequence``: this learner's newest push that was merged in any version up to this one, ``merged_version``
    the version that merged it; 0: none. ``delta``: the change from the version before, where updates are broadcast.
    ``job_tokens``: trained in the whole job at this merge. ``settled``: the newest epoch of this history that trained.
    ``progress``: how much of the job's stop was reached by then.
    """

    fragment: int
    epoch: Count
    version: Count
    full: Payload
    merged_sequence: Count = 0
    merged_version: Count = 0
    delta: Payload | None = None
    job_tokens: Count = 0
    settled: Count = 0
    progress: Share = 0.0


@dataclass(frozen=True, slots=True)
class SlotReceipt:
    """One slot's row of a version's receipt: what the ledger said of it when the version was made.

    ``tenure``: digest of the open one, 64 bits, 0: none. ``merged_tokens`` are of all tenures, ``tenure_tokens`` of
    the open one. ``sequence``: its newest merged push, which ``version`` merged.
    """

    slot: int
    tenure: int
    merged_tokens: Count
    tenure_tokens: Count
    sequence: Count
    version: Count
    last_step: Count
    compute_seconds: Seconds


Receipt = tuple[SlotReceipt, ...]


# ------------------------------------------------------------------ shards

Port = Annotated[int, limits.check_most((1 << 16) - 1, f"it must be below {1 << 16}")]
Host = Annotated[str, limits.check_pattern(r"[-.:%_0-9A-Za-z]{0,253}", "a host's name or address")]


@dataclass(frozen=True, slots=True)
class Shard:
    """A process of the syncer that has the bytes of these fragments. ``port`` 0: the syncer's. ``host`` empty: the one
    at which the receiver reaches the syncer."""

    port: Port
    host: Host
    fragments: tuple[int, ...]
