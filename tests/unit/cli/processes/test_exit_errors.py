"""Which error ended a process of a run: by how it ended, what it wrote, and what the kernel counted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.processes import exit_errors
from diloco.processes.exit_errors import ExitErrors, error_of_exit
from diloco.processes.memory_kills import count_memory_kills, memory_need_text
from diloco.processes.supervisor import Exit, Kind
from diloco_protocol.common.program_errors import NEVER_JOINED
from diloco_protocol.spec.load import parse_job

TRACE = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "NameError: name 'lss'"]
SIGTERM, SIGKILL, SIGSEGV = 15, 9, 11


class Shown:
    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, text: str, style: str = "") -> None:
        self.said.append(text)

    def show_text(self, text: str) -> None:
        self.said.append(text)


def text_of(how: Exit, log: list[str], killed: bool | None = False, joined: bool = True) -> str | None:
    found = error_of_exit(Kind.LEARNER, how, log, killed, need="each needs 8 GB", joined=joined)
    return None if found is None else found.text


@pytest.mark.parametrize(
    ("how", "log", "text"),
    [
        (Exit(code=1), TRACE, "NameError: name 'lss'"),
        (Exit(code=7), ["broken on purpose"], "broken on purpose"),
        (
            Exit(code=1),
            [*TRACE[:2], "ModuleNotFoundError: No module named 'x'"],
            f"ModuleNotFoundError: No module named 'x' "
            f"(imported by {sys.executable}; a command's python is diloco's own)",
        ),
        (Exit(code=7), [], "exit code 7, and nothing in its log"),
        (Exit(code=5), [], "exit code 5: training diverged, and nothing in its log"),
        (Exit(signal=SIGSEGV), ["step 3, loss 2.1"], "SIGSEGV"),
        (Exit(code=128 + SIGSEGV), ["step 4, loss 2.0"], "exit code 139"),
        *((Exit(code=code), TRACE, None) for code in (0, 128 + SIGTERM, 130)),
        (Exit(signal=SIGTERM), TRACE, None),
    ],
)
def test_the_error_of_an_end(how: Exit, log: list[str], text: str | None) -> None:
    assert text_of(how, log) == text


def test_a_kill_by_the_system_is_named_with_the_memory_that_is_needed() -> None:
    for how in (Exit(signal=SIGKILL), Exit(code=128 + SIGKILL)):
        assert text_of(how, TRACE, None) == f"killed by the system, probably out of memory ({how}); each needs 8 GB"
        assert text_of(how, TRACE, True) == f"killed by the system, out of memory ({how}); each needs 8 GB"


def test_a_kill_that_the_kernel_does_not_count_is_a_persons_or_a_services() -> None:
    text = text_of(Exit(signal=SIGKILL), TRACE, False)
    assert text is not None and text.startswith("killed by a person, or by a service that watches memory")
    assert text.endswith("(SIGKILL); the kernel counts no kill for want of memory; each needs 8 GB")
    found = error_of_exit(Kind.LEARNER, Exit(signal=SIGKILL), TRACE, False, need="each needs 8 GB")
    assert found is not None and found.brief == "killed by a person, or by a service that watches memory"


def test_a_program_that_never_joined_and_ended_well_is_told_how_to_join() -> None:
    assert text_of(Exit(code=0), [], joined=False) == NEVER_JOINED
    assert "Learner.from_environment" in NEVER_JOINED
    assert error_of_exit(Kind.EVALUATOR, Exit(code=0), [], False, need="", joined=False) is None
    assert text_of(Exit(signal=SIGTERM), [], joined=False) is None, "it was told to end"


def test_what_the_process_before_wrote_is_not_this_ones(tmp_path: Path) -> None:
    log = tmp_path / "learner-0.log"
    errors = ExitErrors(lambda name: log, lambda: "")
    errors.begin("learner-0")
    log.write_text("\n".join(TRACE) + "\n")
    first = errors.find("learner-0", Kind.LEARNER, Exit(code=1))
    assert first is not None and first.text == "NameError: name 'lss'" and first.lines == tuple(TRACE)
    errors.begin("learner-0")
    second = errors.find("learner-0", Kind.LEARNER, Exit(code=1))
    assert second is not None and second.text == "exit code 1, and nothing in its log" and not second.lines
    with log.open("a") as file:
        file.write("x" * (1 << 20) + "\n" + "\n".join(TRACE))
    third = errors.find("learner-0", Kind.LEARNER, Exit(code=1))
    assert third is not None and third.text == "NameError: name 'lss'"


def test_an_error_is_shown_the_first_time_alone_with_the_path_of_its_log(tmp_path: Path) -> None:
    log, screen = tmp_path / "log", Shown()
    errors = ExitErrors(lambda name: log, lambda: "")
    errors.begin("learner-0")
    log.write_text("\n".join(TRACE))
    for _ in range(3):
        errors.show("learner-0", errors.find("learner-0", Kind.LEARNER, Exit(code=1)), screen)
    assert screen.said == [f"the end of {log}:\n" + "\n".join(f"  {line}" for line in TRACE)]
    errors.show("learner-1", errors.find("learner-1", Kind.LEARNER, Exit(signal=SIGKILL)), screen)
    errors.show("learner-1", None, screen)
    assert len(screen.said) == 2 and screen.said[1].startswith("learner-1: killed by ")
    assert errors.was_shown(errors.find("learner-0", Kind.LEARNER, Exit(code=1))) and not errors.was_shown(None)


def test_a_count_of_the_kernel_that_has_risen_says_that_memory_was_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int | None] = [4, 4, 5, None, 9]
    monkeypatch.setattr(exit_errors, "count_memory_kills", lambda: counts.pop(0))
    errors = ExitErrors(lambda name: tmp_path / "none", lambda: "")
    found = [errors.find("a", Kind.LEARNER, Exit(signal=SIGKILL)) for _ in range(4)]
    said = [one.text.partition(" (")[0] for one in found if one is not None]
    assert said[1] == "killed by the system, out of memory" and "by a person" in said[0]
    assert said[2] == said[3] == "killed by the system, probably out of memory", "the counts were not to be read"


def test_two_kills_in_one_shortage_are_both_named_so_and_a_persons_later_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, now = [4], [100.0]
    monkeypatch.setattr(exit_errors, "count_memory_kills", lambda: count[0])
    monkeypatch.setattr(exit_errors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    errors = ExitErrors(lambda name: tmp_path / "none", lambda: "")

    def is_told_of_memory(name: str) -> bool:
        found = errors.find(name, Kind.LEARNER, Exit(signal=SIGKILL))
        return found is not None and found.text.startswith("killed by the system, out of memory")

    count[0] = 6  # both are counted before the first is looked at
    assert is_told_of_memory("a")
    errors.begin("a")
    assert is_told_of_memory("b") and not is_told_of_memory("c")
    count[0] = 9
    assert errors.find("d", Kind.LEARNER, Exit(code=1)) is not None
    for _ in range(2):  # that it was looked at in between makes it no later
        now[0] += 0.6 * exit_errors.TOGETHER_SECONDS
        errors.begin("d")
    assert not is_told_of_memory("a"), "what the kernel counted then was another program's"


def test_the_kernels_counts_are_read_for_the_machine_and_each_group(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    assert count_memory_kills(proc, groups) is None
    (proc / "self").mkdir(parents=True)
    (proc / "vmstat").write_text("pgfault 12\noom_kill 3\nnr_free_pages 7\n")
    assert count_memory_kills(proc, groups) == 3
    (proc / "self" / "cgroup").write_text("0::/slice/unit\n9:memory:/old\n3:cpu,cpuacct:/x\n")
    for name, file, text in (
        ("slice/unit", "memory.events", "low 0\noom 2\noom_kill 2\n"),
        ("slice", "memory.events", "oom_kill 10\n"),
        ("memory/old", "memory.oom_control", "under_oom 0\noom_kill 100\n"),
        ("cpu/x", "memory.events", "oom_kill 1000\n"),
    ):
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / file).write_text(text)
    assert count_memory_kills(proc, groups) == 3 + 2 + 10 + 100
    (proc / "self" / "cgroup").write_text("0::/../../etc\n")
    assert count_memory_kills(proc, groups) == 3


def test_this_machine_can_be_asked() -> None:
    count = count_memory_kills()
    assert count is None or count >= 0


JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: large}
spec:
  learners: {command: [python, train.py]}
  training: {device: cpu, model: null, data: null, stop: {steps: 10}}
  regions: [{learners: 3, spares: 1}]
"""


def test_the_memory_that_a_job_needs_is_that_of_its_plan() -> None:
    spec = parse_job(JOB).spec
    text = memory_need_text(spec, 1_000_000_000)
    assert "each learner of this model needs at least 24 GB" in text and "for 4 learners" in text
    own = "`diloco plan JOB.yaml --params N` prints what memory the job needs with N trained parameters"
    assert memory_need_text(spec, 0) == own, "without --params it is an error"
    built_in = parse_job(
        JOB.replace("model: null, data: null", "model: {config: {model_type: llama}}, data: {paths: [a.txt]}")
    ).spec
    assert memory_need_text(built_in, 0) == "`diloco plan JOB.yaml` prints what memory the job needs"
