"""``diloco certs``: the files of an authority, of certificates and join tokens.

Theory of operation
-------------------
An authority's folder (``pki/``) is a person's, on a machine of theirs: nothing in a cluster
reads it. Below it, one folder for each job holds the job's join token, and one for each party
holds what that party is given, exactly as the syncer and the learners read it:

    pki/ca.crt, ca.key
    pki/NAMESPACE/JOB/join-token
    pki/NAMESPACE/JOB/syncer/     tls.crt, tls.key, ca.crt, join-token [, secret.yaml]
    pki/NAMESPACE/JOB/CLUSTER/    the same for the learners there, of however many regions

A folder appears whole or not at all, keys and tokens are for their owner alone (0600),
and nothing that is there is overwritten but by ``renew``.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from diloco.console import CommandError
from diloco_protocol.common.files import create_whole, read_bounded, write_whole
from diloco_protocol.security.certificates import (
    CertificateError,
    Described,
    Issued,
    describe,
    issue,
    load_authority,
    new_authority,
)
from diloco_protocol.security.identity import Name, name
from diloco_protocol.spec.job import DiLoCoJob

SECRET_FILE = "secret.yaml"
FILES = ("tls.crt", "tls.key", "ca.crt", "join-token")
SERVER_NAME_FILE = "server-name"  # of learners, where they ask for the syncer by another name
_PRIVATE = frozenset({"tls.key", "ca.key", "join-token", SECRET_FILE})
_MAX = 256 << 10


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True, slots=True)
class Target:
    """One party. ``regions`` empty: the syncer. ``label``: its folder's name. ``secret``: the name of its
    Kubernetes Secret; empty: none."""

    namespace: str
    job: str
    regions: tuple[str, ...]
    label: str
    secret: str = ""

    def names(self) -> list[Name]:
        """Raises ``IdentityError``."""
        if not self.regions:
            return [name(self.namespace, self.job, "syncer")]
        return [name(self.namespace, self.job, "learner", region) for region in self.regions]


def targets_of(job: DiLoCoJob, namespace: str) -> list[Target]:
    """The parties of a job: its syncer, and the learners of each cluster, which share a Secret there. There is one for
    the syncer's cluster too: its evaluator comes as a learner, and the syncer reads the join token in it."""
    spec, job_name = job.spec, job.metadata.name
    places: dict[str | None, list[str]] = {spec.syncer.cluster: []}
    for region in spec.regions:
        places.setdefault(region.cluster, []).append(region.name)
    secret = spec.learners.credentials.secret_name or ""
    found = [Target(namespace, job_name, (), "syncer", secret=spec.syncer.tls.secret_name or "")]
    for cluster, regions in places.items():
        label = cluster or "learners"
        # Without learners there: a region's name that no learner has, good for an evaluator alone.
        found.append(Target(namespace, job_name, tuple(regions or [label]), label, secret=secret))
    return found


def init(out: Path, title: str, days: int) -> Path:
    """A new authority in ``out``. Raises CommandError, CertificateError, OSError."""
    for each in ("ca.crt", "ca.key"):
        if (out / each).exists():
            raise CommandError(
                f"{out / each} is there, and certificates that it signed may be in use: choose another --out"
            )
    authority = new_authority(title, utc_now(), days)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    create_whole(out / "ca.key", authority.key, mode=0o600)
    create_whole(out / "ca.crt", authority.certificate, mode=0o644)
    return out / "ca.crt"


def issue_all(
    pki: Path,
    targets: Sequence[Target],
    out: Path | None,
    hosts: Sequence[str],
    days: int,
    server_name: str | None = None,
) -> list[Path]:
    """A folder for each target. ``out``: of the only one, or that which gets one for each. ``hosts``: more
    DNS names of the syncer; ``server_name``: the one that learners ask for.

    Raises CommandError before anything is written if one of them is there; CertificateError, IdentityError, OSError.
    """
    authority = _authority(pki)
    folders = [_folder(pki, target, out, len(targets) == 1) for target in targets]
    if len(set(folders)) < len(folders):
        raise CommandError("a cluster is called syncer: issue for its regions with --region and --out")
    for folder in folders:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CommandError(
                f"{folder} is there already, and nothing is overwritten: `diloco certs renew {folder}` "
                "gives it a new certificate; else choose another --out"
            )
    contents = []
    for target in targets:
        asked = [*hosts, *([server_name] if server_name else [])]
        made = issue(authority, target.names(), () if target.regions else asked, utc_now(), days=days)
        token = _token(pki, target)
        content = {
            "tls.crt": made.certificate,
            "tls.key": made.key,
            "ca.crt": authority.certificate,
            "join-token": token,
        }
        if server_name and target.regions:
            content[SERVER_NAME_FILE] = server_name.encode()
        if target.secret:
            content[SECRET_FILE] = secret_yaml(target.secret, target.namespace, content)
        contents.append(content)
    for folder, content in zip(folders, contents, strict=True):
        _write_folder(folder, content)
    return folders


def renew(pki: Path, folder: Path, days: int) -> Described:
    """A new key and certificate with the same names; the rest stays. Whoever reads the folder takes them
    for its next connections. Raises CommandError, CertificateError, OSError."""
    authority = _authority(pki)
    old = describe_folder(folder)
    trusted = _read(folder / "ca.crt", "the authority that it trusts")
    if authority.certificate.strip() not in trusted:
        raise CommandError(
            f"{folder} is of another authority than {pki}: name its own with --pki. To change the authority, "
            "put both into every ca.crt first, then issue anew"
        )
    if not old.names:
        raise CommandError(f"{folder}/tls.crt names no job: issue one with `diloco certs issue`")
    made = issue(authority, sorted(old.names), old.hosts, utc_now(), days=days)
    # One after the other: a reader that sees the new key with the old certificate keeps what it has.
    write_whole(folder / "tls.key", made.key, mode=0o600)
    write_whole(folder / "tls.crt", made.certificate, mode=0o644)
    manifest = folder / SECRET_FILE
    if manifest.exists():
        meta = yaml.safe_load(_read(manifest, "the Secret"))["metadata"]
        content = {
            each: _read(folder / each, "a file of the Secret")
            for each in (*FILES, SERVER_NAME_FILE)
            if each in FILES or (folder / each).exists()
        }
        text = secret_yaml(meta["name"], meta["namespace"], content)
        write_whole(manifest, text, mode=0o600)
    return describe(made.certificate)


def describe_folder(folder: Path) -> Described:
    """What the certificate of a folder says; ``folder`` may be the file itself. Raises CommandError."""
    path = folder / "tls.crt" if folder.is_dir() else folder
    try:
        return describe(_read(path, "a certificate"))
    except CertificateError as error:
        raise CommandError(f"{path}: {error}") from error


def secret_yaml(secret: str, namespace: str, content: dict[str, bytes]) -> bytes:
    """A Kubernetes Secret with these files, for ``kubectl apply``."""
    document = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret, "namespace": namespace},
        "type": "Opaque",
        "data": {each: base64.b64encode(content[each]).decode() for each in content},
    }
    return yaml.safe_dump(document, sort_keys=False, width=1_000_000).encode()


def _authority(pki: Path) -> Issued:
    if not (pki / "ca.key").exists():
        raise CommandError(f"{pki} has no authority (ca.key): make one with `diloco certs init --out {pki}`")
    authority = Issued(_read(pki / "ca.crt", "the authority"), _read(pki / "ca.key", "the authority's key"))
    try:
        load_authority(authority)
    except CertificateError as error:
        raise CommandError(f"{pki}: {error}") from error
    return authority


def _folder(pki: Path, target: Target, out: Path | None, alone: bool) -> Path:
    if out is None:
        return pki / target.namespace / target.job / target.label
    return out if alone else out / target.label


def _token(pki: Path, target: Target) -> bytes:
    """The job's join token: one for all of its parties."""
    path = pki / target.namespace / target.job / "join-token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        create_whole(path, secrets.token_hex(32).encode(), mode=0o600)
    return _read(path, "the job's join token")


def _write_folder(folder: Path, content: dict[str, bytes]) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    making = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    making.mkdir(mode=0o700)
    try:
        for each, value in content.items():
            write_whole(making / each, value, mode=0o600 if each in _PRIVATE else 0o644)
        try:
            os.rename(making, folder)  # onto nothing, or an empty folder
        except OSError as error:
            raise CommandError(f"{folder} is there already, and nothing is overwritten") from error
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _read(path: Path, what: str) -> bytes:
    try:
        return read_bounded(path, _MAX)
    except OSError as error:
        raise CommandError(f"cannot read {path} ({what}): {error.strerror or error}") from error
