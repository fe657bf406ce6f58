"""Values of a model that several ranks hold, beside those of one process: equal bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked import fork

SCENARIOS = Path(__file__).resolve().parents[1] / "group_scenarios.py"


def play(folder: Path, scenario: str, form: str, size: int, near: int, **variables: str) -> None:
    """Run the ranks of one learner; ``near`` of them share memory with the leader."""
    ranks = []
    for rank in range(size):
        environ = {"RANK": str(rank), "WORLD_SIZE": str(size), "MEETING": f"file://{folder}/meeting"}
        environ |= {"GLOO_SOCKET_IFNAME": "lo", **variables} | ({"FAR": "1"} if rank >= near else {})
        ranks.append(fork([str(SCENARIOS), scenario, form], environ, folder / f"rank-{rank}.log"))
    for rank in ranks:
        assert rank.wait() == 0, "\n".join(one.log.read_text()[-3000:] for one in ranks)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("diloco-")], "the area has no name any more"


@pytest.mark.promise("Several ranks of a learner hold, give and take exactly the values that one process would")
@pytest.mark.parametrize(
    ("scenario", "form", "size", "near"),
    [
        ("fragments", "tensor", 4, 2),
        ("state", "fsdp", 2, 2),
        ("frozen", "fsdp", 2, 2),
        *[
            pytest.param(scenario, *row, marks=pytest.mark.slow)
            for scenario in ("fragments", "state", "frozen")
            for row in (("ddp", 2, 1), ("fsdp", 4, 1), ("hsdp", 4, 4), ("tensor", 4, 4))
        ],
        pytest.param("state", "fsdp", 8, 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_exchange_what_one_process_would(tmp_path: Path, scenario: str, form: str, size: int, near: int) -> None:
    play(tmp_path, scenario, form, size, near=near)


@pytest.mark.promise("The slot's checkpoint of a learner is read by one of another number of ranks, each its own rows")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 1, 16), (1, 8)], ids=str)
def test_the_slots_checkpoint_of_a_group_of_another_size(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """The first learner writes it, and the others begin with it."""
    for turn, size in enumerate(sizes):
        folder = tmp_path / str(size)
        folder.mkdir()
        scenario, form = "read" if turn else "write", "single" if size == 1 else "fsdp"
        play(
            folder, scenario, form, size, near=-(-size // 2), CHECKPOINT=str(tmp_path / "state" / "local-0.safetensors")
        )


@pytest.mark.promise("Ranks that compute in bfloat16 hold and exchange float32 parameters and optimizer state")
@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["masters", "state"])
def test_ranks_that_compute_in_bfloat16_exchange_float32(tmp_path: Path, scenario: str) -> None:
    play(tmp_path, scenario, "masters", 2, near=1)


@pytest.mark.promise("A push of several ranks is, bit for bit, one process's push of the same parameters")
@pytest.mark.slow
@pytest.mark.parametrize(("form", "near"), [("fsdp", 2), ("ddp", 1)])
def test_a_push_of_ranks_is_one_processs_push(tmp_path: Path, form: str, near: int) -> None:
    """Every encoding, with error feedback and without."""
    play(tmp_path, "pushes", form, 2, near=near)


@pytest.mark.promise("The ranks of a learner act by one stream of commands; one that is out of order ends the learner")
def test_commands_come_whole_and_in_order(tmp_path: Path) -> None:
    play(tmp_path, "commands", "single", 2, near=2)
