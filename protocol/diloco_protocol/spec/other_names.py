"""Other names for fields of a job: the paper's letters, and what other programs call the same thing.

None of them is taken in a job file. They are what an unknown field is compared with, so that the error names
the field that was meant.
"""

from __future__ import annotations

from typing import Any

OTHERS: dict[str, str] = {
    # The letters of the paper and of the README.
    "spec.sync.fragments": "P num_fragments n_fragments shards partitions",
    "spec.sync.every": "H sync_every sync_interval sync_steps inner_steps local_steps num_inner_steps steps_per_round",
    "spec.sync.overlap": "tau τ delay fragment_sync_delay max_delay",
    "spec.sync.quorum": "K min_learners min_replicas min_replica_size min_workers",
    "spec.sync.grace.factor": "gamma γ",
    "spec.sync.grace.capSeconds": "grace_seconds grace_period timeout_after_quorum",
    "spec.sync.outer.lr": "outer_lr outer_learning_rate eta η",
    "spec.sync.outer.momentum": "outer_momentum nesterov_momentum",
    "spec.sync.outer.optimizer": "outer_optimizer outer_opt",
    "spec.sync.compression.up": "quantization quantize should_quantize bits",
    "spec.sync.adoption.alpha": "fragment_update_alpha α",
    "spec.regions.learners": (
        "M replicas workers world_size num_learners n_learners num_replicas num_workers nnodes num_nodes nproc_per_node"
        " count size num"
    ),
    # The inner optimizer.
    "spec.training.optimizer.lr": "learning_rate max_lr peak_lr inner_lr eta η",
    "spec.training.optimizer.betas": "beta adam_betas beta1 beta2 adam_beta1 adam_beta2",
    "spec.training.optimizer.eps": "epsilon adam_epsilon",
    "spec.training.optimizer.weightDecay": "wd",
    "spec.training.optimizer.warmupSteps": "warmup warmup_iters num_warmup_steps lr_warmup_steps",
    "spec.training.optimizer.schedule": "lr_schedule lr_scheduler scheduler lr_scheduler_type decay",
    "spec.training.optimizer.clipNorm": (
        "max_grad_norm grad_clip grad_clip_norm gradient_clipping gradient_clip_val clip_grad clip_grad_norm"
    ),
    "spec.training.optimizer.name": "optim",
    # Batches and data.
    "spec.training.batch.sequences": (
        "batch_size per_device_train_batch_size train_batch_size micro_batch_size local_batch_size"
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
    "spec.learners.command": "cmd program script entrypoint run train_script",
    "spec.output.uri": "output_dir save_dir out_dir export_dir",
    "spec.syncer.checkpoint.everySeconds": "checkpoint_interval save_interval checkpoint_every",
    "spec.syncer.checkpoint.keep": "keep_checkpoints save_total_limit max_checkpoints",
    "spec.failurePolicy.maxReplacements": "max_restarts restarts backoff_limit retries",
    "spec.seed": "random_seed manual_seed rng_seed",
}

OTHER_UNITS = frozenset({"epochs", "numepochs", "maxepochs", "nepochs", "numtrainepochs"})
"""Plain names whose values count something else than the field that is meant: no example has such a value."""

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


_MEANT: dict[str, list[tuple[str, ...]]] = {}
for _path, _names in OTHERS.items():
    for _name in _names.split():
        _MEANT.setdefault(plain_name(_name), []).append(tuple(_path.split(".")))


def meant_by(name: str, container: tuple[str, ...]) -> tuple[str, ...] | None:
    """The path of the field that others call ``name``, for somebody who wrote it into the section at
    ``container`` (both without indices); None: nobody calls a field so, or several and none is nearer."""
    found = _MEANT.get(plain_name(name), [])
    inside = [path for path in found if path[: len(container)] == container]
    return inside[0] if len(inside) == 1 else found[0] if len(found) == 1 else None


def other_names(path: tuple[str, ...]) -> list[str]:
    """What else the field at ``path`` (without indices) is called."""
    return OTHERS.get(".".join(path), "").split()
