"""A worker's credentials, and whether the syncer that it is about to speak to is its job's.

Credentials are read anew for each connection, because a cluster replaces certificates before they
expire. In a pod, files that cannot be used are waited for: its Secret may be put right. Outside of pods
they are the user's mistake, and end the program at once.
"""

from __future__ import annotations

import logging

from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.security.identity import NO_NAMES, IdentityError, own_learner
from diloco_protocol.vocabulary import TrustFailure
from diloco_protocol.wire.verify_server import ServerNotTrusted, verify_syncer
from diloco_worker.settings import ConfigurationError, WorkerSettings

log = logging.getLogger(__name__)


class WorkerCredentials:
    """The credentials of one worker process. Raises ConfigurationError if they cannot be used, outside of pods."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._newest: Credentials | None = None  # the newest that could be used
        self._names = NO_NAMES
        problem = self._reload()
        if problem and not settings.pod:
            raise ConfigurationError(problem)

    async def for_syncer(self, address: str) -> tuple[Credentials, bool]:
        """Credentials for the syncer at ``address`` (host:port), after its certificate was checked; and whether
        channels made with them trust that one certificate only. Raises ServerNotTrusted."""
        problem = self._reload()
        if self._newest is None:
            raise ServerNotTrusted(problem, TrustFailure.CREDENTIALS_UNUSABLE)
        credentials = await verify_syncer(self._newest, address, self._names)
        return credentials, credentials is not self._newest

    def _read(self) -> Credentials:
        if self._settings.join_token_file is not None:
            return Credentials.from_token_file(self._settings.join_token_file)
        return Credentials.from_directory(self._settings.credentials)

    def _reload(self) -> str:
        """What is wrong with the files; then those read before, if there are any, stay in use."""
        try:
            fresh = self._read()
            try:
                region = self._settings.region if self._settings.role == "learner" else None
                self._names = own_learner(fresh.names(), self._settings.job.metadata.name, region)
            except IdentityError as error:
                raise CredentialsError(f"{fresh.directory}/tls.crt: {error}") from error
            self._newest = fresh
        except CredentialsError as error:
            if self._newest is not None:
                log.warning("the credentials read before are used on: %s", error)
            return str(error)
        return ""
