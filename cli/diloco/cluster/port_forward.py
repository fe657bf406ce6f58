"""Port-forward: a pod's port as a port of this machine's loopback, through the API server.

    with forwarded(cluster, "tiny-gpt-syncer-5d8", 7703) as forward:
        fetch(f"http://{forward.address}/")

It reaches what listens on a pod's own loopback, past every NetworkPolicy, for accounts that may create
``pods/portforward``. Every connection to the local port is one websocket to the API server (subprotocol
``v4.channel.k8s.io``): frames whose first byte is the channel, 0 for data and 1 for errors of the node, each channel
opening with a frame that repeats the port's number.

The official client has a port-forward of its own. It keeps all that a slow reader has not taken in one growing
``bytes`` object, which is copied at each send, and drops what is left when the far end hangs up; a model of gigabytes
neither fits nor arrives. Here nothing is kept: a frame is handed to the reader before the next one is read, so that TCP
slows the sender down.

The protocol has no half-closed connections: either end's close ends both directions.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from typing import Any

from diloco.cluster.client import TIMEOUT, Cluster, ClusterError
from diloco_operator.kube.errors import ApiError, refusal

STALL_SECONDS = 120.0  # that one frame may take to come whole, or to be taken by the reader
PING_SECONDS = 20.0
PROTOCOL = "v4.channel.k8s.io"
MAX_CONNECTIONS = 16
_READ = 64 << 10
_DATA, _ERROR = 0, 1


class Forward:
    """A pod's port that listens on this machine. ``address`` is host:port; ``problem`` says what the node
    or the connection last complained of (nothing listens there, the pod is gone), else it is None."""

    def __init__(self, cluster: Cluster, pod: str, port: int, first: Any) -> None:
        self._cluster = cluster
        self._pod = pod
        self._port = port
        self._first: Any = first  # the websocket that showed that this account may forward
        self.problem: str | None = None
        self._closed = threading.Event()
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.2)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name=f"forward {self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections end within a second."""
        self._closed.set()
        self._thread.join(5.0)
        self._listener.close()
        if self._first is not None:
            _close(self._first)

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self._room.acquire(timeout=0.2):
                continue
            try:
                local, _ = self._listener.accept()
            except OSError:  # the timeout, or the listener closed
                self._room.release()
                continue
            threading.Thread(target=self._serve, args=(local,), daemon=True).start()

    def _serve(self, local: socket.socket) -> None:
        far, self._first = self._first, None
        try:
            with local:
                local.settimeout(STALL_SECONDS)
                far = far or dial(self._cluster, self._pod, self._port)
                self._pump(local, far)
        except ClusterError as error:
            self.problem = str(error)
        except Exception as error:  # the library's and the network's; the reader sees its connection end
            if not self._closed.is_set():
                self.problem = f"the connection to the pod {self._pod} broke: {error or type(error).__name__}"
        finally:
            if far is not None:
                _close(far)
            self._room.release()

    def _pump(self, local: socket.socket, far: Any) -> None:
        """Carry bytes both ways until either end closes."""
        from websocket import ABNF

        opened = set()  # channels whose first frame has come
        poll = select.poll()
        for one in (local, far.sock):
            poll.register(one, select.POLLIN)
        heard = time.monotonic()
        while not self._closed.is_set():
            if time.monotonic() - heard > PING_SECONDS:
                far.ping()  # what stands between may end connections that look idle
                heard = time.monotonic()
            waiting = isinstance(far.sock, ssl.SSLSocket) and far.sock.pending() > 0
            ready = {number for number, _ in poll.poll(0 if waiting else 500)}
            if local.fileno() in ready:
                data = local.recv(_READ)
                if not data:
                    return
                far.send_binary(bytes([_DATA]) + data)
            if not waiting and far.sock.fileno() not in ready:
                continue
            opcode, data = far.recv_data(control_frame=True)
            heard = time.monotonic()
            if opcode == ABNF.OPCODE_CLOSE:
                return
            if opcode != ABNF.OPCODE_BINARY or not data:
                continue
            channel = data[0]
            if channel not in opened:
                opened.add(channel)  # the port's number
            elif channel == _DATA:
                local.sendall(memoryview(data)[1:])
            elif channel == _ERROR:
                text = data[1:].decode("utf-8", "replace").strip()
                self.problem = explain(text, self._pod, self._port)
                return


def forwarded(cluster: Cluster, pod: str, port: int, seconds: float = TIMEOUT) -> contextlib.closing[Forward]:
    """The pod's port on this machine while the block runs. Raises ClusterError if this account may not
    forward, the pod is not there, or the API server does not answer within ``seconds``."""
    return contextlib.closing(Forward(cluster, pod, port, dial(cluster, pod, port, seconds)))


def explain(text: str, pod: str, port: int) -> str:
    """What the node says of a port that could not be reached, shorter."""
    if "refused" in text:
        return f"nothing listens on port {port} in the pod {pod} (yet)"
    return f"the pod {pod}: {text}"


def dial(cluster: Cluster, pod: str, port: int, seconds: float = TIMEOUT) -> Any:
    """A websocket to the pod's port; the official client's own has no timeout. Raises ClusterError."""
    import websocket
    from kubernetes.stream.ws_client import websocket_proxycare

    configuration = cluster.client.config
    path = cluster.pod_path(pod, "portforward")
    url = "ws" + configuration.host.removeprefix("http") + f"{path}?ports={port}"
    try:
        headers = [f"{key}: {value}" for key, value in cluster.client.authorization().items()]
    except ApiError as error:
        raise cluster.explain(path, error) from error
    options: dict[str, Any] = {"header": headers, "subprotocols": [PROTOCOL]}
    if configuration.proxy or configuration.proxy_headers:
        options = websocket_proxycare(options, configuration, url, {})
    far = websocket.WebSocket(sslopt=_tls(configuration), skip_utf8_validation=True)
    far.settimeout(seconds)
    try:
        far.connect(url, **options)
    except websocket.WebSocketBadStatusException as error:
        body = getattr(error, "resp_body", None) or b""
        raise cluster.explain(path, refusal("get", path, error.status_code, body)) from error
    except websocket.WebSocketTimeoutException as error:
        raise ClusterError(
            f"{cluster.server} opens no connection to the pod {pod} within {seconds:g} s: is its node up?",
            "Unreachable",
        ) from error
    except (websocket.WebSocketException, OSError, ValueError) as error:
        raise ClusterError(f"{cluster.server} opens no connection to the pod {pod}: {error}", "Unreachable") from error
    far.settimeout(STALL_SECONDS)
    return far


def _tls(configuration: Any) -> dict[str, Any]:
    """The configuration's certificates as the websocket library takes them."""
    options: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE, "check_hostname": False}
    if configuration.verify_ssl:
        options = {"cert_reqs": ssl.CERT_REQUIRED}
        if configuration.ssl_ca_cert:
            options["ca_certs"] = configuration.ssl_ca_cert
        if configuration.assert_hostname is not None:
            options["check_hostname"] = configuration.assert_hostname
    if configuration.cert_file:
        options["certfile"], options["keyfile"] = configuration.cert_file, configuration.key_file
    if configuration.tls_server_name:
        options["server_hostname"] = configuration.tls_server_name
    return options


def _close(far: Any) -> None:
    with contextlib.suppress(Exception):  # it ends here, however it takes that
        far.close(timeout=1)
