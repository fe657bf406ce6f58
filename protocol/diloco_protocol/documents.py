"""The JSON documents that programs show each other: the syncer's status and report, a learner's page.

Each field is defined here once, with its unit and meaning; the tables of docs/contracts.md are generated from
these models, and tests compare them with what the programs really write. A reader leaves out fields that it
does not know. Units, where a description has none: seconds, bytes, nats per token. Null: not known.

``python -m diloco_protocol.documents --write docs/contracts.md`` puts the tables between the marks of that
page; ``--check`` exits 1 if they are not current.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from diloco_protocol.common.files import write_whole
from diloco_protocol.vocabulary import EventKind, JobPhase, SlotState

Count = Annotated[int, Field(ge=0)]
Number = float | None


class Document(BaseModel):
    """Base of all documents: unknown fields are left out, numbers are finite."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Quorum(Document):
    active: Count = Field(description="learners that are active and ready: they can take part in a merge")
    required: Count = Field(description="K, the learners without which nothing is merged")


class RoundRow(Document):
    fragment: Count = Field(description="the fragment that is collected")
    round: Count = Field(description="number of the round")
    merging: bool = Field(description="its pushes are being merged")
    responders: list[int] = Field(description="slots whose push has come")
    waiting: list[int] = Field(description="slots that were asked, can be reached and have not answered")


class SlotLink(Document):
    up_bytes_per_second: Number = Field(description="measured here, while pushes arrived")
    down_bytes_per_second: Number = Field(description="as the learner measured it, while broadcasts arrived")
    round_trip_seconds: Number = Field(description="the shortest of the learner's last echoes")
    needs_up_bytes_per_second: Number = Field(description="what the job needs of it at its pace")
    needs_down_bytes_per_second: Number = Field(description="likewise")
    too_slow: bool = Field(description="too slow for the job")
    message: str = Field(description="why, with numbers")


class SlotRow(Document):
    slot: Count = Field(description="index of the slot")
    retired: bool = Field(description="the job was scaled down: it ends when its process leaves")
    region: str = Field(description="region of the process that holds it, or held it last")
    ordinal: int = Field(description="that process's number within its region")
    process: str = Field(description="that process's id; empty: nobody has held it")
    incarnation: Count = Field(description="fencing number of the newest seat")
    incarnations: Count = Field(description="seats that there were")
    state: SlotState = Field(description="state of the slot")
    ready: bool = Field(description="the process has sent its first report with all bases; the operator decides on it")
    step: Count = Field(description="the slot's step, over all its processes")
    steps: Count = Field(description="steps trained, by all processes of the slot")
    tokens: Count = Field(description="tokens trained, likewise")
    loss: Number = Field(description="of the last step")
    step_seconds: Number = Field(description="moving median; 0: none yet")
    compute_seconds: Number = Field(description="from forward to optimizer step, summed")
    stalled_seconds: Number = Field(description="of the training thread inside the library, summed")
    merged_pushes: Count = Field(description="pushes of the slot that were merged")
    heard_seconds_ago: Number = Field(description="since its last message; null: nobody holds it")
    starved: bool = Field(description="it was late in three rounds running")
    paused: bool = Field(description="the learner waits: it has adopted nothing for staleness.maxSteps")
    bytes_up: Count = Field(description="payload since the job began, of all who held the slot")
    bytes_down: Count = Field(description="likewise")
    link: SlotLink | None = Field(description="null: no session")


class Tokens(Document):
    trained: Count = Field(description="of all learners; merged + pending + dropped")
    merged: Count = Field(description="in a version")
    pending: Count = Field(description="in a learner, or on its way")
    dropped: Count = Field(description="lost for good, each for a reason that the ledger has")


class RegionRow(Document):
    name: str = Field(description="region, `evaluator`, or empty: not known")
    bytes_up: Count = Field(description="payload since the job began")
    bytes_down: Count = Field(description="likewise")
    wire_bytes_up: Count | None = Field(description="everything that passed the sockets; null: no TLS")
    wire_bytes_down: Count | None = Field(description="likewise")


class RefusalRow(Document):
    role: str = Field(description="learner or evaluator")
    region: str = Field(description="region of its place")
    ordinal: int = Field(description="number of its place")
    reason: str = Field(description="a fixed word (protocol.md, session messages down)")
    message: str = Field(description="what is wrong, and the cure")
    fields: list[str] = Field(description="of `spec-drift`: the fields that differ")
    seconds_ago: float = Field(description="since then")


class TlsStatus(Document):
    secure: bool = Field(description="mutual TLS; else everything below but `refused` is null")
    connections: Count | None = Field(description="open ones")
    handshakes: Count | None = Field(description="of them not yet through their handshake")
    refused: dict[str, int] = Field(description="connections, by reason")
    expires: Number = Field(description="when the syncer's own certificate ends, Unix seconds")
    peers_expire: Number = Field(description="when the first of the connected peers' certificates ends, Unix seconds")


class MergeSeconds(Document):
    merge: float = Field(description="of merging, summed over merges")
    quorum: float = Field(description="from a round's opening until its quorum, likewise")
    waited: float = Field(description="from its opening until its pushes are merged, likewise")


class EventRow(Document):
    n: Count = Field(description="number of the event, from 1")
    time: float = Field(description="Unix seconds")
    kind: EventKind = Field(description="what happened")
    slot: int = Field(description="-1: of no slot")
    incarnation: int = Field(description="0: of none")
    message: str = Field(description="a sentence")
    details: dict[str, Any] = Field({}, description="of `joined`: region, ordinal, process, continuing")


class StatusDocument(Document):
    """The syncer's status."""

    job: str = Field(description="name of the job")
    phase: JobPhase = Field(description="the job's phase")
    message: str = Field(description="why, or what is wrong with the store")
    epoch: Count = Field(description="how many syncers this store has had")
    elapsed_seconds: float = Field(description="from the job's first step to its end or now, without suspensions")
    step: Count = Field(description="the greatest slot step")
    loss: Number = Field(description="last score of the merged model; before there is one, the active learners' mean")
    quorum: Quorum = Field(description="who can take part")
    standby: Count = Field(description="processes that wait for a slot")
    standbys: list[str] = Field(description="their process ids")
    evaluators: Count = Field(description="evaluators that are connected")
    versions: list[int] = Field(description="newest version of each fragment; empty: version 0 does not exist yet")
    rounds: list[RoundRow] = Field(description="open rounds")
    slots: list[SlotRow] = Field(description="all slots")
    tokens: Tokens = Field(description="what became of the tokens")
    tokens_per_second: Number = Field(description="trained in the last ten seconds, per second")
    merges: Count = Field(description="merges that are durable")
    goodput: Number = Field(description="compute of merged steps over all slots' wall time, 0 to 1")
    uptime: Number = Field(description="share of the job's time in which at least one learner advanced, 0 to 1")
    eval_loss: list[tuple[int, float | None]] = Field(description="pairs of trained tokens and loss")
    hold_since_seconds: Number = Field(description="when the present hold began, on the job's clock; null: none")
    bytes_up: Count = Field(description="payload since the job began")
    bytes_down: Count = Field(description="likewise")
    refused: dict[str, int] = Field(description="uploads, by reason")
    regions_lost: list[str] = Field(description="regions that are lost now (failurePolicy.regionLostSeconds)")
    sessions: Count = Field(description="open sessions")
    refusals: list[RefusalRow] = Field(description="the last refusal for good of each place, at most 64")
    regions: list[RegionRow] = Field(description="what the regions' links have carried")
    tls: TlsStatus = Field(description="the sync port's TLS")
    store_problem: str = Field(description="why the store cannot be written; empty: it can")
    seconds: MergeSeconds = Field(description="where merges spend their time")
    events: list[EventRow] = Field(description="the last 500")


class LearnerLink(Document):
    up_bytes_per_second: Number = Field(description="as this process measured it")
    down_bytes_per_second: Number = Field(description="likewise")
    round_trip_seconds: Number = Field(description="the shortest of the last echoes")


class LearnerRefusal(Document):
    reason: str = Field(description="a fixed word: the syncer's, or one of this side's own")
    message: str = Field(description="what is wrong, and the cure")


class LearnerPage(Document):
    """The status page of a learner or evaluator."""

    job: str = Field(description="name of the job")
    role: Literal["learner", "evaluator"] = Field(description="what it is")
    region: str = Field(description="its region")
    ordinal: Count = Field(description="its number within the region")
    process: str = Field(description="its process id")
    phase: JobPhase = Field(description="the job's phase as last heard")
    message: str = Field(description="the phase's message, or why there is no session")
    connected: bool = Field(description="it has a session now")
    tried: bool = Field(description="it has begun to connect")
    joined: bool = Field(description="it has joined once")
    standby: bool = Field(description="it waits for a slot")
    idle: bool = Field(description="the job is over and it waits to be removed")
    slot: Count | None = Field(description="null: it holds none")
    merges: Count | None = Field(
        description="every fragment's version as announced last, summed; null: not all were announced"
    )
    step: Number = Field(description="the slot's step")
    tokens: Number = Field(description="trained by this process")
    loss: Number = Field(description="of the last step")
    epoch: Count | None = Field(description="of the syncer; null: it never joined")
    link: LearnerLink = Field(description="its link to the syncer")
    refused: LearnerRefusal | None = Field(description="the refusal that keeps it out; null: none")
    settings: dict[str, Any] | None = Field(
        description="what the syncer told in its last Welcome: sync, learners, stop"
    )


class VersionRange(Document):
    min: Count = Field(description="the oldest fragment's version")
    max: Count = Field(description="the newest fragment's")


class ReportLearner(Document):
    slot: Count = Field(description="index of the slot")
    retired: bool = Field(description="the job was scaled down below it")
    incarnations: Count = Field(description="seats that there were")
    steps: Count = Field(description="trained")
    tokens: Count = Field(description="trained")
    compute_seconds: Number = Field(description="from forward to optimizer step")
    stalled_seconds: Number = Field(description="of the training thread inside the library")
    merged_pushes: Count = Field(description="pushes that were merged")
    bytes_up: Count = Field(description="payload")
    bytes_down: Count = Field(description="payload")


class ReportSyncer(Document):
    epoch: Count | None = Field(description="how many syncers the store has had; null: it could not be asked")
    restarts: Count = Field(description="of them, those before the last; with `diloco run` those of this run")
    peak_rss_bytes: Count = Field(description="the most memory that it had")


class Report(Document):
    """The report as the syncer writes it; `diloco run` adds `message`, `faults` and its own count of restarts."""

    schema_: Count = Field(alias="schema", description="format of this document")
    outcome: Literal["complete", "failed", "interrupted"] = Field(
        description="`interrupted`: it has not ended, or was suspended"
    )
    seed: Count = Field(description="spec.seed")
    spec_digest: str = Field(description="SHA-256 of the spec, hex")
    layout_digest: str | None = Field(description="SHA-256 of the layout, hex; empty: version 0 does not exist")
    wall_seconds: Number = Field(description="of the job; with `diloco run` of this run")
    steps: Count = Field(description="the greatest slot step")
    merges: Count = Field(description="merges that are durable")
    versions: VersionRange = Field(description="of the fragments")
    tokens: Tokens = Field(description="what became of the tokens")
    ledger: list[dict[str, Any]] | None = Field(
        description="the same per slot and fragment, with reasons of what was dropped"
    )
    goodput: Number = Field(description="compute of merged steps over all slots' wall time, 0 to 1")
    uptime: Number = Field(description="share of the job's time in which at least one learner advanced, 0 to 1")
    initial_loss: Number = Field(description="of version 0")
    final_loss: Number = Field(description="of the merged model at the end")
    eval_loss: list[tuple[int, float | None]] = Field(description="pairs of trained tokens and loss")
    bytes_up: Count = Field(description="payload")
    bytes_down: Count = Field(description="payload")
    regions: list[RegionRow] | None = Field(description="what the regions' links have carried")
    learners: list[ReportLearner] | None = Field(description="each slot")
    faults: list[dict[str, Any]] = Field(description="injected by `--chaos`, and when each was over")
    holds: list[dict[str, Number]] | None = Field(
        description="`from_seconds`, `to_seconds` of the job's time in which it held"
    )
    regions_lost: list[dict[str, Any]] | None = Field(
        description="`region`, and `from_seconds`, `to_seconds` of the job's time"
    )
    syncer: ReportSyncer = Field(description="the syncer")


DOCUMENTS: dict[str, type[Document]] = {"status": StatusDocument, "learner": LearnerPage, "report": Report}


def table(model: type[Document]) -> str:
    """The Markdown table of a document's fields, those of inner objects under their paths."""
    return "\n".join(["| field | type | |", "|---|---|---|", *_rows(model, "")])


def _rows(model: type[Document], path: str) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        where, inner = path + (field.alias or name), _model_of(field.annotation)
        many = "list" in str(field.annotation) and inner is not None
        rows.append(f"| `{where}{'[]' if many else ''}` | {_type_words(field.annotation)} | {field.description} |")
        if inner is not None:
            rows += _rows(inner, f"{where}{'[]' if many else ''}.")
    return rows


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The annotation's alternatives, without bounds."""
    if typing.get_origin(annotation) is Annotated:
        return _parts(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(part for one in typing.get_args(annotation) for part in _parts(one))
    return (annotation,)


def _model_of(annotation: Any) -> type[Document] | None:
    """The model inside: itself, or of a list's items, or the one that may be null."""
    for part in _parts(annotation):
        if isinstance(part, type) and issubclass(part, Document):
            return part
        if typing.get_origin(part) is list:
            return _model_of(typing.get_args(part)[0])
    return None


def _type_words(annotation: Any) -> str:
    """The type as a reader of JSON knows it."""
    words = []
    for part in _parts(annotation):
        origin, inside = typing.get_origin(part), typing.get_args(part)
        if origin is list:
            words.append("list" if _model_of(part) else f"list of {_type_words(inside[0])}s")
        elif origin is Literal:
            words.append(", ".join(f"`{one}`" for one in inside))
        elif origin in (dict, tuple) or (isinstance(part, type) and issubclass(part, Document)):
            words.append("pair" if origin is tuple else "object")
        else:
            names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
            words.append(names.get(part) or f"text (`{part.__name__}`)")
    return " or ".join(words)


def filled(text: str) -> str:
    """The page with the tables of today between its marks. Raises ValueError if it lacks one."""
    for name, model in DOCUMENTS.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{begin}\n.*?{end}", re.S)
        if not pattern.search(text):
            raise ValueError(f"the page lacks the marks of {name}")
        content = f"{begin}\n{table(model)}\n{end}"
        text = pattern.sub(lambda _, content=content: content, text)  # type: ignore[misc]
    return text


def main(arguments: list[str] | None = None) -> int:
    """Write or check the tables of a page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m diloco_protocol.documents")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, metavar="FILE", help="put the tables between the page's marks")
    group.add_argument("--check", type=Path, metavar="FILE", help="exit 1 if they are not current")
    chosen = parser.parse_args(arguments)
    page: Path = chosen.write or chosen.check
    before = page.read_text(encoding="utf-8")
    after = filled(before)
    if chosen.write:
        write_whole(page, after.encode())
    elif after != before:
        print(f"{page} is not current: run make docs")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
