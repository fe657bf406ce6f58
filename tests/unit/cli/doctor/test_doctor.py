"""``diloco doctor``: what would fail on this machine, in a cluster and with a job, and the fix."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from diloco.cluster.client import Where
from diloco.doctor.cluster import CRD, RIGHTS, check_cluster, has_kubeconfig, no_kubeconfig
from diloco.doctor.findings import Finding, findings_text
from diloco.doctor.job import check_job
from diloco.doctor.machine import Torch, absent_packages, check_machine, check_packages, free_memory
from diloco.main import app
from repository import ROOT

EXAMPLE = ROOT / "examples" / "minimal.yaml"
CPU = Torch("2.13.0", None, ())


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def bad(findings: Iterator[Finding]) -> dict[str, str]:
    """Errors and warnings: what was looked at, and what was said with the fix."""
    return {f"{one.level} {one.about}": f"{one.said} {one.fix}" for one in findings if one.level != "ok"}


# ------------------------------------------------------------------ the whole


def test_this_machine_and_an_example_are_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, said = diloco("doctor", EXAMPLE, "--json")
    document = json.loads(said)
    assert code == 0 and document["ok"], said
    by_name = {one["about"]: one for one in document["findings"]}
    assert {"python", "cores", "memory", "disk", "syncer", "worker", "torch", "data", "model"} <= set(by_name)
    assert "trained parameters" in by_name["model"]["said"] and "for each of 2 learners" in said
    assert [one["level"] for one in document["findings"] if one["section"] == "cluster"] == ["warning"], "KUBECONFIG"


def test_exit_code_1_where_something_would_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr("diloco.doctor.machine.check_torch", lambda installed: (None, []))  # asked for above
    code, said = diloco("doctor", tmp_path / "absent.yaml")
    assert code == 1 and "there is no such file" in said and "1 error" in said
    code, said = diloco("doctor", EXAMPLE, "--credentials", tmp_path / "absent")
    assert code == 2 and "there is no such folder" in said
    code, said = diloco("doctor", "--set", "seed=1")
    assert code == 2 and "give JOB.yaml too" in said


def test_a_line_for_each_with_its_fix() -> None:
    text = findings_text(
        [
            Finding("machine", "disk", "warning", "3 GB free", fix="make room"),
            Finding("job", "file", "error", "wrong " * 40, fix="diloco validate"),
        ]
    )
    assert text.startswith("machine\n  warning  disk        3 GB free\n                       fix: make room\n\njob\n")
    assert text.endswith("1 error, 1 warning") and all(len(line) <= 100 for line in text.splitlines())
    assert findings_text([Finding("machine", "cores", "ok", "2")]).endswith("no problem found")


# ------------------------------------------------------------------ machine


def test_memory_is_what_the_container_is_given(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       9000000 kB\nMemAvailable:   8000000 kB\n")
    assert free_memory(meminfo, tmp_path) == 8000000 * 1024
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("400000000\n")
    assert free_memory(meminfo, tmp_path) == 600_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(meminfo, tmp_path) == 8000000 * 1024


def test_too_little_of_the_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.doctor.machine.free_memory", lambda: 100 << 20)
    monkeypatch.setattr("diloco.doctor.machine.usable_cores", lambda: 1)
    found = bad(check_machine(tmp_path))
    assert "error memory" in found and "warning cores" in found
    assert "error disk" in bad(check_machine(tmp_path / "not-there"))


def test_extras_that_are_missing_come_with_the_command() -> None:
    absent = absent_packages()
    assert absent["syncer"] == absent["worker"] == []  # the tests need them
    found = bad(check_packages({**absent, "worker": ["torch", "numba"]}))
    assert found == {
        "error worker": "not installed (torch, numba); needed for `diloco run` and `diloco learner join` "
        "pip install 'decoupled-diloco[worker]'"
    }
    (one,) = [one for one in check_packages({"kube": ["kubernetes"]}) if one.about == "kube"]
    assert one.level == "ok" and one.fix == "pip install 'decoupled-diloco[kube]'"


# ------------------------------------------------------------------ a job


@pytest.mark.parametrize(
    ("overrides", "about", "words"),
    [
        (["sync.quorum=9"], "error file", "at most the number of learners"),
        (["training.data.paths=[none.txt]"], "error data", "there is no such file"),
        (["training.data={source: datasets, name: x}"], "error data", "decoupled-diloco[datasets]"),
        (["training.data={source: python, function: 'nowhere:f'}"], "error data", "there is no module nowhere"),
        (["training.device=cuda"], "error device", "torch sees no GPU"),
        (["regions.0.learners=500"], "warning device", "they take turns"),
        (["training.model.config.hidden_size=30000"], "error memory", "are free fewer learners"),
        (["training.model.config.model_type=lama"], "error model", "did you mean llama"),
        (["training.stop={steps: 5}"], "warning file", "no fragment is merged before the job stops"),
    ],
)
def test_what_would_fail_with_a_job_here(
    overrides: list[str], about: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.checks.machine.is_installed", lambda package: package != "datasets")
    found = bad(check_job(EXAMPLE, overrides, CPU))
    assert words in found.get(about, ""), found


def test_programs_are_looked_for(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["training"] = {"stop": {"steps": 300}}
    document["spec"]["learners"] = {"command": ["python", "train.py"]}
    job.write_text(json.dumps(document))
    assert "there is no train.py" in bad(check_job(job, [], CPU))["error program"]
    (tmp_path / "train.py").write_text("")
    assert "error program" not in bad(check_job(job, [], CPU))
    found = bad(check_job(job, ["learners.command=[no-such-program]"], CPU))
    assert "there is no program no-such-program" in found["error program"]


def test_learners_that_share_gpus_are_told() -> None:
    two = Torch("2.13.0", "13.0", (("GPU", 1 << 36), ("GPU", 1 << 36)))
    assert "warning device" not in bad(check_job(EXAMPLE, [], two))
    ranks = bad(check_job(EXAMPLE, ["learners.processes=2"], two))["warning device"]
    assert "2 learners of 4 ranks in all on 2 GPUs" in ranks
    assert "4 learners on 2 GPUs" in bad(check_job(EXAMPLE, ["regions.0.learners=4"], two))["warning device"]


# ------------------------------------------------------------------ a cluster

Answer = Callable[[str, str, Any], Any]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Answer], Where]]:
    """``serve(answer)``: a context whose API server answers so; None: not found."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def begin(answer: Answer) -> Where:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                sent = json.loads(self.rfile.read(size)) if size else None
                document = answer(self.command, self.path, sent)
                body = json.dumps(
                    document if document is not None else {"kind": "Status", "reason": "NotFound"}
                ).encode()
                self.send_response(200 if document is not None else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return where(tmp_path, server.server_address[1])

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def where(directory: Path, port: int) -> Where:
    path = directory / "config"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "u", "user": {"token": "secret-token"}}],
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "lab"}}],
            }
        )
    )
    return Where(("here",), None, path)


READY = {"metadata": {"namespace": "diloco-system"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def cluster(definition: Any, pods: list[Any], denied: frozenset[str] = frozenset()) -> Answer:
    """What an API server answers to all that is asked of it; ``denied``: rights, as `verb resource`."""

    def answer(method: str, path: str, sent: Any) -> Any:
        path = path.partition("?")[0]
        if method == "POST":
            assert path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            asked = sent["spec"]["resourceAttributes"]
            assert asked["namespace"] == "lab"
            resource = "/".join(part for part in (asked["resource"], asked.get("subresource")) if part)
            return {"status": {"allowed": f"{asked['verb']} {resource}" not in denied}}
        group = {"kind": "APIResourceList"} if definition is not None else None
        pages = {
            "/version": {"gitVersion": "v1.36.0"},
            "/apis/diloco.io/v1alpha1": group,
            CRD: definition,
            "/api/v1/pods": {"items": pods, "metadata": {}},
        }
        return pages[path]

    return answer


def definition() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text(encoding="utf-8"))
    return found


def test_a_cluster_that_is_fit(serve: Callable[[Answer], Where]) -> None:
    found = list(check_cluster(serve(cluster(definition(), [READY]))))
    assert [(one.about, one.level) for one in found] == [
        ("reach", "ok"),
        ("DiLoCoJob", "ok"),
        ("operator", "ok"),
        ("rights", "ok"),
    ]
    assert "v1.36.0" in found[0].said and "ready in diloco-system" in found[2].said


def test_a_cluster_without_the_operator(serve: Callable[[Answer], Where]) -> None:
    found = bad(check_cluster(serve(cluster(None, []))))
    assert list(found) == ["error operator"] and "helm install diloco" in found["error operator"]


def test_a_definition_of_another_release_an_operator_that_is_not_ready_and_rights_that_lack(
    serve: Callable[[Answer], Where],
) -> None:
    older = definition()
    schema = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del schema["sync"]["properties"]["normGate"], schema["output"]
    denied = frozenset({"create pods/portforward", "patch dilocojobs"})
    assert denied <= {f"{verb} {resource}" for verb, _, resource, _ in RIGHTS}
    waiting = {"metadata": {"namespace": "x"}, "status": {}}
    found = bad(check_cluster(serve(cluster(older, [waiting], denied))))
    assert "lacks spec.sync.normGate, spec.output:" in found["warning DiLoCoJob"]
    assert "1 pod of it, none ready" in found["error operator"]
    assert "may not patch dilocojobs (for diloco apply" in found["error rights"]
    assert "create pods/portforward" in found["error rights"] and "delete" not in found["error rights"]


def test_a_cluster_that_does_not_answer_is_an_error_only_where_it_was_named(tmp_path: Path) -> None:
    named = where(tmp_path, 1)
    assert list(bad(check_cluster(named))) == ["error reach"] and has_kubeconfig(named)


def test_a_kubeconfig_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Where((), None, None)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert not has_kubeconfig(nobody) and "no such file" in bad(iter([no_kubeconfig()]))["warning reach"]
    monkeypatch.delenv("KUBECONFIG")
    assert no_kubeconfig().level == "ok"
    where(tmp_path, 1)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert has_kubeconfig(nobody) and list(bad(check_cluster(nobody))) == ["warning reach"]
