"""A training script of your own as a learner: the model, the data and the loop are yours.

What makes it a learner is the `with` line, the loop over `learner.batches`, and
`learner.after_step`. A job runs it with `learners.command`; started so, it finds its job
and the syncer in the environment. It is complete: a character model of a few dilated
causal convolutions, trained on the Python standard library's source, nothing of it from
transformers.

    diloco run examples/custom-loop.yaml
"""

import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from diloco_worker import Learner

WIDTH, LAYERS, LENGTH = 96, 6, 128


class ConvLM(nn.Module):
    """Predicts the next byte. int64 [batch, length] -> logits float32 [batch, length, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.mix = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i) for i in range(LAYERS))
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for conv, norm in zip(self.mix, self.norm, strict=True):
            past = F.pad(norm(x).transpose(1, 2), (conv.dilation[0], 0))  # causal: pad the left only
            x = x + F.glu(conv(past), dim=1).transpose(1, 2)
        return self.out(x)


class SourceCode(torch.utils.data.Dataset):
    """The standard library's top-level modules, LENGTH + 1 bytes at a time.

    The same in every learner, and shuffled: a learner is leased runs of neighbouring items.
    """

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.bytes = np.concatenate([np.frombuffer(f.read_bytes(), np.uint8) for f in files])
        self.order = np.random.default_rng(0).permutation((len(self.bytes) - 1) // LENGTH)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> torch.Tensor:
        start = self.order[i] * LENGTH
        return torch.from_numpy(self.bytes[start : start + LENGTH + 1].astype(np.int64))


def main() -> int:
    torch.manual_seed(0)  # every learner starts alike; the first to join hands its weights to all
    model = ConvLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    dataset = SourceCode()
    with Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(dataset):
            for group in optimizer.param_groups:  # half a cosine over the whole job, down to 2 %
                group["lr"] = 2e-3 * (0.51 + 0.49 * math.cos(math.pi * learner.progress)) * learner.rewarm_scale()
            torch.manual_seed(learner.seed)  # for dropout, if there were any: not every learner the same
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.after_step(tokens=batch[:, 1:].numel(), loss=loss)
    return learner.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
