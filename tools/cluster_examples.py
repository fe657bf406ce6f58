"""The jobs of manifests/examples, written from examples/ with what their pods need of a small cluster
(tools/generate.py).

One definition of each job: the text of examples/NAME.yaml, comments included, with another
opening and with what follows here put in. tests/unit/project/test_cluster_examples.py compares the two
as jobs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "examples"


@dataclass(frozen=True)
class Change:
    """What becomes of one example. ``opening``: its first comment. ``replaced``: text → text, each there
    once. ``added``: YAML of fields below spec, put at the end."""

    opening: str
    replaced: dict[str, str] = field(default_factory=dict)
    added: str = ""


def _learners(memory: str, more: str = "", mounts: str = "", image: str = "", command: str = "") -> str:
    return f"""\
  learners:{command}
    podTemplate:               # merged into every learner's pod; the container is called learner
      spec:{more}
        containers:
          - name: learner{image}
            resources:
              requests: {{cpu: 250m, memory: {memory}}}
              limits: {{cpu: "1", memory: 2Gi}}
            env: [{{name: OMP_NUM_THREADS, value: "1"}}]   # one thread for one core{mounts}
"""


_SYNCER = """\
  syncer:
    storage: {size: 1Gi}
    podTemplate:
      spec:
        containers:
          - name: syncer
            resources:
              requests: {cpu: 250m, memory: 256Mi}
              limits: {memory: 1Gi}
"""

CHANGES = {
    "tiny-gpt": Change(
        """\
# A small language model, trained by three learners in pods of their own that only meet at the syncer.
#
#   kubectl apply -f manifests/examples/tiny-gpt.yaml
#   kubectl get dilocojobs
#   kubectl delete pod tiny-gpt-local-1     # training continues; Kubernetes recreates the pod
#   diloco export tiny-gpt OUT
""",
        added=_learners("512Mi") + _SYNCER,
    ),
    "tiny-moe": Change(
        """\
# A small mixture of experts (Mixtral's architecture): four experts a layer, two used per token.
#
# Experts see only the tokens that are routed to them, so each learner's experts
# drift in their own way; the merge weighs learners by tokens.
#
#   kubectl apply -f manifests/examples/tiny-moe.yaml
""",
        added=_learners("512Mi") + _SYNCER,
    ),
    "tiny-vit": Change(
        """\
# A small vision transformer on data of your own making.
#
# source: python calls a function of yours, `module:function`, with the
# training.data section and held_out (true for the evaluator's part). It returns
# a map-style data set. The module is looked for in the container's working directory,
# which is /workspace in the worker's image. Here it comes from a ConfigMap; a module
# that needs more than one file belongs into an image of your own.
#
#   kubectl create configmap tiny-vit-code --from-file=examples/byteplots.py
#   kubectl apply -f manifests/examples/tiny-vit.yaml
""",
        added=_learners(
            "512Mi",
            more="\n        volumes: [{name: code, configMap: {name: tiny-vit-code}}]",
            mounts="\n            volumeMounts: [{name: code, mountPath: /workspace, readOnly: true}]",
        )
        + _SYNCER,
    ),
    "custom-loop": Change(
        """\
# Your own PyTorch loop instead of the built-in trainer, in an image of your own.
#
# The program starts once per learner, with the DILOCO_* environment that
# diloco_worker.Learner.from_environment reads. The image is the worker's with the script
# in its working directory (examples/custom-loop.Dockerfile says how it is built); push it
# where the cluster's nodes can pull it, and name it below.
#
#   kubectl apply -f manifests/examples/custom-loop.yaml
""",
        {
            "  learners:\n    command: [python, custom_loop.py]\n": _learners(
                "512Mi",
                image="\n            image: diloco-custom-loop:0.1.0",
                command="\n    command: [python, custom_loop.py]",
            )
        },
        added=_SYNCER,
    ),
}


def text(name: str) -> str:
    """What manifests/examples/NAME.yaml holds. Raises ValueError where the example has changed so that the
    change does not fit."""
    change = CHANGES[name]
    source = (SOURCE / f"{name}.yaml").read_text(encoding="utf-8")
    body = re.sub(r"\A(#.*\n)+", "", source)
    for old, new in change.replaced.items():
        if body.count(old) != 1:
            raise ValueError(f"examples/{name}.yaml does not hold exactly once: {old!r}")
        body = body.replace(old, new)
    made = f"#\n# Written from examples/{name}.yaml by `make generate` (tools/{Path(__file__).name}).\n"
    added = f"\n{change.added}" if change.added else ""
    return change.opening + made + body.rstrip("\n") + "\n" + added


EXAMPLES: dict[str, Callable[[], str]] = {name: partial(text, name) for name in CHANGES}
