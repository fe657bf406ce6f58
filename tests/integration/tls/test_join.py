"""Syncer and learners with certificates and a join token, as a cluster mounts them: who gets in, who does
not, and what is said to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority, mount
from pods import Hub, Pod, make_job

from diloco_protocol.wire.control_client import ControlClient, ControlError

pytestmark = pytest.mark.timeout(180)
TOKEN = "a5" * 32


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Hub | Pod]]:
    all_of_them: list[Hub | Pod] = []
    yield all_of_them
    for one in all_of_them:
        one.kill()


@pytest.mark.promise(
    "A job with certificates trains to its end without those who lack the right certificate or token, and "
    "a corrected Secret is read at the next try"
)
@pytest.mark.slow
@pytest.mark.ci
def test_a_job_from_start_to_end_over_tls(tmp_path: Path, made: list[Hub | Pod]) -> None:
    ours, other = Authority("the job's"), Authority("another job's")
    hub = Hub(
        tmp_path,
        make_job(learners=2, stop={"steps": 120}),
        credentials=mount(tmp_path / "syncer-secret", ours.secret("diloco-syncer", TOKEN)),
    )
    made.append(hub)
    hub.start().serves()

    def pod(name: str, content: dict[str, bytes] | None, ordinal: int = 9) -> Pod:
        credentials = mount(tmp_path / name, content) if content is not None else None
        made.append(Pod(hub, ordinal, credentials=credentials))
        assert isinstance(made[-1], Pod)
        return made[-1].start()

    # Whoever may not take part, before anybody does: they wait, for a Secret may be put right.
    strangers = {
        "wrong authority": pod("foreign", other.secret("learner", TOKEN, trusts=ours)),
        "trusts another": pod("trusting", ours.secret("learner", TOKEN, trusts=other)),
        "wrong token": pod("guessing", ours.secret("learner", "b6" * 32)),
        "no token": pod("tokenless", ours.secret("learner")),
        "plaintext": pod("bare", None),
    }
    for who, stranger in strangers.items():
        # The first try may have found a syncer that was too busy to answer.
        told = stranger.waits_until(
            lambda s, token="token" in who: (
                "no session with the syncer" in s["message"]
                and (s["refused"] if token else "unavailable" in s["message"])
                and s
            ),
            who,
        )
        assert not told["joined"] and stranger.page("/readyz")[0] == 503, who
        if "token" in who:
            assert told["refused"]["reason"] == "unauthenticated"
            assert "the join token is missing or wrong" in told["refused"]["message"]
    assert hub.status()["sessions"] == 0 and hub.status()["phase"] == "waiting"
    # A Secret that is put right is read at the next try: certificates are replaced while learners run.
    mount(tmp_path / "guessing", ours.secret("learner", TOKEN), "..2026_01_02")
    strangers["wrong token"].waits_until(lambda s: s["joined"] and s["refused"] is None, "the repaired Secret")
    learners = [pod(f"learner-{ordinal}", ours.secret("learner", TOKEN), ordinal) for ordinal in range(2)]
    hub.waits_until(lambda s: s["phase"] == "complete", "the job's end")
    for learner in learners:
        learner.waits_until(lambda s: s["phase"] == "complete" and s["connected"], "the end, at the pod")
    for who in ("wrong authority", "trusts another", "no token", "plaintext"):
        assert not strangers[who].status()["joined"], who
    report = hub.report()
    assert report["merges"] > 3 and report["tokens"]["trained"] == report["tokens"]["merged"]
    # On the wire there is the payload and what goes with it.
    for region in report["regions"]:
        for way in ("up", "down"):
            assert region[f"wire_bytes_{way}"] > region[f"bytes_{way}"], region
    # The control port needs the key and no certificate; a join token opens nothing there.
    status = asyncio.run(hub.call("status"))
    assert status["phase"] == "complete"
    with pytest.raises(ControlError) as caught:
        asyncio.run(ControlClient(hub.address("control"), TOKEN.encode()).call("status"))
    assert caught.value.kind == "refused"
    # Nothing of the secrets is in any log.
    secrets = [TOKEN, "b6" * 32, hub.key.decode().strip(), "PRIVATE KEY"]
    for one in made:
        assert one.terminate()[0] == 0
        assert not any(secret in one.text() for secret in secrets), one.log
