"""What must hold between the fields of a job, in the language of the API server (CEL).

Theory of operation. ``diloco_protocol.spec.rules`` says the same in Python for the loader; here each rule has a home,
the node of the schema that it hangs on, and reads nothing outside of it. Rules hang on ``spec`` and below wherever they
can: the API server does not judge again what an update leaves as it was, so a job that an older set of rules let in can
still have its status written. Only rules about the past and about metadata are at the root.

By the time a rule runs, the API server has checked types and bounds and has filled in every default, so only fields
that may be null need ``has``; it is false for null. What a rule reads is bounded (``diloco_protocol.spec.base``), or
the API server would refuse the whole definition for its cost. A preserved mapping (``model.config``) is invisible to
the type checker; ``dyn`` lets a rule ask whether a key is there and whether it is equal to something, and nothing else.

Two fields are left to the loader: ``training.model.config.model_type`` is to be text, and ``vocab_size`` a whole
number, at least 256 with the tokenizer bytes. Rules see only whether a key of config is there and equal to something.
Typing the two in the schema would make config an object of which the rest is unknown. The API server takes two such
objects for equal when a key is exchanged for another, so what is immutable could be changed; a mapping is compared
key by key. The operator reads every job through the loader's models, and says in the status what they refuse.

tests/wrong_jobs.py breaks each rule once, for the loader and for a real API server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from diloco_protocol.spec.base import NAME_PATTERN, Spec, fields_by_alias, nested_model, unwrap
from diloco_protocol.spec.cluster import MAX_NODE_PORT
from diloco_protocol.spec.job import IMMUTABLE, DiLoCoJob
from diloco_protocol.spec.rules import RESERVED_BEGINNING, RESERVED_REGIONS
from diloco_protocol.spec.sync import LEAST_OF_MEDIAN

Path = tuple[str, ...]
"""Names of properties from the root; ``[]`` for a list's items."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One x-kubernetes-validations entry."""

    home: Path
    cel: str  # true: the rule holds
    message: str  # what is wrong, with the cure; the API server puts the field before it
    field: str = ""  # below home, the field to change; empty: home itself
    reason: Literal["FieldValueInvalid", "FieldValueRequired", "FieldValueForbidden"] = "FieldValueInvalid"


_MISSING: Literal["FieldValueRequired"] = "FieldValueRequired"
_WRONG: Literal["FieldValueInvalid"] = "FieldValueInvalid"

SPEC: Path = ("spec",)
TRAINING, SYNC, SYNCER = (*SPEC, "training"), (*SPEC, "sync"), (*SPEC, "syncer")
MODEL, DATA, STOP = (*TRAINING, "model"), (*TRAINING, "data"), (*TRAINING, "stop")
ENDPOINT, TLS, STORAGE = (*SYNCER, "endpoint"), (*SYNCER, "tls"), (*SYNCER, "storage")
REGIONS, REGION = (*SPEC, "regions"), (*SPEC, "regions", "[]")

_SLOTS = "self.regions.map(r, r.learners).sum()"
_MOST = "(has(r.maxLearners) ? r.maxLearners : r.learners)"
_RANKS = "((has(r.processes) ? r.processes : self.learners.processes) * (has(r.pods) ? r.pods : self.learners.pods))"
_NAMED = "has(self.syncer.cluster) || self.regions.exists(r, has(r.cluster))"
_SPANS = "has(self.syncer.cluster) && self.regions.exists(r, has(r.cluster) && r.cluster != self.syncer.cluster)"
_SPANNING = "the job spans clusters (syncer.cluster and regions[].cluster differ)"
_OWN_VOLUME = "has(self.claimName) || has(self.uri)"


def _source(source: str, field: str, empty: str, example: str) -> Iterator[Rule]:
    """``field`` of training.data belongs to ``source`` and to no other. ``empty``: CEL, it is not given."""
    missing = f"is required with source {source}, such as {example}"
    yield Rule(DATA, f"self.source != '{source}' || !({empty})", missing, f".{field}", reason=_MISSING)
    needless = f"belongs to source {source}: leave it out or set source: {source}"
    yield Rule(DATA, f"self.source == '{source}' || {empty}", needless, f".{field}")


def _of_ranks(part: str, rule: str, message: str, field: str) -> tuple[Rule, Rule]:
    """A rule on the ranks of the built-in trainer's learners, for a part of ``training`` (P in it) that a region may
    have its own of: named where it stands."""
    alone = "has(self.learners.command) || self.regions.all(r, "
    shared, own = (rule.replace("RANKS", _RANKS).replace("P.", f"{one}.{part}.") for one in ("self.training", "r"))
    return (
        Rule(SPEC, f"{alone}has(r.{part}) || {shared})", message, f".training{field}"),
        Rule(SPEC, f"{alone}!has(r.{part}) || {own})", message, ".regions"),
    )


BETWEEN_FIELDS: tuple[Rule, ...] = (
    # training
    Rule(
        STOP,
        "[has(self.steps), has(self.tokens), has(self.seconds)].filter(given, given).size() == 1",
        "needs exactly one of steps, tokens, seconds; set the others to null",
    ),
    Rule(
        SPEC,
        "!has(self.training.stop.seconds) || !self.sync.deterministic",
        "a deterministic job cannot stop by the clock: stop by steps or tokens",
        ".training.stop.seconds",
    ),
    Rule(
        SPEC,
        "!has(self.training.stop.seconds) || self.training.optimizer.schedule != 'cosine'"
        " || has(self.learners.command)",
        "cosine decays towards a known last step, and stop.seconds names none: use schedule constant, or "
        "stop by steps or tokens",
        ".training.optimizer.schedule",
    ),
    Rule(
        SPEC,
        "has(self.training.model) || has(self.learners.command)",
        "is required by the built-in trainer: give config or from (or learners.command for a program of your own)",
        ".training.model",
        reason=_MISSING,
    ),
    Rule(
        MODEL,
        "has(self.from) || has(dyn(self).config)",
        "needs config (a transformers configuration) or from (weights to start from)",
    ),
    Rule(
        MODEL,
        "has(self.from) || !has(dyn(self).config) || has(dyn(self).config.model_type)"
        " && dyn(self).config.model_type != null && dyn(self).config.model_type != ''",
        "model_type is required: the kind of transformers model, such as llama, mixtral or vit",
        ".config",
        reason=_MISSING,
    ),
    Rule(MODEL, "!has(self.revision) || has(self.from)", "belongs to from: give that, or leave it out", ".revision"),
    Rule(
        MODEL,
        "!has(self.initialise) || self.initialise.size() == 0 || has(self.from)",
        "belongs to from: give that, or leave it out",
        ".initialise",
    ),
    Rule(
        TRAINING,
        "!has(self.model) || self.model.frozenDtype != 'bfloat16' || self.precision != 'float32'",
        "bfloat16 needs arithmetic in bfloat16: set training.precision to auto or bfloat16, or this to float32",
        ".model.frozenDtype",
    ),
    Rule(
        MODEL,
        "!has(self.lora) || self.freeze.size() == 0",
        "has no meaning with lora, which freezes everything but the adapters: leave one of them out",
        ".freeze",
    ),
    Rule(
        SPEC,
        "has(self.training.data) || has(self.learners.command)",
        "is required by the built-in trainer, such as {paths: [python-stdlib]} (or learners.command for a "
        "program of your own)",
        ".training.data",
        reason=_MISSING,
    ),
    *_source("text", "paths", "self.paths.size() == 0", "paths: [python-stdlib]"),
    *_source("datasets", "name", "!has(self.name)", "name: wikitext"),
    *_source("python", "function", "!has(self.__function__)", "function: my_data:load"),
    Rule(DATA, "!has(self.subset) || self.source == 'datasets'", "belongs to source datasets: leave it out", ".subset"),
    Rule(
        DATA,
        "!has(self.revision) || self.source == 'datasets'",
        "belongs to source datasets: leave it out",
        ".revision",
    ),
    # sync
    Rule(
        SYNC,
        "self.fragments <= self.every",
        "must be at most sync.every: every fragment is merged once in that many steps",
        ".fragments",
    ),
    Rule(SYNC, "self.overlap < self.every", "must be below sync.every", ".overlap"),
    Rule(
        SYNC,
        "!has(self.staleness.maxSteps) || self.staleness.maxSteps >= self.every",
        "must be at least sync.every, or learners pause before each merge",
        ".staleness.maxSteps",
    ),
    Rule(
        SPEC,
        f"self.sync.quorum <= {_SLOTS}",
        "must be at most the number of learners in all regions, or nothing is ever merged",
        ".sync.quorum",
    ),
    Rule(
        SPEC,
        f"self.sync.merge.method != 'median' || (self.sync.deterministic ? {_SLOTS} : self.sync.quorum) >= "
        f"{LEAST_OF_MEDIAN}",
        f"must be at least {LEAST_OF_MEDIAN} with sync.merge.method median: raise it, or choose another method",
        ".sync.quorum",
    ),
    Rule(
        (*SYNC, "heartbeat"),
        "self.timeoutSeconds > self.intervalSeconds",
        "must be more than sync.heartbeat.intervalSeconds, or every learner is lost at once",
        ".timeoutSeconds",
    ),
    Rule(
        SYNC,
        "!has(self.normGate.factor) || !self.deterministic",
        "is not for a deterministic job, whose rounds wait for every push: leave it out",
        ".normGate.factor",
    ),
    Rule(
        (*SYNC, "compression"),
        "!self.errorFeedback || self.up != 'float32'",
        "has no meaning with up float32, which drops nothing: set it to false or choose a smaller encoding",
        ".errorFeedback",
    ),
    # regions (that names differ: they are the keys of the list)
    Rule(
        REGION,
        f"!(self.name in {list(RESERVED_REGIONS)}) && !self.name.startsWith('{RESERVED_BEGINNING}')",
        "is taken by a part of the job itself: choose another name",
        ".name",
    ),
    Rule(REGIONS, f"self.map(r, {_MOST}).sum() <= 4096", "hold more than 4096 learners in all: ask for fewer"),
    Rule(
        REGION,
        "!has(self.maxLearners) || self.maxLearners >= self.learners",
        "must be at least learners, or be left out",
        ".maxLearners",
    ),
    Rule(
        REGION,
        "!has(self.maxLearners) || self.maxLearners <= self.learners || self.spares == 0",
        "has no effect where maxLearners is above learners, for every learner that joins trains at once: leave it out, "
        "or raise learners",
        ".spares",
    ),
    Rule(
        SPEC,
        f"!self.sync.deterministic || self.regions.all(r, {_MOST} <= r.learners)",
        "maxLearners is not for a deterministic job, whose data and pushes are dealt to a fixed number of learners: "
        "leave it out",
        ".regions",
    ),
    # learners of several processes
    Rule(
        SPEC,
        "!has(self.learners.command) || !self.learners.command[0].endsWith('torchrun') && "
        "!self.learners.command.exists(word, word == 'torch.distributed.run') || "
        f"self.regions.all(r, {_RANKS} == 1)",
        "starts torchrun, and each of the ranks that processes and pods start would start it again: write the program "
        "alone, such as [python, train.py], or leave processes and pods at 1",
        ".learners.command",
    ),
    *_of_ranks(
        "parallel",
        "has(P.shard) || RANKS % P.replicate == 0",
        "parallel.replicate must divide a learner's ranks (processes × pods): change it, or give the region its own "
        "parallel",
        ".parallel.replicate",
    ),
    *_of_ranks(
        "parallel",
        "!has(P.shard) || P.shard * P.replicate == RANKS",
        "parallel.shard times replicate must be a learner's ranks (processes × pods): leave shard out, or give the "
        "region its own parallel",
        ".parallel.shard",
    ),
    *_of_ranks(
        "batch",
        "P.sequences % RANKS == 0",
        "batch.sequences must be divisible by a learner's ranks (processes × pods), which share a batch: change it, or "
        "give the region its own batch",
        ".batch.sequences",
    ),
    Rule(
        SPEC,
        "has(self.learners.command) || !has(self.training.model) || self.training.model.frozenDtype != 'bfloat16' || "
        f"self.regions.all(r, {_RANKS} == 1)",
        "is float32 where a learner has several ranks (processes × pods): leave it out, or use one process a learner",
        ".training.model.frozenDtype",
    ),
    # clusters
    Rule(
        ENDPOINT,
        "self.type != 'External' || has(self.address)",
        "is required with type External: host or host:port that leads to the syncer",
        ".address",
        reason=_MISSING,
    ),
    Rule(
        SPEC,
        f"has(self.syncer.cluster) || !({_NAMED})",
        "is required where regions name clusters: name it everywhere, or nowhere in a job of one cluster",
        ".syncer.cluster",
        reason=_MISSING,
    ),
    Rule(
        SPEC,
        f"self.regions.all(r, has(r.cluster)) || !({_NAMED})",
        "cluster is required in every region where the job names clusters: name it everywhere, or nowhere",
        ".regions",
        reason=_MISSING,
    ),
    Rule(
        SPEC,
        f"self.syncer.endpoint.type != 'ClusterIP' || !({_SPANS})",
        f"ClusterIP is reachable from its own cluster only, and {_SPANNING}: use NodePort, LoadBalancer or External",
        ".syncer.endpoint.type",
    ),
    Rule(
        SPEC,
        f"has(self.syncer.endpoint.address) || self.syncer.endpoint.type == 'External' || !({_SPANS})",
        f"is required: {_SPANNING}, and learners must know where to connect (host or host:port)",
        ".syncer.endpoint.address",
        reason=_MISSING,
    ),
    *(
        Rule(
            SPEC,
            f"has(self.{field}) || !({_SPANS})",
            f"is required: {_SPANNING}, and a made secret does not leave its cluster: create one and name it",
            f".{field}",
            reason=_MISSING,
        )
        for field in ("syncer.tls.secretName", "learners.credentials.secretName")
    ),
    # syncer
    Rule(
        SYNCER,
        "self.tls.mode != 'off' || self.endpoint.type == 'ClusterIP'",
        "off lets in every process that reaches the port, and endpoint.type opens it beyond this cluster: "
        "use auto, or endpoint.type ClusterIP",
        ".tls.mode",
    ),
    Rule(
        ENDPOINT,
        "!has(self.nodePort) || self.type == 'NodePort'",
        "belongs to type NodePort: leave it out",
        ".nodePort",
    ),
    Rule(
        ENDPOINT,
        "!has(self.service.loadBalancerClass) || self.type == 'LoadBalancer'",
        "belongs to type LoadBalancer: leave it out",
        ".service.loadBalancerClass",
    ),
    Rule(
        ENDPOINT,
        "size(self.service.sourceRanges) == 0 || self.type == 'LoadBalancer'",
        "belongs to type LoadBalancer: leave it out",
        ".service.sourceRanges",
    ),
    Rule(
        ENDPOINT,
        "self.service.externalTrafficPolicy == 'Cluster' || self.type in ['NodePort', 'LoadBalancer']",
        "belongs to types NodePort and LoadBalancer: leave it out",
        ".service.externalTrafficPolicy",
    ),
    Rule(
        TLS,
        "self.mode != 'off' || !has(self.secretName)",
        "off contradicts syncer.tls.secretName: leave one of them out",
        ".mode",
    ),
    Rule(
        STORAGE,
        "!has(self.claimName) || !has(self.uri)",
        "contradicts syncer.storage.claimName: the state lies in one place",
        ".uri",
    ),
    Rule(
        STORAGE,
        f"!has(self.storageClassName) || !({_OWN_VOLUME})",
        "is for a volume that is made, and claimName or uri names one of yours: leave it out",
        ".storageClassName",
    ),
    Rule(
        STORAGE,
        f"self.onDelete != 'Delete' || !({_OWN_VOLUME})",
        "Delete is for a volume that is made, and claimName or uri names yours, which is never deleted: leave it out",
        ".onDelete",
    ),
    *(
        Rule(SYNCER, f"!has(self.shardPods) || {holds}", message, field, reason=reason)
        for holds, field, message, reason in (
            ("self.shards > 1", ".shards", "must be more than 1 with syncer.shardPods, a pod for each", _WRONG),
            (
                "has(self.storage.uri)",
                ".storage.uri",
                "is required with syncer.shardPods: the syncer and its shards use one store from any node",
                _MISSING,
            ),
            ("self.tls.mode == 'auto'", ".tls.mode", "must be auto with syncer.shardPods", _WRONG),
            (
                "size(self.shardPods.addresses) in [0, self.shards]",
                ".shardPods.addresses",
                "name one for each shard (syncer.shards), in order",
                _WRONG,
            ),
            (
                f"!has(self.endpoint.nodePort) || self.endpoint.nodePort + self.shards <= {MAX_NODE_PORT}",
                ".endpoint.nodePort",
                f"must be at most {MAX_NODE_PORT} - syncer.shards with syncer.shardPods, which have the ports above it",
                _WRONG,
            ),
        )
    ),
    Rule(
        SPEC,
        "!has(self.syncer.shardPods) || size(self.syncer.shardPods.addresses) > 0 || "
        f"has(self.syncer.endpoint.nodePort) || !({_SPANS})",
        f"is required: {_SPANNING}, and learners must know where to connect: name one for each shard, or set "
        "endpoint.nodePort",
        ".syncer.shardPods.addresses",
        reason=_MISSING,
    ),
    Rule(
        SPEC,
        "!has(self.output.uri) || !has(self.syncer.storage.uri) || "
        "!(self.output.uri + '/').startsWith(self.syncer.storage.uri + '/')",
        "lies in the syncer's own store (syncer.storage.uri): give it a folder beside that",
        ".output.uri",
    ),
    Rule(
        (*STORAGE, "size"),
        "isQuantity(self) && quantity(self).isGreaterThan(quantity('0')) && quantity(self).isLessThan(quantity('8Ei'))",
        "must be a quantity above zero and below 2^63, such as 10Gi, 500M or 1000000000",
    ),
)

NAME = Rule(
    (),
    f"self.metadata.name.size() <= 30 && self.metadata.name.matches('{NAME_PATTERN}')",
    "must be at most 30 lower-case letters, digits and dashes, from a letter to a letter or digit",
    ".metadata.name",
)


def escaped(name: str) -> str:
    """A property's name as CEL wants it where it is one of its keywords."""
    return f"__{name}__" if name in ("function", "namespace", "import", "package", "var", "const") else name


def immutability() -> list[Rule]:
    """Rules at the root: after status.startTime is set, each immutable field is there as it was, with the
    value that it had. One rule a field, so that the message names what was changed."""
    return [rule for path in IMMUTABLE for rule in _unchanged(path)]


def _unchanged(path: Path) -> Iterator[Rule]:
    annotation = _annotation(path)
    inner, _ = nested_model(annotation)
    if inner is None:
        yield _frozen(path, ())
        return
    # The sections model and data are null or there: that stays, and then each field in them.
    parents = (path,) if unwrap(annotation)[1] else ()
    if parents:
        here = ".".join(map(escaped, path))
        yield _after_start(f"has(self.spec.{here}) == has(oldSelf.spec.{here})", path)
    for alias in fields_by_alias(inner):
        yield _frozen((*path, alias), parents)


def _annotation(path: Path) -> object:
    model: type[Spec] = DiLoCoJob
    annotation: object = None
    for step in ("spec", *path):
        annotation = fields_by_alias(model)[step].annotation
        inner, _ = nested_model(annotation)
        model = inner or model
    return annotation


def _frozen(path: Path, parents: tuple[Path, ...]) -> Rule:
    """``path`` is unchanged, wherever all its ``parents`` are there before and after."""
    there = "".join(
        f"!has({side}.{'.'.join(map(escaped, parent))}) || "
        for parent in parents
        for side in ("self.spec", "oldSelf.spec")
    )
    *above, last = map(escaped, path)
    holder = ".".join(["spec", *above])
    # Of config the type checker knows nothing; the value is there all the same.
    new, old = f"self.{holder}", f"oldSelf.{holder}"
    if last == "config":
        new, old = f"dyn({new})", f"dyn({old})"
    same = f"has({new}.{last}) == has({old}.{last}) && (!has({new}.{last}) || {new}.{last} == {old}.{last})"
    return _after_start(f"{there}({same})", path)


def _after_start(cel: str, path: Path) -> Rule:
    return Rule(
        (),
        f"!has(oldSelf.status) || !has(oldSelf.status.startTime) || {cel}",
        "cannot change once the job has started: put it back, or apply it as a new job under another name",
        f".spec.{'.'.join(path)}",
        reason="FieldValueForbidden",
    )


def rules() -> list[Rule]:
    """All of them."""
    return [NAME, *immutability(), *BETWEEN_FIELDS]
