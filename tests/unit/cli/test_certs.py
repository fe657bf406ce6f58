"""`diloco certs`: what it writes, what OpenSSL and Python's ssl make of it, and what it refuses."""

from __future__ import annotations

import base64
import datetime
import shutil
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from diloco.certs import files
from diloco.main import app
from diloco_protocol.security.certificates import CertificateError, Issued, describe, issue, new_authority
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.security.identity import name
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import load_job

NOW = datetime.datetime(2027, 3, 1, 12, tzinfo=datetime.UTC)
JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny, namespace: train}
spec:
  training: {model: null, data: null, stop: {steps: 10}, evaluation: null}
  sync: {fragments: 2, every: 4}
  syncer:
    cluster: hub
    endpoint: {type: NodePort, address: "hub.example.org:30700", nodePort: 30700}
    tls: {secretName: tiny-syncer}
  learners: {command: [python, x.py], credentials: {secretName: tiny-learners}}
  regions:
  - {name: eu-1, cluster: eu-1, learners: 2}
  - {name: us-2, cluster: us, learners: 1}
  - {name: us-3, cluster: us, learners: 1}
"""


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["certs", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    assert diloco("init", "--out", tmp_path / "pki")[0] == 0
    return tmp_path / "pki"


def test_a_job_file_gives_everybody_a_folder_and_a_secret(pki: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    code, output = diloco("issue", tmp_path / "job.yaml", "--pki", pki, "--days", "30")
    assert code == 0 and output.count("good for 30 days") == 4, output
    home = pki / "train" / "tiny"
    assert sorted(path.name for path in home.iterdir()) == ["eu-1", "hub", "join-token", "syncer", "us"]
    assert mode(pki) == 0o700 and mode(pki / "ca.key") == 0o600
    tokens, keys = set(), set()
    for who, uris, secret in (
        ("syncer", ["syncer"], "tiny-syncer"),
        ("hub", ["learner/hub"], "tiny-learners"),  # for the evaluator, and the token
        ("eu-1", ["learner/eu-1"], "tiny-learners"),
        ("us", ["learner/us-2", "learner/us-3"], "tiny-learners"),
    ):
        folder = home / who
        assert sorted(p.name for p in folder.iterdir()) == ["ca.crt", "join-token", "secret.yaml", "tls.crt", "tls.key"]
        for each in ("tls.key", "join-token", "secret.yaml"):
            assert mode(folder / each) == 0o600
        read = Credentials.from_directory(folder)
        assert [one.uri for one in sorted(read.names())] == [f"diloco://job/train/tiny/{uri}" for uri in uris]
        tokens.add(read.token)
        keys.add(read.key)
        document = yaml.safe_load((folder / "secret.yaml").read_text())
        assert document["metadata"] == {"name": secret, "namespace": "train"}
        content = {key: base64.b64decode(value) for key, value in document["data"].items()}
        assert content == {each: (folder / each).read_bytes() for each in files.FILES}
        # What OpenSSL says, which nothing of ours has a part in.
        purpose = "sslserver" if who == "syncer" else "sslclient"
        other = "sslclient" if who == "syncer" else "sslserver"
        for asked, fine in ((purpose, True), (other, False)):
            verdict = subprocess.run(
                ["openssl", "verify", "-x509_strict", "-purpose", asked, "-CAfile", pki / "ca.crt", folder / "tls.crt"],
                capture_output=True,
                timeout=30,
            )
            assert (verdict.returncode == 0) == fine, verdict
    assert len(tokens) == 1 and len(keys) == 4 and len(tokens.pop()) == 64
    assert not any(secret in output for secret in ("PRIVATE", (home / "join-token").read_text()))


def test_names_on_the_command_line(pki: Path, tmp_path: Path) -> None:
    code, _ = diloco("issue", "tiny", "--syncer", "--pki", pki, "--out", tmp_path / "hub", "--dns", "hub.example.org")
    assert code == 0
    found = describe((tmp_path / "hub" / "tls.crt").read_bytes())
    assert found.hosts[0] == "diloco-syncer" and found.hosts[-1] == "hub.example.org"
    assert found.days_left(files.utc_now()) == 90
    made = x509.load_pem_x509_certificate((tmp_path / "hub" / "tls.crt").read_bytes())
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert not (tmp_path / "hub" / "secret.yaml").exists()
    code, output = diloco("show", tmp_path / "hub", pki / "ca.crt")
    assert code == 0 and "diloco://job/default/tiny/syncer" in output and "90 days" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["issue", "tiny", "--pki", "PKI"], "say for whom, --syncer or --region"),
        (["issue", "Tiny!", "--syncer", "--pki", "PKI"], "is no job's name"),
        (["issue", "tiny", "--syncer", "--pki", "NONE"], "diloco certs init --out"),
        (["issue", "tiny", "--region", "EU", "--pki", "PKI"], "region 'EU': expected lower-case"),
        (["issue", "tiny", "--syncer", "--pki", "PKI", "--days", "0"], "days is 0: expected 1 to 36500"),
        (["issue", "tiny", "--syncer", "--pki", "PKI", "--dns", "https://x"], "without port or scheme"),
        (["issue", "tiny", "--syncer", "--region", "a", "--pki", "PKI", "--secret", "s"], "names one Secret"),
        (["issue", "JOB", "--region", "mars", "--pki", "PKI"], "has eu-1, us-2, us-3"),
        (["renew", "NONE", "--pki", "PKI"], "is no folder"),
        (["renew", "PKI", "--pki", "PKI"], "cannot read"),
        (["show", "NONE"], "cannot read"),
        (["init", "--out", "PKI"], "choose another --out"),
    ],
)
def test_what_is_refused_names_the_cure(pki: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    places = {"PKI": str(pki), "NONE": str(tmp_path / "none"), "JOB": str(tmp_path / "job.yaml")}
    before = sorted(tmp_path.rglob("*.crt"))
    code, output = diloco(*[places.get(each, each) for each in arguments])
    assert code == 2 and said in " ".join(output.split()), output
    assert sorted(tmp_path.rglob("*.crt")) == before


def test_what_the_disk_refuses_is_said_without_its_number(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for out, said in [
        (file, "is there already and is no folder"),
        (Path("/proc/x"), "cannot be read or written: the file system of /proc takes no new files"),
    ]:
        result = CliRunner().invoke(app, ["certs", "init", "--out", str(out)])
        assert result.exit_code == 2 and f"error: {out} {said}" in result.output and "Errno" not in result.output


def test_nothing_is_overwritten_but_by_renewal(pki: Path) -> None:
    assert diloco("issue", "tiny", "--syncer", "--region", "eu-1", "--pki", pki)[0] == 0
    folder = pki / "default" / "tiny" / "eu-1"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    # One of two is there: neither is made.
    shutil.rmtree(folder.parent / "syncer")
    code, output = diloco("issue", "tiny", "--syncer", "--region", "eu-1", "--pki", pki)
    assert code == 2 and "diloco certs renew" in output and not (folder.parent / "syncer").exists()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    code, output = diloco("renew", folder.parent / "join-token", folder, "--pki", pki, "--days", "7")
    assert code == 0 and "good for 7 days" in output
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {each for each in before if before[each] != after[each]} == {"tls.crt", "tls.key"}
    assert describe(after["tls.crt"]).names == describe(before["tls.crt"]).names
    ssl.create_default_context().load_cert_chain(folder / "tls.crt", folder / "tls.key")
    assert mode(folder / "tls.key") == 0o600


def test_clusters_share_certificates_as_they_share_secrets(tmp_path: Path) -> None:
    far = load(tmp_path / "far.yaml", JOB)
    found = {target.label: target.regions for target in files.targets_of(far, "train")}
    assert found == {"syncer": (), "hub": ("hub",), "eu-1": ("eu-1",), "us": ("us-2", "us-3")}
    alone = JOB.replace("cluster: eu-1", "cluster: hub").replace("cluster: us", "cluster: hub")
    here = load(tmp_path / "here.yaml", alone)
    found = {target.label: target.regions for target in files.targets_of(here, "x")}
    assert found == {"syncer": (), "hub": ("eu-1", "us-2", "us-3")}


def load(path: Path, text: str) -> DiLoCoJob:
    path.write_text(text)
    return load_job(path)


def test_a_name_for_gateways_goes_to_both_sides(pki: Path) -> None:
    more = ("--pki", pki, "--secret", "s", "--server-name", "hub.example.org")
    assert diloco("issue", "tiny", "--syncer", *more)[0] == 0
    assert diloco("issue", "tiny", "--region", "eu-1", *more)[0] == 0
    home = pki / "default" / "tiny"
    assert describe((home / "syncer" / "tls.crt").read_bytes()).hosts[-1] == "hub.example.org"
    assert Credentials.from_directory(home / "eu-1").server_name == "hub.example.org"
    assert Credentials.from_directory(home / "syncer").server_name == "diloco-syncer"
    for _ in range(2):
        data = yaml.safe_load((home / "eu-1" / "secret.yaml").read_text())["data"]
        assert base64.b64decode(data["server-name"]) == b"hub.example.org" and len(data) == 5
        assert diloco("renew", home / "eu-1", home / "syncer", "--pki", pki)[0] == 0
    assert describe((home / "syncer" / "tls.crt").read_bytes()).hosts[-1] == "hub.example.org"


def test_all_that_the_shells_star_brings_is_shown(pki: Path) -> None:
    for words in (["--syncer"], ["--region", "eu-1"]):
        assert diloco("issue", "tiny", *words, "--pki", pki)[0] == 0
    code, output = diloco("show", *sorted((pki / "default" / "tiny").iterdir()))
    assert code == 0 and "/syncer" in output and "learner/eu-1" in output
    assert diloco("show", pki / "default" / "tiny" / "join-token")[0] == 2, "that is what was asked for"


def test_several_regions_may_share_a_certificate(pki: Path, tmp_path: Path) -> None:
    code, _ = diloco("issue", "tiny", "--region", "eu-1", "--region", "eu-2", "--pki", pki, "--out", tmp_path / "eu")
    names = Credentials.from_directory(tmp_path / "eu").names()
    assert code == 0 and {one.region for one in names} == {"eu-1", "eu-2"}


def test_a_secret_is_renewed_with_its_folder(pki: Path) -> None:
    assert diloco("issue", "tiny", "--syncer", "--pki", pki, "--secret", "hub")[0] == 0
    folder = pki / "default" / "tiny" / "syncer"
    assert diloco("renew", folder, "--pki", pki)[0] == 0
    document = yaml.safe_load((folder / "secret.yaml").read_text())
    assert document["metadata"]["name"] == "hub"
    assert base64.b64decode(document["data"]["tls.crt"]) == (folder / "tls.crt").read_bytes()
    assert "diloco-syncer" in describe((folder / "tls.crt").read_bytes()).hosts


def test_another_authority_renews_nothing(pki: Path, tmp_path: Path) -> None:
    assert diloco("issue", "tiny", "--syncer", "--pki", pki)[0] == 0
    assert diloco("init", "--out", tmp_path / "other")[0] == 0
    code, output = diloco("renew", pki / "default" / "tiny" / "syncer", "--pki", tmp_path / "other")
    assert code == 2 and "of another authority" in output


def test_a_certificate_that_names_no_job_is_not_renewed(pki: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unnamed"
    folder.mkdir()
    for each in ("tls.crt", "ca.crt"):  # the authority's own certificate has no names
        shutil.copy(pki / "ca.crt", folder / each)
    code, output = diloco("renew", folder, "--pki", pki)
    assert code == 2 and "names no job: issue one with" in output and not (folder / "tls.key").exists()


def test_a_leaf_never_outlives_its_authority_and_an_expired_one_signs_nothing() -> None:
    authority = new_authority("short", NOW, 10)
    names = [name("ns", "tiny", "learner", "eu-1")]
    leaf = describe(issue(authority, names, (), NOW, days=90).certificate)
    assert leaf.not_after == describe(authority.certificate).not_after and leaf.days_left(NOW) == 10
    with pytest.raises(CertificateError, match="has expired"):
        issue(authority, names, (), NOW + datetime.timedelta(days=11))
    with pytest.raises(CertificateError, match="no DNS names"):
        issue(authority, names, ["diloco-syncer"], NOW)
    with pytest.raises(CertificateError, match="one role"):
        issue(authority, [*names, name("ns", "tiny", "syncer")], (), NOW)
    with pytest.raises(CertificateError, match=r"is not the .* key of"):
        issue(Issued(authority.certificate, new_authority("x", NOW).key), names, (), NOW)
    assert "PRIVATE" not in repr(authority)


@pytest.mark.parametrize("command", [[], ["init"], ["issue"], ["renew"], ["show"]])
def test_help_teaches_with_examples(command: list[str]) -> None:
    code, output = diloco(*command, "--help")
    assert code == 0 and "diloco certs" in output
