"""What a syncer in a pod does beside training: it stays after the end, serves the model, and answers
signed calls of an operator."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from syncer_client import LAYOUT, TOKENS, Client, SyncerProcess, raw_job, turn

from diloco.export.export import assemble
from diloco.export.remote_model import RemoteModelError, fetch_layout, fetch_model
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.control_client import ControlClient, ControlError
from diloco_syncer.output.read_output import read_output
from diloco_syncer.store.open import open_store
from diloco_worker import load_merged
from patience import until
from s3_service import environment, given

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

STAY = ("--stay", "--export", "127.0.0.1:0")
FROZEN = {"table": np.arange(6, dtype=np.float16).reshape(2, 3)}


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[SyncerProcess]:
    made = SyncerProcess(tmp_path / "syncer", raw_job()).start(*STAY)
    yield made
    made.stop()


async def first(syncer: SyncerProcess) -> Client:
    client = Client(syncer)
    assert (await client.join()).welcome.initialise
    await client.initialise(safetensors.numpy.save(FROZEN))
    await client.ready()
    return client


def control(syncer: SyncerProcess, key: bytes = b"") -> ControlClient:
    return ControlClient(syncer.addresses["control"], key or syncer.key)


async def model(syncer: SyncerProcess) -> tuple[dict[str, np.ndarray], list[int]]:
    url = f"http://{syncer.addresses['export']}"
    job, tensors, versions = await asyncio.to_thread(fetch_model, url)
    assert job == syncer.job
    layout = await asyncio.to_thread(fetch_layout, url)
    assert {one.name: one.shape for one in layout.tensors}.items() <= {n: t.shape for n, t in tensors.items()}.items()
    assert len(layout) == len(versions)
    return tensors, versions


async def end(client: Client, syncer: SyncerProcess, phase: str) -> None:
    """Ask for this end, and leave as a learner does."""
    calls = control(syncer)
    await calls.call("announce", {"phase": phase, "message": "enough"})
    if phase == "suspended":
        await until(lambda: syncer.status()["phase"] == "draining")
        await until(lambda: client.of_kind("peer_state_request"))
        transfer = client.of_kind("peer_state_request")[0].transfer
        await client.say(peer_state_unavailable=sync_pb2.PeerStateUnavailable(transfer=transfer))
        await client.say(drained=sync_pb2.Drained())
    await until(lambda: syncer.status()["phase"] == phase)
    await calls.close()


@pytest.mark.parametrize("phase", ["failed", "suspended", "deleted"])
async def test_it_stays_after_an_end_and_leaves_when_told(syncer: SyncerProcess, phase: str) -> None:
    client = await first(syncer)
    try:
        await turn(client, 0)
        merged = [values.copy() for values in client.bases]
        await end(client, syncer, phase)
        await until(lambda: (syncer.store / "report.json").exists())
        if phase == "failed":
            await asyncio.sleep(4.0)  # longer than one without --stay waits for its report to be fetched
        assert not syncer.exited
        # Whoever comes now hears of the end, and learners that are connected are kept.
        assert not client.ended
        late = Client(syncer, 1)
        welcome = (await late.join()).welcome
        assert sync_pb2.PhaseName.Name(welcome.phase.name) == f"PHASE_{phase.upper()}"
        assert welcome.phase.message == "enough"
        tensors, versions = await model(syncer)
        assert versions == [1, 1]
        expected = assemble(LAYOUT, merged) | {"table": FROZEN["table"].astype(np.float32)}
        assert sorted(tensors) == sorted(expected)
        for name, values in expected.items():
            assert np.array_equal(tensors[name], values), name
        calls = control(syncer)
        told = await calls.call("report")
        wanted = ("failed", "enough") if phase == "failed" else ("interrupted", "")
        assert (told["outcome"], told["message"]) == wanted
        assert (await calls.call("status"))["phase"] == phase
        await calls.close()
        await late.close()
    finally:
        await client.close()
    assert syncer.terminate() == 0


async def test_a_complete_job_is_served_again_by_a_new_syncer(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job("training.stop={steps: 3}")).start(*STAY)
    client = await first(syncer)
    try:
        await turn(client, 0)
        await client.train(1)
        await until(lambda: syncer.status()["phase"] == "draining")
        await client.say(drained=sync_pb2.Drained())
        await until(lambda: syncer.status()["phase"] == "complete")
        await until(lambda: (syncer.store / "report.json").exists())
        before, versions = await model(syncer)
        report = json.loads((syncer.store / "report.json").read_text())
        # However much is asked of it since, and by whichever process it is served.
        assert json.loads(syncer.get("/report")) == report
        await client.close()
        syncer.kill()
        syncer.start(*STAY)
        await until(lambda: json.loads(syncer.get("/report")) == report)
        calls = control(syncer)
        assert await calls.call("report") == report
        await calls.close()
        status = syncer.status()
        assert (status["phase"], status["epoch"], status["step"]) == ("complete", 2, 3)
        after, again = await model(syncer)
        assert again == versions and sorted(after) == sorted(before)
        assert all(np.array_equal(after[name], values) for name, values in before.items())
        for address in (syncer.addresses["export"], f"http://{syncer.addresses['export']}"):
            loaded = await asyncio.to_thread(load_merged, address)
            assert sorted(loaded) == sorted(before)
            assert all(np.array_equal(loaded[name].numpy(), values) for name, values in before.items())
        assert json.loads((syncer.store / "report.json").read_text()) == report
        late = Client(syncer)
        assert (await late.join()).welcome.phase.name == sync_pb2.PHASE_COMPLETE
        await late.close()
        await asyncio.sleep(4.0)
        assert not syncer.exited
        assert syncer.terminate() == 0
    finally:
        await client.close()
        syncer.stop()


async def completed(syncer: SyncerProcess) -> dict[str, np.ndarray]:
    """End the job by its stop, as learners do; returns the merged model."""
    client = await first(syncer)
    try:
        await turn(client, 0)
        await client.train(1)
        await until(lambda: syncer.status()["phase"] == "draining")
        await client.say(drained=sync_pb2.Drained())
        await until(lambda: syncer.status()["phase"] == "complete")
        return (await model(syncer))[0]
    finally:
        await client.close()


def output_of(syncer: SyncerProcess) -> dict[str, Any]:
    return dict(syncer.status()["output"])


@pytest.mark.promise(
    "The merged model at `output.uri` is whole or absent, whatever fails on the way; files of others are never changed"
)
@pytest.mark.parametrize("kind", ["directory", "bucket"])
async def test_the_model_of_a_complete_job_is_written_once(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    place, env = str(tmp_path / "out"), {}
    if kind == "bucket":
        service = request.getfixturevalue("s3")
        place, env = f"s3://{service.make_bucket('models')}/team/tiny", environment(service.url)
    job = raw_job("training.stop={steps: 3}", f"output.uri={place}")
    syncer = SyncerProcess(tmp_path / "syncer", job, env=env).start(*STAY)
    try:
        assert output_of(syncer) == {"uri": place, "state": "waiting", "size": 0, "message": ""}
        merged = await completed(syncer)
        await until(lambda: output_of(syncer)["state"] == "written")
        with given(env):
            found, layout, tensors, versions = await asyncio.to_thread(lambda: read_output(open_store(place)))
        assert found == syncer.job and layout == LAYOUT and versions == [1, 1]
        assert sorted(tensors) == sorted(merged)
        assert all(np.array_equal(tensors[name], values) for name, values in merged.items())
        # The report is written before the model is, and once more after it.
        await until(lambda: json.loads((syncer.store / "report.json").read_text())["output"] == output_of(syncer))
        report = json.loads((syncer.store / "report.json").read_text())
        assert report["output"]["size"] > 0 and json.loads(syncer.get("/report")) == report
        # A syncer that comes later finds it written, and leaves it alone.
        with given(env):
            open_store(place).delete("layout.json")
        syncer.kill()
        syncer.start(*STAY)
        await until(lambda: output_of(syncer) == report["output"])
        with given(env):
            assert not open_store(place).exists("layout.json")
        assert syncer.terminate() == 0
    finally:
        syncer.stop()


async def test_an_output_that_cannot_be_written_is_told_and_the_model_still_served(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"somebody's")
    job = raw_job("training.stop={steps: 3}", f"output.uri={tmp_path}/out")
    syncer = SyncerProcess(tmp_path / "syncer", job).start(*STAY)
    try:
        merged = await completed(syncer)
        await until(lambda: output_of(syncer)["state"] == "failed")
        assert "give output.uri a folder of its own" in output_of(syncer)["message"]
        assert (await model(syncer))[0].keys() == merged.keys()
        (tmp_path / "out" / "model.safetensors").unlink()
        syncer.kill()
        syncer.start(*STAY)  # tried again
        await until(lambda: output_of(syncer)["state"] == "written")
        assert syncer.terminate() == 0
    finally:
        syncer.stop()


async def test_the_model_is_of_one_moment_while_merges_go_on(syncer: SyncerProcess) -> None:
    client = await first(syncer)
    try:
        seen, history = [], {(p, 0): values for p, values in enumerate(client.bases)}
        for version in range(5):
            fetching = asyncio.create_task(model(syncer))
            for fragment in range(len(LAYOUT)):
                await client.train(1)
                await client.merge_once(fragment, version)
                history[fragment, version + 1] = client.bases[fragment]
            seen.append(await fetching)
        for tensors, versions in seen:
            expected = assemble(LAYOUT, [history[p, version] for p, version in enumerate(versions)])
            assert all(np.array_equal(tensors[name], values) for name, values in expected.items())
        assert (await model(syncer))[1] == [5, 5]
    finally:
        await client.close()


async def test_the_model_is_refused_before_there_is_one_and_to_anybody_outside(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job())
    for address in ("0.0.0.0:0", "[::]:0", "10.0.0.1:7703", "example.org:1"):
        syncer.launch("--export", address)
        assert syncer.wait() == 2
        last = json.loads(syncer.text().splitlines()[-1])
        assert last["level"] == "error" and f"--export {address}" in last["message"]
    syncer.start(*STAY)
    try:
        with pytest.raises(RemoteModelError, match="no model yet"):
            await model(syncer)
        # One reader at a time; who waits is let in when the other has gone.
        client = await first(syncer)
        host, port = syncer.addresses["export"].rsplit(":", 1)
        assert host == "127.0.0.1"
        big = Client(syncer)
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"GET /model.safetensors HTTP/1.1\r\n\r\n")
            slow.recv(10)
        assert (await model(syncer))[1] == [0, 0]
        await big.close()
        await client.close()
    finally:
        syncer.stop()


async def test_control_calls_of_an_operator(syncer: SyncerProcess) -> None:
    calls = control(syncer)
    client = await first(syncer)
    try:
        await client.train(3)
        await until(lambda: syncer.status()["tokens"]["trained"] == 3 * TOKENS)
        # Events follow what they tell of, when it is durable; this is the last for now.
        await until(lambda: any(event["kind"] == "first-step" for event in syncer.status()["events"]))
        told = await calls.call("status")
        page = syncer.status()
        assert {**told, "elapsed_seconds": 0, "seconds_left": 0, "slots": 0, "rounds": 0} == {
            **page,
            "elapsed_seconds": 0,
            "seconds_left": 0,
            "slots": 0,
            "rounds": 0,
        } | {"tokens_per_second": told["tokens_per_second"], "uptime": told["uptime"]}
        assert (told["step"], told["loss"]) == (3, 2.0)
        slot = told["slots"][0]
        assert (slot["process"], slot["state"], slot["ready"]) == (client.process, "active", True)
        assert 0 <= slot["heard_seconds_ago"] < 10
        # Only the slot's present process can end.
        for body in (
            {"region": "local", "ordinal": 0, "process": "ab"},
            {"region": "local", "ordinal": 1, "process": client.process},
            {"region": "other", "ordinal": 0, "process": client.process},
        ):
            await calls.call("process-ended", {**body, "reason": "deleted"})
        assert syncer.status()["slots"][0]["state"] == "active"
        await calls.call("process-ended", {"region": "local", "ordinal": 0, "process": client.process})
        # Answered when it is in the core's queue; the page follows.
        await until(lambda: syncer.status()["slots"][0]["state"] == "lost")
        # Errors have kinds.
        for wrong, kind in (
            (calls.call("nothing"), "refused"),
            (calls.call("process-ended", {"region": "local"}), "refused"),
            (control(syncer, b"0123456789abcdef").call("status"), "refused"),
            (ControlClient("127.0.0.1:1", syncer.key).call("status", timeout=3), "unreachable"),
            (ControlClient(syncer.addresses["http"], syncer.key).call("status", timeout=3), "unreachable"),
            (ControlClient(syncer.addresses["sync"], syncer.key).call("status"), "failed"),
        ):
            with pytest.raises(ControlError) as caught:
                await wrong
            assert caught.value.kind == kind, caught.value
        assert (await calls.call("checkpoint"))["epoch"] == 1
    finally:
        await client.close()
        await calls.close()


async def test_probes(syncer: SyncerProcess) -> None:
    assert syncer.get("/readyz") == syncer.get("/healthz") == b"ok\n"
    with urllib.request.urlopen(f"http://{syncer.addresses['export']}/job.json", timeout=5) as page:
        assert json.load(page)["metadata"]["name"] == "raw"
