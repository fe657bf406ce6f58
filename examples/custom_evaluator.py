"""An evaluator of your own: `evaluator.command` of a job whose learners run custom_loop.py.

It has no slot and trains nothing. The observer keeps `model` at the job's newest merged version; the score goes into
status, report and metrics. This one is the mean cross-entropy on modules that no learner reads.

    diloco run examples/custom-loop.yaml
"""

import sysconfig
from pathlib import Path

import torch
from custom_loop import LENGTH, ConvLM
from torch.nn import functional as F

from diloco_worker import Observer


@torch.no_grad()
def score(model: ConvLM, rows: torch.Tensor) -> float:
    """Mean nats per byte of `rows`, int64 [n, LENGTH + 1]."""
    logits = model(rows[:, :-1])
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def main() -> int:
    text = b"".join(f.read_bytes() for f in sorted(Path(sysconfig.get_paths()["stdlib"], "email").glob("*.py")))
    rows = torch.frombuffer(bytearray(text[: 64 * (LENGTH + 1)]), dtype=torch.uint8).long().view(64, LENGTH + 1)
    model, due = ConvLM().eval(), 0.0
    with Observer.from_environment(model) as observer:
        while not observer.ended:
            observer.wait_for_change(timeout=1.0)
            if not observer.complete or observer.refreshing:
                continue  # the model is on its way
            if not observer.current and (observer.phase == "evaluating" or observer.announced_progress >= due):
                observer.refresh()  # download the newest version of each fragment
            elif observer.evaluating:
                observer.report(score(model, rows), final=True)
            elif observer.progress >= due:
                observer.report(score(model, rows))
                due = observer.progress + 0.1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
