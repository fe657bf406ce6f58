"""The command line for clusters: what is plain of it. tests/e2e/test_cli_api.py has its calls."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from diloco.cluster.apply import changed_for_ever, foreign_paths, managers
from diloco.cluster.change import parse_targets, scale_patch, stays
from diloco.cluster.client import ClusterError, Where, forbidden, nearest
from diloco.cluster.fetch import show_report, syncer_pod
from diloco.cluster.follow import ProgressReporter, ended, hindered, resumed, seen, suspended
from diloco.cluster.render import (
    condition_style,
    condition_text,
    conditions_shown,
    event_line,
    event_time,
    holds,
    job_line,
    job_picture,
    jobs_table,
    span,
    unix,
)
from diloco.console import duration, means_job
from diloco.main import app
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import parse_job
from status_documents import job_report, kept_report, slot_row, status_document

NOW = 1_800_000_000.0
LONG_AGO = "2027-01-15T07:58:20Z"  # 100 s before NOW


def a_job(**status: Any) -> dict[str, Any]:
    """A DiLoCoJob as an API server sends it."""
    return {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {
            "name": "tiny",
            "namespace": "lab",
            "uid": "u1",
            "resourceVersion": "7",
            "generation": 3,
            "creationTimestamp": LONG_AGO,
        },
        "spec": {
            "training": {
                "model": {"config": {"model_type": "llama"}},
                "data": {"paths": ["python-stdlib"]},
                "stop": {"tokens": 1_000_000},
            },
            "sync": {"quorum": 2, "fragments": 4, "every": 8},
            "regions": [{"name": "east", "learners": 2}, {"name": "west", "learners": 1, "spares": 1}],
        },
        "status": status,
    }


def a_condition(kind: str, status: str = "True", generation: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": "Why",
        "message": "because it is so",
        "observedGeneration": generation,
        "lastTransitionTime": LONG_AGO,
        **more,
    }


def an_event(kind: str, name: str, reason: str, message: str, **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"uid": f"{name}-{reason}", "creationTimestamp": LONG_AGO},
        "type": "Normal",
        "involvedObject": {"kind": kind, "name": name},
        "reason": reason,
        "message": message,
        "count": 1,
        "lastTimestamp": LONG_AGO,
        **more,
    }


RUNNING: dict[str, Any] = {
    "observedGeneration": 3,
    "phase": "Running",
    "startTime": LONG_AGO,
    "learners": "2/3",
    "quorum": "2/2",
    "progress": {
        "tokens": 250_000,
        "step": 120,
        "percent": 25,
        "secondsLeft": 300,
        "loss": 2.415,
        "goodput": 0.93,
        "merges": 40,
    },
    "regions": [
        {"name": "east", "desired": 2, "ready": 2, "inQuorum": 2, "state": "Whole"},
        {
            "name": "west",
            "desired": 2,
            "ready": 0,
            "inQuorum": 0,
            "state": "Degraded",
            "cause": "west-0: no image worker:x",
        },
    ],
    "conditions": [
        a_condition("QuorumMet"),
        a_condition("Ready", "False"),
        a_condition("Degraded", "False"),
        a_condition("Complete", "False"),
    ],
}
PAGE = status_document(
    job="tiny",
    phase="training",
    elapsed_seconds=90.0,
    quorum={"active": 2, "required": 2},
    versions=[3, 2, 2, 2],
    slots=[slot_row(region="east", ordinal=1, state="active", step=121, tokens=125_000, loss=2.4)],
    step=121,
    tokens={"trained": 250_000, "merged": 0, "pending": 250_000, "dropped": 0},
    tokens_per_second=1000.0,
    eval_loss=[[0, 5.6], [1, 2.5]],
)


def shown(renderable: Any, width: int = 140) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(renderable)
    return out.getvalue()


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


# ------------------------------------------------------------------ words and arguments


@pytest.mark.parametrize(
    "command", ["apply", "status", "logs", "scale", "suspend", "resume", "upgrade", "delete", "export", "report"]
)
def test_help_has_examples_and_the_cluster_options(command: str) -> None:
    code, output = diloco(command, "--help")
    assert code == 0
    assert f"diloco {command} " in output.split("Example")[1]
    for option in ("--context", "--namespace", "--kubeconfig"):
        assert option in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["apply"], "name one job file"),
        (["apply", "a.yaml", "-f", "b.yaml"], "name one job file"),
        (["apply", "a.yaml", "--timeout", "soon"], "is no duration"),
        (["suspend", "Tiny"], "is no job's name"),
        (["scale", "tiny"], "REGION=N"),
        (["logs", "tiny", "--since", "1w"], "is no duration"),
        (["status", "--watch"], "there is no run below ./runs"),
    ],
)
def test_wrong_arguments_are_2(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = diloco(*arguments)
    assert code == 2 and words in output, output


def test_a_wrong_job_file_reaches_no_cluster(tmp_path: Path) -> None:
    """All problems at once and exit 2, before a kubeconfig is even looked for."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "apiVersion: diloco.io/v1alpha1\nkind: DiLoCoJob\nmetadata: {name: x}\n"
        "spec: {regions: [{learners: 0}], sync: {every: -1}}\n"
    )
    code, output = diloco("apply", path, "--kubeconfig", tmp_path / "none")
    assert code == 2 and "spec.regions.0.learners" in output and "spec.sync.every" in output
    assert "kubeconfig" not in output


def test_what_an_argument_of_status_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert means_job("tiny-gpt")
    for other in (None, "there", "runs/x", "127.0.0.1:8080", "Tiny", "a" * 31, "."):
        assert not means_job(other), other
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, output = diloco("status", "tiny-gpt")
    assert code == 2 and "no run tiny-gpt here: name its directory, such as runs/tiny-gpt" in output
    assert "a cluster: there is no kubeconfig at" in output
    code, output = diloco("export", "tiny-gpt", tmp_path / "out")
    assert code == 2 and "there is no run tiny-gpt here" in output
    code, output = diloco("status", "there")
    assert code == 2 and "is no run's directory" in output and "report.json" not in output
    (tmp_path / "there" / "report.json").write_text("{}")
    assert "diloco report there/report.json --html shows its figures" in diloco("report", "there")[1]
    code, output = diloco("status", "there", "-n", "lab")
    assert code == 2 and output.startswith("error: there is no kubeconfig")


def test_the_report_of_a_run_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"metadata": {"name": "x"}}')
    written = job_report(outcome="complete", merges=12).model_dump(mode="json")
    (tmp_path / "report.json").write_text(json.dumps(written))
    code, output = diloco("report", tmp_path)
    assert code == 0 and "complete" in output and "12" in output
    assert json.loads(diloco("report", tmp_path, "--json")[1]) == written
    (tmp_path / "report.json").write_text(json.dumps({**written, "merges": "many"}))
    code, output = diloco("report", tmp_path)
    assert code == 2 and "cannot be read: merges: Input should be a valid integer" in output


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("2min", 120), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


# ------------------------------------------------------------------ settings


def write_kubeconfig(path: Path, names: list[str], server: str = "https://127.0.0.1:1") -> Path:
    shared = {"cluster": "c", "user": "u"}
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": names[0],
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {"token": "secret-token"}}],
                "contexts": [{"name": n, "context": {**shared, "namespace": f"ns-{n}"}} for n in names],
            }
        )
    )
    return path


def test_contexts(tmp_path: Path) -> None:
    path = write_kubeconfig(tmp_path / "config", ["hub", "far"])
    opened = Where(("far", "hub", "far"), None, path).open()
    assert [(one.context, one.namespace) for one in opened] == [("far", "ns-far"), ("hub", "ns-hub")]
    (current,) = Where((), "lab", path).open()
    assert (current.context, current.namespace) == ("hub", "lab")
    assert current.flags == f"--context hub --kubeconfig {path} -n lab"
    assert current.client.authorization() == {"authorization": "Bearer secret-token"}
    assert "secret-token" not in repr(current)
    with pytest.raises(ClusterError, match=r"no context hob; did you mean hub\? There are 2: far, hub") as error:
        Where(("hob",), None, path).open()
    assert error.value.code == 2


def test_kubeconfigs_that_are_none(tmp_path: Path) -> None:
    broken, tab, empty = tmp_path / "broken", tmp_path / "tab", tmp_path / "empty"
    broken.write_text(": [")
    tab.write_text("contexts:\n\t- name: hub\n")
    empty.write_text("")
    for path, words in (
        (broken, "cannot be used: .*broken, line 1: not YAML"),
        (tab, "cannot be used: .*tab, line 2: not YAML: a tab: YAML is indented with spaces only"),
        (empty, "cannot be used"),
        (tmp_path / "no", "no kubeconfig"),
    ):
        with pytest.raises(ClusterError, match=words) as error:
            Where((), None, path).open()
        assert error.value.code == 2 and error.value.reason == "Settings"


def test_without_the_package_kubernetes(tmp_path: Path) -> None:
    """The message names the extra; everything else of the program goes on working."""
    path = write_kubeconfig(tmp_path / "config", ["hub"])
    program = (
        "import sys\nsys.modules['kubernetes'] = None\nfrom diloco.main import app\n"
        f"app(['status', 'x', '--kubeconfig', {str(path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "pip install 'decoupled-diloco[kube]'" in done.stderr


def test_names_that_are_there() -> None:
    assert nearest("tny", ["tiny", "other"]) == "; did you mean tiny? There are 2: other, tiny"
    assert nearest("x", ["tiny"]) == "; there is: tiny"
    assert nearest("x", []) == "; there is none"
    assert nearest("zz", [f"job-{n:02}" for n in range(30)]).endswith("job-09 and 20 more")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            'dilocojobs.diloco.io "x" is forbidden: User "u" cannot patch resource "dilocojobs" in API group'
            ' "diloco.io" in the namespace "lab"',
            'may not patch dilocojobs.diloco.io in the namespace "lab"; ask for a Role',
        ),
        (
            'pods "p" is forbidden: User "u" cannot get resource "pods/portforward" in API group "" in the'
            ' namespace "lab"',
            "may not get and create pods/portforward in",
        ),
        (
            'dilocojobs.diloco.io is forbidden: User "u" cannot list resource "dilocojobs" in API group'
            ' "diloco.io" at the cluster scope',
            "may not list dilocojobs.diloco.io at the cluster scope; ask for a ClusterRole",
        ),
        ("something else", "something else"),
    ],
)
def test_what_is_forbidden_names_verb_and_resource(message: str, words: str) -> None:
    assert words in forbidden(message)


# ------------------------------------------------------------------ apply


def load(document: dict[str, Any]) -> DiLoCoJob:
    written = {key: document[key] for key in ("apiVersion", "kind", "spec")}
    return parse_job(json.dumps({**written, "metadata": {"name": "tiny"}}))


def test_fields_that_are_fixed_are_named() -> None:
    before, after = a_job(), a_job()
    assert changed_for_ever(before, load(after)) == []
    after["spec"]["seed"] = 5
    after["spec"]["training"]["data"]["sequenceLength"] = 64
    after["spec"]["sync"]["every"] = 16  # may change
    assert changed_for_ever(before, load(after)) == ["training.data", "seed"]
    before["spec"]["unknown"] = 1  # an object of another version of the format
    assert changed_for_ever(before, load(after)) == []


def test_who_else_manages_a_field() -> None:
    status = {
        "details": {
            "causes": [
                {
                    "reason": "FieldManagerConflict",
                    "field": ".spec.sync.every",
                    "message": 'conflict with "kubectl-client-side-apply" using diloco.io/v1alpha1',
                },
                {
                    "reason": "FieldManagerConflict",
                    "field": ".spec.seed",
                    "message": 'conflict with "diloco" using diloco.io/v1alpha1 at 2026',
                },
            ]
        }
    }
    assert managers(ClusterError("", status=status)) == {"kubectl-client-side-apply", "diloco"}
    assert managers(ClusterError("")) == set()


def test_paths_that_mean_this_machine_only(tmp_path: Path) -> None:
    document = a_job()
    training = document["spec"]["training"]
    training["data"]["paths"] = ["python-stdlib", "/data/books", "s3://bucket/x", "books/*.txt", "~/x"]
    training["model"]["from"] = "./start"
    warned = [(p.path, p.value) for p in foreign_paths(load(document), tmp_path)]
    assert warned == [
        ("spec.training.data.paths", "books/*.txt"),
        ("spec.training.data.paths", "~/x"),
        ("spec.training.model.from", "./start"),
    ]
    document = a_job()
    document["spec"]["training"]["model"]["from"] = "some-org/some-model"
    document["spec"]["training"]["data"] = {"source": "python", "function": "mine:load"}
    document["spec"]["learners"] = {"command": ["python", "loop.py", "/abs/x.py"]}
    assert foreign_paths(load(document), tmp_path) == []
    for name in ("loop.py", "mine.py"):
        (tmp_path / name).write_text("")
    assert [p.value for p in foreign_paths(load(document), tmp_path)] == ["loop.py", "mine.py"]


# ------------------------------------------------------------------ scale and delete


def test_scale_changes_the_right_item() -> None:
    patch, changed = scale_patch(a_job(), {"west": 4})
    assert patch == [{"op": "replace", "path": "/spec/regions/1/learners", "value": 4}]
    assert changed == {"west": (1, 4)}
    assert scale_patch(a_job(), {"east": 2, "west": 1}) == ([], {})
    patch, changed = scale_patch(a_job(), {"east": 1, "west": 2})
    assert [one["path"] for one in patch] == ["/spec/regions/0/learners", "/spec/regions/1/learners"]


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ({"east": 1, "west": 0}, "the region west needs one learner at least; to stop the job: diloco suspend"),
        ({"eas": 2}, "has no region eas; did you mean east"),
        ({"east": 4095, "west": 2}, r"spec\.regions\.0\.learners = 4095: must be .* at most 1024$"),
    ],
)
def test_scale_refuses_what_is_no_job(targets: dict[str, int], words: str) -> None:
    with pytest.raises(ClusterError, match=words) as error:
        scale_patch(a_job(), targets)
    assert error.value.code == 2


def test_scale_within_the_bound_changes_learners_and_beyond_it_names_the_bound() -> None:
    job = a_job()
    job["spec"]["regions"][0]["maxLearners"] = 4
    assert scale_patch(job, {"east": 4})[1] == {"east": (2, 4)}
    with pytest.raises(ClusterError, match=r"spec\.regions\.0\.maxLearners = 4: must be at least learners \(5\)"):
        scale_patch(job, {"east": 5})


def test_scale_refuses_below_the_quorum_with_words() -> None:
    job = a_job()
    job["spec"]["sync"]["quorum"] = 3
    with pytest.raises(ClusterError, match=r"leave tiny with 2 learners, and its quorum \(K\) is 3: nothing would"):
        scale_patch(job, {"east": 1})
    job["spec"]["sync"] = {"deterministic": True, "fragments": 4, "every": 8}
    assert scale_patch(job, {"east": 1})[1] == {"east": (2, 1)}  # there K is all of them


def test_scale_leaves_other_versions_of_the_format_to_the_api_server() -> None:
    job = a_job()
    job["spec"]["sync"]["newField"] = 1
    assert scale_patch(job, {"east": 3})[1] == {"east": (2, 3)}


@pytest.mark.parametrize("word", ["east", "=3", "east=", "east=-1", "east=2.5", "east=99999", "east=²"])
def test_scale_words_that_are_none(word: str) -> None:
    with pytest.raises(ClusterError, match="is no REGION=N"):
        parse_targets([word])


def test_scale_words() -> None:
    assert parse_targets(["east=5", "west=1"]) == {"east": 5, "west": 1}
    with pytest.raises(ClusterError, match="named twice"):
        parse_targets(["east=5", "east=6"])


def test_what_stays_of_a_deleted_job() -> None:
    job = a_job()
    assert "kubectl --context c -n lab delete pvc tiny-syncer" in (stays(job, "--context c -n lab") or "")
    for storage, words in (
        ({"claimName": "mine"}, "your PersistentVolumeClaim mine"),
        ({"uri": "s3://b/x"}, "stay at s3://b/x"),
    ):
        job["spec"]["syncer"] = {"storage": storage}
        said = stays(job, "") or ""
        assert words in said and "delete pvc" not in said
    job["spec"]["syncer"] = {"storage": {"onDelete": "Delete"}}
    assert stays(job, "") is None


# ------------------------------------------------------------------ pictures


def test_small_figures() -> None:
    assert [span(s) for s in (None, -5, 0, 119, 120, 7199, 7200, 200_000)] == [
        "-",
        "0 s",
        "0 s",
        "119 s",
        "2 min",
        "120 min",
        "2 h",
        "2 d",
    ]
    assert unix("2027-01-15T08:00:00Z") == NOW and unix("2027-01-15T08:00:00.000000Z") == NOW
    assert unix("soon") is None and unix(None) is None


def test_conditions_are_sentences_trouble_first() -> None:
    job = a_job(**RUNNING)
    assert [one["type"] for one in conditions_shown(job)] == ["Ready", "QuorumMet"]
    assert str(condition_text(conditions_shown(job)[0], NOW)) == "not Ready (Why) for 100 s: because it is so"
    assert str(condition_text(a_condition("QuorumMet"), NOW)).startswith("QuorumMet (Why) for 100 s")
    assert "known" in str(condition_text(a_condition("HubReachable", "Unknown"), NOW))
    styles = [
        ("Ready", "True", "green"),
        ("Ready", "False", "red"),
        ("NameConflict", "True", "red"),
        ("NameConflict", "False", "green"),
        ("Failed", "True", "bold red"),
        ("Complete", "True", "green"),
        ("Complete", "False", "dim"),
        ("Suspended", "True", "yellow"),
        ("SyncerReady", "Unknown", "red"),
    ]
    assert [(k, s, condition_style(a_condition(k, s))) for k, s, _ in styles] == styles


def test_a_condition_of_an_earlier_spec_does_not_hold() -> None:
    assert holds(a_job(conditions=[a_condition("Complete")]), "Complete")
    assert not holds(a_job(conditions=[a_condition("Complete", generation=2)]), "Complete")
    assert not holds(a_job(conditions=[a_condition("Complete", "False")]), "Complete")
    assert not holds(a_job(), "Complete")


def test_the_picture_with_the_syncers_page_is_the_local_one() -> None:
    text = shown(job_picture(a_job(**RUNNING), PAGE, [], NOW))
    for words in (
        "tiny",
        "training",
        "250,000 of 1,000,000 tokens",
        "merged loss 2.500",
        "east-1",
        "125,000",
        "2 active, 2 needed",
        "west-0: no image worker:x",
        "not Ready (Why) for 100 s",
    ):
        assert words in text, words
    assert "does not answer" not in text


def test_the_picture_without_the_page_shows_the_regions() -> None:
    event = an_event("DiLoCoJob", "tiny", "LearnerGone", "west-0 is gone,\n a new one starts", type="Warning")
    text = shown(job_picture(a_job(**RUNNING), None, [event], NOW))
    for words in (
        "Running",
        "100 s",
        "250,000 of 1,000,000 tokens",
        "merged loss 2.415",
        "goodput 0.930",
        "quorum 2 active, 2 needed",
        "east",
        "west",
        "Degraded",
        "west-0: no image worker:x",
        "100 s ago  LearnerGone: west-0 is gone, a new one starts",
    ):
        assert words in text, words
    assert "none yet" not in text  # the fragments' versions are not known, which is not none


def test_a_regions_copy_shows_no_figures_that_are_the_hubs() -> None:
    """Neither tokens nor quorum are known there: they are not zero."""
    status = {k: v for k, v in RUNNING.items() if k != "quorum"} | {"progress": {"step": 120, "merges": 40}}
    text = shown(job_picture(a_job(**status), None, [], NOW))
    assert "step 120" in text and "tokens" not in text and "needed" not in text


def test_a_job_that_is_not_placed_was_looked_at() -> None:
    why = a_condition("Ready", "False", reason="NotPlaced", message="The job names the clusters hub and eu-1.")
    text = shown(job_picture(a_job(observedGeneration=3, conditions=[why]), None, [], NOW))
    assert "NotPlaced" in text and "no operator" not in text


def test_a_report_of_a_job_that_goes_on_does_not_say_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    document = job_report(outcome="interrupted", merges=7)
    show_report(document, False, going=True)
    assert "the job continues" in (said := capsys.readouterr().out) and "interrupted" not in said
    show_report(document, True, going=True)
    assert json.loads(capsys.readouterr().out) == document.model_dump(mode="json")


def test_the_report_of_a_failed_job_has_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    document = job_report(outcome="failed", message="NameError: name 'lss'")
    show_report(document, False)
    assert "failed: NameError: name 'lss'" in capsys.readouterr().out
    condition = a_condition("Failed", message="NameError: name 'lss'. To continue it: diloco resume tiny")
    failed = {**RUNNING, "phase": "Failed", "conditions": [condition], "report": kept_report(document)}
    text = shown(job_picture(a_job(**failed), None, [], NOW))
    assert "outcome  failed" in text and text.count("NameError") == 1, "the condition has it already"
    page = PAGE.model_copy(update={"phase": "failed", "message": "NameError: name 'lss'"})
    assert shown(job_picture(a_job(**failed), page, [], NOW)).count("NameError") == 1


def test_the_picture_of_a_job_that_nobody_has_seen() -> None:
    job = a_job()
    del job["status"]
    assert "no operator has looked at it yet" in shown(job_picture(job, None, [], NOW))
    assert job_line(job, None, NOW) == "no operator has looked at it yet"


def test_the_picture_at_the_end_has_the_report() -> None:
    tokens = {"trained": 1_000_000, "merged": 1_000_000, "pending": 0, "dropped": 0}
    report = kept_report(job_report(outcome="complete", merges=77, tokens=tokens))
    done = {**RUNNING, "phase": "Complete", "conditions": [a_condition("Complete")], "report": report}
    text = shown(job_picture(a_job(**done), None, [], NOW))
    assert "77" in text and "1,000,000 trained" in text
    del report["tokens"]
    assert "its report cannot be read: tokens: Field required" in shown(job_picture(a_job(**done), None, [], NOW))


def test_texts_from_outside_are_no_markup() -> None:
    status = {**RUNNING, "conditions": [a_condition("Ready", "False", message="see [red]this[/red] [x]")]}
    page = PAGE.model_copy(update={"message": "disk [full]"})
    event = an_event("DiLoCoJob", "tiny", "Odd", "[bold]x[/nothing]")
    text = shown(job_picture(a_job(**status), page, [event], NOW))
    assert "see [red]this[/red] [x]" in text and "disk [full]" in text and "[bold]x[/nothing]" in text


def test_one_line_for_those_who_wait() -> None:
    assert job_line(a_job(**RUNNING), None, NOW).split("  ")[-7:] == [
        "100.0 s",
        "Running",
        "250,000 of 1,000,000 tokens (25 %, about 5 min left)",
        "loss 2.415",
        "learners 2/3",
        "quorum 2/2",
        "goodput 0.930",
    ]


def test_the_list() -> None:
    text = shown(jobs_table([a_job(**RUNNING), a_job()], NOW, ["hub", "far"], True))
    head, first, second = text.splitlines()[:3]
    assert head.split() == [
        "CONTEXT",
        "NAMESPACE",
        "NAME",
        "PHASE",
        "LEARNERS",
        "QUORUM",
        "STEP",
        "TOKENS",
        "DONE",
        "LOSS",
        "GOODPUT",
        "AGE",
    ]
    assert first.split() == [
        "hub",
        "lab",
        "tiny",
        "Running",
        "2/3",
        "2/2",
        "120",
        "250,000",
        "25",
        "%",
        "2.415",
        "0.930",
        "100",
        "s",
    ]
    assert second.split()[:4] == ["far", "lab", "tiny", "-"]
    assert "CONTEXT" not in shown(jobs_table([a_job()], NOW))


def test_the_list_on_a_narrow_terminal_leaves_columns_out_and_cuts_no_cell() -> None:
    jobs = [a_job(**RUNNING), a_job()]
    for width, columns in ((140, 12), (80, 10), (56, 6)):
        text = shown(jobs_table(jobs, NOW, ["hub", "far"], True), width)
        head, *rows = text.splitlines()
        assert max(map(len, text.splitlines())) <= width and "…" not in text
        assert len(head.split()) == columns and "PHASE" in head and "AGE" in head, head
        assert all("tiny" in row and row.rstrip().endswith("100 s") for row in rows)


# ------------------------------------------------------------------ events


def test_an_event_is_a_sentence() -> None:
    event = an_event("Pod", "tiny-east-1", "FailedScheduling", "0/1 nodes\nare available", count=5)
    assert str(event_line(event, NOW)) == ("  100 s ago  FailedScheduling: 0/1 nodes are available (5 times)")
    newer = {**event, "lastTimestamp": None, "series": {"count": 9, "lastObservedTime": "2027-01-15T08:00:00Z"}}
    assert event_time(newer) == NOW and "(9 times)" in str(event_line(newer, NOW))
    assert event_time({"metadata": {}, "eventTime": None}) == 0.0


def test_the_story_tells_each_thing_once() -> None:
    reporter = ProgressReporter(at=NOW - 200)
    told = an_event("DiLoCoJob", "tiny", "Started", "training begins")
    old = an_event("DiLoCoJob", "tiny", "Before", "long past", lastTimestamp="2027-01-15T07:00:00Z")
    first = reporter.new_lines(a_job(**RUNNING), [told, old], None, NOW)
    assert first[0] == "Started: training begins" and "Running" in first[-1] and len(first) == 2
    assert reporter.new_lines(a_job(**RUNNING), [told, old], None, NOW + 1) == []
    met = [a_condition("Ready", message="all 3 are in"), a_condition("QuorumMet", "False", message="1 of 2")]
    turned = reporter.new_lines(a_job(**{**RUNNING, "conditions": met}), [told], None, NOW + 2)
    assert turned == ["Ready: all 3 are in", "QuorumMet is False: 1 of 2"]
    links = a_condition("LinksTooSlow", "False", message="every link is fast enough")
    slow = a_condition("LinksTooSlow", message="east's link is slow")
    said = [
        reporter.new_lines(a_job(**{**RUNNING, "conditions": [one]}), [], None, NOW + 3) for one in (links, slow, links)
    ]
    assert said == [[], ["LinksTooSlow: east's link is slow"], ["LinksTooSlow is False: every link is fast enough"]]
    again = reporter.new_lines(a_job(**RUNNING), [{**told, "count": 2}], None, NOW + 7)
    assert again[0] == "Started: training begins"  # it happened again
    assert not any("3/3" in line or "2/3" in line for line in again)  # the figures are as they were
    later = {**RUNNING, "progress": {**RUNNING["progress"], "tokens": 300_000}}
    assert "300,000 of" in reporter.new_lines(a_job(**later), [], None, NOW + 9)[-1]
    assert not any("of 1,000,000" in line for line in reporter.new_lines(a_job(**RUNNING), [], None, NOW + 11))
    assert "250,000 of" in reporter.new_lines(a_job(**RUNNING), [], None, NOW + 15)[-1]
    assert "250,000 of" in reporter.new_lines(a_job(**RUNNING), [], None, NOW + 80)[-1]  # a sign of life
    assert "1,000/s)  loss 2.400  merged 2.500" in reporter.new_lines(a_job(**RUNNING), [], PAGE, NOW + 90)[-1]


@pytest.mark.parametrize(
    ("judge", "job", "code"),
    [
        (ended, a_job(**RUNNING), None),
        (ended, a_job(observedGeneration=3, conditions=[a_condition("Complete")]), 0),
        (ended, a_job(observedGeneration=3, conditions=[a_condition("Failed")]), 1),
        (ended, a_job(observedGeneration=3, phase="Invalid", conditions=[a_condition("Ready", "False")]), 1),
        (ended, a_job(observedGeneration=2, phase="Invalid"), None),  # of the spec before
        (ended, None, 1),
        (suspended, a_job(**{**RUNNING, "phase": "Suspending"}), None),
        (suspended, a_job(observedGeneration=3, phase="Suspended"), 0),
        (suspended, a_job(observedGeneration=2, phase="Suspended"), None),
        (suspended, a_job(observedGeneration=3, conditions=[a_condition("Complete")]), 0),
        (resumed, a_job(**RUNNING), 0),
        (resumed, a_job(**{**RUNNING, "observedGeneration": 2}), None),
        (resumed, a_job(observedGeneration=3, phase="Suspended"), None),
        (seen, a_job(observedGeneration=2), None),
        (seen, a_job(observedGeneration=3), 0),
    ],
)
def test_what_is_waited_for(judge: Any, job: dict[str, Any] | None, code: int | None) -> None:
    outcome = judge(job)
    assert (None if outcome is None else outcome[0]) == code
    assert outcome is None or judge is seen or outcome[1]


def test_what_only_people_can_mend_is_told() -> None:
    ready = a_condition("Ready", "False", reason="PodTemplate", message="spec.learners.podTemplate: no such field")
    assert hindered(a_job(conditions=[ready])) == "PodTemplate: spec.learners.podTemplate: no such field"
    assert hindered(a_job(conditions=[{**ready, "reason": "Starting"}])) == ""
    assert hindered(a_job(conditions=[{**ready, "status": "True"}])) == "" and hindered(a_job()) == ""


# ------------------------------------------------------------------ the syncer's pod


def a_pod(name: str, phase: str = "Running", created: str = LONG_AGO, going: bool = False) -> dict[str, Any]:
    metadata = {"name": name, "creationTimestamp": created, **({"deletionTimestamp": created} if going else {})}
    return {"metadata": metadata, "status": {"phase": phase}}


def test_the_syncers_pod() -> None:
    job = a_job(**RUNNING)
    newer = a_pod("new", created="2027-01-15T07:59:00Z")
    assert syncer_pod(job, [newer, a_pod("old")]) == "new"
    assert syncer_pod(job, [a_pod("going", going=True), a_pod("old")]) == "old"
    for pods, status, words in (
        ([a_pod("p", "Pending")], RUNNING, "its pod is Pending"),
        ([], {"phase": "Suspended"}, "diloco resume tiny"),
        ([], RUNNING, "has no syncer's pod here"),
    ):
        with pytest.raises(ClusterError, match=words):
            syncer_pod(a_job(**status), pods)
    written = {"uri": "s3://b/models", "state": "Written", "size": 7_600_000}
    ended = a_job(**{**RUNNING, "phase": "Complete", "output": written})
    with pytest.raises(ClusterError, match="are in s3://b/models: diloco export s3://b/models OUT"):
        syncer_pod(ended, [a_pod("going", going=True)])
    assert "its merged model is at s3://b/models (7.6 MB)" in shown(job_picture(ended, None, [], NOW))
    failed = a_job(**{**RUNNING, "output": {"uri": "s3://b/models", "state": "Failed", "message": "access denied"}})
    assert "was not written to s3://b/models: access denied" in shown(job_picture(failed, None, [], NOW))
    elsewhere = a_job(**RUNNING)
    elsewhere["spec"]["syncer"] = {"cluster": "hub"}
    with pytest.raises(ClusterError, match="it runs in the cluster hub: name that context"):
        syncer_pod(elsewhere, [])
