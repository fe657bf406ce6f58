"""What pages show as code is code: jobs and parts of jobs are valid, and Python compiles and imports what there is.

Commands are checked in test_results.py; tests/integration/run/test_own_loop_page.py runs the blocks of
docs/your-own-loop.md.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from diloco.main import app
from diloco_protocol.spec import kubectl_yaml
from diloco_protocol.spec.load import JobError, parse_job
from repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PROGRAMS = {"Secret", "Certificate"}  # kinds of Kubernetes and cert-manager
ARGO = "resource.customizations.health.diloco.io_DiLoCoJob"  # a setting of Argo CD


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, block) of all pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [
            (str(page.relative_to(ROOT)), block)
            for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)
        ]
    return found


def read_yaml(text: str) -> dict[str, Any]:
    """As the product reads it: 2e-3 is a number."""
    data = kubectl_yaml.parse(text).value
    assert isinstance(data, dict)
    return data


def as_job(document: dict[str, Any]) -> str | None:
    """A job, or a part of one put into one that is whole; None: it belongs to another program."""
    if document.get("kind") in OTHER_PROGRAMS or list(document) == [ARGO]:
        return None
    spec = document.get("spec", document)
    if "training" in spec and "regions" in spec:
        return json.dumps(document)
    job = read_yaml((ROOT / "examples" / "minimal.yaml").read_text(encoding="utf-8"))
    job["metadata"] |= document.get("metadata", {})
    for section, fields in spec.items():
        known = job["spec"].get(section)
        job["spec"][section] = {**known, **fields} if isinstance(known, dict) else fields
    return json.dumps(job)


def test_every_job_and_part_of_a_job_is_valid() -> None:
    checked = 0
    for page, block in blocks("yaml"):
        for document in block.split("\n---\n"):
            if (job := as_job(read_yaml(document))) is not None:
                try:
                    parse_job(job)
                except JobError as error:
                    pytest.fail(f"{page}: {error}\n{block}")
                checked += 1
    assert checked >= 11


@pytest.mark.parametrize(
    "block",
    [
        "sync: {evry: 3}",
        "spec: {syncer: {storge: {size: 1Gi}}}",
        "training: {batch: {sequences: 0}}",
        "strategy: {a: 1}",
    ],
)
def test_a_part_that_is_wrong_is_found(block: str) -> None:
    job = as_job(read_yaml(block))
    assert job is not None
    with pytest.raises(JobError):
        parse_job(job)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_job_that_a_beginner_copies_has_three_learners(page: str) -> None:
    (job,) = [block for name, block in blocks("yaml") if name == page]
    assert parse_job(job).spec.slots == 3


def test_the_tutorials_job_and_commands_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    used = {word for kind, block in shown if not kind for word in re.findall(r"^(?:\$ )?diloco (\w+)", block, re.M)}
    assert {"validate", "run", "status", "report", "export"} <= used <= known.keys()
    monkeypatch.chdir(tmp_path)
    (job,) = [block for kind, block in shown if kind == "yaml"]
    Path("tutorial.yaml").write_text(job)
    Path("corpus").mkdir()
    Path("corpus", "own.txt").write_text("own text\n" * 1000)
    done = CliRunner().invoke(app, ["validate", "tutorial.yaml", "--file-only"])
    assert done.exit_code == 0 and "tutorial.yaml: a valid job" in done.output, done.output


def test_python_compiles_and_imports_what_there_is() -> None:
    """Names are looked up in packages that are installed here; PEFT, for one, is not."""
    checked = 0
    for page, block in blocks("python"):
        compile(block, page, "exec")
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and importlib.util.find_spec(node.module.split(".")[0]):
                module = importlib.import_module(node.module)
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{page}: {node.module} has no {missing}"
        checked += 1
    pages = {page for page, _ in blocks("python")}
    assert checked >= 8 and {"docs/lora.md", "docs/tutorial.md", "docs/your-own-loop.md", "README.md"} <= pages
