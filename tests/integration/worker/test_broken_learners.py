"""Learners that break while they train: what is told of them, and what their replacements begin from."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
import torch
from learner_process import Rows, Syncer, one_step, small_model

from diloco_protocol.vocabulary import WorkerExit
from diloco_worker import Learner
from diloco_worker.settings import DivergedError
from free_ports import free_port
from patience import wait_until

pytestmark = pytest.mark.usefixtures("torch_settings")


def train(service: Syncer, breaks_at: int | None, ends: Callable[[Learner], bool]) -> torch.nn.Module:
    """Train in this process until ``ends``; one element of the gradient of step ``breaks_at`` is NaN."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows(40_000)):
            loss = one_step(model, optimizer, batch)
            if learner.step == breaks_at:
                model[0].weight.grad[0, 0] = torch.nan
                optimizer.step()
            learner.after_step(tokens=batch.numel(), loss=loss)
            if ends(learner):
                break
    return model


@pytest.mark.promise(
    "A learner whose parameters are not finite ends at once with its own exit code (5), and its "
    "replacement trains on; a job of one learner does not hang"
)
def test_nan_ends_a_learner_by_name_and_its_replacement_trains_on(syncer: Callable[..., Syncer]) -> None:
    """One learner, one job: what diverged is never merged, and nothing waits for it."""
    service = syncer({}, {"steps": 1_000_000})
    rounds = 4 * 4  # steps of four rounds
    with pytest.raises(DivergedError, match=r"training diverged: fragment \d has values that are not") as raised:
        train(service, 20, lambda learner: learner.step > 20 + rounds)
    assert raised.value.exit_code == WorkerExit.DIVERGED
    merges = service.status()["merges"]
    model = train(service, None, lambda learner: learner.step % 20 == 0 and service.status()["merges"] > merges + 3)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert service.status()["refused"].get("not-finite", 0) == 0


def page(address: str, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.promise(
    "A learner whose parameters are not finite ends at once with its own exit code (5), and its "
    "replacement trains on; a job of one learner does not hang"
)
def test_values_too_large_for_the_encoding_end_a_learner_too(syncer: Callable[..., Syncer]) -> None:
    """Its parameters are finite, and every push of them is refused."""
    service = syncer({"compression": {"up": "int4"}}, {"steps": 1_000_000})
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with (
        pytest.raises(DivergedError, match=r"training diverged: a push of fragment \d was refused: the outer gradient"),
        Learner.from_environment(model, optimizer, environ=service.environ()) as learner,
    ):
        for batch in learner.batches(Rows(40_000)):
            loss = one_step(model, optimizer, batch)
            if learner.step == 20:
                with torch.no_grad():
                    model[0].weight[0, 0] = 2e38
            learner.after_step(tokens=batch.numel(), loss=loss)
            if learner.step > 2000:
                break


@pytest.mark.promise(
    "A step, loader or collective that hangs is noticed: stack traces of all threads in the log, exit "
    "code 6, a replacement"
)
@pytest.mark.slow
def test_a_data_set_that_hangs_ends_its_learner_with_stack_traces(syncer: Callable[..., Syncer]) -> None:
    """Its heartbeats go on, so nobody but the process itself can notice."""
    port = f"127.0.0.1:{free_port()}"
    service = syncer({}, {"steps": 1_000_000}, stall_seconds=3.0)
    learner = service.learner(0, 40_000, HANGS_AT="400", DILOCO_STATUS=port)
    seen: set[tuple[str, int]] = set()

    def ended() -> bool:
        seen.update((path, page(port, path)) for path in ("/healthz", "/livez"))
        return learner.poll() is not None

    try:
        wait_until(ended, "its end")
    finally:
        learner.kill()
    assert learner.wait() == WorkerExit.STALLED
    assert ("/healthz", 503) in seen and ("/livez", 503) not in seen
    slot = service.status()["slots"][0]
    assert slot["stalled_seconds"] > 1.0, "the wait that had not ended is counted"
    log = (service.folder / "syncer.log").read_text(encoding="utf-8")
    assert "stalled: no step for 3 s (learners.stallSeconds)" in log
    assert "in __getitem__" in log and "in batches" in log, "both threads that matter"
    merges = service.status()["merges"]
    train(service, None, lambda learner: learner.step % 20 == 0 and service.status()["merges"] > merges + 3)


@pytest.mark.promise(
    "A slow first step (compilation), a wait for the syncer, a slow job and a process that was stopped as "
    "a whole are not stalls"
)
@pytest.mark.slow
def test_a_slow_first_step_is_no_stall(syncer: Callable[..., Syncer]) -> None:
    """Compiling may take minutes; a step like it later on is a stall."""
    service = syncer({}, {"steps": 40}, stall_seconds=3.0)
    learner = service.learner(0, FIRST_STEP="6")
    try:
        assert learner.wait() == 0
    finally:
        learner.kill()
    assert service.last_report()["steps"] >= 40
