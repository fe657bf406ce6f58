"""Whether an exported model works: it is loaded as its users load it, generates with the cache, and is scored.

The score is made as the job's evaluator makes it, on the same sequences: it can stand beside the job's last one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco_protocol.spec.job import DiLoCoJob
from diloco_worker import data
from diloco_worker.errors import one_line
from diloco_worker.training import models
from diloco_worker.training.checkpoint import quiet_loading
from diloco_worker.training.evaluator import chosen, mean_loss
from diloco_worker.training.export import ExportError

SECONDS = 60.0
"""For the score: of a large model some batches must do."""
GENERATED = 32  # tokens
_PROMPT = 8


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """``generated``: how many tokens; 0: no language model. ``cached``: with a cache. ``end``: the end tokens.
    ``loss``: nats per prediction on ``batches`` of the evaluator's ``of`` batches; None: not scored, and ``why``."""

    generated: int
    cached: bool
    end: tuple[int, ...]
    loss: float | None
    batches: int = 0
    of: int = 0
    why: str = ""


def check_export(
    job: DiLoCoJob, out: Path, *, directory: Path | None = None, cache_directory: Path | None = None
) -> ExportCheck:
    """Load what ``export`` wrote to ``out``, and use it. ``cache_directory``: the run's, which has its tokens; None:
    the model is not scored. Raises ExportError if it cannot be used."""
    from transformers.utils import logging as transformers_logging

    auto: Any = models.auto_class(models.configuration(job.spec, directory=directory))
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it says which of the model's settings a test of it does without
    try:
        with quiet_loading():
            model = auto.from_pretrained(out, dtype=torch.float32, use_safetensors=True, trust_remote_code=False).eval()
        generated, cached = _generate(model) if model.can_generate() else (0, False)
    except Exception as error:  # the libraries that read and run it have classes of their own
        raise ExportError(f"{out} was written, and it cannot be used: {one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    end = getattr(model.generation_config, "eos_token_id", None) if generated else None
    ends = (end,) if isinstance(end, int) else tuple(end or ())
    if job.spec.training.evaluation is None or cache_directory is None:
        why = "the job has no evaluation" if cache_directory is not None else "the run's data are not here"
        return ExportCheck(generated, cached, ends, None, why=why)
    try:
        batches = chosen(data.load(job.spec, True, directory=directory, cache_directory=cache_directory), job.spec)
        loss, count = _score(model, batches)
    except Exception as error:  # of the user's own code too: what was written is whole all the same
        return ExportCheck(generated, cached, ends, None, why=one_line(error))
    return ExportCheck(generated, cached, ends, loss, batches=count, of=len(batches))


def _generate(model: Any) -> tuple[int, bool]:
    """Greedily, from some tokens; how many came, and whether each was computed from a cache of those before it."""
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or GENERATED + _PROMPT
    count = max(1, min(GENERATED, positions - _PROMPT))
    prompt = torch.arange(_PROMPT).unsqueeze(0) % text.vocab_size
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, given, out: seen.append(given[0].shape[-1])
    )
    try:
        with torch.no_grad():
            made = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, num_beams=1
            )
    finally:
        hook.remove()
    return made.shape[-1] - _PROMPT, all(width == 1 for width in seen[1:])


def _score(model: Any, batches: list[dict[str, torch.Tensor]]) -> tuple[float, int]:
    """The loss, and on how many of the batches: as many as there is time for."""
    total, predictions, count = 0.0, 0, 0
    end = time.monotonic() + SECONDS
    for batch in batches:
        weight = models.predictions(batch)
        total += mean_loss(model, [batch], torch.float32) * weight
        predictions, count = predictions + weight, count + 1
        if time.monotonic() > end:
            break
    return total / predictions, count
