"""What wheel_check.py does in each environment: the tour that needs no extra, and what each extra is for."""

from __future__ import annotations

import json
from collections.abc import Callable

from wheel_place import Place, expect, project

PEFT = "peft>=0.18,<1"  # no extra has it: only users of adapters need it
JOB_HEAD = "apiVersion: diloco.io/v1alpha1\nkind: DiLoCoJob\n"
LORA_JOB = f"""{JOB_HEAD}metadata: {{name: lora}}
spec:
  training:
    model: {{from: model, lora: {{rank: 4, alpha: 8}}}}
    data: {{paths: [python-stdlib], sequenceLength: 32}}
    batch: {{sequences: 2}}
    optimizer: {{lr: 1e-2, warmupSteps: 2}}
    stop: {{steps: 20}}
  sync: {{fragments: 2, every: 4, overlap: 1}}
  regions: [{{learners: 1}}]
"""
LOAD_ADAPTER = """
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(24).reshape(2, 12)).logits

adapted = logits(AutoPeftModelForCausalLM.from_pretrained("adapter"))
base, merged = (logits(AutoModelForCausalLM.from_pretrained(name)) for name in ("model", "merged"))
torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
assert (adapted - base).abs().max() > 1e-3, "the adapter changes nothing"
print("the adapter is the merged model")
"""
STORIES = 300
TOKENS = sum(len(f"story {number} of many") + 1 for number in range(STORIES))  # bytes, and one between documents
WRITE_RECORDS = f"""
import datasets

stories = [f"story {{number}} of many" for number in range({STORIES})]
table = datasets.Dataset.from_dict({{"id": list(range({STORIES})), "story": stories}})
table.to_parquet("stories.parquet")
table.save_to_disk("stories")
"""
RECORDS_JOB = f"""{JOB_HEAD}metadata: {{name: records}}
spec:
  training:
    model:
      config: {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
               num_attention_heads: 2}}
    data: {{paths: [stories.parquet], textField: story, sequenceLength: 16}}
    batch: {{sequences: 2}}
    optimizer: {{warmupSteps: 2}}
    stop: {{steps: 6}}
  sync: {{fragments: 1, every: 3, overlap: 1}}
  regions: [{{learners: 1}}]
"""


def tour(place: Place) -> None:
    """What needs no extra."""
    expect(place.run("diloco", "--help"), "A job is one YAML file")
    expect(place.run("diloco", "version"), str(project()["version"]))
    place.run("diloco", "examples")
    expect(place.run("diloco", "validate", "examples/minimal.yaml"), "a valid job")
    expect(place.run("diloco", "validate", "examples/tiny-gpt.yaml"), "a valid job")


def try_syncer(place: Place) -> None:
    expect(place.run("python", "-m", "diloco_syncer", "--help"), "--store")


def try_worker(place: Place) -> None:
    words = "import diloco_worker, diloco_worker.training.trainer; print(diloco_worker.Learner.__name__)"
    expect(place.run("python", "-c", words), "Learner")


def try_operator(place: Place) -> None:
    expect(place.run("python", "-m", "diloco_operator", "--help"), "--watch-namespaces")


def try_kube(place: Place) -> None:
    place.run("python", "-c", "import diloco.cluster.client, diloco.cluster.commands, kubernetes")


def try_local(place: Place) -> None:
    """A job from its file to a model that transformers loads."""
    few = ("--set", "training.stop={steps: 30}", "--set", "training.batch={sequences: 2}")
    place.run("diloco", "run", "examples/minimal.yaml", "--workdir", "run", *few, timeout=500)
    report = json.loads((place.folder / "run" / "report.json").read_text(encoding="utf-8"))
    if report["outcome"] != "complete" or not report["merges"]:
        raise SystemExit(f"wheel-check: the job ended {report['outcome']} after {report['merges']} merges")
    expect(place.run("diloco", "report", "run"), "complete")
    place.run("diloco", "export", "run", "model")
    load = "from transformers import AutoModelForCausalLM as A; print(type(A.from_pretrained('model')).__name__)"
    expect(place.run("python", "-c", load), "LlamaForCausalLM")
    try_adapter(place)


def try_adapter(place: Place) -> None:
    """A LoRA job on the model that try_local exported, and its adapter in PEFT: that and the merged model agree."""
    (place.folder / "lora.yaml").write_text(LORA_JOB, encoding="utf-8")
    place.run("diloco", "run", "lora.yaml", "--workdir", "lora", timeout=500)
    place.run("diloco", "export", "lora", "merged")
    place.run("diloco", "export", "lora", "adapter", "--adapter")
    place.install(PEFT)
    expect(place.run("python", "-c", LOAD_ADAPTER), "the adapter is the merged model")


def try_datasets(place: Place) -> None:
    """Records with a field of their own, of a Parquet file and of a folder that save_to_disk wrote."""
    place.run("python", "-c", WRITE_RECORDS)
    (place.folder / "records.yaml").write_text(RECORDS_JOB, encoding="utf-8")
    for path in ("stories.parquet", "stories"):
        said = place.run(
            *("diloco", "run", "records.yaml", "--workdir", f"run-{path}", f"--set=training.data.paths=[{path}]"),
            timeout=500,
        )
        expect(said, f"{STORIES} records, {TOKENS:,} tokens")


def try_imports(*names: str) -> Callable[[Place], None]:
    def tried(place: Place) -> None:
        place.run("python", "-c", "import " + ", ".join(names))

    return tried


TRIED: dict[str, Callable[[Place], None]] = {
    "base": lambda place: None,
    "syncer": try_syncer,
    "worker": try_worker,
    "local": try_local,
    "operator": try_operator,
    "kube": try_kube,
    "datasets": try_datasets,
    "tensorboard": try_imports("tensorboard"),
    "report": try_imports("matplotlib", "diloco.reports.plots"),
}
