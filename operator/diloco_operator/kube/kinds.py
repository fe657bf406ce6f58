"""The kinds of objects that the operator has to do with: where the API server has them, and what the
operator does with them.

``needs`` is the one definition of the operator's permissions: what it checks at its start, what
docs/operator.md says, and what the chart and manifests/install.yaml must grant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from diloco_protocol.vocabulary import DOMAIN, JOB_KIND, JOB_PLURAL, VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind. ``group`` is empty for the core API."""

    name: str
    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As ``apiVersion`` says it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str = "", sub: str = "") -> str:
        """The path of the collection, an object or its subresource; ``namespace`` None: of all."""
        parts = [f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"]
        if namespace is not None and self.namespaced:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        return "/".join([*parts, *([name] if name else []), *([sub] if sub else [])])


JOB = Kind(JOB_KIND, DOMAIN, VERSION, JOB_PLURAL)
POD = Kind("Pod", "", "v1", "pods")
NODE = Kind("Node", "", "v1", "nodes", namespaced=False)
STATEFUL_SET = Kind("StatefulSet", "apps", "v1", "statefulsets")
DEPLOYMENT = Kind("Deployment", "apps", "v1", "deployments")
SERVICE = Kind("Service", "", "v1", "services")
CONFIG_MAP = Kind("ConfigMap", "", "v1", "configmaps")
CLAIM = Kind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims")
DISRUPTION_BUDGET = Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets")
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies")
SECRET = Kind("Secret", "", "v1", "secrets")
EVENT = Kind("Event", "", "v1", "events")
LEASE = Kind("Lease", "coordination.k8s.io", "v1", "leases")
ACCESS_REVIEW = Kind(
    "SelfSubjectAccessReview", "authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False
)

CHILDREN = (STATEFUL_SET, DEPLOYMENT, SERVICE, CONFIG_MAP, CLAIM, DISRUPTION_BUDGET, NETWORK_POLICY)
"""What is applied for a job, watched by the job's label."""

LABELLED = (POD, *CHILDREN)
BY_NAME = {kind.name: kind for kind in (JOB, POD, NODE, *CHILDREN, SECRET, EVENT)}
WITH_PODS = frozenset({STATEFUL_SET.name, DEPLOYMENT.name})


class Need(NamedTuple):
    """One rule of RBAC. ``optional``: the operator does without it, and says what it does not do then."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    why: str
    optional: bool = False


OWN_NEEDS = (
    Need("", SECRET.plural, ("create",), "the root key"),
    Need(LEASE.group, LEASE.plural, ("get", "create", "patch"), "which of several operators acts"),
)
"""What the operator must be allowed to do in its own namespace."""


def needs(nodes: bool) -> tuple[Need, ...]:
    """What the operator must be allowed to do where its jobs are; ``nodes``: whether it watches nodes (not
    namespaced)."""
    applied = ("get", "list", "watch", "create", "patch", "delete")
    rules = [
        Need(
            DOMAIN,
            "dilocojobs",
            ("get", "list", "watch", "patch", "delete"),
            "the jobs; patch for the finalizer, delete when a job's time to live is over",
        ),
        Need(DOMAIN, "dilocojobs/status", ("patch",), "a job's status"),
        Need(DOMAIN, "dilocojobs/finalizers", ("update",), "to own objects where owners are checked"),
        Need("", "pods", ("get", "list", "watch", "delete"), "to see a job's pods and replace them"),
        *(Need(kind.group, kind.plural, applied, f"a job's {kind.name}s") for kind in CHILDREN),
        Need("", "secrets", ("create",), "a job's keys and certificates; none is ever read"),
        Need("", "events", ("list", "create", "patch"), "why a pod does not start; what happens to a job"),
    ]
    if nodes:
        rules.append(Need("", "nodes", ("list", "watch"), "lost nodes (nodeLoss)", optional=True))
    return tuple(rules)
