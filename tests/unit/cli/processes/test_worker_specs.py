"""Which processes a job is on one machine, and with what environment."""

from __future__ import annotations

from pathlib import Path

from diloco.processes.supervisor import Kind
from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import (
    base_environment,
    gpus,
    gpus_of,
    syncer_environment,
    threads_each,
    without_meaning,
    worker_environment,
    worker_specs,
)
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import parse_job

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  training:
    model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
                     num_attention_heads: 2}}
    data: {source: text, paths: [python-stdlib]}
  regions: [{name: east, learners: 2, spares: 1}, {name: west, learners: 1}]
"""


def job(*overrides: str) -> DiLoCoJob:
    return parse_job(JOB, overrides)


def test_learners_of_all_regions_then_spares_then_the_evaluator() -> None:
    found = [(m.name, m.kind, m.region, m.ordinal, m.learner) for m in worker_specs(job())]
    assert found == [
        ("east-0", Kind.LEARNER, "east", 0, 0),
        ("east-1", Kind.LEARNER, "east", 1, 1),
        ("west-0", Kind.LEARNER, "west", 0, 2),
        ("east-2", Kind.LEARNER, "east", 2, None),
        ("evaluator", Kind.EVALUATOR, "east", 0, None),
    ]
    assert [m.name for m in worker_specs(job("training.evaluation=null"))][-1] == "east-2"


def test_a_learners_ranks_are_those_of_all_its_pods_as_its_region_says() -> None:
    several = job("learners.processes=2", "regions.0.pods=2", "regions.1.processes=1")
    assert [(one.name, one.ranks) for one in worker_specs(several)] == [
        ("east-0", 4),
        ("east-1", 4),
        ("west-0", 1),
        ("east-2", 4),
        ("evaluator", 1),
    ]


def test_gpus_are_dealt_rank_by_rank() -> None:
    workers = worker_specs(job("regions.0.processes=2"))  # east-0, east-1, west-0, east-2, evaluator
    assert [gpus_of(one, workers, ["4", "5", "6"]) for one in workers] == ["4,5", "6,4", "5", "6,4", "5"]
    assert gpus_of(workers[0], workers, ["4"]) == "4"  # ranks may share one


def test_threads_are_shared_out_and_never_none() -> None:
    assert [threads_each(cores, 3) for cores in (1, 2, 3, 8, 64)] == [1, 1, 1, 2, 21]


def test_the_environment_of_another_job_does_not_leak() -> None:
    env = base_environment({"PATH": "/bin", "DILOCO_SYNCER": "other:1", "OMP_NUM_THREADS": "7"}, threads=2)
    assert env["PATH"] == "/bin" and "DILOCO_SYNCER" not in env
    assert env["OMP_NUM_THREADS"] == "7"  # the user has said how many
    assert env["MKL_NUM_THREADS"] == "2"
    assert base_environment({"DILOCO_LOG_LEVEL": "DEBUG"}, 1)["DILOCO_LOG_LEVEL"] == "DEBUG"


def test_the_syncer_has_no_learners_share_of_threads() -> None:
    env = base_environment({"NUMBA_NUM_THREADS": "3"}, threads=2)
    found = syncer_environment(env, {"NUMBA_NUM_THREADS": "3"})
    assert "OPENBLAS_NUM_THREADS" not in found and found["NUMBA_NUM_THREADS"] == "3"
    assert found["OMP_NUM_THREADS"] == "2"


def test_a_worker_is_told_who_it_is_and_where_the_syncer_is() -> None:
    workdir = Workdir(Path("/run"))
    learner = worker_specs(job())[2]
    env = worker_environment(learner, "ab12", workdir, Path("/jobs"), syncer=None, gpu=None)
    assert env["DILOCO_ROLE"] == "learner" and env["DILOCO_REGION"] == "west" and env["DILOCO_ORDINAL"] == "0"
    assert env["DILOCO_PROCESS"] == "ab12" and env["DILOCO_JOB_DIRECTORY"] == "/jobs"
    assert env["DILOCO_SYNCER_FILE"] == "/run/address.json" and "DILOCO_SYNCER" not in env
    env = worker_environment(worker_specs(job())[-1], "ab12", workdir, Path("/jobs"), syncer="127.0.0.1:5", gpu="1")
    assert env["DILOCO_ROLE"] == "evaluator" and env["DILOCO_SYNCER"] == "127.0.0.1:5"
    assert env["CUDA_VISIBLE_DEVICES"] == "1"


def test_gpus_are_found_without_cuda() -> None:
    names = ["null", "nvidiactl", "nvidia10", "nvidia2", "nvidia-uvm", "nvidia0"]
    assert gpus({}, names) == ["0", "2", "10"]
    assert gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-abc"}, names) == ["3", "GPU-abc"]
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}, names) == []


def test_what_only_a_cluster_reads_is_named_and_nothing_else() -> None:
    assert without_meaning(job()) == []
    assert without_meaning(job("seed=3", "sync.every=12", "sync.fragments=12", "learners.command=[python, x]")) == []
    given = [
        "suspend=true",
        "syncer.storage.size=20Gi",
        "syncer.podTemplate={spec: {}}",
        "nodeLoss.policy=ForceDelete",
        "learners.podTemplate={spec: {}}",
        "regions.1.podTemplate={spec: {}}",
    ]
    assert sorted(without_meaning(job(*given))) == sorted(entry.partition("=")[0] for entry in given)
