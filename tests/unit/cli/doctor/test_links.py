"""``diloco doctor``, links: an endpoint that answers or does not, by real sockets, and what bandwidth links need."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.bandwidth_plan import Conditions, plan
from diloco.console import CommandError
from diloco.doctor.findings import Finding
from diloco.doctor.links import check_links
from diloco.main import app
from diloco_protocol.common.format_units import bits_text
from free_ports import closed_port
from parties import Parties
from repository import ROOT

EXAMPLE = ROOT / "examples" / "minimal.yaml"
JOB, NAMESPACE = "minimal", "default"
REGIONS = "regions=[{name: near, cluster: hub, learners: 1}, {name: far, cluster: eu-1, learners: 2, spares: 1}]"


def across(address: str, kind: str = "External") -> list[str]:
    return [
        REGIONS,
        "syncer.cluster=hub",
        f"syncer.endpoint={{type: {kind}, address: '{address}'}}",
        "syncer.tls={secretName: a}",
        "learners.credentials={secretName: b}",
    ]


def links(
    overrides: list[str], credentials: Path | None = None, step_seconds: float | None = None
) -> dict[str, Finding]:
    return {one.about: one for one in check_links(EXAMPLE, overrides, credentials, step_seconds)}


@contextlib.contextmanager
def listening(context: ssl.SSLContext | None = None, reply: bytes = b"") -> Iterator[str]:
    """A server's address: with ``context`` it speaks TLS, and sends ``reply`` to each client."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:  # the test is over
                    return
                with client, contextlib.suppress(OSError):  # SSLError is one: a client that refuses, or is refused
                    client.settimeout(10)
                    end = client if context is None else context.wrap_socket(client, server_side=True)
                    end.sendall(reply)
                    end.recv(1)
                    end.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=10)


def tls_of(folder: Path) -> ssl.SSLContext:
    """As the syncer does it: mutual TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


def test_a_syncer_that_answers_is_named_by_its_certificate(tmp_path: Path) -> None:
    parties = Parties(tmp_path / "pki", JOB, NAMESPACE)
    with listening(tls_of(parties.syncer()), b"x") as address:
        found = links(across(address))
        assert found["name"].level == found["connection"].level == "ok"
        said = found["TLS"]
        assert (
            said.level == "ok" and f"CN=syncer {NAMESPACE}/{JOB} answers" in said.said and "not verified" in said.said
        )
        assert "--credentials" in said.fix


def test_with_credentials_both_sides_are_judged(tmp_path: Path) -> None:
    parties = Parties(tmp_path / "pki", JOB, NAMESPACE)
    strangers = Parties(tmp_path / "strange", JOB, NAMESPACE, title="theirs")
    mine, theirs = parties.learner(region="far"), strangers.learner(region="far")
    with listening(tls_of(parties.syncer()), b"x") as address:
        good = links(across(address), mine)["TLS"]
        assert good.level == "ok" and "is the job's syncer, and accepts the certificate" in good.said
        bad = links(across(address), theirs)["TLS"]
        assert bad.level == "error" and "is not trusted" in bad.said
        absent = links(across(address), tmp_path / "none")["TLS"]
        assert absent.level == "error" and "is not a directory" in absent.said


def test_what_answers_without_tls_is_an_error() -> None:
    with listening(reply=b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        found = links(across(address))["TLS"]
    assert found.level == "error" and f"{address} does not answer with TLS" in found.said and "gateway" in found.fix


def test_silence_instead_of_a_handshake_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.doctor.links.HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = links(across(address))["TLS"]
    assert found.level == "error" and f"no TLS handshake with {address}" in found.said


def test_a_closed_port_and_a_name_that_does_not_resolve() -> None:
    with closed_port() as port:
        found = links(across(closed := f"127.0.0.1:{port}"))
    assert found["connection"].level == "warning" and f"nothing listens on {closed}" in found["connection"].said
    assert "expected before the job runs" in found["connection"].fix and "TLS" not in found
    found = links(across("nosuch.invalid"))
    assert found["name"].level == "error" and "nosuch.invalid does not resolve" in found["name"].said
    assert "connection" not in found


def test_links_need_what_the_plan_says() -> None:
    overrides = [*across("nosuch.invalid:7700")]
    planned = plan(EXAMPLE, overrides, None, Conditions(0.5))
    found = links(overrides, step_seconds=0.5)
    far = next(one for one in planned["regions"] if one["name"] == "far")
    said = found["region far"].said
    assert said == f"needs {bits_text(far['up'])} up and {bits_text(far['down'])} down for 3 learners at 500 ms a step"
    hub = planned["queued"]["hub"]
    assert f"{bits_text(hub['in'])} in and {bits_text(hub['out'])} out" in found["hub"].said and not found["hub"].fix
    found = links(overrides)
    assert "at 1 s a step" in found["hub"].said and "--step-seconds S" in found["hub"].fix
    with pytest.raises(CommandError, match="--step-seconds -1"):
        links(overrides, step_seconds=-1.0)


def test_a_program_of_ones_own_has_a_size_that_only_its_user_knows(tmp_path: Path) -> None:
    overrides = [*across("nosuch.invalid:7700"), "learners.command=[python, train.py]", "training.model=null"]
    found = links(overrides)["bandwidth"]
    assert found.level == "warning" and "--params" in found.said and "diloco plan" in found.fix


def test_a_job_of_one_region_on_this_machine_has_no_links() -> None:
    assert links([]) == {}
    assert set(links(["regions=[{name: a, learners: 1}, {name: b, learners: 1}]"])) == {"region a", "region b", "hub"}
    assert links(["sync.quorum=99"]) == {}, "the job's own section reports a wrong file"


def test_the_command_has_them_as_a_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr("diloco.doctor.machine.check_torch", lambda installed: (None, []))  # which takes seconds
    words = [word for override in across("nosuch.invalid") for word in ("--set", override)]
    done = CliRunner().invoke(app, ["doctor", str(EXAMPLE), *words, "--step-seconds", "2", "--json"])
    document = json.loads(done.output)
    assert done.exit_code == 1 and not document["ok"]
    about = {one["about"]: one["level"] for one in document["findings"] if one["section"] == "links"}
    assert about == {"name": "error", "region near": "ok", "region far": "ok", "hub": "ok"}
    done = CliRunner().invoke(app, ["doctor", "--step-seconds", "2"])
    assert done.exit_code == 2 and "give JOB.yaml too" in done.output
