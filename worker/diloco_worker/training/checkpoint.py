"""Whether the tensors of ``training.model.from`` are the model's own: by name, by shape, without a gap.

transformers itself says which are missing, unexpected or of another shape, for it alone knows how a checkpoint's names
become those of a model. It builds what is missing from random values and goes on; here that is refused, unless
``training.model.initialise`` allows it.

``compare_headers`` asks the same of the headers of safetensors files alone: transformers loads tensors without values.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from diloco_protocol.spec.load import Problem
from diloco_protocol.spec.training import ModelSpec
from diloco_worker.errors import job_error, shorten
from diloco_worker.training.pretrained import FIELD

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ASYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"


def check_loaded(model_spec: ModelSpec, info: Mapping[str, Any]) -> Problem | None:
    """``info``: what transformers says of its loading (``output_loading_info``). Raises JobError if tensors are missing
    or of another shape and ``initialise`` does not allow it. Returns a warning for those that nothing takes."""

    def is_new(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in model_spec.initialise)

    missing = sorted(name for name in info["missing_keys"] if not is_new(name))
    wrong = sorted(row for row in info["mismatched_keys"] if not is_new(row[0]))
    unexpected = sorted(info["unexpected_keys"])
    said = [_missing_text(missing, unexpected)] if missing else []
    if wrong:
        shapes = [f"{name} ({_shape(there)} there, {_shape(ours)} in the model)" for name, there, ours in wrong]
        said.append(f"{_count(wrong)} of another shape: {shorten(shapes, 3)}")
    if said:
        cure = "" if _prefix(missing, unexpected) else "; those that are meant to be new: training.model.initialise"
        raise job_error(FIELD, model_spec.from_, f"does not fit the model: {'; '.join(said)}{cure}")
    if not unexpected:
        return None
    return Problem(FIELD, model_spec.from_, f"{_count(unexpected)} not the model's and left out: {shorten(unexpected)}")


def compare_headers(model_spec: ModelSpec, source: str, revision: str, model: Any) -> Problem | None:
    """``check_loaded`` for the weights at ``source``, a directory or a name on Hugging Face, before any value is read.
    ``model`` is one of transformers, whose values are not looked at. Raises JobError, and what reading the headers
    raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shapes = dict(_header_shapes(source, revision))
    os.environ.setdefault(_ASYNCHRONOUS, "1")  # tensors without values know one thread
    with quiet_loading(), FakeTensorMode(allow_non_fake_inputs=True):
        values = {name: torch.empty(shape) for name, shape in shapes.items()}
        _, info = type(model).from_pretrained(
            None, config=model.config, state_dict=values, output_loading_info=True, ignore_mismatched_sizes=True
        )
    return check_loaded(model_spec, info)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' bars out of the log, and its coloured report of a loading: what of it counts is told by
    ``check_loaded``."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # it would run a thread and fill logs
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_report)


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def _header_shapes(source: str, revision: str) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of all tensors."""
    if not Path(source).is_dir():
        from huggingface_hub import get_safetensors_metadata

        for held in get_safetensors_metadata(source, revision=revision).files_metadata.values():
            yield from ((name, list(tensor.shape)) for name, tensor in held.tensors.items())
        return
    from safetensors import safe_open

    folder = Path(source)
    files = [_WHOLE]
    if not (folder / _WHOLE).is_file():
        files = sorted(set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values()))
    for file in files:
        with safe_open(str(folder / file), framework="pt") as opened:
            yield from ((name, opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118


def _missing_text(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    text = f"{_count(missing)} missing: {shorten(missing, 3)}"
    prefix = _prefix(missing, unexpected)
    if prefix:
        text += f"; its names begin with `{prefix}`, as a wrapper saves them: remove that from its names"
    return text


def _prefix(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """What the checkpoint's names have before the model's, where that explains what is missing; empty: nothing."""
    wanted = set(missing)
    found = Counter(
        name[:at] for name in unexpected for at in range(1, len(name)) if name[at - 1] == "." and name[at:] in wanted
    )
    prefix, count = found.most_common(1)[0] if found else ("", 0)
    return prefix if 2 * count >= len(wanted) else ""


def _count(names: Sequence[object]) -> str:
    return f"{len(names)} tensors are" if len(names) != 1 else "1 tensor is"


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes)) or "a scalar"
