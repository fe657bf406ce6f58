"""Learners as they live in pods: what their status port says, how they meet an end, and a syncer that is
away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from pods import Hub, Pod, get, make_job

from diloco_protocol.spec.load import job_to_json
from diloco_worker.sync.drain import PATIENCE_SECONDS
from patience import wait_for_end, wait_until

pytestmark = pytest.mark.timeout(240)


class House:
    """What a test starts; all of it is killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Hub | Pod] = []

    def hub(self, **job: object) -> Hub:
        hub = Hub(self.folder, make_job(**job))  # type: ignore[arg-type]
        self.all.append(hub)
        return hub.start().serves()

    def pod(self, hub: Hub, ordinal: int = 0, **env: str) -> Pod:
        pod = Pod(hub, ordinal, **env)  # type: ignore[arg-type]
        self.all.append(pod)
        return pod.start()

    def close(self) -> None:
        for one in self.all:
            one.kill()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


def announce(hub: Hub, phase: str) -> None:
    asyncio.run(hub.call("announce", phase=phase, message="enough of it"))


def end_without_a_drain(pod: Pod) -> None:
    """SIGTERM ends a process that holds no slot: it has nothing to hand over, and waits for no syncer."""
    code, _ = pod.terminate()
    assert code == 0, pod.text()[-3000:]
    for words in ("were not taken over", "could not be told"):
        assert words not in pod.text()


@pytest.mark.slow
def test_learners_idle_at_the_end_and_a_new_pod_does_too(house: House) -> None:
    # Both are needed for a merge, so neither reaches the stop before the other is back with the syncer.
    settings: dict[str, object] = {"quorum": 2, "heartbeat": {"intervalSeconds": 0.1, "timeoutSeconds": 60}}
    hub = house.hub(**settings)
    pods = [house.pod(hub, ordinal) for ordinal in range(2)]
    for pod in pods:
        pod.waits_until(lambda s: s["step"], "a first step")
    # A pod's process id begins with the pod's UID: the operator finds its slot by that.
    processes = [row["process"] for row in hub.status()["slots"]]
    assert {process[:32] for process in processes} == {pod.uid.replace("-", "") for pod in pods}
    assert all(len(process) == 48 for process in processes)
    # The stop is set while no syncer is there: without one a learner makes 16 steps, so that none is past it.
    assert hub.terminate()[0] == 0
    stop = max(pod.status()["step"] for pod in pods) + 100
    hub.change(make_job(stop={"steps": stop}, **settings))  # type: ignore[arg-type]
    hub.start().serves()
    ends = []
    for pod in pods:
        end = pod.waits_until(
            lambda s: s["phase"] == "complete" and s["idle"] and s["connected"] and s, "the job's end"
        )
        assert (end["joined"], end["refused"], end["slot"]) == (True, None, None)
        assert end["step"] > 0 and end["tokens"] > 0 and end["loss"] > 0
        assert pod.page("/readyz")[0] == pod.page("/healthz")[0] == 200
        ends.append(end["step"])
    # Alone for 16 steps after each of the last broadcasts, of which there is one per fragment.
    assert stop <= max(ends) <= stop + 3 * 16, (stop, ends)
    report = hub.report()
    # Of a fragment one of the two may have had nothing left to offer at the end, and a merge takes both.
    tokens, steps = report["tokens"], sum(row["steps"] for row in report["learners"])
    assert tokens["trained"] == tokens["merged"] + tokens["pending"]
    assert tokens["pending"] <= 16 * tokens["trained"] / steps, "more than one learner's steps alone"
    # It came to nobody's mind to train on: a pod that is made anew now finds the end.
    late = house.pod(hub, 0)
    late.waits_until(lambda s: s["phase"] == "complete" and s["idle"], "the end, for a newcomer")
    assert late.status()["step"] == 0
    assert hub.report()["tokens"] == report["tokens"]
    assert [pod.status()["step"] for pod in pods] == ends, "nobody has trained on"
    for pod in [*pods, late]:
        end_without_a_drain(pod)
        lines = pod.lines()  # JSON throughout
        assert {"time", "level", "job", "region", "ordinal", "slot", "message"} <= set(lines[-1])
        assert all(line["job"] == "pods" and line["ordinal"] == int(pod.env["DILOCO_ORDINAL"]) for line in lines)
    assert any(line["slot"] >= 0 for line in pods[0].lines())
    assert hub.terminate()[0] == 0


@pytest.mark.parametrize("phase", [pytest.param("failed", marks=pytest.mark.slow), "deleted"])
def test_an_end_that_is_announced_is_shown_and_idled_through(house: House, phase: str) -> None:
    hub = house.hub(learners=1)
    pod = house.pod(hub)
    pod.waits_until(lambda s: s["step"], "a first step")
    announce(hub, phase)
    end = pod.waits_until(lambda s: s["idle"] and s["phase"] == phase and s["connected"] and s, "the end")
    assert end["message"] == "enough of it"
    end_without_a_drain(pod)


@pytest.mark.slow
def test_suspend_the_syncer_goes_and_a_resume_makes_room_for_new_processes(house: House) -> None:
    hub = house.hub(learners=2)
    pods = [house.pod(hub, ordinal) for ordinal in range(2)]
    for pod in pods:
        pod.waits_until(lambda s: s["step"], "a first step")
    announce(hub, "suspended")
    hub.waits_until(lambda s: s["phase"] == "suspended", "the suspension")
    for pod in pods:
        pod.waits_until(lambda s: s["idle"] and s["phase"] == "suspended", "the suspension, at the pod")
    tokens = hub.status()["tokens"]
    assert tokens["dropped"] == 0
    # The operator stops the syncer. Learners show what they last heard, and wait; so does a new one.
    assert hub.terminate()[0] == 0
    late = house.pod(hub, 2)
    late.waits_until(lambda s: "no session with the syncer" in s["message"], "a pod without a syncer")
    assert late.page("/healthz")[0] == 200 and late.page("/readyz")[0] == 503
    for pod in pods:
        pod.waits_until(lambda s: not s["connected"], "the loss")
        assert pod.status()["phase"] == "suspended" and pod.page("/readyz")[0] == 200
    end_without_a_drain(late)
    # Resumed: who idles has no loop any more and makes room; its pod starts it again.
    hub.start().serves()
    for pod in pods:
        assert pod.ends() == 0
        assert "the job continues" in pod.text()
        pod.start()
    hub.waits_until(lambda s: s["phase"] == "training" and s["quorum"]["active"] == 2, "the resumed job")
    hub.waits_until(lambda s: s["tokens"]["trained"] > tokens["trained"] + 100, "training")
    assert hub.status()["tokens"]["dropped"] == 0


@pytest.mark.parametrize("limit", [2.0, pytest.param(None, marks=pytest.mark.slow)])
def test_a_drain_without_a_syncer_is_bounded(house: House, limit: float | None) -> None:
    """By DILOCO_DRAIN_SECONDS, else by the drain's own patience, whose exact end tests/unit/worker/sync has."""
    env = {} if limit is None else {"DILOCO_DRAIN_SECONDS": str(limit)}
    hub = house.hub(learners=1)
    pod = house.pod(hub, 0, **env)
    pod.waits_until(lambda s: (s["step"] or 0) > 5, "some steps")
    hub.kill()
    pod.waits_until(lambda s: not s["connected"], "the loss of the syncer")
    code, seconds = pod.terminate()
    assert code == 0 and "no acknowledgement in time" in pod.text() and "could not be told" in pod.text()
    if limit is None:
        assert seconds > PATIENCE_SECONDS
    else:
        assert limit / 2 < seconds < PATIENCE_SECONDS, "the limit is shorter than the drain's patience"


@pytest.mark.slow
def test_a_drain_with_a_syncer_loses_nothing_and_is_confirmed(house: House) -> None:
    hub = house.hub(learners=2)
    pods = [house.pod(hub, ordinal) for ordinal in range(2)]
    for pod in pods:
        pod.waits_until(lambda s: (s["step"] or 0) > 5, "some steps")
    code, _ = pods[0].terminate()
    assert code == 0 and "drained: slot" in pods[0].text()
    hub.waits_until(lambda s: sorted(row["state"] for row in s["slots"]) == ["active", "drained"], "the drain")
    assert hub.status()["tokens"]["dropped"] == 0


def test_the_metrics_of_a_pod(house: House) -> None:
    hub = house.hub(learners=1)
    pod = house.pod(hub)
    pod.waits_until(lambda s: (s["step"] or 0) > 8, "some steps")
    code, body = pod.page("/metrics")
    text = body.decode()
    assert code == 200
    labels = 'job="pods",ordinal="0",region="local",role="learner"'
    samples = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    assert samples[f"diloco_worker_step{{{labels}}}"] > 8
    assert samples[f"diloco_worker_connected{{{labels}}}"] == samples[f"diloco_worker_joined{{{labels}}}"] == 1
    assert samples[f"diloco_worker_reconnects_total{{{labels}}}"] == 0
    assert samples[f"diloco_worker_received_bytes_total{{{labels}}}"] > 0
    assert samples[f"diloco_worker_compute_seconds_total{{{labels}}}"] > 0
    assert samples['diloco_worker_phase{job="pods",ordinal="0",phase="training",region="local",role="learner"}'] == 1
    for name in ("tokens", "loss_nats", "step_seconds", "stalled_seconds", "sent_bytes"):
        assert f"# HELP diloco_worker_{name}" in text, name
    # Over IPv6 too, where there is one: the port listens on both.
    if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
        assert get(f"http://[::1]:{pod.port}/healthz")[0] == 200
    announce(hub, "failed")


@pytest.mark.slow
def test_the_built_in_programs_as_pods(house: House, tmp_path: Path) -> None:
    """Trainer and evaluator: their status port is there before data and model are; the evaluator comes and
    goes as it likes, a syncer too, and both idle at the end."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("how vexingly quick daft zebras jump over the lazy dog, again and again\n" * 2000)
    hub = house.hub(learners=1, stop={"tokens": 100_000_000}, corpus=corpus)
    assert hub.process is not None
    hub.process.send_signal(signal.SIGSTOP)  # so that the learner cannot join before it is looked at
    learner = house.pod(hub, DILOCO_WORKDIR=str(tmp_path / "learner"))
    early = wait_until(learner.status, "the status port")
    assert (early["joined"], early["phase"], early["role"]) == (False, "waiting", "learner")
    assert learner.page("/readyz")[0] == 503 and learner.page("/healthz")[0] == 200
    hub.process.send_signal(signal.SIGCONT)
    evaluator = house.pod(hub, DILOCO_ROLE="evaluator", DILOCO_WORKDIR=str(tmp_path / "evaluator"))
    scored = evaluator.waits_until(lambda s: s["loss"] and s["tokens"] and s, "a first score")
    assert (scored["role"], scored["slot"], scored["connected"]) == ("evaluator", None, True)
    assert evaluator.page("/readyz")[0] == 200
    # The syncer is replaced: the evaluator is back with it.
    hub.restart()
    evaluator.waits_until(lambda s: s["connected"] and s["epoch"] == 2, "the new syncer")
    hub.waits_until(lambda s: s["evaluators"] == 1 and s["phase"] == "training", "training")
    # Its own loss blocks nobody, and a new one goes on.
    before = hub.status()["step"]
    evaluator.kill()
    hub.waits_until(lambda s: s["step"] > before + 10 and s["evaluators"] == 0, "training without it")
    again = house.pod(hub, DILOCO_ROLE="evaluator", DILOCO_WORKDIR=str(tmp_path / "evaluator"))
    # The stop comes near only now, as all that was awaited is awaited in a job that trains.
    stop = hub.status()["tokens"]["trained"] + 40_000
    hub.restart(make_job(learners=1, stop={"tokens": stop}, corpus=corpus))
    end = hub.waits_until(lambda s: s["phase"] == "complete" and s, "the end")
    assert end["loss"] == end["eval_loss"][-1][1] < end["eval_loss"][0][1]
    for pod in (learner, again):
        pod.waits_until(lambda s: s["phase"] == "complete" and s["idle"] and s["connected"], "the end, idle")
    assert again.status()["loss"] == pytest.approx(end["loss"])
    # Told to end while it loads, and when it idles.
    loading = house.pod(hub, DILOCO_ROLE="evaluator")
    wait_until(loading.status, "its status port")
    for pod in (loading, learner, again):
        end_without_a_drain(pod)
        assert all(line["job"] == "pods" for line in pod.lines())


def blackhole() -> tuple[str, list[socket.socket]]:
    """An address that answers no connection: its queue is full, and the kernel drops what comes."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    host, port = listener.getsockname()
    held = [listener]
    for _ in range(3):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex((host, port))
        held.append(one)
    return f"{host}:{port}", held


@pytest.mark.promise(
    "Learners return to a syncer that was replaced, at the same address or another one, also after an "
    "address that swallows connections"
)
@pytest.mark.slow
@pytest.mark.ci
def test_learners_are_back_after_their_syncer(house: House) -> None:
    """A syncer's pod that is replaced, at the same address and at another one; and an address that swallows
    all connections for a while, as a Service may whose endpoint has gone. How soon they try again is in
    tests/unit/worker/net/test_client.py."""
    hub = house.hub(learners=2)
    pods = [house.pod(hub, ordinal) for ordinal in range(2)]
    for pod in pods:
        pod.waits_until(lambda s: s["step"], "a first step")

    def back() -> bool:
        return all(pod.status().get("epoch") == epoch and pod.status()["connected"] for pod in pods)

    epoch = 2
    hub.kill()
    wait_until(lambda: not any(pod.status().get("connected") for pod in pods), "the loss")
    hub.start().serves()
    wait_until(back, "all to be back with the syncer")
    # Elsewhere: the address file is a link into a folder that is swapped, as a mounted ConfigMap's.
    epoch, swallowing = 3, blackhole()
    for pod in pods:
        volume = pod.log.with_suffix(".volume")
        for version, address in (("a", swallowing[0]), ("b", hub.address("listen"))):
            (volume / version).mkdir(parents=True)
            (volume / version / "address.json").write_text(json.dumps({"sync": address}))
        (volume / "..data").symlink_to("a")
        (volume / "address.json").symlink_to("..data/address.json")
        pod.address_file.unlink()
        pod.address_file.symlink_to(volume / "address.json")
    hub.kill()
    hub.start().serves()
    wait_until(
        lambda: all(
            "timeout" in str(pod.status().get("message")).lower() or "no session" in str(pod.status().get("message"))
            for pod in pods
        ),
        "the black hole",
    )
    for pod in pods:
        volume = pod.log.with_suffix(".volume")
        (volume / "..new").symlink_to("b")
        os.replace(volume / "..new", volume / "..data")
    wait_until(back, "all to be back at the new address")
    for sock in swallowing[1]:
        sock.close()
    assert all(pod.running for pod in pods)
    assert all(pod.status()["refused"] is None for pod in pods)


@pytest.mark.slow
def test_what_went_wrong_is_the_last_line(house: House, tmp_path: Path) -> None:
    hub = house.hub(learners=1)
    last: Callable[[Pod], dict[str, object]] = lambda pod: pod.lines()[-1]  # noqa: E731
    for env, code, words in (
        ({"DILOCO_STATUS": "nowhere"}, 2, "DILOCO_STATUS 'nowhere': expected HOST:PORT"),
        ({"DILOCO_STATUS": hub.address("http")}, 2, "DILOCO_STATUS"),
        ({"DILOCO_POD": "abc"}, 2, "DILOCO_POD is 'abc': it must be the pod's UID"),
        ({"DILOCO_DRAIN_SECONDS": "long"}, 2, "DILOCO_DRAIN_SECONDS is 'long'"),
        ({"DILOCO_CREDENTIALS": str(tmp_path), "DILOCO_POD": ""}, 2, "lacks tls.crt, tls.key, ca.crt"),
    ):
        pod = house.pod(hub, **env)
        assert pod.ends() == code
        assert last(pod)["level"] == "error" and words in str(last(pod)["message"]), pod.text()
    # What is no business of the library's: the traceback, and then the error.
    program = "import diloco_worker; diloco_worker.configure_logging(); import warnings; warnings.warn('hm'); 1 / 0"
    crashed = Pod(hub)
    crashed.launch([sys.executable, "-c", program], crashed.env)
    assert crashed.ends() == 1
    said = crashed.lines()
    assert "hm" in said[0]["message"] and "ZeroDivisionError" in said[1]["traceback"]
    assert said[2]["message"] == "failed: ZeroDivisionError: division by zero" and len(said) == 3
    # Refused for good by the syncer: with its reason, and the cure.
    other = Pod(hub)
    Path(other.env["DILOCO_JOB_FILE"]).write_text(job_to_json(make_job(learners=1, name="other")))
    house.all.append(other)
    assert other.start().ends() == 4
    assert "bad-join" in str(last(other)["message"]) and "'other'" in str(last(other)["message"])


def test_the_first_process_of_a_container_ends_when_it_is_told_to() -> None:
    """The kernel drops SIGTERM for a first process without a handler: a pod that is deleted while it loads
    its model would sit out its grace period, and its successor with it."""
    program = "import diloco_worker; print('up', flush=True); import time; time.sleep(60)"
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            pytest.skip("this machine lets nobody make PID namespaces")
        (inside,) = wait_until(lambda: psutil.Process(process.pid).children(), "the process inside")
        inside.terminate()
        assert wait_for_end(process) == 0
    finally:
        process.kill()
