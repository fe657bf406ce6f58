"""`diloco syncer serve` and `diloco learner join`: what they refuse, and what is settled before anything
runs. tests/integration/run/test_bare_machines.py runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.console import CommandError
from diloco.machines import join as joining
from diloco.machines.join import JoinOptions
from diloco.main import app
from diloco.processes.supervisor import Kind
from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import ServeOptions, served_worker_specs, syncer_command
from diloco_protocol.spec.job import DiLoCoJob, immutable_digests
from diloco_protocol.spec.load import job_from_json, load_job, parse_job
from diloco_syncer.server.downloads import job_for_learners
from repository import ROOT

GPT = ROOT / "examples" / "tiny-gpt.yaml"
TWO = "regions=[{name: eu-1, learners: 2}, {name: us-2, learners: 1, podTemplate: {spec: {hostname: inside}}}]"


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def job(*overrides: str) -> DiLoCoJob:
    return load_job(GPT, overrides)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["syncer", "serve", GPT, "--listen", "0.0.0.0:0"], "--credentials is missing: any process"),
        (["syncer", "serve", GPT, "--plaintext", "--listen", "nowhere"], "--listen nowhere: write host:port"),
        (["syncer", "serve", GPT, "--credentials", "/not/there"], "--credentials /not/there: there is no"),
        (["syncer", "serve", "no.yaml", "--listen", "127.0.0.1:0"], "there is no such file"),
        (["learner", "join", "hub"], "hub: write the syncer's host:port"),
        (["learner", "join", "hub:99999"], "write the syncer's host:port"),
        (["learner", "join", "hub.example.org:7700"], "--credentials is missing: hub.example.org is another"),
        (["learner", "join", "127.0.0.1:1", "--set", "seed=1"], "give JOB.yaml too"),
        (["learner", "join", "127.0.0.1:1", GPT, "--nnodes", "2"], "--master-addr is missing"),
        (["learner", "join", "127.0.0.1:1", GPT, "--nnodes", "2", "--node-rank", "2"], "--node-rank 2: machines count"),
        (
            ["learner", "join", "127.0.0.1:1", GPT, "--nnodes", "2", "--master-addr", "a"],
            "a learner of local has 1 ranks",
        ),
        (["learner", "join", "127.0.0.1:1", "no.yaml"], "there is no such file"),
        (["learner", "join", "127.0.0.1:1", GPT, "--region", "mars"], "--region mars: the job has local"),
        (["learner", "join", "127.0.0.1:1", "--credentials", "/not/there"], "is not a directory"),
        (["learner", "join", "127.0.0.1:1", "--join-token-file", "/not/there"], "No such file"),
        (["learner", "join", "127.0.0.1:1", "--join-token-file", "a", "--credentials", "b"], "leave one of the two"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(
    arguments: list[str | Path], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = diloco(*arguments)
    assert code == 2 and words in output
    assert not (tmp_path / "runs").exists() and not (tmp_path / "learners").exists()


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "FETCH_SECONDS", 1.0)
    code, output = diloco("learner", "join", "127.0.0.1:1")
    assert code == 1 and "from the syncer at 127.0.0.1:1: nothing listens on 127.0.0.1:1" in output
    assert "UNKNOWN" not in output and "`diloco syncer serve`" in output


@pytest.mark.parametrize("command", [["syncer"], ["syncer", "serve"], ["learner"], ["learner", "join"]])
def test_help_teaches(command: list[str]) -> None:
    code, output = diloco(*command, "--help")
    assert code == 0 and f"diloco {command[0]} " in output and "pki/default/job/" in output


@pytest.mark.parametrize(
    ("overrides", "given", "named", "region"),
    [
        ([], None, [], "local"),
        ([TWO], "us-2", [], "us-2"),
        ([TWO], None, ["us-2"], "us-2"),
        ([TWO], None, ["us-2", "mars"], "us-2"),
        ([TWO], "eu-1", ["eu-1", "us-2"], "eu-1"),
    ],
)
def test_the_region_is_the_given_the_certificates_or_the_only_one(
    overrides: list[str], given: str | None, named: list[str], region: str
) -> None:
    assert joining._region(job(*overrides), given, named) == region


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        (None, [], "--region is missing: the job has eu-1, us-2"),
        (None, ["eu-1", "us-2"], "the certificate is for eu-1, us-2"),
        (None, ["mars"], "the certificate is for mars"),
        ("mars", [], "--region mars: the job has eu-1, us-2"),
        ("eu-1", ["us-2"], "--region eu-1: the certificate is for us-2"),
    ],
)
def test_a_region_that_cannot_be_told(given: str | None, named: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        joining._region(job(TWO), given, named)


def test_the_hub_may_not_choose_a_program() -> None:
    own = load_job(GPT.parent / "custom-loop.yaml")
    with pytest.raises(CommandError, match=r"learners\.command.*give JOB\.yaml"):
        joining._without_code(own)
    with pytest.raises(CommandError, match=r"training\.data\.function"):
        joining._without_code(load_job(GPT.parent / "tiny-vit.yaml"))
    assert joining._without_code(job()) == job()


def test_a_place_is_drawn_once(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    drawn = joining._ordinal(workdir)
    assert 100_000 <= drawn < 1_000_000 and joining._ordinal(workdir) == drawn
    other = tmp_path / "other"
    other.mkdir()
    assert joining._ordinal(Workdir(other)) != drawn or joining._ordinal(Workdir(tmp_path)) == drawn
    for broken in ("", "{}", '{"ordinal": -1}', '{"ordinal": "x"}', "[]"):
        (tmp_path / "place.json").write_text(broken)
        assert joining._ordinal(workdir) >= 100_000
        assert json.loads((tmp_path / "place.json").read_text())["ordinal"] == joining._ordinal(workdir)


def test_addresses_of_this_machine_need_no_certificates() -> None:
    for address in ("127.0.0.1:7700", "localhost:1", "[::1]:7700", "127.0.0.53:9"):
        joining._check(JoinOptions(address))
    for address in ("10.0.0.1:7700", "hub:1", "[fe80::1]:7700", "localhost.example.org:1", "127.example.org:1"):
        with pytest.raises(CommandError, match="--credentials"):
            joining._check(JoinOptions(address))
        joining._check(JoinOptions(address, plaintext=True))


def test_what_is_handed_out_is_the_job_without_templates() -> None:
    own = "{spec: {containers: [{name: own, env: [{name: K, value: w}]}]}}"
    parts = ("learners", "evaluator", "syncer", "syncer.shardPods")
    given = job(
        TWO, "syncer.shards=2", "syncer.storage.uri=s3://bucket", *(f"{part}.podTemplate={own}" for part in parts)
    )
    handed = job_from_json(job_for_learners(given))
    assert immutable_digests(handed) == immutable_digests(given)
    assert (handed.spec.sync, handed.spec.training) == (given.spec.sync, given.spec.training)
    text = job_for_learners(given).decode()
    assert "inside" not in text and '"K"' not in text and "inside" in given.model_dump_json()
    annotated = parse_job(GPT.read_text().replace("name: tiny-gpt", "name: tiny-gpt\n  annotations: {a: unheard}"))
    assert "unheard" not in job_for_learners(annotated).decode()


@pytest.mark.promise(
    "A job without certificates refuses every client that cannot read its join token", section="Hostile callers"
)
def test_without_certificates_a_served_job_has_a_join_token(tmp_path: Path) -> None:
    workdir, pki = Workdir(tmp_path), tmp_path / "pki"
    for serving, options in (
        (None, ["--join-token-file", str(workdir.join_token)]),
        (ServeOptions("127.0.0.1:0"), ["--join-token-file", str(workdir.join_token)]),
        (ServeOptions("127.0.0.1:0", pki), ["--credentials", str(pki)]),
    ):
        assert syncer_command(workdir, "a:1", "a:2", "a:3", serving=serving)[-2:] == options


def test_a_serving_machine_runs_the_evaluator_at_most() -> None:
    kinds = [member.kind for member in served_worker_specs(job(), ServeOptions("127.0.0.1:0"))]
    assert kinds == [Kind.EVALUATOR]
    assert served_worker_specs(job(), ServeOptions("127.0.0.1:0", evaluator=False)) == []
    assert served_worker_specs(job("training.evaluation=null"), ServeOptions("127.0.0.1:0")) == []
