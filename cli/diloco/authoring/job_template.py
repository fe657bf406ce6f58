"""``diloco init``: a job file to start from, with a comment at what is usually changed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.authoring.field_pages import yaml_line

_BUILT_IN_DATA = "python-stdlib"
_LONG_RUN = 2000  # steps of a learner from which DiLoCo's own settings are meant


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A Llama-like model: width, feed-forward width, layers, heads; and what suits it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    sequence: int
    lr: float

    @property
    def parameters(self) -> int:
        """Without embeddings, which the tokenizer decides."""
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden) + self.hidden


SIZES = {
    "tiny": ModelSize(128, 352, 4, 4, sequence=128, lr=3e-3),
    "10m": ModelSize(320, 864, 8, 5, sequence=256, lr=2e-3),
    "50m": ModelSize(640, 1728, 10, 10, sequence=512, lr=1e-3),
    "125m": ModelSize(896, 2368, 13, 14, sequence=1024, lr=6e-4),
    "350m": ModelSize(1024, 2752, 28, 16, sequence=1024, lr=4e-4),
    "1b": ModelSize(2048, 5504, 20, 16, sequence=1024, lr=3e-4),
}


@dataclass(frozen=True, slots=True)
class JobChoices:
    """What a new job file is to say. ``command``: an own program, in place of ``size`` and ``data``."""

    name: str
    size: str = "tiny"
    command: str | None = None
    data: Sequence[str] = (_BUILT_IN_DATA,)
    tokenizer: str = "bytes"
    learners: int = 2
    steps: int = 300


def name_for(file: str) -> str:
    """A job's name from its file's: `My Job_2.yaml` gives `my-job-2`."""
    plain = re.sub(r"[^a-z0-9]+", "-", Path(file).stem.lower()).strip("-")
    return re.sub(r"^[^a-z]+", "", plain)[:30].rstrip("-") or "my-job"


def data_below(directory: Path, names: Sequence[str]) -> list[str]:
    """Paths as a job file in ``directory`` names them: relative ones, given from here, start there."""
    return [
        name
        if name == _BUILT_IN_DATA or "://" in name or name.startswith(("/", "~"))
        else os.path.relpath(name, directory)
        for name in names
    ]


def job_text(choices: JobChoices, file: str) -> str:
    """The job file. ``file``: what its first lines call it. Raises ValueError for a command that cannot be split."""
    long = choices.steps >= _LONG_RUN
    training = _trainer(choices) if choices.command is None else _own_program(choices)
    return "\n".join([*_head(choices, file), *training, "", *_sync(long), "", *_regions(choices)]) + "\n"


def _head(choices: JobChoices, file: str) -> list[str]:
    commands = [
        (f"diloco validate {file}", "lists its problems"),
        (f"diloco run {file}", "trains on this machine; each learner is a process"),
        ("diloco explain training.stop", "describes a field, here this one"),
    ]
    width = max(len(command) for command, _ in commands)
    return [
        "# A job for Decoupled DiLoCo: one model, trained by learners that only meet at the syncer.",
        "# Every other field has a default.",
        "#",
        *(f"#   {command:<{width}}   {does}" for command, does in commands),
        "apiVersion: diloco.io/v1alpha1",
        "kind: DiLoCoJob",
        f"metadata: {{name: {yaml_line(choices.name)}}}",
        "spec:",
    ]


def _own_program(choices: JobChoices) -> list[str]:
    assert choices.command is not None
    return [
        "  learners:",
        "    # Your program. It starts once for each learner, in this file's directory; its loop is",
        "    #   with diloco_worker.Learner.from_environment(model, optimizer) as learner:",
        "    #       for batch in learner.batches(dataset):",
        "    #           ...  # forward, backward, optimizer step",
        "    #           learner.after_step(tokens=batch.numel(), loss=loss)",
        f"    command: {yaml_line(shlex.split(choices.command))}",
        "",
        "  training:",
        *_aligned([("    batch: {sequences: 8}", "what learner.batches() yields at once"), _stop(choices)]),
    ]


def _trainer(choices: JobChoices) -> list[str]:
    size = SIZES[choices.size]
    embeddings = 2 * 256 * size.hidden if choices.tokenizer == "bytes" else 0
    count = f"{_count(size.parameters + embeddings)} parameters{'' if embeddings else ', and the embeddings'}"
    warmup = max(1, min(100, choices.steps // 10))
    paths = yaml_line(list(choices.data))
    return [
        "  training:",
        "    model:",
        f"      # A transformers configuration, built from scratch: {count}.",
        "      # `from: DIRECTORY` starts from weights; then config may be left out.",
        "      config:",
        "        model_type: llama",
        f"        hidden_size: {size.hidden}",
        f"        intermediate_size: {size.intermediate}",
        f"        num_hidden_layers: {size.layers}",
        f"        num_attention_heads: {size.heads}",
        f"        max_position_embeddings: {size.sequence}",
        "    data:",
        *_aligned(
            [
                ("      source: text", "or datasets; or python: a function of yours"),
                (f"      paths: {paths}", "files, directories, globs, URIs; from this file's directory"),
                (f"      tokenizer: {yaml_line(choices.tokenizer)}", "bytes, or a transformers tokenizer"),
                (f"      sequenceLength: {size.sequence}", "tokens"),
                ("    batch: {sequences: 8}", "of each learner and step; accumulation: N multiplies it"),
                (f"    optimizer: {{lr: {size.lr:g}, warmupSteps: {warmup}}}", "AdamW"),
                _stop(choices),
            ]
        ),
    ]


def _stop(choices: JobChoices) -> tuple[str, str]:
    return f"    stop: {{steps: {choices.steps}}}", "of each learner; or tokens: of all together, or seconds:"


def _sync(long: bool) -> list[str]:
    every = 24 if long else 12
    return [
        "  sync:",
        *_aligned(
            [
                (f"    every: {every}", "H: a learner's steps between two merges of one part; more: less traffic"),
                (f"    fragments: {every}", "P: parts of the model, merged in turn; at most every"),
                ("    overlap: 2", "tau: steps that a learner makes while a part is exchanged"),
                ("    quorum: 1", "K: the number of learners that a merge needs"),
                ("    # outer: {lr: 1.4, momentum: 0.5}", "default: by the model's size, docs/choosing.md"),
                ("    compression: {up: int4, down: bfloat16}", "encodings on the wire"),
            ]
        ),
    ]


def _regions(choices: JobChoices) -> list[str]:
    said = [("    - name: local", ""), (f"      learners: {choices.learners}", "each trains a full copy of the model")]
    return ["  regions:", *_aligned(said)]


def _aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Lines with their comments below one another."""
    width = min(max(len(code) for code, _ in lines), 48)
    return [f"{code:<{width}}  # {comment}" if comment else code for code, comment in lines]


def _count(number: int) -> str:
    unit, word = (10**9, "billion") if number >= 10**9 else (10**6, "million")
    return f"{number / unit:.3g} {word}"
