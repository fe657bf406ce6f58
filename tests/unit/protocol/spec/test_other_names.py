"""What an unknown field is taken to mean: the paper's letters, other programs' names, single values for sections."""

from __future__ import annotations

import json

import pytest

from diloco_protocol.spec.explain import locate
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, parse_job
from diloco_protocol.spec.other_names import IN_SECTION, OTHERS, SAMPLES, meant_by, other_names

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  training:
    model: {config: {model_type: llama}}
    data: {paths: [python-stdlib]}
  regions: [{learners: 2}]
"""


def said(*overrides: str) -> list[str]:
    """What is wrong with the job, with these fields set."""
    with pytest.raises(JobError) as caught:
        parse_job(JOB, overrides)
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sync.H=10", "did you mean every? Such as every: 10"),
        ("sync.K=1", "did you mean quorum? Such as quorum: 1"),
        ("sync.P=8", "did you mean fragments? Such as fragments: 8"),
        ("sync.tau=2", "did you mean overlap? Such as overlap: 2"),
        ("sync.τ=2", "did you mean overlap? Such as overlap: 2"),
        ("H=10", "did you mean spec.sync.every? Such as below spec: sync: {every: 10}"),
        ("training.optimizer.learning_rate=0.1", "did you mean lr? Such as lr: 0.1"),
        ("training.learningRate=0.1", "did you mean spec.training.optimizer.lr? Such as"),
        (
            "training.batch_size=8",
            "spec.training.batch.sequences? Such as below spec: training: {batch: {sequences: 8}}",
        ),
        ("training.max_steps=10", "did you mean spec.training.stop.steps?"),
        ("training.data.path=a.txt", "did you mean paths? Such as paths: [a.txt]"),
        ("training.model.hidden_size=64", "did you mean config? Such as config: {model_type: llama, hidden_size: 64}"),
        ("training.model.model_type=gpt2", "did you mean config? Such as config: {model_type: gpt2}"),
        ("training.model.name=gpt2", "did you mean from? Such as from: gpt2"),
        ("learners.script=train.py", "did you mean command? Such as command: [train.py]"),
        ("num_learners=3", "did you mean regions? Such as regions: [{learners: 3}]"),
        ("regions.0.replicas=4", "did you mean learners? Such as learners: 4"),
        ("sync.compression.bits=4", "did you mean up? Such as up: int4"),
        ("training.epochs=3", "spec.training.stop.steps? There are no epochs: set steps or tokens"),
        ("training.stop.epochs=3", "did you mean steps? There are no epochs: set steps or tokens"),
        ("training.weight_decay=0.1", "did you mean spec.training.optimizer.weightDecay?"),
        ("sync.adoption.α=0.5", "did you mean alpha? Such as alpha: 0.5"),
        ("training.optimizer.eta=0.1", "did you mean lr? Such as lr: 0.1"),
        ("training.optimizer.η=0.1", "did you mean lr? Such as lr: 0.1"),
        ("sync.outer.eta=0.4", "did you mean lr? Such as lr: 0.4"),
        ("training.lr=0.1", "did you mean spec.training.optimizer.lr?"),
        ("sync.lr=0.1", "did you mean spec.sync.outer.lr?"),
        ("lr=0.1", "did you mean spec.training.optimizer.lr or spec.sync.outer.lr?"),
        # The section where it was written comes first: the outer optimizer's rate is not the inner one's.
        ("sync.outer.learning_rate=0.7", "did you mean lr? Such as lr: 0.7"),
        ("sync.outer.eta=0.7", "did you mean lr? Such as lr: 0.7"),
        ("sync.learning_rate=0.7", "did you mean spec.sync.outer.lr? Such as below spec: sync: {outer: {lr: 0.7}}"),
        ("sync.η=0.7", "did you mean spec.sync.outer.lr? Such as below spec: sync: {outer: {lr: 0.7}}"),
        ("eta=0.7", "did you mean spec.sync.outer.lr or spec.training.optimizer.lr?"),
        ("sync.outer.beta=0.9", "did you mean betas?"),
        ("sync.outer.epsilon=0.1", "did you mean eps? Such as eps: 0.1"),
        ("sync.outer.name=sgd", "did you mean optimizer? Such as optimizer: sgd"),
        ("sync.outer.type=sgd", "did you mean optimizer? Such as optimizer: sgd"),
        ("sync.outer.α=0.7", "did you mean ageDecay? Such as ageDecay: 0.7"),
        ("sync.α=0.7", "did you mean spec.sync.adoption.alpha? Such as below spec: sync: {adoption: {alpha: 0.7}}"),
        ("sync.timeout=20.0", "did you mean spec.sync.grace.capSeconds or spec.sync.heartbeat.timeoutSeconds?"),
        ("training.bf16=true", "did you mean precision? Such as precision: bfloat16"),
        ("training.bf16=false", "did you mean precision? Such as precision: float32"),
        ("training.mixed_precision=bf16", "did you mean precision? Such as precision: bfloat16"),
        ("training.fp16=true", "did you mean precision? There is no float16 here. Such as precision: bfloat16"),
        ("training.precision=fp16", "there is no float16 here (did you mean bfloat16?)"),
        ("training.precision=fp32", "(did you mean float32?)"),
        ("learners_per_region=2", "did you mean regions? Such as regions: [{learners: 2}]"),
        ("regions.0.learners_per_region=2", "did you mean learners? Such as learners: 2"),
        ("train_micro_batch_size_per_gpu=4", "Such as below spec: training: {batch: {sequences: 4}}"),
        ("training.weight_decay=0.1", "did you mean spec.training.optimizer.weightDecay?"),
        ("rdzv_endpoint=h:1", "did you mean spec.syncer.endpoint.address? Such as below spec: syncer: {endpoint: {"),
        (
            "learners.image=x",
            "did you mean podTemplate? Such as podTemplate: {spec: {containers: [{name: learner, image: x}]}}",
        ),
        (
            "learners.env={A: 1}",
            "Such as podTemplate: {spec: {containers: [{name: learner, env: [{name: A, value: '1'}]}]}}",
        ),
        ("regions.0.resources={limits: {cpu: 1}}", "[{name: learner, resources: {limits: {cpu: 1}}}]"),
        (
            "regions.0.nodeSelector={a: b}",
            "did you mean podTemplate? Such as podTemplate: {spec: {nodeSelector: {a: b}}}",
        ),
        ("syncer.image=x", "[{name: syncer, image: x}]"),
    ],
)
def test_another_name_is_told_by_the_fields_own_with_an_example(override: str, words: str) -> None:
    (problem,) = said(override)
    assert words in problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "training.eval_steps=10",
            "did you mean spec.training.evaluation.everyTokens? It counts tokens, of all learners",
        ),
        ("training.evaluation.eval_steps=10", "did you mean everyTokens? It counts tokens"),
        ("save_steps=100", "did you mean spec.syncer.checkpoint.everySeconds? It counts seconds, not steps."),
        (
            "training.warmup_ratio=0.1",
            "did you mean spec.training.optimizer.warmupSteps? It counts steps: the ratio times",
        ),
        (
            "training.num_train_epochs=3",
            "did you mean spec.training.stop.steps? There are no epochs: set steps or tokens",
        ),
        ("epochs=3", "did you mean spec.training.stop.steps? There are no epochs"),
        ("training.data.num_workers=2", "spec.training.data.num_workers: does not exist here: a learner prepares"),
        ("training.zero_optimization={stage: 2}", "divides the model by FSDP2"),
        ("zero_optimization={stage: 2}", "divides the model by FSDP2"),
    ],
)
def test_a_number_of_another_unit_is_not_taken_over_and_what_is_not_here_is_said(override: str, words: str) -> None:
    (problem,) = said(override)
    assert words in problem and "Such as" not in problem


def test_fields_of_a_configuration_beside_config_are_one_problem() -> None:
    job = JOB.replace("{config: {model_type: llama}}", "{model_type: llama, hidden_size: 64, rope_theta: 5}")
    with pytest.raises(JobError) as caught:
        parse_job(job)
    (problem,) = caught.value.problems
    assert problem.path == "spec.training.model.model_type" and problem.line is not None
    assert "and neither are hidden_size, rope_theta: did you mean config?" in problem.message
    assert problem.message.endswith("Such as config: {model_type: llama, hidden_size: 64, rope_theta: 5}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.stop=1000", "must be a mapping, such as {steps: 1000}"),
        ("training.batch=16", "must be a mapping, such as {sequences: 16}"),
        ("training.model=./w", "must be a mapping, or null, such as {from: ./w}"),
        ("training.data=a.txt", "must be a mapping, or null, such as {paths: [a.txt]}"),
        ("training.optimizer=3e-4", "must be a mapping, such as {lr: 0.0003}"),
        ("sync.compression=int8", "must be a mapping, such as {up: int8}"),
        ("sync.outer=sgd", "must be a mapping, such as {optimizer: sgd}"),
        ("sync.grace=often", "must be a mapping, such as {capSeconds: 10.0}"),
        ("learners=4", "set for each region, such as regions: [{learners: 4}]"),
        ("regions=3", "must be a list of 1 to 64 mappings, such as [{learners: 3}]"),
    ],
)
def test_a_single_value_for_a_section_gets_an_example_with_that_value(override: str, words: str) -> None:
    (problem,) = said(override)
    assert words in problem


def test_a_rule_does_not_speak_of_a_field_that_was_given_by_another_name() -> None:
    """`H: 2` is refused; that 24 fragments need an `every` of 24 is no second problem."""
    assert len(said("sync.H=2", "sync.fragments=30")) == 1


def test_the_example_is_one_that_the_field_takes() -> None:
    (problem,) = said("sync.H=often")
    assert "Such as every: 24" in problem


def test_other_names_lead_to_fields_and_samples_to_sections() -> None:
    for path in (*OTHERS, *IN_SECTION):
        steps: list[str | int] = list(path.split("."))
        if steps[1] == "regions":
            steps.insert(2, 0)
        assert locate(DiLoCoJob, tuple(steps))[0] is not None, path
    assert other_names(("spec", "sync", "quorum"))[0] == "K" and other_names(("spec",)) == []
    for path, sample in SAMPLES.items():
        for name in sample:
            assert locate(DiLoCoJob, (*path.split("."), name))[0] is not None, (path, name)
    assert meant_by("h", ("spec", "training")) == ("spec", "sync", "every")
    assert meant_by("path", ("spec", "training", "data")) == ("spec", "training", "data", "paths")
    assert meant_by("path", ("spec", "sync")) is None  # of the model's or of the data's
    assert meant_by("nonsense", ()) is None


@pytest.mark.parametrize(
    ("written", "cure"),
    [("python train.py", "Such as command: [python, train.py]"), ("python 'no end", "each text"), ("", "each text")],
)
def test_a_text_for_a_command_gets_the_list_that_it_means(written: str, cure: str) -> None:
    job = {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "own"},
        "spec": {"learners": {"command": written}, "regions": [{"learners": 1}]},
    }
    with pytest.raises(JobError) as refused:
        parse_job(json.dumps(job))
    (message,) = [one.message for one in refused.value.problems if one.path == "spec.learners.command"]
    assert cure in message and ("Such as" in message) == ("Such as" in cure)
