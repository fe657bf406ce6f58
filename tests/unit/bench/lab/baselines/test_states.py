"""What a data-parallel job keeps in memory, and a link that is cut."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from lab.baselines.link import cut_until
from lab.baselines.states import MemoryStates, TrainState
from repository import ROOT


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_is_the_whole_state(tmp_path: Path) -> None:
    states = MemoryStates(tmp_path)
    model, optimizer = trained(0)
    other, others = trained(1)
    assert states.restore(other, others) == TrainState(), "without one, it is the beginning"
    states.save(TrainState(7, 56, 700), model, optimizer)
    assert states.restore(other, others) == TrainState(7, 56, 700)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(optimizer.state[mine]["exp_avg"], others.state[theirs]["exp_avg"])


def test_scores_of_an_undone_course_are_forgotten(tmp_path: Path) -> None:
    states = MemoryStates(tmp_path)
    model, optimizer = trained(0)
    for tokens in (100, 200, 300):
        states.keep_for_score(TrainState(tokens // 100, 0, tokens), model)
    states.save(TrainState(2, 0, 250), model, optimizer)
    states.forget_scores_after(250)
    assert [kept["tokens"] for kept in states.kept()] == [100, 200, 250], "last the checkpoint, which is ahead"


def test_of_several_writers_the_most_advanced_state_counts(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    for writer, tokens in (("-0", 100), ("-1", 300), ("-2", 200)):
        MemoryStates(tmp_path, writer).save(TrainState(tokens // 100, 0, tokens), model, optimizer)
    other, others = trained(1)
    assert MemoryStates(tmp_path, "-0").restore(other, others).tokens == 300
    assert [kept["tokens"] for kept in MemoryStates(tmp_path).kept()] == [300]


CUT = """
import socket
from lab.baselines.link import shut_connections_down
with socket.create_server(("127.0.0.1", 0)) as server:
    here = socket.create_connection(server.getsockname())
    there, _ = server.accept()
    here.settimeout(10)
    assert shut_connections_down() >= 2
    assert here.recv(1) == b"" and there.recv(1) == b""
    socket.create_connection(server.getsockname()).close()
"""


def test_a_cut_ends_connections_at_both_ends(tmp_path: Path) -> None:
    # In a process of its own: it shuts down whatever connections its process has.
    subprocess.run([sys.executable, "-c", CUT], cwd=ROOT / "bench", check=True, timeout=60)
    path = tmp_path / "cut.json"
    assert cut_until(path) == 0.0
    path.write_text(json.dumps(time.time() + 5))
    assert cut_until(path) > time.time()
