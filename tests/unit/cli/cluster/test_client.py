"""The command line's requests against a server of this test: what an API server may answer, or not."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.cluster import change, chaos
from diloco.cluster.apply import ApplyOptions, apply, apply_to
from diloco.cluster.client import Cluster, ClusterError, Where, open_cluster
from diloco.cluster.follow import ended, follow, gone_within, seen
from diloco.cluster.port_forward import forwarded
from diloco.local.chaos.schedule import parse
from diloco.main import app
from diloco_protocol.spec.load import load_manifest
from free_ports import closed_port

Reply = tuple[int, Any]
Answer = Callable[[str, str], Reply]  # of method and path with query

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny, namespace: lab}
spec:
  training: {model: null, data: null, stop: {steps: 10}, evaluation: null}
  sync: {fragments: 2, every: 4}
  learners: {command: [python, x.py]}
  regions: [{name: a, learners: 1}]
"""
JOBS = "/apis/diloco.io/v1alpha1/namespaces/lab/dilocojobs"


def a_status(reason: str, message: str, **details: Any) -> dict[str, Any]:
    return {"kind": "Status", "reason": reason, "message": message, "details": details}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Answer], Cluster]]:
    """``serve(answer)``: a cluster whose API server answers so."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def begin(answer: Answer) -> Cluster:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, document = answer(self.command, self.path)
                body = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PATCH = do_DELETE = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return connect(tmp_path, server.server_address[1])

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def connect(directory: Path, port: int) -> Cluster:
    path = directory / "config"
    context = {"cluster": "c", "user": "u", "namespace": "lab"}
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "u", "user": {"token": "secret-token"}}],
                "contexts": [{"name": "here", "context": context}],
            }
        )
    )
    return open_cluster(None, None, path)


class Clock:
    """The module ``time`` of a caller that only ``sleep`` takes time from."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_700_000_000.0 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of ``follow`` and of those who call it."""
    made = Clock()
    for module in ("apply", "follow"):
        monkeypatch.setattr(f"diloco.cluster.{module}.time", made)
    return made


@pytest.mark.parametrize(
    ("reply", "reason", "code", "words"),
    [
        ((401, a_status("Unauthorized", "Unauthorized")), "Unauthorized", 2, "log in again"),
        (
            (
                403,
                a_status(
                    "Forbidden",
                    'x is forbidden: User "u" cannot get resource "dilocojobs" in API group'
                    ' "diloco.io" in the namespace "lab"',
                ),
            ),
            "Forbidden",
            1,
            'may not get dilocojobs.diloco.io in the namespace "lab"',
        ),
        ((403, a_status("Forbidden", "exceeded quota: small")), "Forbidden", 1, "exceeded quota: small"),
        ((404, b"404 page not found\n"), "NoCRD", 1, "helm install diloco charts/diloco"),
        (
            (404, a_status("NotFound", 'namespaces "lab" not found', kind="namespaces", name="lab")),
            "NoNamespace",
            2,
            "create namespace lab",
        ),
        ((409, a_status("Conflict", "was changed", name="tiny")), "Conflict", 1, "was changed"),
        ((422, a_status("Invalid", "is invalid", name="tiny")), "Invalid", 1, "is invalid"),
        ((429, a_status("TooManyRequests", "slow down")), "Busy", 1, "try again"),
        ((503, a_status("ServiceUnavailable", "starting")), "Busy", 1, "starting"),
        ((502, b"<html>Bad Gateway</html>"), "Busy", 1, "Bad Gateway"),
        ((200, b"<html>log in</html>"), "", 1, "no JSON object"),
        ((200, b"[1]"), "", 1, "no JSON object"),
    ],
)
def test_what_an_api_server_answers(
    serve: Callable[[Answer], Cluster], reply: Reply, reason: str, code: int, words: str
) -> None:
    cluster = serve(lambda method, path: reply)
    with pytest.raises(ClusterError) as error:
        cluster.get(cluster.job_path("tiny"))
    assert (error.value.reason, error.value.code) == (reason, code)
    assert words in str(error.value) and "here" in str(error.value)
    assert "secret-token" not in str(error.value)
    assert error.value.passing is (reason == "Busy")


def test_nobody_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        cluster = connect(tmp_path, port)
        with pytest.raises(ClusterError, match=r"does not answer within 0\.3 s") as error:
            cluster.request("GET", "/version", seconds=0.3)
        assert error.value.reason == "Unreachable"
        with (
            pytest.raises(ClusterError, match=r"opens no connection to the pod p within 0\.3 s"),
            forwarded(cluster, "p", 7702, 0.3),
        ):
            pass
    with closed_port() as port:
        cluster = connect(tmp_path, port)
        with pytest.raises(ClusterError, match=r"cannot be reached \(Connection refused\)") as error:
            cluster.get("/version")
        assert error.value.passing
        refused = pytest.raises(ClusterError, match=r"opens no connection to the pod p: .*refused")
        with refused, forwarded(cluster, "p", 1):
            pass


def test_a_job_that_is_not_there_names_those_that_are(serve: Callable[[Answer], Cluster]) -> None:
    def answer(method: str, path: str) -> Reply:
        if path.startswith(f"{JOBS}?"):
            return 200, {"items": [{"metadata": {"name": name}} for name in ("tiny", "other")]}
        return 404, a_status("NotFound", "not found", name="tny", kind="dilocojobs")

    with pytest.raises(ClusterError, match=r"no job tny in the namespace lab.*did you mean tiny\?") as error:
        serve(answer).job("tny")
    assert error.value.code == 2


def test_long_lists_come_in_pages(serve: Callable[[Answer], Cluster]) -> None:
    def answer(method: str, path: str) -> Reply:
        if "continue=next" in path:
            return 200, {"items": [{"n": 2}], "metadata": {}}
        return 200, {"items": [{"n": 1}], "metadata": {"continue": "next"}}

    assert serve(answer).jobs() == [{"n": 1}, {"n": 2}]


# ------------------------------------------------------------------ applying


def a_conflict(*owners: str) -> Reply:
    causes = [{"field": ".spec.seed", "message": f'conflict with "{one}" using diloco.io/v1alpha1'} for one in owners]
    return 409, a_status("Conflict", "Apply failed", name="tiny", causes=causes)


def applied_query(
    serve: Callable[[Answer], Cluster], tmp_path: Path, *refusals: Reply, **options: Any
) -> list[dict[str, str]]:
    """The queries of the PATCH requests of ``diloco apply``, of which the first are refused so."""
    queries: list[dict[str, str]] = []

    def answer(method: str, path: str) -> Reply:
        if method != "PATCH":
            return 200, a_job()
        queries.append(dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(path).query)))
        return refusals[len(queries) - 1] if len(queries) <= len(refusals) else (200, a_job())

    cluster = serve(answer)
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    job, document = load_manifest(file, ())
    with contextlib.suppress(ClusterError):
        apply_to(cluster, job, document, ApplyOptions(Where(), file, **options))
    return queries


ASKED = {"fieldManager": "diloco", "fieldValidation": "Strict"}


@pytest.mark.promise(
    "`diloco apply` reverts only what this command line has set since, sends no field that the cluster "
    "does not know, and sends no file to another namespace than the file names"
)
def test_a_job_is_applied_by_its_fields_manager_strictly_and_dry_if_asked(
    serve: Callable[[Answer], Cluster], tmp_path: Path
) -> None:
    """Strictly: a field that the cluster's CRD does not have is refused, and not dropped in silence."""
    assert applied_query(serve, tmp_path) == [{**ASKED, "force": "false"}]
    assert applied_query(serve, tmp_path, dry_run=True) == [{**ASKED, "dryRun": "All", "force": "false"}]


@pytest.mark.promise(
    "`diloco apply` reverts only what this command line has set since, sends no field that the cluster "
    "does not know, and sends no file to another namespace than the file names"
)
@pytest.mark.parametrize(
    ("owners", "forced"), [(["diloco"], True), (["diloco", "kubectl"], False), (["kubectl"], False)]
)
def test_only_what_this_command_line_has_set_is_taken_back(
    serve: Callable[[Answer], Cluster], tmp_path: Path, owners: list[str], forced: bool
) -> None:
    queries = applied_query(serve, tmp_path, a_conflict(*owners))
    assert [query["force"] for query in queries] == ["false", "true"][: 1 + forced]


@pytest.mark.promise(
    "`diloco apply` reverts only what this command line has set since, sends no field that the cluster "
    "does not know, and sends no file to another namespace than the file names"
)
def test_a_file_of_another_namespace_is_not_applied(serve: Callable[[Answer], Cluster], tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(method: str, path: str) -> Reply:
        asked.append(path)
        return 200, a_job()

    serve(answer)
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    with pytest.raises(ClusterError, match=r"metadata\.namespace: lab, and --namespace says other: leave one") as told:
        apply(ApplyOptions(Where(namespace="other", kubeconfig=tmp_path / "config"), file))
    assert told.value.code == 2 and asked == []


def test_the_wait_for_an_operator_is_a_part_of_the_timeout(
    serve: Callable[[Answer], Cluster], tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody takes note of the job: after the two seconds that were given it ends, and not ten seconds later."""
    job = {"metadata": {"name": "tiny", "namespace": "lab", "uid": "u", "generation": 1}, "spec": {"regions": []}}
    serve(lambda method, path: (200, {"items": [], "metadata": {}} if "events" in path else job))
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    code = apply(ApplyOptions(Where(kubeconfig=tmp_path / "config"), file, wait=True, timeout=2.0))
    assert code == 1 and clock.now == pytest.approx(2.0)
    assert "has not ended within 2 s" in capsys.readouterr().err


# ------------------------------------------------------------------ following


def a_job(*conditions: str, phase: str = "Running") -> dict[str, Any]:
    made = [{"type": kind, "status": "True", "observedGeneration": 1, "message": "so it is"} for kind in conditions]
    return {
        "metadata": {"name": "tiny", "uid": "u", "generation": 1},
        "spec": {"regions": [{"learners": 1}]},
        "status": {"observedGeneration": 1, "phase": phase, "conditions": made},
    }


def in_turn(*replies: Reply) -> Answer:
    left = list(replies)

    def answer(method: str, path: str) -> Reply:
        if "/events" in path or "/pods" in path:
            return 200, {"items": []}
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


def test_waiting_outlives_an_api_server_that_is_away(
    serve: Callable[[Answer], Cluster], clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = (503, a_status("ServiceUnavailable", "starting"))
    cluster = serve(in_turn((200, a_job()), busy, busy, busy, (200, a_job("Complete"))))
    ((_, outcome, _),) = follow([cluster], "tiny", ended, 60)
    said, pauses = capsys.readouterr().out.splitlines(), clock.pauses
    assert outcome == (0, "is complete")
    assert len([line for line in said if "asking again" in line]) == 1  # said once
    assert said[-1] == "Complete: so it is"
    assert len(pauses) == 4 and max(pauses[1:]) > max(pauses[:1]) and max(pauses) <= 15 * 1.2


def test_waiting_ends_with_the_time(serve: Callable[[Answer], Cluster], clock: Clock) -> None:
    cluster = serve(in_turn((200, a_job())))
    ((_, outcome, job),) = follow([cluster], "tiny", ended, 7.0)
    assert outcome is None and job is not None and clock.now == pytest.approx(7.0)


def test_waiting_for_every_copy(serve: Callable[[Answer], Cluster], clock: Clock) -> None:
    first, second = (serve(in_turn((200, a_job("Complete")))), serve(in_turn((200, a_job()), (200, a_job("Failed")))))
    found = follow([first, second], "tiny", ended, 60)
    assert [outcome and outcome[0] for _, outcome, _ in found] == [0, 1]


def test_waiting_where_asking_is_forbidden_ends_at_once(serve: Callable[[Answer], Cluster]) -> None:
    cluster = serve(in_turn((403, a_status("Forbidden", "no"))))
    with pytest.raises(ClusterError, match="no"):
        follow([cluster], "tiny", seen, 60)


def test_a_job_that_is_gone_or_another_by_now(serve: Callable[[Answer], Cluster], clock: Clock) -> None:
    other = {**a_job(), "metadata": {**a_job()["metadata"], "uid": "new"}}
    missing = (404, a_status("NotFound", "not found", name="tiny"))
    for last in ((200, other), missing):
        cluster = serve(in_turn((200, a_job()), last))
        judge = gone_within({"u"})
        ((_, outcome, _),) = follow([cluster], "tiny", judge, 60)
        assert outcome == (0, "is deleted")


@pytest.mark.promise("`diloco resume` of a failed job waits until its operator has seen the suspension")
def test_a_job_that_failed_is_resumed_by_a_suspension_that_its_operator_has_seen(
    serve: Callable[[Answer], Cluster], tmp_path: Path
) -> None:
    job = a_job("Failed", phase="Failed")
    job["metadata"]["resourceVersion"] = "1"
    patches, looks = [], 0

    def answer(method: str, path: str) -> Reply:
        nonlocal looks
        if method == "PATCH":
            job["spec"]["suspend"] = not patches
            job["metadata"]["generation"] += 1
            patches.append(job["spec"]["suspend"])
        elif patches == [True] and (looks := looks + 1) == 3:  # the operator looks
            row = {"type": "Suspended", "status": "False", "reason": "Suspending", "observedGeneration": 2}
            job["status"] = {**job["status"], "observedGeneration": 2}
            job["status"]["conditions"] = [*job["status"]["conditions"], row]
        return 200, job

    serve(answer)
    assert change.suspend(Where(kubeconfig=tmp_path / "config"), "tiny", False, False, timeout=None) == 0
    assert patches == [True, False] and looks >= 3 and job["spec"]["suspend"] is False


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["apply", "JOB"], {"result": "configured", "dry_run": False}),
        (["apply", "JOB", "--dry-run"], {"result": "configured", "dry_run": True}),
        (["scale", "tiny", "a=2"], {"changed": {"a": {"before": 1, "after": 2}}}),
        (["suspend", "tiny"], {"suspend": True, "changed": True}),
        (["resume", "tiny"], {"suspend": False, "changed": False}),
        (["resume", "tiny", "--wait"], {"suspend": False, "changed": False, "outcome": "is running", "in_time": True}),
        (["upgrade", "tiny"], {"changed": True, "release": None}),
        (["delete", "tiny", "--no-wait"], {"deleted": True}),
    ],
)
def test_for_programs_stdout_has_one_object_and_nothing_else(
    serve: Callable[[Answer], Cluster], tmp_path: Path, words: list[str], expected: dict[str, Any]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    spec = load_manifest(file, ())[1]["spec"]
    job = {**a_job("Complete"), "spec": spec}
    job["metadata"] = {**job["metadata"], "name": "tiny", "uid": "u", "resourceVersion": "1"}
    after = {**job, "spec": {**spec, "seed": 77}}

    def answer(method: str, path: str) -> Reply:
        if "events" in path:
            return 200, {"metadata": {"resourceVersion": "1"}, "items": []}
        return 200, after if method == "PATCH" else job

    serve(answer)
    words = [str(file) if word == "JOB" else word for word in words]
    done = CliRunner().invoke(app, [*words, "--json", "--kubeconfig", str(tmp_path / "config")])
    assert done.exit_code == 0, done.output
    (item,) = json.loads(done.stdout)["items"]
    assert item.items() >= {"context": "here", "namespace": "lab", "job": "tiny", **expected}.items(), item
    assert "tiny" in done.stderr, "people read it there"


def test_for_programs_an_error_is_an_item_too(serve: Callable[[Answer], Cluster], tmp_path: Path) -> None:
    serve(in_turn((404, a_status("NotFound", "not found", name="tiny"))))
    done = CliRunner().invoke(app, ["suspend", "tiny", "--json", "--kubeconfig", str(tmp_path / "config")])
    assert done.exit_code == 2, done.output
    (item,) = json.loads(done.stdout)["items"]
    assert "there is no job tiny" in item["error"] and "there is no job tiny" in done.stderr


def test_deletions_by_a_schedule_are_told_as_rows(
    serve: Callable[[Answer], Cluster],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was deleted and when, and what was not there in its time; progress is on stderr."""
    asked: list[tuple[str, str]] = []
    labels = {"diloco.io/role": "learner", "diloco.io/region": "a"}
    pod = {
        "metadata": {"name": "tiny-a-0", "uid": "u", "labels": labels},
        "spec": {"containers": [{"name": "learner"}]},
    }
    job = {"metadata": {"name": "tiny"}, "spec": {"regions": [{"name": "a", "learners": 2}]}}

    def answer(method: str, path: str) -> Reply:
        asked.append((method, urllib.parse.urlsplit(path).path))
        if method == "GET" and len(asked) in range(3, 5):
            return 503, {"message": "the API server starts"}
        if method == "GET":
            return 200, {"items": [pod]} if "/pods" in path else job
        return 200, {}

    serve(answer)
    monkeypatch.setattr(chaos, "time", Clock())
    where = Where(kubeconfig=tmp_path / "config")
    schedule = parse("1s:kill:a-0,2s:kill:a-1")
    assert chaos.delete_by_schedule(where, "tiny", schedule, 4.0, as_json=True) == 1, "one was never there"
    assert [path for method, path in asked if method == "DELETE"] == ["/api/v1/namespaces/lab/pods/tiny-a-0"]
    said = capsys.readouterr()
    told = json.loads(said.out)
    done, held = told["rows"]
    assert (told["job"], told["failed"]) == ("tiny", False)
    assert (done["name"], done["pod"], done["baseline"]) == ("1s:kill:a-0", "tiny-a-0", 1.0)
    assert 1.0 <= done["value"] < 2.0 and done["ratio"] == done["value"]
    assert (held["name"], held["pod"], held["value"], held["ratio"]) == ("2s:kill:a-1", None, None, None)
    assert "deleted tiny-a-0 (1s:kill:a-0)" in said.err and "2s:kill:a-1 was never carried out" in said.err

    assert chaos.delete_by_schedule(where, "tiny", parse("1s:kill:a-0"), 4.0) == 0
    assert "deleted tiny-a-0" in capsys.readouterr().out
