"""Finding the operator's root key, or making it, without the right to read Secrets.

The Secret ``diloco-operator-key`` is mounted as an optional volume. If the file is there, that is the key. If not, the
operator makes the Secret; if that succeeds, what it made is the key, and the file will say the same. If somebody made
it meanwhile (another start of this operator), only the file can tell: the cluster brings it within two minutes.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from pathlib import Path

from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import SECRET
from diloco_operator.names import MANAGER
from diloco_operator.reconcile.apply import explain_refusal
from diloco_operator.reconcile.job_secrets import RootKey
from diloco_protocol.common.files import read_bounded

log = logging.getLogger(__name__)

NAME = "diloco-operator-key"
SAY_SECONDS = 30.0


class RootKeyFinder:
    """``key`` is None until it is known; ``problem`` then says why."""

    def __init__(self, api: Api, file: Path, namespace: str) -> None:
        self._api = api
        self._file = file
        self._namespace = namespace
        self.key: RootKey | None = None
        self.problem = "the operator has not read its root key yet"

    async def run(self) -> None:
        """Find the key; returns when it is known."""
        wait, said, said_at = 1.0, "", 0.0
        exists = False
        while True:
            if self._read():
                log.info("root key: read from %s", self._file)
                return
            exists = exists or await self._make()
            if self.key is not None:
                return
            now = time.monotonic()
            if self.problem != said or now - said_at > SAY_SECONDS:
                log.warning("%s", self.problem)
                said, said_at = self.problem, now
            wait = 2.0 if exists else min(2 * wait, 30.0)
            await asyncio.sleep(wait)

    def _read(self) -> bool:
        try:
            self.key = RootKey(read_bounded(self._file, 4096).strip())
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            what = f"the mounted Secret {self._namespace}/{NAME}, key `key`"
            self.problem = f"root key: {self._file}: {error}; it is {what}"
            return False
        return True

    async def _make(self) -> bool:
        """Whether the Secret exists, made by somebody else."""
        value = secrets.token_hex(32).encode()
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "immutable": True,
            "metadata": {
                "name": NAME,
                "namespace": self._namespace,
                "labels": {"app.kubernetes.io/name": "diloco", "app.kubernetes.io/managed-by": MANAGER},
            },
            "data": {"key": base64.b64encode(value).decode()},
        }
        try:
            # By any operator, not the leader alone: whichever comes second is refused.
            await self._api.ask("create", SECRET.plural, "POST", SECRET.path(self._namespace), body=manifest)
        except ApiError as error:
            if error.status == 409:
                self.problem = (
                    f"root key: the Secret {self._namespace}/{NAME} exists; waiting until it is mounted at "
                    f"{self._file} (a cluster takes up to two minutes; outside of one, write it there: "
                    f"kubectl get secret -n {self._namespace} {NAME} -o jsonpath='{{.data.key}}' | base64 -d)"
                )
                return True
            self.problem = f"root key: the Secret {self._namespace}/{NAME} cannot be made: {explain_refusal(error)}"
            return False
        self.key = RootKey(value)
        log.info("root key: made, as Secret %s/%s", self._namespace, NAME)
        return False
