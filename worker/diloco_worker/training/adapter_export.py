"""The merged adapters of a job with LoRA as a directory in PEFT's format, for ``PeftModel.from_pretrained(base, out)``.

``adapter_model.safetensors`` holds A [rank, in] and B [out, rank] of each adapted layer under PEFT's names,
``adapter_config.json`` what they are added to, how, and with which scale: PEFT computes alpha / r · B·A, as lora.py
does. The base model is not in the directory: it is that of ``training.model.from``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from diloco_protocol.common import files
from diloco_protocol.spec.job import DiLoCoJob
from diloco_worker.training import lora, models
from diloco_worker.training.export import ExportError, check_parameters, save_tokenizer
from diloco_worker.training.pretrained import local_directory

PREFIX = "base_model.model."  # PEFT's own wrapping of a model
_PARTS = (("lora_a", "lora_A"), ("lora_b", "lora_B"))  # our names and PEFT's
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(
    job: DiLoCoJob, tensors: Mapping[str, NDArray[np.generic]], out: Path, *, directory: Path | None = None
) -> int:
    """Write the adapters among ``tensors`` (parameter name to array of its shape) to ``out``; returns how many layers
    have one.

    ``out`` must not exist, or be an empty directory. ``directory`` is where relative paths of the job start. Raises
    ExportError where the job has no adapters or no base to add them to, or JobError if its model cannot be built.
    """
    spec = job.spec.training.model
    if spec is None or spec.lora is None:
        raise ExportError("the job has no training.model.lora, so there are no adapters: leave --adapter out")
    if spec.from_ is None:
        raise ExportError(
            "the job's model began with random weights, not with training.model.from, so there is no base to add "
            "adapters to: leave --adapter out, and the whole model is written, adapters merged in"
        )
    with torch.device("meta"):
        model = models.skeleton(job.spec, directory=directory)
    layers = lora.adapters(model)
    names = {f"{name}.{part}": f"{PREFIX}{name}.{peft}.weight" for name in layers for part, peft in _PARTS}
    shapes = {f"{name}.{part}": getattr(layer, part).shape for name, layer in layers.items() for part, _ in _PARTS}
    check_parameters(shapes, {name: values for name, values in tensors.items() if name in shapes})
    named = {names[name]: torch.from_numpy(np.array(tensors[name], np.float32)) for name in shapes}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if hasattr(model.config, "vocab_size") else None,
        "base_model_name_or_path": _base(spec.from_, directory),
        "revision": spec.revision,
        "r": spec.lora.rank,
        "lora_alpha": int(spec.lora.alpha) if spec.lora.alpha.is_integer() else spec.lora.alpha,
        "target_modules": sorted(layers),
        "fan_in_fan_out": all(isinstance(layer, lora.LoraConv1D) for layer in layers.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    try:
        with files.create_directory(out) as temporary:
            save_file(named, temporary / TENSORS, {"format": "pt"})
            (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_tokenizer(job, temporary)
    except FileExistsError as e:
        raise ExportError(f"{e.filename} {e.strerror}") from e
    except OSError as e:
        raise ExportError(f"{out} cannot be written: {e.strerror or e}") from e
    return len(layers)


def _base(source: str, directory: Path | None) -> str:
    """The base as PEFT looks for it, from any directory: a path becomes absolute."""
    if "://" in source:
        return source
    found = local_directory(source, directory)
    return os.path.abspath(found) if os.path.isdir(found) else found
