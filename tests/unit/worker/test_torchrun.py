"""Which ranks a pod starts: its place in its learner, and what torchrun is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_worker.integrations import torchrun
from diloco_worker.integrations.torchrun import GroupPlace, check_options, group_environment, place_of
from diloco_worker.settings import ConfigurationError

ADDRESS = "job-local-{first}.job-local"


def test_the_pods_of_a_learner_follow_each_other() -> None:
    assert [place_of(index, 3) for index in range(5)] == [
        GroupPlace(0, 0),
        GroupPlace(0, 1),
        GroupPlace(0, 2),
        GroupPlace(1, 0),
        GroupPlace(1, 1),
    ]
    assert place_of(7, 1) == GroupPlace(7, 0)


def test_torchrun_is_told_by_its_variables() -> None:
    found = group_environment({"DILOCO_POD_INDEX": "5", "DILOCO_DRAIN_SECONDS": "85"}, 8, 2, ADDRESS)
    assert found == {
        "DILOCO_ORDINAL": "2",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "8",
        "PET_MAX_RESTARTS": "0",
        "PET_SHUTDOWN_TIMEOUT": "85",
        "PET_MASTER_ADDR": "job-local-4.job-local",
        "PET_MASTER_PORT": "29500",
        "PET_RDZV_CONF": "timeout=3600",
    }
    alone = group_environment({"DILOCO_POD_INDEX": "5"}, 4, 1, "")
    assert alone["DILOCO_ORDINAL"] == "5" and not any("MASTER" in name for name in alone), (
        "torchrun chooses a free port"
    )


def test_torchrun_itself_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    for name, value in group_environment({"DILOCO_POD_INDEX": "3"}, 4, 2, ADDRESS).items():
        monkeypatch.setenv(name, value)
    options = parse_args(torchrun.torchrun_arguments(["python", "-m", "diloco_worker"]))
    assert (options.nnodes, options.node_rank, options.nproc_per_node) == ("2", 1, "4")
    assert (options.master_addr, options.master_port) == ("job-local-2.job-local", 29500)
    assert (options.max_restarts, options.shutdown_timeout, options.no_python) == (0, 25, True)
    assert [options.training_script, *options.training_script_args] == ["python", "-m", "diloco_worker"]
    check_options(options, 4, 2)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["python", "-m", "diloco_worker"], ["--no-python", "python", "-m", "diloco_worker"]),
        (["/usr/bin/train", "--lr", "1"], ["--no-python", "/usr/bin/train", "--lr", "1"]),
        (["torchrun", "train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["/opt/venv/bin/torchrun", "-m", "train"], ["-m", "train"]),
        (["python3.11", "-m", "torch.distributed.run", "train.py"], ["train.py"]),
        (["python", "torchrun", "train.py"], ["--no-python", "python", "torchrun", "train.py"]),
    ],
)
def test_a_command_that_is_torchrun_keeps_its_options(command: list[str], arguments: list[str]) -> None:
    assert torchrun.torchrun_arguments(command) == arguments


def options(**given: Any) -> Any:
    found = {"nproc_per_node": "2", "nnodes": "1", "standalone": False, "rdzv_backend": "static", "rdzv_endpoint": ""}
    return SimpleNamespace(**{**found, **given})


@pytest.mark.parametrize(
    ("pods", "given", "said"),
    [
        (1, {"nproc_per_node": "8"}, "--nproc-per-node 8, and learners.processes is 2: leave --nproc-per-node out"),
        (1, {"nproc_per_node": "gpu"}, "--nproc-per-node gpu"),
        (2, {"nnodes": "1:4"}, "--nnodes 1:4, and learners.pods is 2"),
        (2, {"nnodes": "2", "standalone": True}, "--standalone"),
        (2, {"nnodes": "2", "rdzv_backend": "c10d"}, "--rdzv-…"),
        (2, {"nnodes": "2", "rdzv_endpoint": "host:1"}, "--rdzv-…"),
    ],
)
def test_an_option_that_contradicts_the_job_is_refused(pods: int, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^learners\.command has") as refused:
        check_options(options(**given), 2, pods)
    assert said in str(refused.value)


def test_options_that_agree_with_the_job_are_taken() -> None:
    check_options(options(nnodes="1:1", standalone=True), 2, 1)
    check_options(options(nnodes="2:2"), 2, 2)


@pytest.mark.parametrize(
    ("environ", "said"),
    [({"DILOCO_POD_INDEX": "local-3"}, "DILOCO_POD_INDEX"), ({"DILOCO_DRAIN_SECONDS": "soon"}, "DILOCO_DRAIN_SECONDS")],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{said} is "):
        group_environment(environ, 2, 2, ADDRESS)


@pytest.mark.parametrize("arguments", [["--processes", "0", "--", "x"], ["--pods", "2", "--", "x"], []])
def test_wrong_arguments_end_with_a_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        torchrun.main(arguments)
    assert "usage:" in capsys.readouterr().err
