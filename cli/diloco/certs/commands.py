"""The words of ``diloco certs``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.command_line import CommandLine, FileOption
from diloco.console import CommandError, command, job_name, print_text, refusal_text, unwritable_text
from diloco_protocol.common.files import FileError

if TYPE_CHECKING:
    from datetime import datetime

    from diloco.certs.files import Target
    from diloco_protocol.security.certificates import Described

certs = CommandLine(
    name="certs",
    help="""Make the certificates by which learners and the syncer identify each other.

A job over several clusters uses mutual TLS. Each party has a folder with tls.crt, tls.key, ca.crt and
join-token; its certificate names the job and the role in a URI. Make an authority once, then a folder for the
syncer and for each cluster with learners:

    diloco certs init --out pki/

    diloco certs issue job.yaml --pki pki/

    kubectl --context eu-1 apply --server-side \\
      -f pki/default/tiny-gpt/eu-1/secret.yaml

Certificates from cert-manager work as well: docs/regions.md has the URIs.
""",
)

Pki = Annotated[Path, typer.Option(metavar="DIR", help="The authority's folder, as `init` made it.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print one object, for programs.")]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Around what makes and reads certificates."""
    from diloco_protocol.security.certificates import CertificateError
    from diloco_protocol.security.identity import IdentityError

    try:
        yield
    except (CertificateError, IdentityError) as error:
        raise CommandError(str(error)) from None
    except FileExistsError as error:
        raise CommandError(f"{error.filename} is there already and is no folder: name another one") from None
    except OSError as error:
        if isinstance(error, FileError):
            raise CommandError(unwritable_text(Path(), error)) from None
        where = Path(error.filename or "a file")
        said = f"{where} cannot be read or written: {refusal_text(where, error)}"
        raise CommandError(f"{said}; name another folder") from None


@certs.command()
@command
@_explained()
def init(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new authority's folder.")] = Path("pki"),
    title: Annotated[str, typer.Option("--name", metavar="NAME", help="The authority's name, for people.")] = "diloco",
    days: Annotated[int, typer.Option(metavar="DAYS", help="Days of validity.")] = 3650,
    as_json: AsJson = False,
) -> None:
    """Make an authority: a key that signs, and the certificate that all parties trust.

    Keep ca.key where only you can read it: its holder can pose as any party. No cluster needs it.

    Example:

        diloco certs init --out pki/
    """
    from diloco.certs.files import init as make

    made, key = make(out, title, days), out / "ca.key"
    if as_json:
        print_text(json.dumps({"authority": str(made), "key": str(key)}, indent=1))
    else:
        print_text(f"{made}: the authority. Keep {key} to yourself.")


@certs.command()
@command
@_explained()
def issue(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB|JOB.yaml",
            help="The job's name, with --syncer or --region; or its file: then the syncer and every cluster.",
        ),
    ] = None,
    file: FileOption = None,
    pki: Pki = Path("pki"),
    syncer: Annotated[bool, typer.Option("--syncer", help="Issue for the syncer.")] = False,
    region: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="Issue for the learners of this region; repeatable: one certificate for all of them."
        ),
    ] = [],  # noqa: B006 - typer reads it, nobody writes it
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="The job's namespace, the same in every cluster.  [default: the file's, else default]",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write it.  [default: a folder in PKI/NAMESPACE/JOB]")
    ] = None,
    dns: Annotated[list[str], typer.Option(metavar="HOST", help="One more DNS name of the syncer; repeatable.")] = [],  # noqa: B006
    server_name: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="The name by which learners ask for the syncer (TLS's SNI), where a gateway passes "
            "connections on by it.  [default: diloco-syncer]",
        ),
    ] = None,
    days: Annotated[int, typer.Option(metavar="DAYS", help="Days of validity.")] = 90,
    secret: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Write secret.yaml too, a Kubernetes Secret of this name.  [default: the job file's names]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make keys and certificates for the syncer and for learners, in folders ready to be used.

    Existing files are never overwritten. The first issue for a job makes its join token, and all parties get the same.

    Examples:

        diloco certs issue job.yaml

        diloco certs issue tiny-gpt --syncer --out creds/hub --dns hub.example.org

        diloco certs issue tiny-gpt --region eu-1 --secret tiny-gpt-learner
    """
    from diloco.certs.files import describe_folder, issue_all, utc_now

    if (job is None) == (file is None):
        raise CommandError("name one job: diloco certs issue JOB.yaml, -f JOB.yaml, or JOB with --syncer or --region")
    if file is not None and not file.is_file():
        raise CommandError(f"{file}: there is no such file")
    targets = _targets(job or str(file), syncer, region, namespace, secret=secret)
    made = issue_all(pki, targets, out, dns, days=days, server_name=server_name)
    if as_json:
        print_text(
            json.dumps({"items": [_row(folder, describe_folder(folder), utc_now()) for folder in made]}, indent=1)
        )
        return
    for folder in made:
        found = describe_folder(folder)
        who = ", ".join(map(str, sorted(found.names)))
        print_text(f"{folder}: {who}, good for {found.days_left(utc_now())} days")
        if (folder / "secret.yaml").exists():
            print_text(f"    kubectl apply --server-side -f {folder / 'secret.yaml'}")


@certs.command()
@command
@_explained()
def renew(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of `diloco certs issue`.")],
    pki: Pki = Path("pki"),
    days: Annotated[int, typer.Option(metavar="DAYS", help="Days of validity of the new ones.")] = 90,
    as_json: AsJson = False,
) -> None:
    """Give folders a new key and certificate with the same names.

    Nothing has to be restarted: syncer and learners take them for their next connections. In a cluster apply
    the new secret.yaml; a kubelet needs about a minute to hand it on.

    Example:

        diloco certs renew pki/default/tiny-gpt/* --pki pki/
    """
    from diloco.certs.files import renew as make
    from diloco.certs.files import utc_now

    rows = []
    for folder in folders:
        if folder.is_dir():  # the shell's * brings join-token too
            described = make(pki, folder, days)
            rows.append(_row(folder, described, utc_now()))
            if not as_json:
                print_text(f"{folder}: good for {described.days_left(utc_now())} days")
        elif folder.name != "join-token":
            raise CommandError(f"{folder} is no folder of credentials")
    if as_json:
        print_text(json.dumps({"items": rows}, indent=1))


@certs.command()
@command
@_explained()
def show(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR|FILE...", help="Folders of `diloco certs issue`, or certificates.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say whose certificates these are, and how long they are good for.

    Examples:

        diloco certs show pki/default/tiny-gpt/eu-1

        diloco certs show pki/default/tiny-gpt/* --json
    """
    from diloco.certs.files import describe_folder, utc_now

    # The shell's * brings the join token too.
    described = [(each, describe_folder(each)) for each in folders if each.name != "join-token" or len(folders) == 1]
    now = utc_now()
    if as_json:
        print_text(json.dumps({"items": [_row(folder, found, now) for folder, found in described]}, indent=1))
        return
    for folder, found in described:
        print_text(f"{folder}")
        for each in sorted(found.names):
            print_text(f"    {each.uri}")
        if not found.names:
            print_text("    names no job: only a party whose own certificate names none believes it")
        if found.hosts:
            print_text(f"    hosts {', '.join(found.hosts)}")
        until = f"{found.not_after:%Y-%m-%d %H:%M} UTC"
        left = f"good until {until}, {found.days_left(now)} days"
        print_text(f"    {f'expired {until}' if found.not_after <= now else left}")


def _row(folder: Path, found: Described, now: datetime) -> dict[str, Any]:
    """A certificate, for programs; with the Secret's manifest where the folder has one."""
    manifest = folder / "secret.yaml"
    return {
        "path": str(folder),
        "names": sorted(each.uri for each in found.names),
        "hosts": list(found.hosts),
        "not_after": found.not_after.isoformat(),
        "days_left": found.days_left(now),
        "expired": found.not_after <= now,
        "secret": str(manifest) if manifest.exists() else None,
    }


def _targets(job: str, syncer: bool, regions: list[str], namespace: str | None, secret: str | None) -> list[Target]:
    from diloco.certs.files import Target, targets_of
    from diloco.validate import read_job_file

    if secret and syncer and regions:
        raise CommandError("--secret names one Secret: issue for the syncer and for regions apart")
    name, space, ours, theirs = job, namespace, secret, secret
    if Path(job).is_file():
        document = read_job_file(job)
        name, space = document.metadata.name, namespace or document.metadata.namespace
        known = [each.name for each in document.spec.regions]
        for each in regions:
            if each not in known:
                raise CommandError(f"--region {each}: {job} has {', '.join(known)}")
        if not (syncer or regions):
            if secret:
                raise CommandError("--secret names one Secret, and a job file has its own: say --syncer or --region")
            return targets_of(document, space or "default")
        ours = secret or document.spec.syncer.tls.secret_name
        theirs = secret or document.spec.learners.credentials.secret_name
    elif not (syncer or regions):
        raise CommandError(f"{job} is no file: with a job's name say for whom, --syncer or --region NAME")
    else:
        try:
            job_name(job)
        except typer.BadParameter as error:
            raise CommandError(str(error)) from None
    found = [Target(space or "default", name, (), "syncer", secret=ours or "")] if syncer else []
    if regions:
        found.append(Target(space or "default", name, tuple(regions), regions[0], secret=theirs or ""))
    return found
