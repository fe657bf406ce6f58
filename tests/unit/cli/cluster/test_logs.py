"""``diloco logs``: whose lines, in which order, and how they are shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco.cluster.client import ClusterError
from diloco.cluster.logs import MAX_LINE, chosen, lines, source, stamped
from diloco.log_lines import LinePrinter, LogOptions, rendered
from diloco_protocol.common.logs import JsonLines, TextLines

JOB: dict[str, Any] = {
    "metadata": {"name": "tiny"},
    "spec": {"regions": [{"name": "west", "learners": 2, "spares": 1}, {"name": "east", "learners": 1}]},
}


def pod(name: str, role: str, region: str = "", container: str = "", index: str = "") -> dict[str, Any]:
    labels = {
        "diloco.io/role": role,
        **({"diloco.io/region": region} if region else {}),
        **({"apps.kubernetes.io/pod-index": index} if index else {}),
    }
    containers = [{"name": "sidecar"}, {"name": container or role}]
    return {"metadata": {"name": name, "uid": f"uid-{name}", "labels": labels}, "spec": {"containers": containers}}


PODS = [
    pod("tiny-east-0", "learner", "east"),
    pod("tiny-west-10", "learner", "west"),
    pod("tiny-west-2", "learner", "west", index="2"),
    pod("tiny-evaluator-7f-x", "evaluator"),
    pod("tiny-syncer-5d-y", "syncer"),
    pod("tiny-west-0", "learner", "west"),
]


def labels(target: str | None, pods: list[dict[str, Any]] = PODS) -> list[str]:
    return [one.label for one in chosen(JOB, pods, target)]


def test_all_of_a_job_in_its_order() -> None:
    assert labels(None) == ["syncer", "evaluator", "west-0", "west-2", "west-10", "east-0"]
    assert source(PODS[4]).container == "syncer"
    assert source(pod("p", "learner", "west", container="other")).container == "sidecar"


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("syncer", ["syncer"]),
        ("evaluator", ["evaluator"]),
        ("west-2", ["west-2"]),
        ("east", ["east-0"]),
        ("west", ["west-0", "west-2"]),
        ("learner-0", ["west-0"]),
        ("learner-2", ["east-0"]),
        ("learner-1", []),
        ("west-1", []),  # of the job, and not there now
        ("tiny-west-10", ["west-10"]),
        ("west-10", ["west-10"]),  # there still, though scaled away
    ],
)
def test_whose(target: str, found: list[str]) -> None:
    assert labels(target) == found


def test_a_shard_that_has_a_pod_is_called_by_its_number() -> None:
    shards = [pod(f"tiny-syncer-shard-{n}-6c-z", "shard", container="syncer") for n in (1, 0)]
    for n, one in zip((1, 0), shards, strict=True):
        one["metadata"]["labels"]["diloco.io/shard"] = str(n)
    assert source(shards[0]).container == "syncer"
    assert labels(None, [*PODS, *shards])[:4] == ["syncer", "syncer-shard-0", "syncer-shard-1", "evaluator"]
    assert labels("syncer-shard-1", [*PODS, *shards]) == ["syncer-shard-1"] and labels("syncer", PODS) == ["syncer"]
    job = {**JOB, "spec": {**JOB["spec"], "syncer": {"shards": 3, "shardPods": {}}}}
    assert chosen(job, PODS, "syncer-shard-2") == [], "of the job, and not there now"
    with pytest.raises(ClusterError, match="has no syncer-shard-3"):
        chosen(job, PODS, "syncer-shard-3")


@pytest.mark.parametrize("target", ["wst-0", "learner-3", "west-3", "learner", "north", "tiny-north-0", "syncer-0"])
def test_whose_is_none_of_the_job(target: str) -> None:
    with pytest.raises(ClusterError, match=f"the job tiny has no {target}") as error:
        labels(target)
    assert error.value.code == 2
    assert "west" in str(error.value)


def test_a_region_called_learner_means_itself() -> None:
    regions = [{"name": "a", "learners": 1}, {"name": "learner", "learners": 2}]
    job = {"metadata": {"name": "tiny"}, "spec": {"regions": regions}}
    pods = [pod("tiny-a-0", "learner", "a"), pod("tiny-learner-0", "learner", "learner")]
    assert [one.pod for one in chosen(job, pods, "learner-0")] == ["tiny-learner-0"]
    assert [one.pod for one in chosen(job, pods, "learner")] == ["tiny-learner-0"]


def test_the_pods_of_a_learner_of_several_are_its_own() -> None:
    """Indices 2 and 3 are learner 1's, where each has two pods."""
    pods = [pod(f"tiny-west-{index}", "learner", "west", index=str(index)) for index in range(4)]
    for one in pods:
        one["metadata"]["labels"]["diloco.io/pods"] = "2"
    assert labels(None, pods) == ["west-0", "west-0", "west-1", "west-1"]
    assert [one.pod for one in chosen(JOB, pods, "west-1")] == ["tiny-west-2", "tiny-west-3"]


def test_times_sort_though_their_ends_are_cut() -> None:
    stamps = [
        "2026-11-21T07:50:10Z",
        "2026-11-21T07:50:10.1Z",
        "2026-11-21T07:50:10.12Z",
        "2026-11-21T07:50:10.123456789Z",
        "2026-11-21T07:50:11Z",
    ]
    keys = [stamped(f"{stamp} a line")[0] for stamp in stamps]
    assert keys == sorted(keys) and len(set(keys)) == 5
    assert stamped(f"{stamps[3]} a  line ")[1] == "a  line "
    assert stamped(f"{stamps[0]} ") == (keys[0], "")
    for odd in ("no time here", "", "2026Z x", "failed to open log file: x"):
        assert stamped(odd) == ("", odd)


def test_lines_of_the_projects_own_programs_are_rendered() -> None:
    """Made by the formatter that pods use, so that the two cannot drift apart."""
    import logging

    record = logging.LogRecord("diloco_worker", logging.WARNING, "", 0, "the push was %s", ("refused",), None)
    record.created, record.msecs = 1_800_000_000.25, 250.0
    line = JsonLines({"job": "tiny", "region": "west", "ordinal": 1, "slot": 3}).format(record)
    text = TextLines().format(record)  # of a process on this machine
    assert rendered(line) == (f"{text[:23]} WARNING slot 3  the push was refused", "yellow")
    assert text.startswith("2027-01-1") and text[19:23] == ",250"


def test_other_lines_are_shown() -> None:
    for line in ("plain text", "{not json", '["a"]', '{"level": "info"}', "{}", ""):
        assert rendered(line) == (line, "")
    line = json.dumps({"message": "m", "level": "error", "step": 7, "slot": -1, "traceback": "T\n  at x"})
    assert rendered(line) == ("ERROR   m  step=7\nT\n  at x", "red")


class Chunks:
    def __init__(self, *chunks: bytes) -> None:
        self.chunks = chunks

    def stream(self, size: int) -> Any:
        return iter(self.chunks)


def test_lines_are_put_together_from_chunks() -> None:
    assert list(lines(Chunks(b"one\ntw", b"o\r\n\nthr", b"ee"))) == ["one", "two", "", "three"]
    assert list(lines(Chunks("Δ".encode()[:1], "Δ\n".encode()[1:]))) == ["Δ"]
    assert list(lines(Chunks(b"\xff\n"))) == ["\ufffd"]
    long = list(lines(Chunks(b"x" * (MAX_LINE + 5), b"y\n")))
    assert [len(one) for one in long] == [MAX_LINE, 6]


@pytest.mark.promise("A terminal does not obey text that a pod wrote into its log", section="Hostile callers")
def test_a_terminal_does_not_obey_what_a_pod_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    """Titles, the clipboard, erased lines: as text they are harmless."""
    evil = "a\x1b]52;c;ZXZpbA==\x07b\x9b2Kc\rd\te"
    one = source(PODS[0])
    printer = LinePrinter(LogOptions(), [one.label])
    printer.show(one.label, json.dumps({"level": "info", "message": evil, "time": "x", "slot": -1}))
    printer.show(one.label, evil)
    printer.show(one.label, '{"a":' * 100_000)
    said = capsys.readouterr().out
    assert not set(said) & {"\x1b", "\x07", "\x9b", "\r"} and said.count("\te") == 2
