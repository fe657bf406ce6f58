"""``spec.training``: what is trained, on what, how, and until when."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from diloco_protocol.spec.base import FUNCTION_PATTERN, Free, Pattern, Seconds, Spec, Text

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Beta], Field(min_length=2, max_length=2)]

# `kubectl apply` without --server-side drops nulls from what it creates, and the default would come
# in their place. So what null says here can be said with a zero too, and both become None.
_NONE_FOR_ZERO = AfterValidator(lambda value: value or None)
_NONE_WITHOUT_FRACTION = AfterValidator(lambda value: value if value is not None and value.fraction else None)


class LoraSpec(Spec):
    """Low-rank adapters on linear layers; everything else is frozen."""

    rank: int = Field(8, ge=1, le=4096, description="Rank of each adapter.")
    alpha: float = Field(16.0, gt=0, le=65536, description="Scale of the adapters' output: alpha / rank.")
    targets: list[Pattern] = Field(
        ["*q_proj", "*v_proj"],
        min_length=1,
        max_length=64,
        description="Patterns (fnmatch) over the names of the linear modules that get an adapter; Conv1D of "
        "GPT-2-like models is one of them.",
    )


class ModelSpec(Spec):
    """The model: a transformers configuration, weights to start from, and what of it is trained."""

    config: Free | None = Field(
        None,
        description="A transformers configuration: model_type and that configuration's own fields. "
        "The model is built from it and initialised from the seed. "
        "vocab_size follows the tokenizer if left out.",
        examples=[{"model_type": "llama", "hidden_size": 128}],
    )
    from_: Text | None = Field(
        None,
        alias="from",
        description="Weights to start from: a directory, a URI or a name on Hugging Face. "
        "Without config, the configuration comes from there too.",
    )
    revision: Text | None = Field(
        None,
        description="If from is a name on Hugging Face: its commit, tag or branch; null: the main branch. "
        "Only a commit never changes.",
    )
    initialise: list[Pattern] = Field(
        [],
        max_length=64,
        description="Patterns (fnmatch) of tensor names that may begin with random values (by the seed), because from "
        "does not hold them, or holds them in another shape. Anything else that is missing there is refused.",
    )
    freeze: list[Pattern] = Field(
        [],
        max_length=64,
        description="Patterns (fnmatch) of parameter names that are not trained. They travel once, with version 0, to "
        "learners that have not loaded the same values.",
    )
    frozen_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type of frozen matrices (by freeze or lora), except embeddings. bfloat16 halves their memory; "
        "the arithmetic is then in bfloat16, with precision auto too.",
    )
    lora: LoraSpec | None = Field(
        None, description="Train low-rank adapters and freeze everything else; null: train the model itself."
    )


class DataSpec(Spec):
    """The training data."""

    source: Literal["text", "datasets", "python"] = Field(
        "text",
        description="text: files, of plain text or of records; datasets: a Hugging Face data set; python: a function "
        "of yours.",
    )
    paths: list[Text] = Field(
        [],
        max_length=256,
        description="Of source text: files, directories, globs or fsspec URIs. Files of records (.jsonl, .ndjson, "
        ".json, .csv, .tsv, each also .gz; .parquet, .arrow, folders written by save_to_disk) give their textField, "
        "all others their bytes. `python-stdlib` is the built-in corpus: the Python standard library's own source.",
    )
    name: Text | None = Field(
        None,
        description="Of source datasets: a name on Hugging Face, a directory written by save_to_disk, or a file of "
        "records.",
    )
    subset: Text | None = Field(
        None, description="Of source datasets: the data set's configuration, where it has several."
    )
    revision: Text | None = Field(
        None,
        description="Of source datasets, where name is one on Hugging Face: a commit, tag or branch; null: its main "
        "branch. All learners must read the same rows: name a commit.",
    )
    split: Text = Field(
        "train", description="Of source datasets, and of folders written by save_to_disk: the split to train on."
    )
    text_field: Text = Field(
        "text", description="Of source datasets, and of files of records: the field or column that holds the text."
    )
    function: Annotated[str, Field(pattern=FUNCTION_PATTERN, max_length=256)] | None = Field(
        None,
        description="Of source python: `module:function`, called with this section and held_out (bool); "
        "it returns a map-style data set. The module is found in the job file's directory first.",
    )
    tokenizer: Text = Field(
        "bytes",
        description="bytes: one token a byte, 256 of them; or a transformers tokenizer, by directory or name on "
        "Hugging Face.",
    )
    sequence_length: int = Field(
        128, ge=2, le=1_048_576, description="Tokens per training sequence; for text and datasets."
    )


class BatchSpec(Spec):
    """One learner's batch."""

    sequences: int = Field(16, ge=1, le=65_536, description="Sequences per learner and forward pass.")
    accumulation: int = Field(1, ge=1, le=4096, description="Forward passes per optimizer step.")


class ParallelSpec(Spec):
    """How the built-in trainer divides the model among a learner's ranks: shard × replicate of them."""

    shard: int | None = Field(
        None,
        ge=1,
        le=16_384,
        description="Ranks that hold one copy of the model together, each a part of every tensor (FSDP2); 1: each rank "
        "holds the model whole; null: the learner's ranks divided by replicate.",
    )
    replicate: int = Field(
        1,
        ge=1,
        le=16_384,
        description="Copies of the model in a learner. Both above 1: HSDP. With shard 1: data parallelism like DDP's.",
    )


class OptimizerSpec(Spec):
    """The inner optimizer, one per learner."""

    name: Literal["adamw"] = Field("adamw", description="The algorithm.")
    lr: float = Field(0.001, gt=0, le=10, description="The peak learning rate.")
    betas: Betas = Field([0.9, 0.95], description="Decay of the first and second moment.")
    eps: float = Field(1e-8, gt=0, le=1, description="Added to the denominator.")
    weight_decay: float = Field(0.1, ge=0, le=10, description="Decoupled weight decay, applied to matrices only.")
    warmup_steps: int = Field(100, ge=0, le=10_000_000, description="Steps of linear warm-up.")
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="After the warm-up. cosine: decay to 2 % of the peak at the stop; constant: the peak."
    )
    clip_norm: Annotated[float, Field(ge=0, le=1e6), _NONE_FOR_ZERO] | None = Field(
        1.0, description="Gradients are clipped to this norm; 0 or null: not clipped."
    )


class StopSpec(Spec):
    """When the job is done; exactly one of them."""

    steps: Annotated[int, Field(ge=1, le=10**12)] | None = Field(
        None, description="Inner steps per learner; the job is done when the most advanced slot reaches it."
    )
    tokens: Annotated[int, Field(ge=1, le=2**53)] | None = Field(
        None, description="Tokens trained by all learners together."
    )
    seconds: Seconds | None = Field(None, description="Seconds since the first step.")

    @property
    def kind(self) -> Literal["steps", "tokens", "seconds"]:
        """Which of them is given."""
        return "steps" if self.steps is not None else "tokens" if self.tokens is not None else "seconds"

    @property
    def limit(self) -> float:
        """Its value: steps of a slot, tokens of all learners, or seconds."""
        return next((v for v in (self.steps, self.tokens, self.seconds) if v is not None), 0.0)


class EvaluationSpec(Spec):
    """Evaluation of the merged model on held-out data."""

    fraction: float = Field(0.01, ge=0, le=0.5, description="Share of the data held out of training; 0: no evaluation.")
    every_tokens: Annotated[int, Field(ge=1, le=2**53)] | None = Field(
        None, description="Tokens, of all learners, between evaluations; null: 1/50 of the way to the stop."
    )
    batches: int = Field(8, ge=1, le=100_000, description="Batches per evaluation.")


class TrainingSpec(Spec):
    """The built-in trainer, or the settings that your own program (learners.command) reads."""

    model: ModelSpec | None = Field(None, description="The model. Required unless learners.command is given.")
    data: DataSpec | None = Field(None, description="The data. Required unless learners.command is given.")
    batch: BatchSpec = Field(default_factory=BatchSpec, description="One learner's batch.")
    parallel: ParallelSpec = Field(
        default_factory=ParallelSpec,
        description="How a learner of several processes (learners.processes, learners.pods) divides the model.",
    )
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec, description="The inner optimizer.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Arithmetic of the forward and backward pass; weights stay float32. "
        "auto: bfloat16 where the device has it in hardware, else float32.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is one, else cpu.")
    activation_checkpointing: bool = Field(
        False,
        description="The built-in trainer keeps each block's input alone, and computes its activations again in the "
        "backward pass: less memory, about a third more arithmetic.",
    )
    compile: bool = Field(
        False,
        description="The built-in trainer compiles each block of the model (torch.compile), which needs a C++ compiler "
        "on the CPU. The first step takes longer.",
    )
    stop: StopSpec = Field(
        default_factory=lambda: StopSpec(tokens=2_000_000),
        description="When the job is done: exactly one of steps, tokens, seconds.",
    )
    evaluation: Annotated[EvaluationSpec | None, _NONE_WITHOUT_FRACTION] = Field(
        default_factory=EvaluationSpec,
        description="Evaluation of the merged model; needs model and data, or evaluator.command. "
        "null or fraction 0: none.",
    )
