"""The merged model as a directory that transformers loads: model.safetensors, config.json, the tokenizer.

``export(job, tensors, out)`` takes the parameters under the names of the model that learners train, frozen ones too;
who reads them from the syncer's store is the caller. transformers itself writes the files, so that names in them are
those of its published checkpoints (a mixture's experts one by one, tied tensors once).

The model is ready to generate: with the cache, with the generation settings of the weights that it started from, and
with the end token that stood behind each document in training.

A directory is whole under its name or not there: it is filled under another name, synced and renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from diloco_protocol.common import files
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.training import ModelSpec
from diloco_worker.data.text import HubTokenizer, tokenizer
from diloco_worker.errors import job_error, one_line, shorten
from diloco_worker.training import lora, models
from diloco_worker.training.pretrained import local_directory


class ExportError(Exception):
    """The model cannot be written; the message says what is missing or in the way, and the cure."""


def export(
    job: DiLoCoJob, tensors: Mapping[str, NDArray[np.generic]], out: Path, *, directory: Path | None = None
) -> None:
    """Write the model of ``tensors`` (parameter name to array of its shape, floating point) to ``out``.

    ``out`` must not exist, or be an empty directory. Adapters (training.model.lora) are merged into their layers.
    ``directory`` is where relative paths of the job start. Raises ExportError, or JobError if the job's model cannot
    be built.
    """
    from transformers.utils import logging as transformers_logging

    model = assemble(job, tensors, directory=directory)
    try:
        with files.create_directory(out) as temporary:
            transformers_logging.disable_progress_bar()
            save: Any = model
            settings = _prepare_use(job, save, directory)
            save.save_pretrained(temporary, max_shard_size="1000GB")
            if settings:
                (temporary / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
            save_tokenizer(job, temporary)
    except FileExistsError as e:
        raise ExportError(f"{e.filename} {e.strerror}") from e
    except OSError as e:
        said = files.absent_text(out) if isinstance(e, FileNotFoundError) else e.strerror or e
        raise ExportError(f"{out} cannot be written: {said}") from e


def assemble(job: DiLoCoJob, tensors: Mapping[str, NDArray[np.generic]], *, directory: Path | None = None) -> nn.Module:
    """The model with these parameters, float32, on the CPU, adapters merged, ready to evaluate.

    Raises ExportError naming parameters that are missing, unknown or of another shape.
    """
    model = models.skeleton(job.spec, directory=directory)
    wanted = dict(model.named_parameters())  # a tied tensor comes once, under its first name
    check_parameters({name: parameter.shape for name, parameter in wanted.items()}, tensors)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(tensors[name], dtype=np.float32)))
    lora.merge(model)
    return model.eval()


def check_parameters(shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, NDArray[np.generic]]) -> None:
    """Raise ExportError naming what of ``shapes`` is missing in ``tensors``, unknown or of another shape."""
    missing = sorted(set(shapes) - set(tensors))
    unknown = sorted(set(tensors) - set(shapes))
    wrong = sorted(n for n in set(shapes) & set(tensors) if tuple(shapes[n]) != tensors[n].shape)
    for names, what in ((missing, "missing"), (unknown, "not the model's"), (wrong, "of another shape")):
        if names:
            raise ExportError(f"the weights do not fit the job's model; {what}: {shorten(names)}")


def _prepare_use(job: DiLoCoJob, model: Any, directory: Path | None) -> dict[str, Any]:
    """Prepare the configuration for use after training; returns the generation settings (empty: it generates
    nothing). A job that starts from random weights has the special tokens of its tokenizer, and those that the
    defaults of a configuration name are of another one."""
    model.config.use_cache = True
    if not model.can_generate():
        return {}
    spec, tokens = job.spec.training.model, _special_tokens(job)
    settings: dict[str, Any] = model.generation_config.to_diff_dict()
    if spec is not None and spec.from_ is not None:
        settings = _generation_settings(spec, directory) or settings
        there, end = settings.get("eos_token_id"), tokens.get("eos_token_id")
        ends = [there] if isinstance(there, int) else [*(there or [])]
        if end is not None and end not in ends:
            settings["eos_token_id"] = [*ends, end] if ends else end
    else:
        settings |= tokens
        for name, token in tokens.items():
            setattr(model.config, name, token)
            setattr(model.generation_config, name, token)
    return {name: value for name, value in {**settings, "use_cache": True}.items() if value is not None}


def _special_tokens(job: DiLoCoJob) -> dict[str, int | None]:
    """By the names of a configuration, those of the tokenizer; empty: the data have none."""
    data = job.spec.training.data
    if data is None or data.source == "python":
        return {}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    words = tokenizer(data.tokenizer)
    if isinstance(words, HubTokenizer):
        return {name: getattr(words.inner, name) for name in names}
    return {**dict.fromkeys(names), "eos_token_id": 0}


def _generation_settings(model: ModelSpec, directory: Path | None) -> dict[str, Any]:
    """Those of the weights to start from; empty: there are none."""
    from transformers import GenerationConfig

    source = local_directory(model.from_ or "", directory)
    try:
        found = GenerationConfig.from_pretrained(source, revision=model.revision or "main")
    except (OSError, ValueError):
        return {}
    settings: dict[str, Any] = found.to_diff_dict()
    return settings


def save_tokenizer(job: DiLoCoJob, out: Path) -> None:
    """Write the tokenizer of ``training.data`` to the directory, where there is one. Raises JobError."""
    data = job.spec.training.data
    if data is None or data.source == "python":
        return
    if data.tokenizer == "bytes":
        _save_byte_tokenizer(out, data.sequence_length)
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(data.tokenizer, trust_remote_code=False).save_pretrained(out)
    except (OSError, ValueError) as e:
        raise job_error(
            "spec.training.data.tokenizer",
            data.tokenizer,
            f"cannot be loaded, to be saved with the model ({one_line(e)})",
        ) from e


def _save_byte_tokenizer(out: Path, length: int) -> None:
    """The tokenizer ``bytes`` as transformers knows it: a byte-level vocabulary without merges. Byte-level tokenizers
    write each byte as a printable character (GPT-2's table); here that character's id is the byte."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE({c: b for b, c in enumerate(byte_characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def byte_characters() -> list[str]:
    """For each byte the character that byte-level tokenizers write for it: itself where it is printable, else the next
    free one from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
