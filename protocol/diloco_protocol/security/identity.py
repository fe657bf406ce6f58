"""Who a certificate says its holder is, and whether that is enough.

Theory of operation
-------------------
A certificate names a job and a role in URIs among its subject alternative names:

    diloco://job/NAMESPACE/NAME/syncer
    diloco://job/NAMESPACE/NAME/learner            a learner or evaluator, of any region
    diloco://job/NAMESPACE/NAME/learner/REGION     a learner of that region; or an evaluator

NAMESPACE and NAME are the DiLoCoJob's. A certificate may carry several of them, of one role: a learner's for two
regions, a syncer's for two jobs. URIs of other schemes say nothing here.

Each side compares the other's names with its own, so nothing has to be configured: a syncer takes learners of the job
(namespace and name) that its own certificate names, and a learner talks to the syncer of the job that its own names.
What a certificate is good for otherwise (its authority, its time, server or client) is TLS's business.

A certificate without such a URI names nobody. Only a party whose own certificate names
nobody accepts it (both then rely on the authority alone, as an authority for one job may):
so a forgotten URI never opens what a named certificate closes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from diloco_protocol.vocabulary import ConnectionRefusal

SCHEME = "diloco"
SERVER_NAME = "diloco-syncer"
"""The host name that a syncer's certificate carries, whatever its address is."""
Role = Literal["syncer", "learner"]
_URI = re.compile(r"diloco://job/([^/]+)/([^/]+)/(syncer|learner)(?:/([^/]+))?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class IdentityError(ValueError):
    """A certificate's names make no sense, or are not its holder's; the message says which."""


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """One name in a certificate. ``region``: of a learner; empty: any."""

    namespace: str
    job: str
    role: Role
    region: str = ""

    @property
    def uri(self) -> str:
        """As it stands in the certificate."""
        tail = f"/{self.region}" if self.region else ""
        return f"{SCHEME}://job/{self.namespace}/{self.job}/{self.role}{tail}"

    def __str__(self) -> str:
        of = f" of region {self.region}" if self.region else ""
        return f"the {self.role}{of} of job {self.namespace}/{self.job}"


Names = frozenset[Name]
NO_NAMES: Names = frozenset()


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a peer is refused: a fixed word (a label of metrics), and a sentence with the cure."""

    reason: str
    message: str


def name(namespace: str, job: str, role: Role, region: str = "") -> Name:
    """A checked name. Raises ``IdentityError`` for what Kubernetes would not take as such a name."""
    for field, value in (("namespace", namespace), ("job", job), ("region", region)):
        if (value or field != "region") and not _LABEL.fullmatch(value):
            raise IdentityError(
                f"{field} {value[:80]!r}: expected lower-case letters, digits and '-', at most 63 characters"
            )
    if region and role != "learner":
        raise IdentityError(f"region {region!r}: only a learner has a region")
    return Name(namespace, job, role, region)


def parse(uri: str) -> Name:
    """The name in a ``diloco:`` URI. Raises ``IdentityError``."""
    match = _URI.fullmatch(uri)
    if match is None:
        raise IdentityError(f"{uri[:200]!r} is not diloco://job/NAMESPACE/NAME/syncer or …/learner or …/learner/REGION")
    namespace, job, role, region = match.groups(default="")
    return name(namespace, job, "syncer" if role == "syncer" else "learner", region)


def names_in(uris: Iterable[str]) -> Names:
    """All names among a certificate's URIs. Raises ``IdentityError`` if one is malformed, or if they are of
    different roles."""
    found = frozenset(parse(uri) for uri in uris if uri.lower().startswith(f"{SCHEME}:"))
    if len({one.role for one in found}) > 1:
        raise IdentityError("the certificate names a syncer and a learner: each has a certificate of its own")
    return found


def own_syncer(names: Names, job: str) -> Names:
    """What a syncer's own certificate says of this job. Raises ``IdentityError`` if it is not this job's."""
    mine = frozenset(one for one in names if (one.role, one.job) == ("syncer", job))
    if names and not mine:
        raise IdentityError(f"the certificate is for {_all(names)}, and this is the syncer of job {job!r}")
    return mine


def own_learner(names: Names, job: str, region: str | None) -> Names:
    """What a learner's own certificate says of this job. ``region`` None: an evaluator, which has none.

    Raises ``IdentityError`` if it is not good for this job and region.
    """
    mine = frozenset(one for one in names if (one.role, one.job) == ("learner", job))
    if names and not mine:
        raise IdentityError(f"the certificate is for {_all(names)}, and this is a learner of job {job!r}")
    if mine and region is not None and not covers(mine, region):
        raise IdentityError(f"the certificate is for {_all(mine)}, and this learner is in region {region!r}")
    return mine


def covers(names: Names, region: str) -> bool:
    """Whether a learner's certificate is good for this region. Names of nobody are: TLS was enough."""
    return not names or any(one.region in ("", region) for one in names)


def same_party(one: Names, other: Names) -> bool:
    """Whether two learners' certificates may be the same party's, before and after a change: they name
    a job's region in common, or nobody both."""
    if not one or not other:
        return one == other
    return any(
        (a.namespace, a.job) == (b.namespace, b.job) and (a.region == b.region or not (a.region and b.region))
        for a in one
        for b in other
    )


def check_learner(mine: Names, theirs: Names, job: str) -> Objection | None:
    """What a syncer with the names ``mine`` has against a client's certificate; None: nothing."""
    if not theirs and not mine:
        return None
    if not theirs:
        return Objection(ConnectionRefusal.UNNAMED, f"a certificate without {Name('NAMESPACE', job, 'learner').uri}")
    learners = frozenset(one for one in theirs if one.role == "learner")
    if not learners:
        return Objection(ConnectionRefusal.WRONG_ROLE, f"a certificate of {_all(theirs)}: only learners join")
    jobs = {(one.namespace, one.job) for one in mine}
    if not any((one.namespace, one.job) in jobs if jobs else one.job == job for one in learners):
        here = _all(mine) or f"the syncer of job {job}"
        return Objection(ConnectionRefusal.WRONG_JOB, f"a certificate of {_all(theirs)}: this is {here}")
    return None


def check_syncer(mine: Names, theirs: Names) -> Objection | None:
    """What a learner with the names ``mine`` has against a server's certificate; None: nothing."""
    if not mine:
        return None
    if not theirs:
        return Objection(
            ConnectionRefusal.UNNAMED, "the server's certificate names no job: issue it with the syncer's URI"
        )
    syncers = frozenset(one for one in theirs if one.role == "syncer")
    if not syncers:
        return Objection(
            ConnectionRefusal.WRONG_ROLE, f"the server shows a certificate of {_all(theirs)}: it is no syncer"
        )
    jobs = {(one.namespace, one.job) for one in mine}
    if not any((one.namespace, one.job) in jobs for one in syncers):
        own = ", ".join(sorted(f"{namespace}/{job}" for namespace, job in jobs))
        return Objection(
            ConnectionRefusal.WRONG_JOB, f"the server shows a certificate of {_all(theirs)}, not of job {own}"
        )
    return None


def _all(names: Names) -> str:
    return ", ".join(map(str, sorted(names)))
