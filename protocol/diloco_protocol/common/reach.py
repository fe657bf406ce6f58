"""Whether an address can be reached from this machine, and why not, in words: the texts of all commands.

Each wait has an end: the system's resolver takes no time limit, so a name is resolved in a thread that is not waited
for any longer than that. A name may have addresses that lead nowhere, such as those of a broken IPv6. So all of them
are tried side by side (``connect_first``), and the silent ones are named.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import queue
import socket
import threading

CONNECT_SECONDS = 3.0
RACE_SECONDS = 0.25  # after which the next address is tried beside those before
RESOLVE_SECONDS = 10.0


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of ``host:port``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """``host:port``, with the brackets of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach the host, by its name or address, with or without brackets."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_number(host: str) -> bool:
    """Whether the host is an IP address, and no name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


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


class NoAddressAnswers(OSError):
    """A name has several addresses, and none answers; the message says what each of them does."""


async def connect_first(address: str, seconds: float) -> socket.socket:
    """A TCP connection, not blocking, to the first of the host's IP addresses that answers, within ``seconds``. Raises
    OSError; NoAddressAnswers where there are several."""
    host, port = split_address(address)
    numbers = [host] if is_number(host) else _by_turns(await asyncio.to_thread(resolve_name, host, port))
    fates = dict.fromkeys(numbers, "no answer")
    errors: list[OSError] = []

    async def one(number: str, wait: float) -> socket.socket | None:
        await asyncio.sleep(wait)
        made = socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET)
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, (number, port))
            return made
        except OSError as error:
            errors.append(error)
            fates[number] = (error.strerror or str(error)).lower()
        except asyncio.CancelledError:
            made.close()
            raise
        made.close()
        return None

    tasks = [asyncio.ensure_future(one(number, RACE_SECONDS * n)) for n, number in enumerate(numbers)]
    found: list[socket.socket] = []
    try:
        for first in asyncio.as_completed(tasks, timeout=seconds):
            if (made := await first) is not None:
                found.append(made)
                return made
    except TimeoutError:
        errors.append(TimeoutError())
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, socket.socket) and ended not in found:
                ended.close()
    if len(numbers) > 1:
        raise NoAddressAnswers(", ".join(f"{number}: {fate}" for number, fate in fates.items()))
    raise errors[0] if errors else OSError("the name has no IP address")


async def first_answering(address: str, seconds: float) -> str:
    """``address``; of a name with several IP addresses, the first that answers, with the port. Where none does, or the
    name does not resolve, it is ``address`` too: who connects to it says why it fails."""
    host, port = split_address(address)
    if is_number(host):
        return address
    try:
        if len(await asyncio.to_thread(resolve_name, host, port)) < 2:
            return address
        with await connect_first(address, seconds) as made:
            number = str(made.getpeername()[0])
    except OSError:
        return address
    return join_address(number, port)


def _by_turns(numbers: list[str]) -> list[str]:
    """IPv6 and IPv4 in turns, beginning with the kind of the first: mostly it is a whole kind that leads nowhere."""
    kinds = [[n for n in numbers if (":" in n) is (":" in numbers[0])], []]
    kinds[1] = [n for n in numbers if n not in kinds[0]]
    return [n for pair in itertools.zip_longest(*kinds) for n in pair if n is not None]


def unreachable_text(address: str, error: OSError) -> str:
    """Why no connection to ``address`` (``host:port``) came about, with what to check."""
    host = split_address(address)[0]
    if isinstance(error, NoAddressAnswers):
        return f"no address of {host} answers ({error}); is that the right host, and is the way to it open?"
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
