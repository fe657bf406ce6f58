"""A cluster as the command line sees it: a context of a kubeconfig, and words for what goes wrong with it.

Requests are those of the one Kubernetes client (``diloco_operator.kube.client``). Here are the contexts, the paths
of a namespace, and ``ClusterError``: each of its messages names the context, what failed, and the cure. Every request
ends within ``TIMEOUT`` seconds.

The client and the package ``kubernetes`` are loaded when a context is opened, not before: ``diloco run`` and
``--help`` work without them.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from diloco.console import FAILED, WRONG, CommandError
from diloco_operator.kube.errors import ApiError

if TYPE_CHECKING:
    from diloco_operator.kube.client import Client, RequestParts

from diloco_protocol.spec import kubectl_yaml
from diloco_protocol.vocabulary import DOMAIN, JOB_PLURAL, VERSION

TIMEOUT = 10.0  # seconds until an API server counts as not answering

MANAGER = "diloco"  # field manager of everything that this command line writes
INSTALL = "helm install diloco charts/diloco --namespace diloco-system --create-namespace"

Object = dict[str, Any]
"""One API object as the API server sends it."""


class ClusterError(CommandError):
    """What could not be done and the cure. ``reason`` is the API server's word, or ``Unreachable``, ``Busy``,
    ``NoCRD``, ``NoNamespace``, ``Settings``; ``code`` the exit code that fits; ``status`` the API server's Status."""

    def __init__(self, message: str, reason: str = "", code: int = FAILED, status: Object | None = None) -> None:
        super().__init__(message, code)
        self.reason = reason
        self.status = status or {}

    @property
    def passing(self) -> bool:
        """Whether asking again later may help: nobody answered, or an API server that starts or is overloaded."""
        return self.reason in ("Unreachable", "Busy")

    @property
    def causes(self) -> list[Object]:
        """The API server's list of what is wrong: ``field``, ``reason`` and ``message`` each."""
        return list((self.status.get("details") or {}).get("causes") or [])


@dataclass(frozen=True, slots=True)
class Where:
    """What the options ``--context``, ``--namespace`` and ``--kubeconfig`` said."""

    contexts: tuple[str, ...] = ()
    namespace: str | None = None
    kubeconfig: Path | None = None

    @property
    def given(self) -> bool:
        """Whether any of them was."""
        return bool(self.contexts or self.namespace or self.kubeconfig)

    def open(self) -> list[Cluster]:
        """Every context named, in order, or the current one. Raises ClusterError."""
        names: Sequence[str | None] = list(dict.fromkeys(self.contexts)) or [None]
        return [open_cluster(name, self.namespace, self.kubeconfig) for name in names]

    def open_one(self, which: str = "") -> Cluster:
        """For a command that takes one context. Raises ClusterError, which says ``which`` it is."""
        cluster, *more = self.open()
        if more:
            raise ClusterError(f"this takes one --context{which}", code=WRONG)
        return cluster


class Cluster:
    """One context of a kubeconfig: a cluster, an account and a namespace."""

    def __init__(self, client: Client, context: str, namespace: str, kubeconfig: Path | None = None) -> None:
        self.client = client
        self.context = context
        self.namespace = namespace
        self._named = f" --kubeconfig {kubeconfig}" if kubeconfig else ""

    @property
    def reach(self) -> str:
        """The options, of this program and of kubectl, that lead to this cluster."""
        return f"--context {self.context}{self._named}"

    @property
    def flags(self) -> str:
        return f"{self.reach} -n {self.namespace}"

    # ------------------------------------------------------------------ paths

    def jobs_path(self, everywhere: bool = False) -> str:
        """The jobs of this namespace, or of all."""
        base = f"/apis/{DOMAIN}/{VERSION}"
        return f"{base}/{JOB_PLURAL}" if everywhere else f"{base}/namespaces/{self.namespace}/{JOB_PLURAL}"

    def job_path(self, name: str) -> str:
        return f"{self.jobs_path()}/{name}"

    def core_path(self, resource: str) -> str:
        """``pods``, ``events`` … of this namespace."""
        return f"/api/v1/namespaces/{self.namespace}/{resource}"

    def pod_path(self, pod: str, *below: str) -> str:
        return "/".join([self.core_path("pods"), pod, *below])

    # ------------------------------------------------------------------ requests

    def get(self, path: str, **query: Any) -> Object:
        return self.request("GET", path, query=query)

    def find(self, path: str) -> Object | None:
        """One object; None: it is not there. Raises ClusterError."""
        try:
            return self.get(path)
        except ClusterError as error:
            if error.reason != "NotFound":
                raise
        return None

    def request(self, method: str, path: str, *, seconds: float = TIMEOUT, **parts: Unpack[RequestParts]) -> Object:
        """One request; the reply's JSON object. Raises ClusterError."""
        try:
            return self.client.request(method, path, seconds=seconds, **parts)
        except ApiError as error:
            raise self.explain(path, error, seconds) from error

    @contextlib.contextmanager
    def stream(self, path: str, query: dict[str, Any], silence: float | None) -> Iterator[Any]:
        """A reply as it comes: urllib3's response, its bytes unread. ``silence``: seconds without a byte
        that are borne; None: any. Raises ClusterError."""
        with contextlib.ExitStack() as stack:
            try:
                reply = stack.enter_context(self.client.stream("GET", path, query=query, silence=silence))
            except ApiError as error:
                raise self.explain(path, error) from error
            yield reply

    # ------------------------------------------------------------------ what went wrong

    @property
    def server(self) -> str:
        return f"{self.client.host} (context {self.context})"

    def explain(self, path: str, error: ApiError, seconds: float = TIMEOUT) -> ClusterError:
        """A request for ``path`` that failed, in words for people."""
        if error.reason == "Credentials":
            return ClusterError(f"context {self.context}: {error}", "Settings", WRONG)
        if isinstance(error.__cause__, Exception) and error.status == 0:
            return self._unreachable(error.__cause__, seconds)
        if error.status == 0 or (error.status == 400 and isinstance(error.__cause__, UnicodeError)):
            return ClusterError(f"context {self.context}: {error}", code=WRONG if error.status else FAILED)
        return self._refusal(path, error)

    def _unreachable(self, error: Exception, seconds: float) -> ClusterError:
        text = str(error.__cause__ or error)
        kind = type(error).__name__
        cure = "is it running, and this machine's network (or VPN) up?"
        if "SSL" in kind or "certificate" in text.lower():
            why = f"does not show a certificate that the kubeconfig trusts ({text})"
            cure = "is this the right cluster, and its kubeconfig current?"
        elif "Timeout" in kind:
            why = f"does not answer within {seconds:g} s"
        elif "NameResolution" in kind:
            why = "has a name that does not resolve"
        else:
            why = f"cannot be reached ({reason_of(text)})"
        return ClusterError(f"{self.server} {why}: {cure}", "Unreachable")

    def _refusal(self, path: str, error: ApiError) -> ClusterError:
        """What a reply with a status of 300 and above means."""
        code, status, message = error.status, error.document, str(error)
        reason = error.reason or str(code)
        details = status.get("details") or {}
        if code == 401:
            return ClusterError(
                f"{self.server} does not know this account: the kubeconfig's credentials are wrong or have"
                " expired; log in again",
                "Unauthorized",
                WRONG,
            )
        if code == 403 and reason == "Forbidden" and not error.over_quota:
            if path.endswith("/portforward") and not _FORBIDDEN.search(message):
                # The right to create one is asked for after the one to get it, and not named.
                message = f'cannot create resource "pods/portforward" in the namespace "{self.namespace}"'
            said = f"context {self.context}: {forbidden(message)}"
            return ClusterError(said, "Forbidden", status=status)
        if code == 404 and details.get("kind") == "namespaces":
            name = details.get("name") or self.namespace
            return ClusterError(
                f"context {self.context}: there is no namespace {name}; create it"
                f" (kubectl {self.reach} create namespace {name}), or name another with -n",
                "NoNamespace",
                WRONG,
                status,
            )
        if code == 404 and f"/apis/{DOMAIN}/" in path and not details.get("name"):
            return ClusterError(
                f"context {self.context}: the cluster knows no DiLoCoJobs: the operator is not installed."
                f" Install it: {INSTALL} --kube-context {self.context}{self._named}"
                f" (without Helm: kubectl {self.reach} apply -f manifests/install.yaml)",
                "NoCRD",
            )
        if code == 429 or code >= 500:
            said = f"{self.server} cannot answer now ({' '.join(message.split())}): try again"
            return ClusterError(said, "Busy", status=status)
        return ClusterError(f"context {self.context}: {message}", reason, FAILED, status)

    # ------------------------------------------------------------------ jobs

    def job(self, name: str) -> Object:
        """The DiLoCoJob ``name``. Raises ClusterError; of one that is not there, the message lists the
        jobs that are, the nearest name first."""
        if (job := self.find(self.job_path(name))) is not None:
            return job
        there = ""
        with contextlib.suppress(ClusterError):
            there = nearest(name, [str(job["metadata"]["name"]) for job in self.jobs()])
        place = f"the namespace {self.namespace} of context {self.context}"
        raise ClusterError(f"there is no job {name} in {place}{there}", "NotFound", WRONG)

    def jobs(self, everywhere: bool = False) -> list[Object]:
        """All jobs of this namespace, or of all. Raises ClusterError."""
        return self.all_of(self.jobs_path(everywhere))

    def all_of(self, path: str, **query: Any) -> list[Object]:
        """A whole list, read in pages. Raises ClusterError."""
        try:
            return [item for page in self.client.pages(path, query=query) for item in page.get("items") or ()]
        except ApiError as error:
            raise self.explain(path, error) from error

    def pods(self, job: str, role: str | None = None) -> list[Object]:
        """The job's pods, those that are going included. Raises ClusterError."""
        selector = f"{DOMAIN}/job={job}" + (f",{DOMAIN}/role={role}" if role else "")
        return self.all_of(self.core_path("pods"), labelSelector=selector)


def reason_of(text: str) -> str:
    """The words at the end of a chain of network errors: ``… [Errno 111] Connection refused``."""
    return text.rpartition("] ")[2].rstrip("')\" ") or text


def nearest(name: str, there: Sequence[str], shown: int = 10) -> str:
    """What to say of the names that are there: a guess at the one that was meant, and a list."""
    if not there:
        return "; there is none"
    close = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    rest = sorted(there)
    listed = ", ".join(rest[:shown]) + (f" and {len(rest) - shown} more" if len(rest) > shown else "")
    head = f"; did you mean {close[0]}? There" if close else "; there"
    return f"{head} {'is' if len(rest) == 1 else f'are {len(rest)}'}: {listed}"


_FORBIDDEN = re.compile(r'cannot (\w+) resource "([^"]+)"(?: in API group "([^"]*)")?(.*)', re.DOTALL)


def forbidden(message: str) -> str:
    """The API server's refusal of an account, with the rights to ask for."""
    match = _FORBIDDEN.search(message)
    if match is None:
        return message
    verb, resource, group, place = match.groups()
    # A websocket is asked for with GET, and newer API servers want the right to create it, too.
    verb = "get and create" if resource == "pods/portforward" else verb
    role = "ClusterRole" if "cluster scope" in place else "Role"
    resource = f"{resource}.{group}" if group else resource
    return f"this account may not {verb} {resource}{place}; ask for a {role} with that verb and resource"


# ------------------------------------------------------------------ kubeconfig


def _yaml_problem(files: Sequence[str]) -> str:
    """Which of the files is not YAML, and why."""
    for file in files:
        try:
            kubectl_yaml.parse(Path(file).expanduser().read_text(encoding="utf-8"))
        except kubectl_yaml.YamlProblem as problem:
            return f"{file}{'' if problem.line is None else f', line {problem.line}'}: {problem.message}"
        except (OSError, UnicodeDecodeError) as error:
            return f"{file}: {error}"
    return f"{os.pathsep.join(files)}: not YAML"


def open_cluster(context: str | None, namespace: str | None, kubeconfig: Path | None) -> Cluster:
    """The named context of the kubeconfig, or its current one; in a pod without a kubeconfig, the pod's
    own account. Raises ClusterError."""
    try:
        from kubernetes import client, config
        from yaml import YAMLError

        from diloco_operator.kube.client import Client
    except ImportError as error:
        raise ClusterError(
            "the package kubernetes is not installed: pip install 'decoupled-diloco[kube]'", "Settings", WRONG
        ) from error
    # At the client's own import KUBECONFIG was read; here it is read as it is now.
    paths = str(kubeconfig) if kubeconfig else os.environ.get("KUBECONFIG") or "~/.kube/config"
    present = [one for one in paths.split(os.pathsep) if one and Path(one).expanduser().is_file()]
    configuration = client.Configuration()

    def connect(name: str, own: str) -> Cluster:
        # 100 connections: streams of logs, one a pod
        return Cluster(Client(configuration, MANAGER, 100, TIMEOUT), name, namespace or own, kubeconfig)

    try:
        if not present and kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
            own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
            return connect("in-cluster", own)
        if not present:
            raise ClusterError(
                f"there is no kubeconfig at {paths}: name one with --kubeconfig or the variable KUBECONFIG",
                "Settings",
                WRONG,
            )
        contexts, current = config.list_kube_config_contexts(os.pathsep.join(present))
        name = context if context is not None else (current or {}).get("name")
        found = next((one for one in contexts if one["name"] == name), None)
        if found is None:
            known = [str(one["name"]) for one in contexts]
            said = "names no current context" if name is None else f"knows no context {name}"
            raise ClusterError(f"{paths} {said}{nearest(name or '', known)}", "Settings", WRONG)
        config.load_kube_config(
            os.pathsep.join(present), name, client_configuration=configuration, persist_config=False
        )
    except YAMLError as error:
        raise ClusterError(f"the kubeconfig cannot be used: {_yaml_problem(present)}", "Settings", WRONG) from error
    except (config.ConfigException, OSError, KeyError, TypeError, ValueError) as error:
        raise ClusterError(f"the kubeconfig {paths} cannot be used: {error}", "Settings", WRONG) from error
    own = (found.get("context") or {}).get("namespace") or "default"
    return connect(str(name), own)
