"""torchtitan's Trainer as a learner: its model, sharding, optimizer and step, with the job's data and end.

    learners: {processes: 8, command: [python, torchtitan_learner.py]}

torchtitan's own loop (``Trainer.train``) is replaced, because the job decides which sequences come next and when it
ends. Not used of torchtitan: its loader and tokenizer, its checkpoints and its validation. docs/many-gpus.md says with
which version this was run, and on what.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from diloco_worker import Learner, configure_logging

LENGTH = 64
# What torchtitan wants of torchrun; a learner of one process has none of it.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences that count on from anywhere, modulo 64; replace them by your tokens."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(LENGTH + 1) * (1 + index % 3) + index) % 64


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        raise NotImplementedError("the data set gives tokens")

    decode = get_vocab_size = encode


class NoLoader(BaseDataLoader):
    """The learner gives the batches."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class LearnerTrainer(Trainer):
    """torchtitan's Trainer, whose steps are a learner's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_as_learner(self) -> int:
        (model,) = self.model_parts  # no pipeline stages
        dims = self.parallel_dims
        share = (0, 1)  # which of the ranks' batches this one loads: tensor-parallel ranks load the same
        if dims.dp_enabled:
            mesh = dims.get_mesh("batch")
            share = mesh.get_local_rank(), mesh.size()
        with Learner.from_environment(model, list(self.optimizers), data_rank=share) as learner:
            for batch in learner.batches(Numbers()):
                self.step += 1
                self.gc_handler.run(self.step)
                tokens, labels = batch[:, :-1], batch[:, 1:].contiguous()
                positions = torch.arange(LENGTH).expand_as(tokens).contiguous()
                self.loss = torch.zeros((), device=self.device)
                self.train_step(
                    self.batch_generator([({"input": tokens.contiguous(), "positions": positions}, labels)])
                )
                # torchtitan's loss is this rank's sum over the tokens of all ranks.
                learner.after_step(tokens=labels.numel(), loss=self.loss * share[1])
        return learner.exit_code

    def forward_backward_step(self, **given: Any) -> torch.Tensor:
        loss: torch.Tensor = super().forward_backward_step(**given)
        self.loss += loss.detach()
        return loss


def main() -> int:
    configure_logging()
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    given = llama3_debugmodel()
    config = LearnerTrainer.Config(**{one.name: getattr(given, one.name) for one in fields(given) if one.init})
    config.tokenizer, config.dataloader = NoTokenizer.Config(), NoLoader.Config()
    config.training.seq_len = LENGTH
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # FSDP2; torch 2.13 refuses the default in several ranks
    config.checkpoint.enable = config.validator.enable = False
    config.training.steps, config.lr_scheduler.decay_ratio = 10**9, 0.0  # the job decides when it ends: no decay
    trainer = config.build()
    try:
        return int(trainer.train_as_learner())
    finally:
        trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
