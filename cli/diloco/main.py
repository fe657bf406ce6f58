"""The command ``diloco``. Each command imports what it needs when it runs: help, validate
and status must answer at once, and without torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from diloco import version
from diloco.authoring import commands as authoring_commands
from diloco.certs.commands import certs
from diloco.cluster import commands as cluster_commands
from diloco.cluster.commands import Context, Contexts, Kubeconfig, Namespace, in_cluster, where
from diloco.command_line import CommandLine, FileOption, JobFile, Overrides, ReportAsJson, RunFolder, StatusPage
from diloco.console import CommandError, command, job_file, means_job, named_job, print_text, replace_unprintable
from diloco.doctor import commands as doctor_commands
from diloco.local import background
from diloco.machines import commands as machine_commands

app = CommandLine(
    name="diloco",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train one model on machines that come and go (Decoupled DiLoCo, arXiv 2604.21428).

A job is one YAML file. Try it on this machine, with the examples or a file of your own (`diloco init`):

    diloco examples

    diloco validate examples/tiny-gpt.yaml

    diloco run examples/tiny-gpt.yaml --chaos 20s:kill:local-1

    diloco export runs/tiny-gpt model/

Or in a Kubernetes cluster with the operator:

    diloco apply examples/tiny-gpt.yaml --context my-cluster --wait

Exit codes: 0 job complete, 1 job failed, 2 the job file or the arguments are wrong, 130 interrupted. Of the
other commands: 0 done, 1 the syncer or cluster does not answer or failed, 2 the arguments or a file or path that they
name are wrong.
""",
)

Everywhere = Annotated[
    bool, typer.Option("--all-namespaces", "-A", help="List the jobs of every namespace of the cluster.")
]


@app.command()
@command
def run(
    job: JobFile = None,
    file: FileOption = None,
    workdir: RunFolder = None,
    chaos: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="What to break, and when: TIME:ACTION:TARGET[:DURATION], separated by commas. TIME is 20s "
            "(from the first merge) or step=150; ACTION kill (with a DURATION: that long away), term, or pause, cut or "
            "slow with a DURATION; TARGET local-2 (a learner: region and number), learner (any, by the seed) "
            "or syncer.",
        ),
    ] = "",
    seed: Annotated[int | None, typer.Option(metavar="N", help="Instead of the job's seed.")] = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody writes it
    http: StatusPage = "127.0.0.1:0",
    force: Annotated[
        bool, typer.Option("--force", help="Start the job even if it needs more memory than is free.")
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Return once the job has started; it goes on without this terminal (`diloco attach`)."
        ),
    ] = False,
    as_json: ReportAsJson = False,
) -> int:
    """Run a job on this machine until it is done; each learner is a process.

    The checks of `diloco validate` come first, within seconds: a job that cannot run here is not started.

    The same command on the same workdir continues from its checkpoint. Ctrl-C drains the job: learners offer their
    work, and the syncer makes a checkpoint. A second Ctrl-C stops at once. Logs, metrics and report.json are in the
    workdir.

    Examples:

        diloco run examples/tiny-gpt.yaml

        diloco run examples/tiny-gpt.yaml --workdir runs/second --seed 1

        diloco run examples/tiny-gpt.yaml --set regions.0.learners=2

        diloco run examples/tiny-gpt.yaml \\
          --chaos 20s:kill:local-1,step=150:cut:local-2:5s,40s:kill:syncer

        diloco run examples/tiny-gpt.yaml --detach
    """
    named = job_file(job, file, "diloco run")
    if detach and as_json:
        raise CommandError("--detach returns before there is a report: leave out --json")
    changes = [*overrides, *([] if seed is None else [f"seed={seed}"])]
    if detach:
        from diloco.local.background import start_detached
        from diloco.validate import read_job_file

        return start_detached(workdir or Path("runs") / read_job_file(named, changes).metadata.name, sys.argv[1:])
    from diloco.local.run import RunOptions
    from diloco.local.run import run as run_job

    return run_job(RunOptions(named, workdir, chaos, overrides=changes, http=http, force=force, as_json=as_json))


@app.command()
@command
def chaos(
    job: JobFile = None,
    file: FileOption = None,
    workdir: RunFolder = None,
    mtbf: Annotated[
        float, typer.Option(metavar="SECONDS", help="Mean time until a healthy learner fails (Poisson).")
    ] = 60.0,
    repair: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Mean time that a fault lasts (Weibull: most are short, few are long).  [default: --mtbf / 6]",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(metavar="N", help="Minutes in which faults come, from the first merge.")
    ] = 5.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the faults.")] = 0,
    spec: Annotated[
        str, typer.Option("--chaos", metavar="SPEC", help="These faults instead of random ones, as for `diloco run`.")
    ] = "",
    overrides: Overrides = [],  # noqa: B006
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the faults, as --chaos takes them, and end.")
    ] = False,
    as_json: ReportAsJson = False,
    context: Context = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Run a job on this machine under random faults: learners are killed, paused, cut off and slowed down.

    The same seed gives the same faults. The job runs to its own end, as by `diloco run`. Its report says what each
    fault cost.

    With --context the job's pods in that cluster are deleted by the schedule instead (kills only, at a time from now).
    The job must exist; nothing is started. --json prints when each pod was deleted.

    Examples:

        diloco chaos examples/tiny-gpt.yaml --mtbf 30 --seed 7

        diloco chaos examples/tiny-gpt.yaml --mtbf 30 --seed 7 --dry-run

        diloco chaos job.yaml --mtbf 120 --minutes 10 --context my-cluster
    """
    from diloco.local.chaos.draw import draw_faults
    from diloco.local.chaos.random_faults import schedule_document, text_of

    named = job_file(job, file, "diloco chaos")
    there = where(context, namespace, kubeconfig)
    name, schedule = draw_faults(
        named, overrides, chaos=spec, mtbf=mtbf, repair=repair, minutes=minutes, seed=seed, kills_alone=there.given
    )
    if dry_run:
        print_text(json.dumps(schedule_document(schedule)) if as_json else text_of(schedule))
        return 0
    if there.given:
        if workdir is not None:
            raise CommandError("with --context nothing is run here: leave out --workdir")
        from diloco.cluster.chaos import delete_by_schedule

        return delete_by_schedule(there, name, schedule, minutes * 60, as_json=as_json)
    from diloco.local.run import RunOptions
    from diloco.local.run import run as run_job

    return run_job(RunOptions(named, workdir, chaos=text_of(schedule), overrides=overrides, as_json=as_json))


@app.command()
@command
def validate(
    job: JobFile = None,
    file: FileOption = None,
    overrides: Overrides = [],  # noqa: B006
    file_only: Annotated[
        bool, typer.Option("--file-only", help="Read the file and nothing else: at once, on any machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Problems, warnings and sizes, for programs.")] = False,
) -> int:
    """Check a job: every problem of its file, with a fix, and what would fail on this machine.

    If torch is installed, the model is built without values, in a few seconds and almost no memory. That finds a wrong
    configuration, patterns that match nothing, and a missing tokenizer or device. It also shows the size of the model
    and the memory of the processes.

    Absent data and too little memory are warnings; the first line says that `diloco run` would not start the job here.
    An absent device or program is an error, unless the job has fields for clusters: then it is a warning, too.

    Examples:

        diloco validate examples/tiny-gpt.yaml --set sync.every=12

        diloco validate job.yaml --file-only

        diloco validate -f job.yaml --json
    """
    from diloco.checks.verdict import judge_file
    from diloco.validate import validate_file

    named = job_file(job, file, "diloco validate")
    verdict = validate_file(named, overrides) if file_only else judge_file(named, overrides)
    if as_json:
        print_text(json.dumps(verdict.document, indent=1))
    else:
        print_text(verdict.text, file=sys.stderr if verdict.problems else sys.stdout)
    return verdict.exit_code


@app.command()
@command
def plan(
    step_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How long one inner step takes; `diloco status` shows it for a running job."
        ),
    ],
    job: JobFile = None,
    file: FileOption = None,
    params: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Number of trained parameters, such as 5e9, 5B or 350M.  [default: the job's own model]"
        ),
    ] = None,
    round_trip_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Round trip between learner and hub, as ping shows it.")
    ] = 0.0,
    utilisation: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of its time that a learner should compute rather than wait.")
    ] = 0.95,
    overrides: Overrides = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="All figures, for programs.")] = False,
) -> None:
    """Print what a job needs: the bandwidth of each learner's link, each region's, the hub's; memory and disk; and the
    cores of the hub, with the number of shards (syncer.shards) that its work wants.

    Two figures of bandwidth are shown: by the paper's formula, and by a model in which fragments wait for each other on
    the link. Size links by the second. The need of data-parallel training is beside them. Nothing is started.

    Examples:

        diloco plan job.yaml --step-seconds 0.8

        diloco plan job.yaml --params 5e9 --step-seconds 1 --round-trip-seconds 0.1

        diloco plan job.yaml --params 5e9 --step-seconds 1 \\
          --set sync.compression.down=delta-int4 --json
    """
    from diloco.bandwidth_plan import Conditions, text
    from diloco.bandwidth_plan import plan as made

    conditions = Conditions(step_seconds, round_trip_seconds, utilisation)
    found = made(job_file(job, file, "diloco plan"), overrides, params, conditions)
    print_text(json.dumps(found, indent=1) if as_json else text(found))


@app.command()
@command
def status(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WORKDIR|ADDRESS|JOB",
            help="A run's directory, host:port of its status page, or the name of a job in a cluster.  [default: the "
            "newest below ./runs; with --context, -n or -A all jobs there]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole status document, for programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until the job is over.")] = False,
    everywhere: Everywhere = False,
    context: Contexts = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Show how a job is doing, on this machine or in a cluster.

    Examples:

        diloco status

        diloco status runs/tiny-gpt --json

        diloco status runs/tiny-gpt --watch

        diloco status 127.0.0.1:8080

        diloco status tiny-gpt --context my-cluster --watch

        diloco status -A
    """
    there = where(context, namespace, kubeconfig)
    meant = there.given or everywhere
    if meant or means_job(what):
        from diloco.cluster.status import show_status

        with in_cluster(None if meant else what):
            show_status(there, what, everywhere, watch, as_json=as_json)
        return 0
    from diloco.local.status import as_json as json_of
    from diloco.local.status import read_status, show

    if watch:
        from diloco.local.watch_status import watch_status

        return watch_status(what, as_json)
    document = read_status(what)
    if as_json:
        print_text(json.dumps(json_of(document), indent=1))
    else:
        show(document)
    return 0


@app.command(name="list")
@command
def list_jobs(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Where the runs are.  [default: ./runs]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object with all of them, for programs.")] = False,
) -> None:
    """List the runs on this machine. `diloco status -A` lists the jobs of a cluster.

    Examples:

        diloco list

        diloco list /data/runs --json
    """
    from diloco.local.status import list_runs, show_runs

    if directory is not None and not directory.is_dir():
        raise CommandError(f"{directory} is not a directory: name one that holds runs, such as runs")
    place = directory or Path("runs")
    rows = list_runs(place)
    if as_json:
        print_text(json.dumps({"items": [row.document for row in rows]}, indent=1))
    else:
        show_runs(rows, place)


@app.command()
@command
def audit(
    what: Annotated[str, typer.Argument(metavar="WORKDIR|STORE", help="A run's directory, or a store's URI.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, with every fault, for programs.")] = False,
) -> int:
    """Check a run's books against its tape and records: is what was reported what is in the model?

    The tape has a line for each merge, with the digest of the line before. This chain is checked, and that
    versions have no gaps. Weights and ages are computed again from tokens and versions. No step of a learner
    may be merged twice. Each record is read, and compared with its digest on the tape; each row of the ledger,
    with the sums of the tape.

    It reads beside a run that goes on, and changes nothing; opening a bucket writes a probe, and removes it.
    The exit code is 1 where something does not hold.

    Examples:

        diloco audit runs/tiny-gpt

        diloco audit s3://bucket/stores/tiny-gpt --json
    """
    from diloco.packages import require_packages

    require_packages("diloco audit", ["syncer"])
    from diloco.audit import audit as audit_run

    return audit_run(what, as_json)


@app.command()
@command
def export(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WORKDIR|JOB|OUTPUT|ADDRESS",
            help="A run's directory, a job in a cluster, the place that output.uri names, or host:port of a syncer's "
            "export listener.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for the model.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapters of a job with LoRA alone, in PEFT's format.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Load what was written, generate with it, and score it.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Say what was written as JSON, for programs.")] = False,
    context: Context = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Write the merged model to a directory that transformers loads, during the job or after it.

    Then the model is used as others will use it: it is loaded, generates some tokens with the cache, and is scored as
    the evaluator scores. Its loss stands beside the job's last score.

    Of a job whose loop is your own (learners.command, no training.model) the directory gets model.safetensors: every
    merged parameter by its name in your model, in float32. Your program loads it with `load_state_dict`. layout.json
    has the fragments of the model. The directory appears whole or not at all.

    Of a job with training.model.lora the adapters are merged into the model. With --adapter they are written alone, as
    adapter_model.safetensors and adapter_config.json, to be loaded by PEFT on top of training.model.from.

    From a cluster the model comes through a port-forward to the syncer's pod, checked by length and checksum.

    Examples:

        diloco export runs/tiny-gpt model/

        diloco export tiny-gpt model/ --context my-cluster

        diloco export s3://bucket/models/tiny-gpt model/

        diloco export runs/my-lora adapter/ --adapter

        python -c "from transformers import AutoModelForCausalLM as Model
        Model.from_pretrained('model/')"
    """
    from diloco_protocol.common.files import require_free

    try:
        require_free(out)  # before a model is fetched and built, which takes long
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror}") from error
    there = where(context, namespace, kubeconfig)
    if there.given or means_job(what):
        from diloco.cluster.fetch import export as export_job

        with in_cluster(None if there.given else what):
            written = export_job(there, what, out, adapter=adapter, check=check)
    else:
        from diloco.packages import require_packages

        require_packages("diloco export", ["syncer"])
        from diloco.export.export import read_merged, write_merged

        written = write_merged(read_merged(what), out, adapter, check)
    print_text(json.dumps(written.document, indent=1) if as_json else written.text)


@app.command()
@command
def report(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WORKDIR|JOB|report.json",
            help="A run's directory, a job in a cluster, or with --html a report.json.  "
            "[default: the newest run below ./runs]",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="With --html: the page.  [default: report.html in WORKDIR]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json, for programs.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write one HTML page with plots, also during the run.")] = False,
    context: Context = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show a job's report: its outcome, and what became of every token. Also during the job.

    Examples:

        diloco report runs/tiny-gpt

        diloco report runs/tiny-gpt --html

        diloco report tiny-gpt --json --context my-cluster > report.json
    """
    there = where(context, namespace, kubeconfig)
    if html:
        from diloco.local.report import write_page

        of_job = f"diloco report {what or 'JOB'} --json > report.json, then diloco report report.json --html"
        if there.given:
            raise CommandError(f"pages are made of files: {of_job}")
        if means_job(what):
            raise CommandError(f"there is no run {what} here; of a job in a cluster: {of_job}")
        if as_json:
            raise CommandError("--html goes without --json: name the page after --html")
        write_page(what, page)
        return
    if page is not None:
        raise CommandError(f"{page}: a second file is for --html")
    from diloco.cluster.fetch import report as report_job
    from diloco.cluster.fetch import show_report
    from diloco.local.status import read_report

    with in_cluster(None if there.given else what):
        if there.given or means_job(what):
            report_job(there, named_job(what, "diloco report"), as_json)
            return
        show_report(read_report(what), as_json)


version.add_to(app)
background.add_to(app)
authoring_commands.add_to(app)
doctor_commands.add_to(app)
cluster_commands.add_to(app)
machine_commands.add_to(app)
app.add_typer(certs)


def main() -> None:
    replace_unprintable()
    app()


if __name__ == "__main__":
    main()
