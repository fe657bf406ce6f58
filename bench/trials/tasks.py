"""What is trained in a trial: models, data and evaluation, as jobs that the product's own code reads.

Three kinds of model at two sizes each, small enough that a trial takes minutes:

* ``dense``: the demo's kind, a llama on the bytes of the Python standard library's source;
* ``moe``: that of examples/tiny-moe.yaml, a mixture of four experts of which each token takes two, on the same bytes;
* ``vision``: a vision transformer on scikit-learn's handwritten digits (1,797 images of 8 x 8), a fifth held out;
  training images get noise on every pixel, so that long trials have something to learn.

A third size, ``gpu``, is of ``dense`` alone: 26 million parameters, trained on a CUDA device.

A trial's batch is the same whatever trains it: so many sequences per step in all, which learners share. The model is
built and evaluated by the product's code (``diloco_worker.training``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from diloco_protocol.spec.job import DiLoCoJob
from diloco_worker import data
from diloco_worker.data.shuffle import Permutation
from diloco_worker.training import evaluator, models

SEQUENCES = 16  # of a step, over all learners, but where the task says others
LENGTH = 32  # tokens of a sequence, likewise
PIXEL_NOISE = 0.5  # of training images, whose pixels are -1 to 1
EVALUATED = 2048  # sequences that are held out and scored, at most (of vision: all images that are held out)
_TEXT = {"source": "text", "paths": ["python-stdlib"], "tokenizer": "bytes", "sequenceLength": LENGTH}
_DIGITS = {"source": "python", "function": "digits:load"}


@dataclass(frozen=True, slots=True)
class Task:
    """A model and its data. ``rate``: peak learning rate of the learners' inner optimizer. The data-parallel reference
    has it too where its own best rate was not searched (bench/trials/search.py). ``sequences``: of a step, over all
    learners. ``device``: of torch, on which it is trained."""

    config: Mapping[str, Any]
    data: Mapping[str, Any]
    rate: float
    mean_tensors: tuple[str, ...] = ()
    sequences: int = SEQUENCES
    device: str = "cpu"

    @property
    def is_text(self) -> bool:
        return "sequenceLength" in self.data

    def equal_parts(self, learners: int) -> tuple[int, ...]:
        """The sequences of a step that each of so many learners trains, where all train as many."""
        per_learner, rest = divmod(self.sequences, learners)
        if rest:
            raise ValueError(f"{learners} learners cannot share {self.sequences} sequences")
        return (per_learner,) * learners


def _llama(width: int, layers: int, heads: int = 4, length: int = 64) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
    }


def _mixtral(width: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
        "max_position_embeddings": 64,
    }


def _vit(width: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "vit",
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "num_labels": 10,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


TASKS: dict[tuple[str, str], Task] = {
    ("dense", "small"): Task(_llama(64, 2), _TEXT, 2e-3),
    ("dense", "large"): Task(_llama(128, 3), _TEXT, 3e-3),
    ("dense", "gpu"): Task(_llama(512, 8, 8, 256), {**_TEXT, "sequenceLength": 256}, 1e-3, sequences=32, device="cuda"),
    ("moe", "small"): Task(_mixtral(48, 2), _TEXT, 2e-3, ("*.gate.weight",)),
    ("moe", "large"): Task(_mixtral(96, 3), _TEXT, 3e-3, ("*.gate.weight",)),
    ("vision", "small"): Task(_vit(64, 3), _DIGITS, 2e-3),
    ("vision", "large"): Task(_vit(96, 4), _DIGITS, 1e-3),
}


def make_job(
    kind: str,
    size: str,
    learners: int,
    steps: int,
    seed: int,
    sync: Mapping[str, Any],
    rate: float | None = None,
    timed: bool = False,
    visitors: int = 0,
) -> DiLoCoJob:
    """The job of a trial: ``steps`` steps of the task's sequences in all, ``sync`` as in a job file. ``timed`` and
    ``visitors``: as the trial has them."""
    task = TASKS[kind, size]
    per_learner = task.equal_parts(learners)[0]
    length = task.data.get("sequenceLength", 1)
    region = {"name": "r", "learners": learners}
    if visitors:
        region["maxLearners"] = learners + visitors
    # The word of the stop takes its way, and everybody ends the step after.
    stop = {"steps": steps - 1} if timed else {"tokens": (steps - 1) * task.sequences * length}
    merge = {"meanTensors": list(task.mean_tensors), **dict(sync).get("merge", {})}
    return DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.io/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": f"{kind}-{size}"},
            "spec": {
                "seed": seed,
                "training": {
                    "model": {"config": dict(task.config)},
                    "data": dict(task.data),
                    "batch": {"sequences": per_learner},
                    "optimizer": {"lr": rate or task.rate, "warmupSteps": 20},
                    "stop": stop,
                },
                "sync": {**sync, "merge": merge},
                "regions": [region],
            },
        }
    )


Batch = dict[str, torch.Tensor]


class TrialData:
    """The training data of a seed, in its order; and what is held out, every other sequence: ``evaluation``, whose
    loss is reported, and ``choice``, by whose loss learning rates are chosen."""

    def __init__(self, kind: str, size: str, seed: int) -> None:
        self._task = TASKS[kind, size]
        if self._task.is_text:
            held_out, self._tokens = _text(kind, size)
            count = min(EVALUATED, len(held_out)) // 2 * 2
            rows = [held_out[i * len(held_out) // count] for i in range(count)]
            self.choice, self.evaluation = _batches(rows[0::2]), _batches(rows[1::2])
            self.sequences = len(self._tokens)
        else:
            images, labels = _digits()
            held = np.arange(len(labels)) % 5 == 4
            self._images = torch.from_numpy(images[~held])[:, None]
            self._labels = torch.from_numpy(labels[~held])
            rows = [
                {"pixel_values": image[None], "labels": label}
                for image, label in zip(torch.from_numpy(images[held]), torch.from_numpy(labels[held]), strict=True)
            ]
            self.choice, self.evaluation = _batches(rows[0::2]), _batches(rows[1::2])
            self.sequences = len(self._labels)
        self._seed = seed
        self._orders: dict[int, Permutation] = {}

    def batch(self, positions: np.ndarray) -> Batch:
        """The sequences (or images) at these places of the endless order, int64 of any shape; each passage over the
        data has a permutation of its own."""
        flat = [self._item(int(position)) for position in positions.ravel()]
        index = torch.tensor(flat).view(positions.shape)
        if self._task.is_text:
            ids = self._tokens[index]
            return {"input_ids": ids, "labels": ids}
        noise = torch.Generator().manual_seed(self._seed + (int(positions.ravel()[0]) << 8))
        pixels = self._images[index]
        return {
            "pixel_values": pixels + PIXEL_NOISE * torch.randn(pixels.shape, generator=noise),
            "labels": self._labels[index],
        }

    def _item(self, position: int) -> int:
        passage, place = divmod(position, self.sequences)
        if passage not in self._orders:
            self._orders[passage] = Permutation(self.sequences, 1000 * self._seed + passage)
        return self._orders[passage](place)


def _batches(rows: Sequence[Any]) -> list[Batch]:
    return [default_collate(list(rows[i : i + 64])) for i in range(0, len(rows), 64)]


@functools.cache
def _text(kind: str, size: str) -> tuple[data.Dataset, torch.Tensor]:
    """What is held out, and all training sequences, int64 [sequences, tokens], as they lie."""
    spec = make_job(kind, size, 1, 2, seed=0, sync={}).spec
    length = TASKS[kind, size].data["sequenceLength"]
    inner: Any = data.load(spec).inner  # type: ignore[attr-defined]  # the order is the trial's
    rows = inner.tokens[: inner.part.total * length].reshape(-1, length)
    index = np.fromiter((inner.part[k] for k in range(len(inner))), np.int64, len(inner))
    return data.load(spec, held_out=True), torch.from_numpy(rows[index].astype(np.int64))


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [n, 8, 8] in -1..1 and labels int64 [n], in an order that mixes the writers."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return (found.images[order] / 8.0 - 1.0).astype(np.float32), found.target[order].astype(np.int64)


def build_model(job: DiLoCoJob) -> torch.nn.Module:
    """The job's model with its first weights, as learners build it."""
    return models.build(job.spec, job.spec.seed)


def score(model: torch.nn.Module, data: TrialData) -> dict[str, float]:
    """Mean cross-entropy in nats per prediction, as the evaluator makes it, in float32: ``loss``, which is reported,
    and ``choice_loss``, by which rates are chosen."""
    halves = {"loss": data.evaluation, "choice_loss": data.choice}
    return {name: evaluator.mean_loss(model, batches, torch.float32) for name, batches in halves.items()}
