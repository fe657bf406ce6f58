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

    def _reload(self) -> str:
        """What is wrong with the files; then those read before, if there are any, stay in use."""
        settings = self._settings
        try:
            if settings.join_token_file is not None:
                fresh = Credentials.from_token_file(settings.join_token_file)
            else:
                fresh = Credentials.from_directory(settings.credentials)
            try:
                region = settings.region if settings.role == "learner" else None
                self._names = own_learner(fresh.names(), settings.job.metadata.name, region)
            except IdentityError as error:
                raise CredentialsError(f"{fresh.directory}/tls.crt: {error}") from error
            self._newest = fresh
        except CredentialsError as error:
            if self._newest is not None:
                log.warning("the credentials read before are used on: %s", error)
            return str(error)
        return ""
