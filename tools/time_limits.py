"""The tables of docs/time-limits.md: who waits for what, how long, and what happens then (tools/generate.py).

The words stand here, and the seconds in the code: each row names the constants, or the fields of a job with their
defaults, from which its time is written.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from diloco_protocol.spec.base import fields_by_alias, nested_model
from diloco_protocol.spec.job import DiLoCoJob


@dataclass(frozen=True)
class Limit:
    """One wait. ``names``: constants as ``package.module:NAME`` without ``diloco_``, or fields as ``spec.…``.
    ``time``: how their values make the limit."""

    who: str
    waits_for: str
    names: tuple[str, ...]
    then: str
    time: str = "{0}"


MEMBERS = (
    Limit(
        "a learner",
        "its next sign of life to the syncer",
        ("spec.sync.heartbeat.intervalSeconds",),
        "it sends a report, or a heartbeat if nothing is new",
    ),
    Limit(
        "the syncer",
        "a sign of life of a learner; a broken stream makes its slot `suspect` at once",
        ("spec.sync.heartbeat.timeoutSeconds",),
        "the slot is `lost`: a spare may take it, and rounds stop waiting for it",
    ),
    Limit(
        "the syncer",
        "any learner of a region to be heard",
        ("spec.failurePolicy.regionLostSeconds",),
        "the region is lost: `failurePolicy.onRegionLost` decides",
    ),
    Limit(
        "the syncer",
        "other learners' pushes, once a round has its quorum",
        ("spec.sync.grace.capSeconds",),
        "it merges what is there",
        time="at most {0}; usually less (algorithm.md, section 4)",
    ),
    Limit(
        "the syncer",
        "the pushes of a round without a quorum",
        ("syncer.core.books.rounds:OVERDUE_SECONDS", "syncer.core.books.rounds:OVERDUE_TURNS"),
        "the round is overdue: the condition RoundOverdue, and nothing else",
        time="{0}, and at least {1} turns of H steps",
    ),
    Limit(
        "the syncer",
        "a learner whose push came too late",
        ("syncer.core.merging.aggregation:LATE_ROUNDS",),
        "the slot is `starved`: an event, and a field of the status",
        time="{0} rounds in succession",
    ),
    Limit(
        "the syncer",
        "merges with far fewer learners than there are",
        ("syncer.core.merging.aggregation:FEW_MERGES", "syncer.core.merging.aggregation:FEW_QUIET_SECONDS"),
        "the event `few-learners`, which names how long an exchange takes",
        time="{0} merges; told again after {1}",
    ),
    Limit(
        "the syncer",
        "the first step of a learner that holds a slot",
        ("syncer.core.members.first_steps:LONG_SECONDS",),
        "the slot's `problem` says so in the status",
    ),
    Limit(
        "the syncer",
        "a learner that may bring the only optimizer state",
        ("protocol.wire.limits:REJOIN_SECONDS",),
        "the newcomer begins with a fresh optimizer",
    ),
    Limit(
        "the syncer",
        "an optimizer state from one slot whose sessions break before a byte of it comes",
        ("syncer.core.members.state_donors:MOST_TRIES",),
        "it asks others, and tells the newcomer if there is none",
        time="{0} sessions",
    ),
    Limit(
        "a learner",
        "a step of its own training",
        ("spec.learners.stallSeconds", "worker.core.stall_rule:FACTOR", "worker.core.stall_rule:FIRST_STEP"),
        "stalled: stack traces in the log, exit code 6, a replacement. At half of it `/healthz` answers 503",
        time="{0}, and at least {1} median steps; {2} times as long before the first step",
    ),
    Limit(
        "a learner",
        "to be asked for the rest of an optimizer state whose upload broke with its session",
        ("worker.net.transfers:_STATE_SECONDS",),
        "it frees the copy, and declines",
    ),
    Limit(
        "a learner",
        "an optimizer state, when it joins, without a session or without a byte that the state needs",
        ("protocol.wire.limits:REJOIN_SECONDS",),
        "it turns to the next source, and after the last one begins with a fresh optimizer",
    ),
    Limit(
        "a learner that leaves",
        "any progress of its offers",
        ("worker.sync.drain:PATIENCE_SECONDS", "worker.sync.drain:LONGEST_SECONDS"),
        "it ends; the syncer drops what was not acknowledged (`drain`)",
        time="{0} without progress, {1} in all",
    ),
    Limit(
        "a learner",
        "its goodbye to be heard",
        ("worker.learner:_GOODBYE_SECONDS",),
        "it ends without",
    ),
)  # fmt: skip
LINKS = (
    Limit("a client", "a connection, TCP and TLS", ("protocol.wire.limits:CONNECT_SECONDS",),
          "it resolves the name again, and tries again"),
    Limit("a client", "the first of a name's addresses to answer", ("protocol.common.reach:RACE_SECONDS",),
          "it tries the next one beside it"),
    Limit("a client", "its next try, after gRPC could not connect",
          ("protocol.wire.limits:FIRST_PAUSE_SECONDS", "protocol.wire.limits:LONGEST_PAUSE_SECONDS"),
          "it tries again", time="{0} at first, at most {1}"),
    Limit("both ends", "the first message of a session", ("protocol.wire.limits:JOIN_SECONDS",),
          "the connection is closed"),
    Limit("both ends", "a ping's answer on an idle connection",
          ("protocol.wire.limits:KEEPALIVE_SECONDS", "protocol.wire.limits:KEEPALIVE_ANSWER_SECONDS"),
          "the connection is closed, and the learner connects again", time="a ping after {0}, its answer within {1}"),
    Limit("both ends", "a byte of any transfer of a session",
          ("protocol.wire.limits:STALL_SECONDS", "protocol.wire.progress:OVERTAKEN_BYTES"),
          "its transfers are given up, and go on over another connection from where they were",
          time="{0}; a stream as long, if {1} bytes of its session passed it by"),
    Limit("a learner", "the answer to a part that it has sent",
          ("protocol.wire.limits:STALL_SECONDS", "protocol.wire.limits:SLOWEST_BYTES_PER_SECOND"),
          "the part is sent again", time="{0}, and 1 s for each {1} bytes, once nothing moves"),
    Limit("a learner", "a connection on which a transfer broke",
          ("protocol.wire.bulk:FIRST_REST_SECONDS", "protocol.wire.bulk:LONGEST_REST_SECONDS"),
          "it is used again; its transfers go on over the others at once",
          time="{0}, twice as long after each further break, at most {1}"),
    Limit("both ends", "a turn for a newcomer's bytes beside those of rounds",
          ("protocol.wire.link_share:ALIVE_SECONDS",), "a few bytes go, so that the other end does not give up"),
    Limit("the syncer", "the next part of an upload", ("syncer.runtime.multipart:IDLE_SECONDS",),
          "it forgets the parts"),
    Limit("the syncer", "the next part of a download", ("syncer.runtime.active_downloads:IDLE_SECONDS",),
          "it forgets the older version"),
    Limit("the syncer", "a TLS handshake", ("syncer.server.tls.listener:HANDSHAKE_SECONDS",),
          "it closes the connection"),
    Limit("the syncer", "learners to use a new join token", ("syncer.server.tls.listener:TOKEN_SECONDS",),
          "it refuses the old one"),
    Limit("a caller", "the answer to a control call", ("protocol.wire.control_client:CALL_SECONDS",),
          "an error; the operator and the runner try again"),
    Limit("a page's server", "a request, and taking its answer", ("protocol.common.http_server:REQUEST_SECONDS",),
          "it closes the connection"),
)  # fmt: skip
STORE = (
    Limit("the syncer", "a checkpoint of its state", ("spec.syncer.checkpoint.everySeconds",),
          "it writes one; merges are durable without it"),
    Limit("the syncer", "its store to accept writes, a full disk excepted", ("syncer.runtime.durability:PATIENCE",),
          "it ends, and is started again"),
    Limit("the syncer", "a request to a bucket",
          ("syncer.store.bucket:QUICK_SECONDS", "syncer.store.bucket:BULK_SECONDS",
           "syncer.store.bucket:RETRY_SECONDS"),
          "the request fails, as a write to a disk would",
          time="{0} for a small object, {1} for a large one, tries within {2}"),
    Limit("the syncer", "a byte of an object that it reads", ("syncer.store.bucket:READ_SECONDS",),
          "the request is tried again"),
    Limit("the syncer", "a lost version from the learner that holds it",
          ("syncer.core.recovery.lost_versions:ANSWER_SECONDS",), "it asks another holder"),
    Limit("the syncer", "a successor in another pod that has claimed the store", ("syncer.store.epochs:LEAVE_SECONDS",),
          "it claims the store itself"),
    Limit("the syncer, at its end", "offers and the last checkpoint to be durable",
          ("syncer.syncer:SPOOL_SECONDS", "syncer.runtime.durability:LAST_CHECKPOINT_SECONDS"),
          "it ends without; what was announced is durable anyway", time="{0} for offers, {1} for the checkpoint"),
    Limit("the syncer, at its end", "learners to hear of it", ("syncer.syncer:LINGER_SECONDS",), "it ends"),
)  # fmt: skip
OPERATOR = (
    Limit("the operator", "a learner to be heard that joined and is Ready",
          ("operator.plan.pods.silence:LEARNER_SILENT_SECONDS", "spec.sync.heartbeat.timeoutSeconds"),
          "it replaces the pod, if the silence is the learner's own fault; several at once also wait for "
          "`regionLostSeconds`", time="{0}, and at least twice {1}"),
    Limit("the operator", "a node that is not ready", ("spec.nodeLoss.afterSeconds",),
          "with `nodeLoss.policy: ForceDelete` it deletes the node's pods"),
    Limit("the operator", "a lost node to come back", ("operator.plan.pods.node_loss:TOLD_AFTER_SECONDS",),
          "status and Events name it"),
    Limit("the operator", "a crashed or stuck pod of one place",
          ("operator.plan.pods.replacement:FIRST_BACKOFF", "operator.plan.pods.replacement:LAST_BACKOFF"),
          "it deletes the pod", time="{0} the first time, doubling to {1}"),
    Limit("the operator", "a program to read settings again that somebody had edited",
          ("operator.plan.pods.replacement:SETTINGS_SECONDS",),
          "a program that cannot run the job fails it, as at any other time"),
    Limit("the operator", "a pod to be gone after its grace period", ("operator.plan.view:STUCK_SECONDS",),
          "the pod counts as stuck"),
    Limit("the operator", "an answer of the syncer", ("operator.plan.view:ANSWER_PATIENCE",),
          "SyncerReady is False"),
    Limit("the operator", "a newer view of the syncer", ("operator.plan.view:FRESH_SECONDS",),
          "it deletes no pod by the older one"),
    Limit("the operator", "a learner that runs to join", ("operator.plan.regions:JOIN_PATIENCE",),
          "status says so"),
    Limit("the operator", "the syncer to tell its learners of a deletion", ("operator.plan.lifecycle:DELETE_SECONDS",),
          "the job's objects are deleted"),
    Limit("the operator", "a suspension's drain, merges and checkpoint",
          ("operator.plan.lifecycle:SUSPEND_SECONDS", "operator.plan.lifecycle:UNREACHABLE_SECONDS"),
          "Stalled is True; with `suspendPolicy: Anyway` the pods are removed",
          time="{0}; {1} if the syncer does not answer"),
    Limit("the operator", "the report of a job that ended", ("operator.plan.lifecycle:REPORT_SECONDS",),
          "the job completes without it"),
    Limit("the operator", "the merged model at `output.uri`, if the syncer does not answer",
          ("operator.plan.lifecycle:OUTPUT_UNANSWERED_SECONDS",), "the job completes without it"),
    Limit("the operator", "a deleted job's volume", ("operator.plan.planning:LET_GO_SECONDS",),
          "the job goes without it"),
    Limit("the operator", "a write that fails, to try it again", ("operator.reconcile.apply:LONGEST_PAUSE_SECONDS",),
          "it sends it again", time="half as long as that lasts, {0} at most"),
    Limit("the operator", "a webhook or a missing right, before a person has to act",
          ("operator.plan.conditions.decide:STALLED_SECONDS",), "Stalled is True"),
    Limit("the operator", "the next bytes of a watch",
          ("operator.informer.reflector:NO_BYTE_SECONDS", "operator.informer.reflector:WATCH_SECONDS"),
          "it lists and watches again", time="{0}; a watch lasts {1} at most"),
    Limit("the operator", "one turn for a job", ("operator.reconcile.workqueue:TURN_SECONDS",),
          "the turn is ended and repeated, with a backoff"),
    Limit("the kubelet", "the operator's turns to end, and its streams to hear something",
          ("operator.health:STUCK_SECONDS", "operator.informer.reflector:DEAD_SECONDS"),
          "`/healthz` fails, and the kubelet restarts the operator", time="{0} for a turn, {1} for a stream"),
    Limit("another operator", "the leader to renew its Lease",
          ("operator.leadership.election:LEASE_SECONDS", "operator.leadership.election:ACT_SECONDS"),
          "it leads; the old leader has stopped before", time="{0}; the leader acts for {1} after a renewal"),
    Limit("the kubelet", "a program to open its port", ("operator.objects.pods:START_SECONDS",),
          "it restarts the container"),
    Limit("Kubernetes", "a pod to end after SIGTERM",
          ("operator.objects.pods:GRACE_SECONDS", "operator.objects.pods:SPARED_SECONDS"),
          "SIGKILL", time="{0}, of which a learner's drain leaves {1}"),
    Limit("Kubernetes", "a node that is not ready or unreachable, for a pod there",
          ("operator.objects.pods:TOLERATION_SECONDS",), "the pod is evicted"),
)  # fmt: skip
ONE_MACHINE = (
    Limit("`diloco run`", "an answer of the syncer; while it starts, any work of it",
          ("cli.processes.watchdog:SYNCER_SILENT_SECONDS", "cli.local.runner.job_follower:LAST_SECONDS",
           "cli.processes.watchdog:START_SECONDS"),
          "it kills the syncer and starts it again", time="{0}, then {1} for one last call; a start at most {2}"),
    Limit("`diloco run`", "a learner that runs to join", ("cli.processes.unjoined:UNJOINED_SECONDS",),
          "it prints a line with the name of the log"),
    Limit("`diloco run`", "the next start of a program that ends again and again",
          ("cli.processes.supervisor:FIRST_BACKOFF_SECONDS", "cli.processes.supervisor:MAX_BACKOFF_SECONDS"),
          "it starts the program", time="{0}, doubling to {1}"),
    Limit("`diloco run`, after Ctrl-C", "progress of learners that offer their work and of a syncer that ends",
          ("cli.local.runner.run_end:DRAIN_SECONDS", "cli.local.runner.run_end:MAX_DRAIN_SECONDS"),
          "it stops the processes", time="{0} without progress, {1} in all"),
    Limit("`diloco run`, after the end", "processes to leave by themselves",
          ("cli.local.runner.run_end:LEAVE_SECONDS", "cli.local.runner.runner:TERM_SECONDS"),
          "SIGTERM, then SIGKILL", time="{0}, then {1}"),
    Limit("`diloco run`", "progress of the fork server that loads the libraries",
          ("cli.processes.loading:SILENT_SECONDS", "cli.processes.launch:START_SECONDS"),
          "the run fails", time="{0} without progress; {1} for an answer to a start"),
    Limit("`diloco run`, `diloco validate`", "progress of the process that checks model and data",
          ("cli.processes.loading:SILENT_SECONDS",), "these stay unchecked", time="{0} without progress"),
    Limit("`diloco learner join`", "a learner to live long enough",
          ("cli.machines.join:LIVED_SECONDS", "cli.machines.join:IN_VAIN"),
          "it gives up, with the last error", time="{0}, for {1} ends in succession"),
    Limit("`diloco apply`", "an operator to look at the job", ("cli.cluster.apply:HEARD_SECONDS",),
          "it says that no operator answers"),
    Limit("`diloco export`, from a running job", "bytes of the model",
          ("cli.export.remote_model:FIRST_BYTE_SECONDS", "cli.export.remote_model:STALL_SECONDS"),
          "it fails", time="{0} until the first, {1} between two"),
    Limit("a program", "another one that makes the same token file", ("worker.data.cache:LOCK_TIMEOUT_SECONDS",),
          "it fails, and names the file"),
)  # fmt: skip


def tables() -> dict[str, str]:
    """The parts of the page by their names."""
    return {
        "learners and syncer": table(MEMBERS),
        "links and calls": table(LINKS),
        "store": table(STORE),
        "clusters": table(OPERATOR),
        "one machine": table(ONE_MACHINE),
    }


def table(limits: Sequence[Limit]) -> str:
    rows = ["| who waits | for what | how long | what happens then | set by |", "|---|---|---|---|---|"]
    for one in limits:
        time = one.time.format(*(shown(name) for name in one.names))
        names = ", ".join(f"`{name if name.startswith('spec.') else path(name)}`" for name in one.names)
        rows.append(f"| {one.who} | {one.waits_for} | {time} | {one.then} | {names} |")
    return "\n".join(rows)


def shown(name: str) -> str:
    """The value of a constant or of a field's default; seconds have their unit. Raises ValueError: there is none."""
    value = default_of(name) if name.startswith("spec.") else constant(name)
    if not isinstance(value, int | float):
        raise ValueError(f"{name} is no number: {value!r}")
    return f"{value:,}" if is_count(name) else f"{value:,g} s"


def is_count(name: str) -> bool:
    """Whether it counts something other than seconds, as its name says."""
    return name.endswith(
        ("TURNS", "ROUNDS", "TRIES", "MERGES", "FACTOR", "FIRST_STEP", "IN_VAIN", "BYTES_PER_SECOND", "_BYTES")
    )


def module_of(name: str) -> str:
    """The module of a constant: ``cli.…`` is the package ``diloco``, another ``x.…`` is ``diloco_x``."""
    package, _, rest = name.partition(":")[0].partition(".")
    return f"{'diloco' if package == 'cli' else f'diloco_{package}'}.{rest}"


def path(name: str) -> str:
    """As the page shows a constant."""
    return f"{module_of(name)}.{name.partition(':')[2]}"


def constant(name: str) -> object:
    """A constant's value. Raises ValueError: it is not there."""
    try:
        return getattr(importlib.import_module(module_of(name)), name.partition(":")[2])
    except (ImportError, AttributeError):
        raise ValueError(f"tools/time_limits.py names {path(name)}, which is not there") from None


def default_of(name: str) -> object:
    """The default of a field of the job. Raises ValueError: there is no such field."""
    model = DiLoCoJob
    *outer, last = name.split(".")
    try:
        for step in outer:
            model, _ = nested_model(fields_by_alias(model)[step].annotation)
        return fields_by_alias(model)[last].get_default(call_default_factory=True, validated_data={})
    except (KeyError, TypeError):
        raise ValueError(f"tools/time_limits.py names {name}, which is no field") from None
