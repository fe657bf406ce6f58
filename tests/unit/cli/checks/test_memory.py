"""What a run takes on its machine, and what is free there."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.checks.memory import PROCESS_BYTES, estimate_memory, free_memory, memory_shortage, size_line
from diloco_protocol.resources import needs
from diloco_protocol.spec.load import load_job
from diloco_worker.training.findings import ModelFacts
from repository import ROOT

EXAMPLE = ROOT / "examples" / "minimal.yaml"
MILLION = ModelFacts("Model", 1_000_000, 1_000_000, 4_000_000, fragments=(500_000, 500_000))


def test_every_process_of_the_run_counts() -> None:
    job = load_job(
        EXAMPLE,
        ["training.device=auto", "regions=[{name: a, learners: 2, spares: 1}, {name: b, learners: 1, maxLearners: 9}]"],
    )
    need = estimate_memory(job, MILLION, "cpu")
    needed = needs(job.spec, MILLION.fragments)
    assert need.learners == 4 and need.syncer == needed.syncer_memory
    assert need.learner == PROCESS_BYTES + needed.learner_memory + 16_000_000
    assert need.evaluator == PROCESS_BYTES + 4_000_000
    assert need.whole == need.syncer + 4 * need.learner + need.evaluator
    assert not estimate_memory(load_job(EXAMPLE, ["training.evaluation=null"]), MILLION, "cpu").evaluator
    # The same as of a job that says cpu: then the plan's own figure has the loop.
    assert estimate_memory(load_job(EXAMPLE, ["training.device=cpu"]), MILLION, "cpu").learner == need.learner


def test_the_ranks_of_a_learner_share_what_the_library_keeps_and_divide_the_model() -> None:
    one = "regions=[{name: a, learners: 1, processes: 4, parallel: {replicate: 2}}, {name: b, learners: 2}]"
    job = load_job(EXAMPLE, [one, "training.device=auto"])
    need = estimate_memory(job, MILLION, "cpu")
    shared = 8 * 500_000  # in /dev/shm
    group = 4 * PROCESS_BYTES + 8_000_000 + shared + 2 * 16_000_000
    single = PROCESS_BYTES + 8_000_000 + 16_000_000
    assert (need.learner, need.all_learners, need.device) == (group, group + 2 * single, 0)
    assert "for 3 learners" in need.text()
    assert estimate_memory(job, MILLION, "cuda").device == 16_000_000 + 8 * 500_000, "of the single one"
    four = estimate_memory(load_job(EXAMPLE, ["learners.processes=4", "training.device=auto"]), MILLION, "cuda")
    assert four.device == 4_000_000 + 2 * 500_000
    said = memory_shortage(four, 10**12, device_bytes=4_900_000)
    assert "a rank needs at least about 5 MB of its GPU, which has 4.9 MB" in said and "learners.processes" in said
    assert not memory_shortage(four, 10**12, device_bytes=5_000_000)


def test_frozen_parameters_are_held_by_every_learner_on_the_cpu() -> None:
    job = load_job(EXAMPLE, ["training.device=cpu"])
    frozen = ModelFacts("Model", 9_000_000, 1_000_000, 4_000_000 + 2 * 8_000_000, fragments=(500_000, 500_000))
    assert estimate_memory(job, frozen, "cpu").learner == estimate_memory(job, MILLION, "cpu").learner + 16_000_000
    assert "9,000,000 (20 MB), 1,000,000 of them trained; per learner about " in size_line(
        frozen, estimate_memory(job, frozen, "cpu")
    )


def test_what_does_not_fit_names_need_and_have() -> None:
    need = estimate_memory(load_job(EXAMPLE), MILLION, "cpu")
    assert memory_shortage(need, need.whole) == ""
    said = memory_shortage(need, need.whole - 1)
    assert said.startswith("the job needs at least about ") and "for each of 2 learners" in said
    assert "are free on this machine: fewer learners (--set regions.0.learners=N)" in said
    one = need.syncer + need.learner + need.evaluator
    assert "fewer learners" in memory_shortage(need, one)
    assert memory_shortage(need, one - 1).endswith("are free on this machine: a smaller model, or a larger machine")


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       9000000 kB\nMemAvailable:   8000000 kB\n")
    return path


def limit(group: Path, most: str, used: int, cached: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon {used - cached}\nfile {cached}\ninactive_file {cached}\nactive_file 0\n")


def test_what_files_have_cached_is_free(tmp_path: Path, meminfo: Path) -> None:
    groups = tmp_path / "groups"
    limit(groups, "1000000000", 990_000_000, cached=800_000_000)
    assert free_memory(meminfo, groups, tmp_path / "none") == 810_000_000


def test_the_narrowest_group_around_this_process_holds(tmp_path: Path, meminfo: Path) -> None:
    groups, own = tmp_path / "groups", tmp_path / "cgroup"
    own.write_text("0::/slice/unit/inner\n")
    groups.mkdir()
    limit(groups / "slice", "3000000000", 1_000_000_000)
    limit(groups / "slice" / "unit", "700000000", 100_000_000)
    limit(groups / "slice" / "unit" / "inner", "max", 100_000_000)
    limit(groups / "slice" / "other", "5", 5)
    assert free_memory(meminfo, groups, own) == 600_000_000


def test_the_older_version_of_control_groups(tmp_path: Path, meminfo: Path) -> None:
    memory = tmp_path / "groups" / "memory"
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("500000000\n")
    (memory / "memory.usage_in_bytes").write_text("400000000\n")
    (memory / "memory.stat").write_text("total_inactive_file 300000000\ntotal_active_file 5\n")
    assert free_memory(meminfo, tmp_path / "groups", tmp_path / "none") == 400_000_005
