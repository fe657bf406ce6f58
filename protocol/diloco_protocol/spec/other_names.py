"""Other names for fields of a job: the paper's letters, and what other programs call the same thing.

None of them is taken in a job file. They are what an unknown field is compared with, so that the error names
the field that was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHERS: dict[str, str] = {
    # The letters of the paper and of the README.
    "spec.sync.fragments": "P num_fragments n_fragments shards partitions",
    "spec.sync.every": "H sync_every sync_interval sync_steps inner_steps local_steps num_inner_steps steps_per_round",
    "spec.sync.overlap": "tau τ delay fragment_sync_delay max_delay",
    "spec.sync.quorum": "K min_learners min_replicas min_replica_size min_workers",
    "spec.sync.grace.factor": "gamma γ",
    "spec.sync.grace.capSeconds": "grace_seconds grace_period timeout_after_quorum timeout",
    "spec.sync.heartbeat.timeoutSeconds": "heartbeat_timeout timeout",
    "spec.sync.outer.lr": "outer_lr outer_learning_rate eta η",
    "spec.sync.outer.momentum": "outer_momentum nesterov_momentum",
    "spec.sync.outer.optimizer": "outer_optimizer outer_opt",
    "spec.sync.compression.up": "quantization quantize should_quantize bits",
    "spec.sync.adoption.alpha": "fragment_update_alpha α",
    "spec.regions.learners": (
        "M learners_per_region"
        " replicas workers world_size num_learners n_learners num_replicas num_workers nnodes num_nodes"
        " count size num"
    ),
    # The inner optimizer.
    "spec.training.optimizer.lr": "learning_rate max_lr peak_lr inner_lr eta η",
    "spec.training.optimizer.betas": "beta adam_betas beta1 beta2 adam_beta1 adam_beta2",
    "spec.training.optimizer.eps": "epsilon adam_epsilon",
    "spec.training.optimizer.weightDecay": "wd",
    "spec.training.optimizer.warmupSteps": "warmup warmup_iters num_warmup_steps lr_warmup_steps warmup_ratio",
    "spec.training.optimizer.schedule": "lr_schedule lr_scheduler scheduler lr_scheduler_type decay",
    "spec.training.optimizer.clipNorm": (
        "max_grad_norm grad_clip grad_clip_norm gradient_clipping gradient_clip_val clip_grad clip_grad_norm"
    ),
    "spec.training.optimizer.name": "optim",
    # Batches and data.
    "spec.training.batch.sequences": (
        "batch_size per_device_train_batch_size train_batch_size micro_batch_size local_batch_size"
        " train_micro_batch_size_per_gpu"
    ),
    "spec.training.batch.accumulation": (
        "gradient_accumulation gradient_accumulation_steps grad_accum grad_accumulation_steps accumulate_grad_batches"
    ),
    "spec.training.data.sequenceLength": (
        "seq_len seq_length sequence_len max_length max_seq_len max_seq_length context_length block_size"
    ),
    "spec.training.data.paths": "path file files data_files data_path dir directory",
    "spec.training.data.name": "dataset dataset_name data_set",
    "spec.training.data.textField": "text_column column",
    "spec.training.data.tokenizer": "tokenizer_name tokenizer_path",
    "spec.training.model.from": "pretrained checkpoint model_name model_name_or_path weights init_from path",
    "spec.training.model.config": (
        "architecture arch model_type hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size"
        " n_embd n_layer n_head d_model"
    ),
    # Length, arithmetic, evaluation.
    "spec.training.stop.steps": (
        "max_steps total_steps num_steps train_steps num_train_steps max_iters iterations"
        " epochs num_epochs max_epochs n_epochs num_train_epochs"
    ),
    "spec.training.stop.tokens": "max_tokens total_tokens num_tokens",
    "spec.training.stop.seconds": "max_seconds max_time duration time_limit",
    "spec.training.precision": "dtype torch_dtype mixed_precision bf16 fp16 amp",
    "spec.training.evaluation.everyTokens": "eval_every eval_interval eval_steps",
    "spec.training.evaluation.fraction": "val_fraction validation_split eval_split",
    # Programs, places and the end.
    "spec.learners.processes": "nproc_per_node nproc gpus_per_node devices num_gpus",
    "spec.training.parallel.shard": "data_parallel_shard_degree dp_shard fsdp_size sharding_degree",
    "spec.training.parallel.replicate": "data_parallel_replicate_degree dp_replicate replicas_per_group",
    "spec.learners.command": "cmd program script entrypoint run train_script",
    "spec.output.uri": "output_dir save_dir out_dir export_dir",
    "spec.syncer.checkpoint.everySeconds": "checkpoint_interval save_interval checkpoint_every save_steps",
    "spec.syncer.endpoint.address": "rdzv_endpoint master_addr",
    "spec.syncer.checkpoint.keep": "keep_checkpoints save_total_limit max_checkpoints",
    "spec.failurePolicy.maxReplacements": "max_restarts restarts backoff_limit retries",
    "spec.seed": "random_seed manual_seed rng_seed",
}

IN_SECTION: dict[str, str] = {
    "spec.sync.outer.optimizer": "name type algorithm",
    "spec.sync.outer.ageDecay": "α alpha",
    "spec.training.model.from": "name id repo",
}
"""Names that mean the field only in its own section."""

NOT_HERE: tuple[tuple[str, str, str], ...] = (
    (
        "",
        "zero_optimization zero_stage deepspeed fsdp fsdp_config tensor_parallel tensor_parallel_size"
        " pipeline_parallel pipeline_parallel_size",
        "does not exist here: the built-in trainer divides the model by FSDP2 (learners.processes, training.parallel), "
        "and a program of your own (learners.command) as it likes",
    ),
    (
        "spec.training.data",
        "num_workers dataloader_num_workers prefetch_factor pin_memory",
        "does not exist here: a learner prepares its batches in its own process; the number of learners is set in "
        "spec.regions",
    ),
)
"""Settings of other programs that no field stands for: the section (empty: any), their names, what to say of them."""

UNITS: dict[str, str] = {
    "eval_every eval_interval eval_steps": (
        "It counts tokens, of all learners together: steps × learners × batch.sequences × batch.accumulation × "
        "data.sequenceLength."
    ),
    "checkpoint_interval checkpoint_every save_interval save_steps": "It counts seconds, not steps.",
    "warmup_ratio": "It counts steps: the ratio times the steps until training.stop.",
    "epochs num_epochs max_epochs n_epochs num_train_epochs": (
        "There are no epochs: set steps or tokens; an epoch is as many tokens as the data hold."
    ),
}
"""Names of what is counted in another unit than the field: a number is not taken over."""

_VALUES: dict[str, dict[str, str]] = {
    "spec.training.precision": {
        "bf16": "bfloat16",
        "bf16-mixed": "bfloat16",
        "fp32": "float32",
        "32": "float32",
        "no": "float32",
    }
}
_FLOAT16 = ("fp16", "float16", "half", "16", "16-mixed")
NO_FLOAT16 = "there is no float16 here"

CONTAINERS = {"learners": "learner", "regions": "learner", "syncer": "syncer", "evaluator": "evaluator"}
"""Sections with a podTemplate, and the container in its pods."""
_OF_CONTAINER = "image imagePullPolicy resources env envFrom volumeMounts securityContext"
_OF_POD = (
    "nodeSelector tolerations affinity volumes serviceAccountName imagePullSecrets runtimeClassName priorityClassName"
    " schedulerName"
)

SAMPLES: dict[str, dict[str, Any]] = {
    "metadata": {"name": "my-job"},
    "spec.training.model": {"from": "./weights"},
    "spec.training.model.lora": {"rank": 8},
    "spec.training.data": {"paths": ["python-stdlib"]},
    "spec.training.batch": {"sequences": 16},
    "spec.training.optimizer": {"lr": 0.001, "name": "adamw"},
    "spec.training.stop": {"steps": 1000},
    "spec.training.evaluation": {"fraction": 0.01},
    "spec.sync.grace": {"capSeconds": 10.0},
    "spec.sync.merge": {"method": "rda"},
    "spec.sync.outer": {"optimizer": "nesterov", "lr": 0.7},
    "spec.sync.adoption": {"rule": "keep"},
    "spec.sync.compression": {"up": "int4"},
    "spec.sync.staleness": {"maxVersions": 16},
    "spec.sync.heartbeat": {"timeoutSeconds": 10.0},
    "spec.sync.normGate": {"factor": 4.0},
    "spec.syncer.storage": {"uri": "s3://bucket/prefix", "size": "10Gi"},
    "spec.syncer.checkpoint": {"everySeconds": 60.0},
    "spec.output": {"uri": "s3://bucket/models/tiny-gpt"},
}
"""Sections that people give a single value, with the fields that such a value may be meant for, likeliest first."""


def plain_name(name: str) -> str:
    """A name without case, underscores and dashes: by it two spellings of one name are the same."""
    return name.lower().replace("_", "").replace("-", "")


def _by_name(table: Mapping[str, str]) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for path, names in table.items():
        for name in names.split():
            found.setdefault(plain_name(name), []).append(tuple(path.split(".")))
    return found


_MEANT, _MEANT_IN_SECTION = _by_name(OTHERS), _by_name(IN_SECTION)
_UNITS = {plain_name(name): said for names, said in UNITS.items() for name in names.split()}


def others_by(name: str, container: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The paths of the fields that others call ``name``: those in the section at ``container``, if there are any."""
    here = [path for path in _MEANT_IN_SECTION.get(plain_name(name), []) if path[:-1] == container]
    if here:
        return here
    found = _MEANT.get(plain_name(name), [])
    return [path for path in found if path[: len(container)] == container] or found


def meant_by(name: str, container: tuple[str, ...]) -> tuple[str, ...] | None:
    """The path of the field that others call ``name``, where it was written into the section at ``container`` (both
    without indices); None: no field is called so, or several are and none is nearer."""
    found = others_by(name, container)
    return found[0] if len(found) == 1 else None


def not_here(name: str, container: tuple[str, ...]) -> str:
    """What to say of a setting that no field stands for, in the section at ``container``; empty: it is none."""
    written = plain_name(name)
    for section, names, said in NOT_HERE:
        if written in map(plain_name, names.split()) and section in ("", ".".join(container)):
            return said
    return ""


def unit_note(name: str) -> str:
    """What to say of a name whose numbers are of another unit than the field's; empty: they are of the same."""
    return _UNITS.get(plain_name(name), "")


def pod_part(name: str, value: Any, container: str) -> dict[str, Any] | None:
    """The pod template that holds the Kubernetes field ``name`` with its value; None: it is no field of pods.
    ``container``: the name of the one that is meant."""
    names = {plain_name(one): one for one in f"{_OF_CONTAINER} {_OF_POD}".split()}
    field = names.get(plain_name(name))
    if field is None:
        return None
    if field in _OF_POD.split():
        return {"spec": {field: value}}
    if field == "env" and isinstance(value, dict):
        value = [{"name": str(key), "value": str(one)} for key, one in value.items()]
    return {"spec": {"containers": [{"name": container, field: value}]}}


def translated(path: str, name: str, value: Any) -> tuple[Any, str]:
    """What others write as a value of the field at ``path``, in its words, with a remark (often empty). ``name``: what
    they call the field. What needs no translation stays."""
    if path != "spec.training.precision":
        return value, ""
    written = plain_name(name)
    if isinstance(value, bool) and written in ("bf16", "fp16"):
        value = written if value else "fp32"
    word = str(value).lower()
    if word in _FLOAT16:
        return "bfloat16", NO_FLOAT16
    return _VALUES[path].get(word, value), ""


def other_names(path: tuple[str, ...]) -> list[str]:
    """What else the field at ``path`` (without indices) is called."""
    return OTHERS.get(".".join(path), "").split()
