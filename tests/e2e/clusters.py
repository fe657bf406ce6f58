"""Real Kubernetes clusters for the tests: localkube, kind, or the one that KUBECONFIG names.

CLUSTER=localkube|kind|current chooses (default: the first that is there); CLUSTER_NAME names
a cluster that is made; KEEP=1 leaves it running, and a running one is used again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import yaml

from patience import WaitFailed, wait_until
from repository import ROOT as ROOT


class CommandFailed(AssertionError):
    """A command that had to work did not; the message has its output."""


def run(*command: str, check: bool = True, timeout: float = 120, stdin: str | None = None, **env: str) -> str:
    """The command's stdout. Raises CommandFailed with all that it said."""
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout, env={**os.environ, **env}, check=False
    )
    if check and done.returncode:
        raise CommandFailed(
            f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done.stdout


def delete_at_end(config: pytest.Config, delete: Callable[[], None]) -> None:
    """Delete clusters when all tests have ended, unless KEEP is set.

    It takes minutes on a slow disk, for which the last test's time limit is not meant.
    """
    if not os.environ.get("KEEP"):
        config.add_cleanup(delete)


# What a command or a request raises that failed, or got no answer in time.
FAILURES = (CommandFailed, OSError, http.client.HTTPException, subprocess.TimeoutExpired)
PATIENCE = 60.0  # seconds for which a read outside of ``until`` is repeated
T = TypeVar("T")
_repeated = threading.local()  # ``depth``: how many callers repeat what this thread reads now


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    """Reads raise their first failure meanwhile: who called them repeats them."""
    _repeated.depth = getattr(_repeated, "depth", 0) + 1
    try:
        yield
    finally:
        _repeated.depth -= 1


def until(
    what: str, condition: Callable[[], Any], timeout: float, *moves: Callable[[], Any], every: float = 0.5
) -> Any:
    """Wait for the first true value of ``condition``; errors count as false, and the last one is told.

    ``timeout``: for so many seconds nothing has moved in the clusters (``Cluster.pods_and_events``), nor in ``moves``.
    How long an image, a node or a pod takes is the machine's business.
    """
    problem: Exception | None = None

    def holds() -> Any:
        nonlocal problem
        try:
            with repeating():
                value = condition()
            problem = None
            return value
        except (*FAILURES, KeyError, IndexError, ValueError) as error:
            problem = error
            return None

    try:
        return wait_until(holds, what, *Cluster.all_open, *moves, silent=timeout, every=every)
    except WaitFailed as error:
        raise WaitFailed(f"{error}" + (f" ({problem})" if problem else "")) from None


def is_answer(error: Exception) -> bool:
    """Whether the server has answered, and would answer the same again: there is no such thing, or it is forbidden."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code < 500 and error.code != 429
    return "(NotFound)" in str(error) or "(Forbidden)" in str(error)


def read_patiently(read: Callable[[], T], is_final: Callable[[Exception], bool] = is_answer) -> T:
    """What ``read`` returns. Without an answer it is repeated for PATIENCE seconds, as a busy machine's API server or
    syncer may stand still for some. Below ``until``, which repeats it as well, it is not.

    Raises what ``read`` raises: at once where ``is_final`` says that it would raise the same again.
    """
    if getattr(_repeated, "depth", 0):
        return read()
    problem: Exception | None = None

    def answer() -> tuple[T] | None:
        nonlocal problem
        try:
            with repeating():
                return (read(),)
        except (OSError, http.client.HTTPException) as error:
            if is_final(error):
                raise
            problem = error
            return None

    try:
        return wait_until(answer, "an answer", *Cluster.all_open, silent=PATIENCE, every=0.5)[0]
    except WaitFailed as error:
        raise problem or error from None


# What kubectl says where the API server could not be asked, or could not do what it was asked. Said in another case
# too, it costs a repetition.
NO_ANSWER = (
    "etcdserver: ",
    "TLS handshake timeout",
    "(ServiceUnavailable)",
    "(Timeout)",
    "(TooManyRequests)",
    "Unable to connect to the server",
    "was refused - did you specify the right host or port",
    "connection reset by peer",
    "i/o timeout",
    "unexpected EOF",
    "http2: client connection lost",
    "request canceled",
)


def is_repeatable(words: Sequence[str]) -> bool:
    """Whether kubectl with these words does the same when it is run once more."""
    verb = words[0] if words else ""
    if verb == "patch":
        return "json" not in words and "--type=json" not in words  # a list of operations
    if verb == "delete":
        return "--ignore-not-found" in words
    return verb in ("apply", "scale", "label", "annotate", "get", "rollout")


# Links that ``without_link`` cuts, as rules of iptables in a node's own network. The API server of kind and localkube
# listens at 6443.
LINKS = {
    # What the node's pods send to other nodes and hear from them, but for the API server.
    "pods": (
        ("FORWARD", "-p", "tcp", "-m", "multiport", "--ports", "6443", "-j", "ACCEPT"),
        ("FORWARD", "-i", "eth0", "-j", "DROP"),
        ("FORWARD", "-o", "eth0", "-j", "DROP"),
    ),
    # What the node's kubelet and pods send to the API server; other pods they reach as before.
    "api": (("POSTROUTING", "-p", "tcp", "--dport", "6443", "-j", "DROP"),),
}


class _NoAnswer(OSError):
    """kubectl got no answer: ``error`` says it."""

    def __init__(self, error: CommandFailed | subprocess.TimeoutExpired) -> None:
        super().__init__(str(error))
        self.error = error


class Cluster:
    """One cluster, reached with kubectl, helm, and the API server's own HTTP."""

    can: frozenset[str] = frozenset()  # which faults can be made: node, isolate, links, api, fake-nodes
    all_open: ClassVar[list[Callable[[], Any]]] = []  # what waits watch: ``pods_and_events`` of each

    def __init__(self, name: str, kubeconfig: Path, context: str | None = None) -> None:
        self.name, self.kubeconfig = name, kubeconfig
        self.loading: dict[str, Future[None]] = {}  # images on their way, by role
        self._figure: Any = None  # of ``pods_and_events``, and when it may be read again
        self._read_next = 0.0
        self.all_open.append(self.pods_and_events)
        document = yaml.safe_load(kubeconfig.read_text())
        self.context = context or document["current-context"]
        entry = next(c["context"] for c in document["contexts"] if c["name"] == self.context)
        cluster = next(c["cluster"] for c in document["clusters"] if c["name"] == entry["cluster"])
        user = next((u["user"] for u in document["users"] if u["name"] == entry["user"]), {})
        self.server = cluster["server"]
        self._token = user.get("token")
        self._tls = ssl.create_default_context()
        if "certificate-authority-data" in cluster:
            import base64

            self._tls = ssl.create_default_context(
                cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
            )

    # ------------------------------------------------------------- commands

    def kubectl(self, *args: str, check: bool = True, timeout: float = 90, stdin: str | None = None) -> str:
        """What kubectl prints. What can be repeated is, for PATIENCE seconds, while the API server gives no answer.

        Raises CommandFailed where ``check``, and subprocess.TimeoutExpired.
        """
        command = ("kubectl", "--kubeconfig", str(self.kubeconfig), "--context", self.context, *args)

        def once() -> str:
            try:
                return run(*command, check=check, timeout=timeout, stdin=stdin)
            except (CommandFailed, subprocess.TimeoutExpired) as error:
                timed_out = isinstance(error, subprocess.TimeoutExpired)
                if timed_out or any(words in str(error) for words in NO_ANSWER):
                    raise _NoAnswer(error) from error
                raise

        try:
            return read_patiently(once) if check and is_repeatable(args) else once()
        except _NoAnswer as error:
            raise error.error from None

    def logs(self, *args: str) -> str:
        """What `kubectl logs` prints. Raises AssertionError for a pod whose node has no file of its log."""
        said = self.kubectl("logs", *args)
        assert "failed to try resolving symlinks" not in said, said[:1000]
        return said

    def helm(self, *args: str, check: bool = True, timeout: float = 300) -> str:
        command = ("helm", "--kubeconfig", str(self.kubeconfig), "--kube-context", self.context, *args)
        return run(*command, check=check, timeout=timeout)

    def diloco(self, *args: str, check: bool = True, timeout: float = 120) -> str:
        """The command line of this checkout, on this cluster."""
        import sys

        program = Path(sys.executable).with_name("diloco")
        extra = ("--kubeconfig", str(self.kubeconfig), "--context", self.context)
        return run(str(program), *args, *extra, check=check, timeout=timeout)

    def apply(self, *objects: dict[str, Any], namespace: str = "default") -> str:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        return self.kubectl("apply", "-n", namespace, "-f", "-", stdin=text)

    # ------------------------------------------------------------- the API, quickly

    def raw(self, path: str, timeout: float = 5) -> bytes:
        """GET below the API server, repeated while there is no answer within ``timeout``. Raises OSError."""
        return read_patiently(lambda: self._get(path, timeout))

    def _get(self, path: str, timeout: float) -> bytes:
        if self._token is None:  # client certificates: kubectl knows how
            try:
                return self.kubectl("get", "--raw", path, timeout=timeout + 5).encode()
            except (CommandFailed, subprocess.TimeoutExpired) as error:
                raise OSError(str(error)) from error
        request = urllib.request.Request(self.server + path, headers={"Authorization": f"Bearer {self._token}"})
        with urllib.request.urlopen(request, timeout=timeout, context=self._tls) as answer:
            return bytes(answer.read())

    def api(self, path: str) -> dict[str, Any] | None:
        """A JSON object of the API server; None: not found."""
        try:
            return dict(json.loads(self.raw(path)))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        except OSError as error:
            if "NotFound" in str(error):
                return None
            raise

    def items(self, path: str, selector: str = "") -> list[dict[str, Any]]:
        from urllib.parse import quote

        document = self.api(path + (f"?labelSelector={quote(selector)}" if selector else ""))
        return list(document["items"]) if document else []

    def pods_and_events(self) -> Any:
        """What changes while the cluster is about something: its nodes, the states of its pods, and its normal events.

        Of warnings the same come again and again, and a job that trains writes its status all the time: these are not
        in it. It is read every 5 seconds at most, and rarely from a server that does not answer: then it stays as it
        was.
        """
        if time.monotonic() < self._read_next:
            return self._figure
        self._read_next = time.monotonic() + 60.0
        with contextlib.suppress(*FAILURES, ValueError), repeating():
            nodes = [
                (node["metadata"]["uid"], [(c["type"], c["status"]) for c in node["status"].get("conditions", [])])
                for node in self._items_now("/api/v1/nodes")
            ]
            pods = [
                (
                    pod["metadata"]["uid"],
                    pod["status"].get("phase"),
                    "deletionTimestamp" in pod["metadata"],
                    [(c["ready"], sorted(c["state"])) for c in pod["status"].get("containerStatuses", [])],
                )
                for pod in self._items_now("/api/v1/pods")
            ]
            events = self._items_now("/api/v1/events")
            self._figure = nodes, pods, sorted(e["metadata"]["uid"] for e in events if e["type"] == "Normal")
            self._read_next = time.monotonic() + 5.0
        return self._figure

    def _items_now(self, path: str) -> list[dict[str, Any]]:
        return list(json.loads(self._get(path, timeout=2.0))["items"])

    # ------------------------------------------------------------- life and faults

    def load(self, tags: Sequence[str]) -> None:
        raise NotImplementedError

    def down(self) -> None:
        """Delete the cluster, if the tests made it."""

    def nodes(self) -> list[str]:
        return sorted(n["metadata"]["name"] for n in self.items("/api/v1/nodes"))

    def fault(self, *words: str) -> None:
        """localkube's words: stop-node N, start-node N, isolate N, rejoin N, stop-api, start-api, and of
        links to other clusters cut, heal, slow RATE, fast."""
        raise NotImplementedError(f"{type(self).__name__} cannot do {words}")

    def run_in_node(self, number: int, *command: str) -> str:
        """Run a command in a node's network; its stdout. Raises CommandFailed."""
        raise NotImplementedError(f"{type(self).__name__} cannot do {command} in a node")

    @contextlib.contextmanager
    def without_link(self, link: str, number: int) -> Iterator[None]:
        """The node is without this one of LINKS meanwhile."""
        made = []
        try:
            for rule in LINKS[link]:
                self.run_in_node(number, "iptables", "-w", "-t", "mangle", "-A", *rule)
                made.append(rule)
            yield
        finally:
            for rule in made:
                self.run_in_node(number, "iptables", "-w", "-t", "mangle", "-D", *rule)

    def link_bytes(self) -> tuple[int, int]:
        """What the link of its first node has received and sent, in bytes, as the kernel counts."""
        raise NotImplementedError(f"{type(self).__name__} does not count")


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


class LocalKube(Cluster):
    can = frozenset({"node", "isolate", "links", "api", "fake-nodes"})

    def __init__(self, program: str, name: str, nodes: int) -> None:
        self._program = program
        env = run(program, "env").strip()
        folder = env.removeprefix("export PATH=").removesuffix(":$PATH")
        if folder not in os.environ["PATH"].split(":"):
            os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        kubeconfig = run(program, "up", name, "--nodes", str(nodes), timeout=600).strip().splitlines()[-1]
        super().__init__(name, Path(kubeconfig))
        self._separate_pod_logs()

    def _separate_pod_logs(self) -> None:
        """Give each node its own directory for the logs of its pods.

        localkube's nodes share /var/log/pods of their machine. Once a minute a kubelet removes from there the logs of
        pods that it does not know, which are the other nodes' pods. So each kubelet is started again with another
        directory; its pods run on.
        """
        folder = self.kubeconfig.parent
        for file in sorted(folder.glob("pid/kubelet-*")):
            node, pid = file.name.removeprefix("kubelet-"), int(file.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
            settings = folder / f"kubelet-{node}.yaml"
            own = folder / f"kubelet-{node}-pod-logs.yaml"
            if f"--config={settings}" not in command:
                continue
            own.write_text(f"{settings.read_text()}podLogsDir: {folder}/pod-logs-{node}\n")
            command[command.index(f"--config={settings}")] = f"--config={own}"
            os.kill(pid, signal.SIGTERM)
            until(f"the kubelet of node {node} has ended", lambda pid=pid: not is_running(pid), 30, every=0.1)
            network = f"--net=/run/netns/lk-{self.name}-{node}"
            with (folder / "log" / f"kubelet-{node}.log").open("ab") as log:
                kubelet = subprocess.Popen(
                    ["nsenter", network, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            file.write_text(f"{kubelet.pid}\n")

    def load(self, tags: Sequence[str]) -> None:
        run(self._program, "load", self.name, *tags, timeout=900)

    def fault(self, *words: str) -> None:
        run(self._program, words[0], self.name, *words[1:], timeout=180)
        if words[0] == "start-node":
            self._separate_pod_logs()

    def run_in_node(self, number: int, *command: str) -> str:
        return run("ip", "netns", "exec", f"lk-{self.name}-{number}", *command)

    def link_bytes(self) -> tuple[int, int]:
        words = run(self._program, "bytes", self.name).splitlines()[0].split()
        received, sent = (int(word) for word in words if word.isdigit())
        return received, sent

    def down(self) -> None:
        run(self._program, "down", self.name, timeout=600)


class Kind(Cluster):
    can = frozenset({"node", "isolate", "links", "api"})

    def __init__(self, name: str, nodes: int) -> None:
        self._kind = name
        if name not in run("kind", "get", "clusters").split():
            roles = [{"role": "control-plane"}, *({"role": "worker"} for _ in range(nodes - 1))]
            config = yaml.safe_dump({"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": roles})
            run("kind", "create", "cluster", "--name", name, "--config", "-", stdin=config, timeout=600)
        path = Path(os.environ.get("TMPDIR", "/tmp")) / f"kind-{name}.kubeconfig"
        path.write_text(run("kind", "get", "kubeconfig", "--name", name))
        path.chmod(0o600)
        super().__init__(name, path)

    def load(self, tags: Sequence[str]) -> None:
        run("kind", "load", "docker-image", "--name", self._kind, *tags, timeout=900)

    def fault(self, *words: str) -> None:
        node = self.nodes()[int(words[1])] if len(words) > 1 else f"{self._kind}-control-plane"
        docker = {
            "stop-node": ("stop", node),
            "start-node": ("start", node),
            "isolate": ("network", "disconnect", "kind", node),
            "rejoin": ("network", "connect", "kind", node),
        }
        if words[0] in docker:
            run("docker", *docker[words[0]], timeout=120)
        elif words[0] == "stop-api":
            manifest = "/etc/kubernetes/manifests/kube-apiserver.yaml"
            run("docker", "exec", node, "mv", manifest, "/etc/kubernetes/apiserver.away")
        else:
            manifest = "/etc/kubernetes/manifests/kube-apiserver.yaml"
            run("docker", "exec", node, "mv", "/etc/kubernetes/apiserver.away", manifest)

    def run_in_node(self, number: int, *command: str) -> str:
        return run("docker", "exec", self.nodes()[number], *command)

    def down(self) -> None:
        run("kind", "delete", "cluster", "--name", self._kind, timeout=600)


class Current(Cluster):
    """The cluster of KUBECONFIG; its nodes have the images, or pull them from IMAGE_REGISTRY."""

    def __init__(self) -> None:
        path = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
        super().__init__("current", path)

    def load(self, tags: Sequence[str]) -> None:
        pass


def localkube() -> str | None:
    """The localkube program, from LOCALKUBE or PATH."""
    return os.environ.get("LOCALKUBE") or shutil.which("localkube")


def open_cluster(name: str | None = None, nodes: int = 2) -> Cluster | str:
    """The cluster that CLUSTER asks for, or why there is none."""
    kind = os.environ.get("CLUSTER") or (
        "localkube"
        if localkube()
        else "kind"
        if shutil.which("kind")
        else "current"
        if "KUBECONFIG" in os.environ
        else ""
    )
    name = name or os.environ.get("CLUSTER_NAME", "dilocoe2e")
    if kind == "localkube":
        program = localkube()
        return LocalKube(program, name, nodes) if program else "CLUSTER=localkube, but LOCALKUBE names no program"
    if kind == "kind":
        return Kind(name, nodes) if shutil.which("kind") else "CLUSTER=kind, but kind is not on PATH"
    if kind == "current":
        return Current()
    return "no cluster: set CLUSTER=localkube|kind|current (and LOCALKUBE or KUBECONFIG)"
