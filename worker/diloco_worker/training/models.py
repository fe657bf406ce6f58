"""The job's model: a transformers configuration, weights to start from, and what of it is trained.

Every learner builds the same model from the same job: the random state is forked and seeded for the construction, so
that nothing that ran before matters. Whoever joins first uploads what it built as version 0, and all others take that;
equal construction makes version 0 independent of who was first.

Nothing is unpickled and no code of a checkpoint is run: weights come as safetensors, configurations are those that
transformers itself knows.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import JobError, Problem
from diloco_protocol.spec.training import ModelSpec
from diloco_worker.errors import job_error, one_line, shorten
from diloco_worker.fragments import running_statistics
from diloco_worker.training import lora
from diloco_worker.training.checkpoint import check_loaded, compare_headers, quiet_loading
from diloco_worker.training.pretrained import FIELD as FROM
from diloco_worker.training.pretrained import local_directory

log = logging.getLogger(__name__)

CONFIG = "spec.training.model.config"
# Fields that transformers takes beside a configuration's own.
_COMMON = frozenset({"model_type", "num_labels", "rope_theta", "rope_scaling", "architectures"})
_REFUSED = {
    "dtype": "weights are float32 here; training.precision chooses the arithmetic",
    "torch_dtype": "weights are float32 here; training.precision chooses the arithmetic",
    "auto_map": "code that comes with a checkpoint is not run",
    "transformers_version": "is written by transformers, not by a job",
}


def build(spec: JobSpec, seed: int, *, directory: Path | None = None) -> nn.Module:
    """The model to train: on the CPU, float32 (frozen matrices in training.model.frozenDtype), frozen where the job
    says so.

    A function of the job and the seed alone: bit-identical in every process. ``directory`` is where a relative
    ``from`` starts. Raises JobError naming the field of ``training.model``.
    """
    model = _construct(spec, seed, directory, pretrained=True)
    _prepare_training(model, _required(spec))
    return model


def skeleton(spec: JobSpec, *, directory: Path | None = None) -> nn.Module:
    """The model with random weights and the configuration as the job gives it: for export."""
    return _construct(spec, 0, directory, pretrained=False)


def outline(spec: JobSpec, *, directory: Path | None = None) -> nn.Module:
    """The model of ``build`` without its values (torch's meta device): what a layout is made from, and ranks begin
    with, in no memory, however large the model is. Raises JobError."""
    with torch.device("meta"):
        model = skeleton(spec, directory=directory)
    _prepare_training(model, _required(spec))
    return model


def configuration(spec: JobSpec, *, directory: Path | None = None) -> Any:
    """The transformers configuration, checked. Raises JobError with all problems found."""
    from transformers import AutoConfig

    model_spec = _required(spec)
    given = dict(model_spec.config or {})
    if model_spec.from_ is None:
        kind = _known_type(given)
        defaults = AutoConfig.for_model(kind)
        auto_class(defaults)
        _check_names(given, defaults)
        own = {k: v for k, v in given.items() if k != "model_type"}
        if "vocab_size" not in own and (vocabulary := _vocabulary(spec)) is not None:
            own["vocab_size"] = vocabulary
        # What a byte model cannot have: transformers' defaults name tokens of other vocabularies.
        config = _checked(given, lambda: AutoConfig.for_model(kind, **_within(defaults, own)))
    else:
        where = local_directory(model_spec.from_, directory)
        try:
            config = AutoConfig.from_pretrained(where, revision=_revision(model_spec), trust_remote_code=False)
        except (OSError, ValueError) as e:
            raise _bad_from(model_spec, e) from e
        if given.get("model_type", config.model_type) != config.model_type:
            raise job_error(
                f"{CONFIG}.model_type",
                given["model_type"],
                f"training.model.from holds a {config.model_type}; leave it out, or name that",
            )
        _check_names(given, config)
        kept = {**config.to_dict(), **given}
        for name in ("model_type", "transformers_version", "dtype"):
            kept.pop(name, None)
        config = _checked(given, lambda: type(config)(**kept))
    _check_fit(spec, config)
    return config


@dataclass(frozen=True, slots=True)
class Loss:
    """``value``: what is differentiated, with a router's auxiliary loss. ``nats``: the mean cross-entropy of the
    batch's predictions, detached. Both scalars on the model's device."""

    value: torch.Tensor
    nats: torch.Tensor


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Loss:
    """One forward pass. ``batch`` is on the model's device; see data.load for its tensors."""
    outputs = model(**batch)
    value = outputs.loss
    auxiliary = getattr(outputs, "aux_loss", None)
    nats = value.detach()
    if auxiliary is not None and torch.is_tensor(auxiliary):
        nats = nats - getattr(model.config, "router_aux_loss_coef", 0.0) * auxiliary.detach()
    return Loss(value, nats)


def predictions(batch: Mapping[str, torch.Tensor]) -> int:
    """How many predictions a batch is scored on: every label but each sequence's first and those marked -100; of
    images, every image. ``batch`` is on the CPU, because the answer of a device would be waited for."""
    labels = batch["labels"]
    if "input_ids" in batch and labels.shape == batch["input_ids"].shape:
        labels = labels[..., 1:]
    return int((labels != -100).sum())


def check_ids(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    """Raise JobError if ``batch`` (on the CPU) has a token or a class that the model has not: a GPU could not say
    which. Labels of -100 are no predictions."""
    config: Any = model.config
    text = "input_ids" in batch
    most = getattr(config, "vocab_size", 0) if text else getattr(config, "num_labels", 0)
    for name in ("input_ids", "labels"):
        ids = batch.get(name)
        if most <= 1 or ids is None or ids.is_floating_point():
            continue
        bad = ids[(ids >= most) | ((ids < 0) & ((ids != -100) | (name == "input_ids")))]
        if bad.numel():
            what = f"vocabulary of {most}: raise config.vocab_size, or correct the data" if text else f"{most} classes"
            raise job_error("spec.training.data", int(bad[0]), f"{name} beyond the model's {what}")


def check_batch(model: nn.Module, batch: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise JobError if the data's items hold what the model does not take, or no labels."""
    takes = inspect.signature(model.forward).parameters
    strange = [name for name in batch if name not in takes]
    if strange or "labels" not in batch:
        what = f"gives {', '.join(strange)}, which the model does not take" if strange else "gives no labels"
        wanted = [n for n in ("input_ids", "pixel_values", "attention_mask", "labels") if n in takes]
        raise job_error("spec.training.data", source, f"{what}: items are dicts of {', '.join(wanted)}")


# ------------------------------------------------------------------ construction


def _required(spec: JobSpec) -> ModelSpec:
    if spec.training.model is None:
        raise job_error("spec.training.model", None, "is required by the built-in trainer")
    return spec.training.model


def auto_class(config: Any) -> Any:
    """The transformers class for this configuration: a causal language model, else image classification."""
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return transformers.AutoModelForImageClassification
    raise job_error(
        f"{CONFIG}.model_type",
        config.model_type,
        "transformers has neither a causal language model nor an image classifier of this type",
    )


def _construct(spec: JobSpec, seed: int, directory: Path | None, pretrained: bool) -> nn.Module:
    """The model with its adapters. ``pretrained``: with the weights of ``training.model.from``, if it names some."""
    model_spec, config = _required(spec), configuration(spec, directory=directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if pretrained and model_spec.from_ is not None:
            model = _from_weights(model_spec, model_spec.from_, config, directory)
        else:
            model = _from_config(model_spec, config)
        _refuse_running_statistics(model_spec, config, model)
        adapters = model_spec.lora
        if adapters is not None and not lora.adapt(model, adapters.rank, adapters.alpha, list(adapters.targets)):
            raise job_error(
                "spec.training.model.lora.targets",
                list(adapters.targets),
                "match no linear layer; there are " + shorten(lora.linear_names(model)),
            )
    return model


def _from_weights(model_spec: ModelSpec, source: str, config: Any, directory: Path | None) -> nn.Module:
    auto = auto_class(config)
    try:
        with quiet_loading():
            model, info = auto.from_pretrained(
                local_directory(source, directory),
                revision=_revision(model_spec),
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_loaded names them
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise _bad_from(model_spec, e) from e
    _refuse_unmatched("initialise", model_spec.initialise, list(model.state_dict()))
    warning = check_loaded(model_spec, info)
    if warning is not None:
        log.warning("%s: %s", FROM, warning.message)
    built: nn.Module = model.train()
    return built


def _refuse_unmatched(field: str, patterns: list[str], names: list[str]) -> None:
    problems = [
        Problem(f"spec.training.model.{field}.{i}", pattern, "matches no parameter; there are " + shorten(names))
        for i, pattern in enumerate(patterns)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if problems:
        raise JobError(problems)


def check_start(spec: JobSpec, model: nn.Module, *, directory: Path | None = None) -> Problem | None:
    """Compare the checkpoint's headers with the model's ``outline``. Raises JobError where they do not fit, OSError
    where there are none to read; returns a warning for tensors that the model does not take."""
    model_spec = _required(spec)
    if model_spec.from_ is None:
        return None
    _refuse_unmatched("initialise", model_spec.initialise, list(model.state_dict()))
    source = local_directory(model_spec.from_, directory)
    return compare_headers(model_spec, source, _revision(model_spec), model)


def _revision(model_spec: ModelSpec) -> str:
    return model_spec.revision or "main"


def _from_config(model_spec: ModelSpec, config: Any) -> nn.Module:
    auto = auto_class(config)
    try:
        model: nn.Module = auto.from_config(config, dtype=torch.float32)
    except Exception as e:  # a configuration that only the construction finds impossible
        given = model_spec.config or {}
        named = next((n for n, v in given.items() if isinstance(e, KeyError) and v in e.args), None)
        if named is not None:  # a name that some table of transformers does not hold
            raise job_error(f"{CONFIG}.{named}", given[named], "transformers knows no such one") from e
        raise job_error(CONFIG, given, f"no model can be built from it: {one_line(e)}") from e
    return model.train()


def _refuse_running_statistics(model_spec: ModelSpec, config: Any, model: nn.Module) -> None:
    names = running_statistics(model)
    if names:
        field, value = (CONFIG, config.model_type) if model_spec.from_ is None else (FROM, model_spec.from_)
        raise job_error(
            f"{field}.model_type" if field == CONFIG else field,
            value,
            f"keeps running statistics (in {shorten(names, 3)}), which are not merged, so evaluation and export would "
            "have those that the model began with: choose one with layer or group norms, or bring your own loop",
        )


def _prepare_training(model: nn.Module, model_spec: ModelSpec) -> None:
    """Freeze what the job says, hold it in training.model.frozenDtype, and configure the model for training."""
    _freeze(model, model_spec.freeze)
    if model_spec.frozen_dtype == "bfloat16":
        _convert_frozen(model, torch.bfloat16)
    config: Any = model.config
    config.use_cache = False  # of the attention, which training has no use for
    if hasattr(config, "output_router_logits"):
        # A mixture of experts: the router's load-balancing loss is part of the training loss.
        config.output_router_logits = True


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    _refuse_unmatched("freeze", patterns, names)
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise job_error("spec.training.model.freeze", list(patterns), "freezes every parameter: nothing is left")


def _convert_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Bring frozen matrices to ``dtype``. Vectors (gains of norms, biases) and embeddings stay: they are small, or
    what all layers add to, and autocast leaves them alone."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.ndim >= 2 and id(parameter) not in embeddings:
            parameter.data = parameter.data.to(dtype)


# ------------------------------------------------------------------ checks


def _known_type(given: Mapping[str, Any]) -> str:
    from transformers import CONFIG_MAPPING

    kind = given.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return kind
    near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING.keys()), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near and kind else "llama, mixtral and vit are three that it knows"
    what = "transformers knows no such model type" if kind is not None else "is required (or training.model.from)"
    raise job_error(f"{CONFIG}.model_type", kind, f"{what}; {hint}")


def _field_names(config: Any) -> set[str]:
    if dataclasses.is_dataclass(config):
        own = {field.name for field in dataclasses.fields(config)}
    else:
        own = set(inspect.signature(type(config).__init__).parameters) - {"self", "kwargs"}
    return own | set(config.attribute_map) | _COMMON


def _check_names(given: Mapping[str, Any], config: Any) -> None:
    known = _field_names(config) - set(_REFUSED)
    problems = []
    for name, value in given.items():
        path = f"{CONFIG}.{name}"
        if name in _REFUSED:
            problems.append(Problem(path, value, _REFUSED[name]))
        elif (name.startswith("num_") or name.endswith("_size")) and type(value) in (int, float) and value < 1:
            problems.append(Problem(path, value, "must be at least 1"))
        elif name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            problems.append(Problem(path, value, f"a {config.model_type} configuration has no such field{hint}"))
    if problems:
        raise JobError(problems)


def _checked(given: Mapping[str, Any], make: Any) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return make()
    except (StrictDataclassError, ValueError, TypeError, KeyError) as e:
        words = one_line(e, last=True)
        named = next((name for name in given if f"'{name}'" in str(e)), None)
        path = f"{CONFIG}.{named}" if named else CONFIG
        raise job_error(path, given[named] if named else dict(given), words) from e


def _vocabulary(spec: JobSpec) -> int | None:
    """The tokenizer's vocabulary; None where the data have no tokenizer."""
    from diloco_worker.data.text import tokenizer

    data = spec.training.data
    if data is None or data.source == "python":
        return None
    return tokenizer(data.tokenizer).vocabulary


def _within(defaults: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Special-token defaults that lie outside the vocabulary become None."""
    names = _field_names(defaults)
    if "vocab_size" not in names:
        own.pop("vocab_size", None)
        return own
    size = own.get("vocab_size", defaults.vocab_size)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default = getattr(defaults, name, None)
        if name in names and name not in own and isinstance(default, int) and isinstance(size, int) and default >= size:
            own[name] = None
    return own


def _check_fit(spec: JobSpec, config: Any) -> None:
    """The data's tokens and sequences must fit the model."""
    data, vocabulary = spec.training.data, _vocabulary(spec)
    if data is None or vocabulary is None:
        return
    problems = []
    size, positions = (getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings"))
    if size is None:
        problems.append(Problem("spec.training.data.source", data.source, f"a {config.model_type} takes no text"))
    elif size < vocabulary:
        what = f"is smaller than the tokenizer's vocabulary of {vocabulary}: leave it out, or raise it"
        problems.append(Problem(f"{CONFIG}.vocab_size", size, what))
    if isinstance(positions, int) and positions < data.sequence_length:
        what = f"is less than training.data.sequenceLength = {data.sequence_length}: raise it, or shorten that"
        problems.append(Problem(f"{CONFIG}.max_position_embeddings", positions, what))
    if problems:
        raise JobError(problems)


def _bad_from(model_spec: ModelSpec, error: Exception) -> JobError:
    return job_error(
        FROM, model_spec.from_, f"no model could be loaded: {one_line(error)}; it must hold config.json and safetensors"
    )
