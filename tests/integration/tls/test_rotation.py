"""Certificates are replaced while syncer and learners run: nobody is started again."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pods import Hub, Pod, make_job

from parties import DAY, TOKEN, Parties
from patience import wait_until

pytestmark = pytest.mark.timeout(180)


class Wire:
    """Passes connections on, and can break some of them."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.open: list[socket.socket] = []  # the learner's ends, oldest first
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
                there = socket.create_connection(self._target)
            except OSError:
                return
            self.open.append(here)
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=(source, sink, here), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, here: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if here in self.open:
            self.open.remove(here)

    def break_all_but_the_oldest(self) -> int:
        """What is left is the session's connection."""
        victims = self.open[1:]
        for each in victims:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)
        return len(victims)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def made() -> Iterator[list[Hub | Pod | Wire]]:
    everything: list[Hub | Pod | Wire] = []
    yield everything
    for one in everything:
        one.close() if isinstance(one, Wire) else one.kill()


@pytest.mark.slow
def test_certificates_are_replaced_while_a_job_runs(tmp_path: Path, made: list[Hub | Pod | Wire]) -> None:
    parties = Parties(tmp_path / "pki", "pods")
    hub = Hub(tmp_path, make_job(learners={"eu-1": 1, "us-2": 1}), credentials=parties.syncer())
    made.append(hub)
    hub.start().serves()
    wire = Wire(hub.address("listen"))
    made.append(wire)
    expired = parties.learner("us", "us-2", since=-30 * DAY, days=10)
    europe = Pod(hub, 0, "eu-1", credentials=parties.learner("eu", "eu-1"), DILOCO_SYNCER=wire.address).start()
    america = Pod(hub, 0, "us-2", credentials=expired).start()
    made += [europe, america]
    hub.waits_until(lambda s: s["merges"] > 3, "merges of one learner")
    told = america.waits_until(lambda s: "certificate expired" in s["message"] and s, "the reason, at the learner")
    assert not told["joined"] and told["refused"]["reason"] == "certificate-refused"
    # A handshake that takes too long on a busy machine is another one's reason.
    assert hub.status()["tls"]["refused"].keys() - {"broken-off"} == {"expired"}
    # Renewed in place, as a kubelet does: it joins by itself.
    parties.learner("us", "us-2")
    america.waits_until(
        lambda s: s["joined"] and s["connected"] and s["refused"] is None, "the renewed learner to join"
    )
    # The syncer's, while both train. The session stays; bulk connections that break afterwards do not
    # believe the new certificate, until the learner has looked at it.
    before = hub.status()
    parties.syncer()
    hub.waits_until(lambda s: s["merges"] > before["merges"] + 20, "merges after the change")
    time.sleep(1.1)  # the files are looked at once a second, when somebody connects
    assert wire.break_all_but_the_oldest() > 0

    # Whichever fails first tells it, a download or a push.
    doubts = ("bulk transfers fail", "pushes do not come through")
    wait_until(lambda: any(doubt in europe.text() for doubt in doubts), "the learner to doubt its channels")
    for pod in (europe, america):
        assert pod.running
    # Alone, so that no round with a quorum of one is over before its push is there.
    america.terminate()

    def merged(status: dict[str, Any]) -> int:
        return next(int(row["merged_pushes"]) for row in status["slots"] if row["region"] == "eu-1")

    start = merged(hub.status())
    hub.waits_until(lambda s: merged(s) > start + 3, "its work to be merged under the new certificate")
    assert "the credentials have changed: new connections get the new ones" in hub.text()
    for one in (hub, europe, america):
        assert TOKEN not in one.text() and "PRIVATE" not in one.text()


def test_a_learner_with_anothers_certificate_says_so_and_waits_for_its_own(
    tmp_path: Path, made: list[Hub | Pod | Wire]
) -> None:
    parties = Parties(tmp_path / "pki", "pods")
    hub = Hub(tmp_path, make_job(learners={"eu-1": 1}), credentials=parties.syncer())
    made.append(hub)
    hub.start().serves()
    pod = Pod(hub, 0, "eu-1", credentials=parties.learner("mounted", "us-2")).start()
    made.append(pod)
    told = pod.waits_until(
        lambda s: s["refused"] and "the certificate" in s["message"] and s, "its own certificate to be looked at"
    )
    assert told["refused"]["reason"] == "credentials-unusable" and not told["joined"]
    assert "the certificate is for the learner of region us-2" in told["message"]
    assert "this learner is in region 'eu-1'" in told["message"]
    parties.learner("mounted", "eu-1")
    pod.waits_until(lambda s: s["joined"] and s["refused"] is None, "the Secret that was put right")
