"""Whether an address can be reached from this machine, and why not, in words: the texts of all commands.

Each wait has an end: the system's resolver takes no time limit, so a name is resolved in a thread that is not waited
for any longer than that.
"""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading

CONNECT_SECONDS = 3.0
RESOLVE_SECONDS = 10.0


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of ``host:port``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach the host, by its name or address, with or without brackets."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def resolve_name(host: str, port: int, seconds: float = RESOLVE_SECONDS) -> list[str]:
    """The IP addresses of a host, in the order in which they are tried. Raises OSError: gaierror where the name does
    not resolve, TimeoutError where the name server does not answer in time."""
    answers: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put(list(dict.fromkeys(str(one[4][0]) for one in found)))
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
            answers.put(error if isinstance(error, OSError) else socket.gaierror(socket.EAI_NONAME, str(error)))

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"the name server did not answer within {seconds:g} s") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def connect(address: str, seconds: float = CONNECT_SECONDS) -> socket.socket:
    """A TCP connection to ``host:port``; ``seconds`` for each of the host's IP addresses. Raises OSError."""
    host, port = split_address(address)
    failed = OSError("the name has no IP address")
    for number in resolve_name(host, port):
        try:
            return socket.create_connection((number, port), timeout=seconds)
        except OSError as error:
            failed = error
    raise failed


def unreachable_text(address: str, error: OSError) -> str:
    """Why no connection to ``address`` (``host:port``) came about, with what to check."""
    host = split_address(address)[0]
    if isinstance(error, ConnectionRefusedError):
        programs = "`diloco run`, `diloco syncer serve`"
        return f"nothing listens on {address}; is the syncer up ({programs}), and is that its port?"
    if isinstance(error, socket.gaierror):
        return f"the host name {host} does not resolve here; check the name, or write its IP address"
    if isinstance(error, TimeoutError):
        return f"{address} does not answer; is that the right host, and does a firewall let its port through?"
    if isinstance(error, ConnectionError):  # reset, or the other side's end of a connection that stood
        return f"{address} closed the connection; is that the right port?"
    return f"{address} cannot be reached ({error.strerror or error}); is this machine's network up?"


def unreachable(address: str) -> str:
    """Why no connection to ``address`` (``host:port``) comes about, with what to check; empty: it does."""
    try:
        connect(address).close()
    except OSError as error:
        return unreachable_text(address, error)
    return ""
