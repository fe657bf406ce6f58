"""A store in a bucket: S3 and services that speak its protocol, and by the same client gs:// and az://.

The client is obstore, which has no dependencies and threads of its own; its calls release the GIL and block.
It must not be used on both sides of a fork, and the syncer never forks.

``create`` is a put with ``If-None-Match: *``. If the answer to a put is lost the client repeats it, and then
is told that the name exists. So every caller that gets ``ObjectExists`` checks whether what is there is its
own. No service creates an object exclusively from parts, so one that is created has at most 5 GiB on S3. Large ones
that may be there already (``replace``: optimizer states, frozen parameters, version 0) go in parts, and are there when
all parts are. Of a syncer that dies meanwhile the parts stay in the bucket, unseen, until a rule of the bucket's
removes them.

**Bounds.** A request that moves little may take ``QUICK_SECONDS``, another ``BULK_SECONDS``. A request that may
safely be repeated is tried again for up to ``RETRY_SECONDS``. What then still fails is an ``OSError``, and the caller
waits and tries again (``Durability.run_write``). An object that is being read may pause for ``READ_SECONDS``. A put has
no such bound: the client's bound would also run while the request's body is sent, during which nothing can come back.

**Error texts** are put together here from the status, the service's error code and the kind of failure. The
client's own text is never shown: it contains the service's answer, which to a wrong signature is the whole
request with its session token.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn
from urllib.parse import urlsplit

from diloco_protocol.common.files import Buffer, NotWritable, TooLarge
from diloco_syncer.store.base import ObjectExists, ObjectNotFound, Store, checked
from diloco_syncer.store.spool import Spool

SCHEMES = ("s3", "gs", "az")
QUICK_SECONDS = 20.0
BULK_SECONDS = 300.0
CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0  # without a byte, while an object is read
RETRY_SECONDS = 15.0
RETRIES = 4
PART_BYTES = 64 << 20  # of what is larger, in one request
MOST_CREATED = {"s3": 5 << 30, "az": 5000 << 20}  # bytes of one put
CONCURRENT_PARTS = 4
_QUICK_BYTES = 4 << 20

_BUCKET = re.compile(r"[A-Za-z0-9._$-]+")
_PLACE = re.compile(r"(?:.*@)?(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NOT_IN_ADDRESS = re.compile(r'[^!-~]|["<>\\^`{|}]')  # RFC 3986
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_ASKED = re.compile(r"https?://([^/\s]+)")
_METADATA = ("/latest/api/token", "/latest/meta-data/", "169.254.", "fd00:ec2::254", "metadata.google.internal")
_SETTINGS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_ENDPOINTS: dict[str, tuple[str, ...]] = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": (),  # a service account's file says it
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_WHERE = {"s3": "AWS_ENDPOINT_URL", "gs": "gcs_base_url of GOOGLE_SERVICE_ACCOUNT", "az": "AZURE_STORAGE_ENDPOINT"}
_ELSEWHERE = frozenset({"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"})


class BucketStore(Store):
    """Objects below a URI such as ``s3://bucket/folder``. Raises ``NotWritable`` with the cure when the bucket cannot
    be used, also when it does not refuse to overwrite, or says of an object what was true before."""

    def __init__(self, where: str) -> None:
        self._scheme, _, rest = where.partition("://")
        bucket = re.split(r"[/?#]", rest, maxsplit=1)[0]
        problem = ""
        if "@" in bucket or "?" in rest:
            problem = (
                "credentials and options do not belong into the URI (syncer.storage.uri): give them to the "
                "syncer in its environment"
            )
        elif not bucket:
            problem = f"names no bucket: correct syncer.storage.uri to {self._scheme}://BUCKET[/FOLDER]"
        elif not _BUCKET.fullmatch(bucket):
            problem = f"this is no bucket: correct syncer.storage.uri to {self._scheme}://BUCKET[/FOLDER]"
        elif _endpoint(self._scheme) and not _is_address(_endpoint(self._scheme)):
            problem = f"its endpoint is no address: set {_endpoint_name(self._scheme)} to https://HOST[:PORT]"
        if problem:
            raise NotWritable(errno.EINVAL, f"store {_shown(where)}: {problem}")
        self.where = where
        try:
            import obstore
            import obstore.exceptions
        except ImportError as error:
            raise NotWritable(
                errno.EINVAL,
                f"store {where}: the package obstore is not installed here; "
                "pip install 'decoupled-diloco[syncer]', or use a directory",
            ) from error
        self._client = obstore
        self._errors = (obstore.exceptions.BaseError, OSError)
        self._exists_already = obstore.exceptions.AlreadyExistsError
        self._spool = Spool(None)
        self.most_created = MOST_CREATED.get(self._scheme)
        self._quick = self._opened(QUICK_SECONDS, QUICK_SECONDS)
        self._bulk = self._opened(BULK_SECONDS, BULK_SECONDS)
        self._reading = self._opened(BULK_SECONDS, READ_SECONDS)
        self._check_conditional_put()
        self._check_answers()

    def _opened(self, seconds: float, silent: float) -> Any:
        from obstore.store import from_url

        options = {
            # A person who gives an address without TLS means it; nobody falls back to it.
            "allow_http": _endpoint(self._scheme).startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            "read_timeout": timedelta(seconds=silent),
            "timeout": timedelta(seconds=seconds),
        }
        retries = {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=3), "base": 2},
        }
        # One object is deleted by DELETE: not all that speak S3 know the request for many.
        config: Any = {"disable_bulk_delete": True} if self._scheme == "s3" else None
        try:
            return from_url(self.where, config=config, client_options=options, retry_config=retries)  # type: ignore[call-overload]
        except (*self._errors, ValueError, TypeError) as error:
            self._failed(error, opening=True)

    @contextlib.contextmanager
    def _explained(self, name: str = "", opening: bool = False) -> Iterator[None]:
        """Raise what the client's errors mean; with ``name``, ``ObjectNotFound`` if there is no such object."""
        try:
            yield
        except self._errors as error:
            if name and isinstance(error, FileNotFoundError):
                raise ObjectNotFound(name) from error
            self._failed(error, opening)

    def _check_conditional_put(self) -> None:
        probe = f"probe-{os.getpid()}-{os.urandom(4).hex()}"
        self._exists_on_create(probe)  # True: the answer was lost, and the client asked again
        try:
            if self._exists_on_create(probe):
                return
        finally:
            self._delete(probe)
        raise NotWritable(
            errno.EOPNOTSUPP,
            f"store {self.where}: it does not refuse to overwrite (a put with If-None-Match); use a service "
            "that does, or a volume",
        )

    def _check_answers(self) -> None:
        """Refuse a service that answers whether an object is there out of a cache: a syncer would not hear that another
        has claimed the next epoch (epochs.py)."""
        probe = f"probe-{os.getpid()}-{os.urandom(4).hex()}"
        seen = [self.exists(probe)]
        self._exists_on_create(probe)
        seen.append(self.exists(probe))
        self._delete(probe)
        seen.append(self.exists(probe))
        if seen != [False, True, False]:
            raise NotWritable(
                errno.EOPNOTSUPP,
                f"store {self.where}: it does not say at once whether an object is there (HEAD lags after a put or a "
                "delete); turn the cache before it off, or use a service without one, or a volume",
            )

    def _exists_on_create(self, name: str) -> bool:
        with self._explained(opening=True), contextlib.suppress(self._exists_already):
            self._client.put(self._quick, name, b"", mode="create", use_multipart=False)
            return False
        return True

    def _delete(self, name: str) -> None:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            self._client.delete(self._quick, name)

    def _put(self, name: str, parts: tuple[Buffer, ...], mode: Any) -> None:
        views = [memoryview(part) for part in parts]
        whole = [view.cast("B") for view in views if view.nbytes]
        size = sum(view.nbytes for view in whole)
        store = self._quick if size <= _QUICK_BYTES else self._bulk
        in_parts = mode == "overwrite" and size > PART_BYTES
        words: Any = {"use_multipart": in_parts, "chunk_size": PART_BYTES, "max_concurrency": CONCURRENT_PARTS}
        with self._explained():
            try:
                self._client.put(store, checked(name), whole or b"", mode=mode, **words)
            except self._exists_already as error:
                raise ObjectExists(name) from error

    def create(self, name: str, *parts: Buffer) -> None:
        self._put(name, parts, "create")

    def replace(self, name: str, *parts: Buffer) -> None:
        self._put(name, parts, "overwrite")

    def read(self, name: str, limit: int) -> bytes:
        return bytes(self.read_large(name, limit, mapped=False))

    def read_large(self, name: str, limit: int, mapped: bool = True) -> Buffer:
        with self._explained(name):
            found = self._client.get(self._reading, checked(name))
            size = found.meta["size"]
            if size <= min(limit, PART_BYTES):
                return bytes(found.bytes())
        if size > limit:
            raise TooLarge(errno.EFBIG, f"{self.where}/{name} has {size} bytes; at most {limit} are allowed")
        del found  # the rest of that answer is not read
        whole = memoryview(self._spool.allocate(size) if mapped else bytearray(size))  # type: ignore[arg-type]
        for start in range(0, size, PART_BYTES):
            with self._explained(name):
                part = self._client.get_range(self._reading, name, start=start, end=min(start + PART_BYTES, size))
            if len(part) != min(PART_BYTES, size - start):
                raise OSError(errno.EIO, f"store {self.where}: {name} was replaced while it was read")
            whole[start : start + len(part)] = part
        return whole

    def read_start(self, name: str, count: int) -> bytes:
        with self._explained(name):
            size = self._client.head(self._quick, checked(name))["size"]
            if not (count := min(count, size)):
                return b""
            return bytes(self._client.get_range(self._quick, name, start=0, end=count))

    def list(self, folder: str) -> list[str]:
        with self._explained():
            found = self._client.list_with_delimiter(self._quick, checked(folder))
        return sorted(f"{folder}/{entry['path'].rsplit('/', 1)[-1]}" for entry in found["objects"])

    def exists(self, name: str) -> bool:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            self._client.head(self._quick, checked(name))
            return True
        return False

    def delete(self, name: str) -> None:
        self._delete(checked(name))

    def local_path(self, name: str) -> None:
        return None

    def _failed(self, error: Exception, opening: bool = False) -> NoReturn:
        """Raise what the client's error means. ``from None``: a traceback would show its text."""
        kind = NotWritable if opening else OSError
        raise kind(errno.EIO, f"store {self.where}: {_meaning(str(error), self._scheme)}") from None


def _shown(where: str) -> str:
    """A URI that may hold secrets, without them: neither what is before the @ nor options."""
    scheme, _, rest = where.partition("://")
    place, *options = re.split(r"[?#]", rest, maxsplit=1)
    if "@" in "".join(options):  # a password with such a sign in it, perhaps
        return f"{scheme}://…"
    _, secret, after = place.rpartition("@")
    return f"{scheme}://…@{after}" if secret else f"{scheme}://{place}"


def _is_address(text: str) -> bool:
    """Whether the client can ask there. It takes that for granted, and panics otherwise: an exception that
    no handler of ours would catch."""
    try:
        parts = urlsplit(text)
        port, host = parts.port, (parts.hostname or "").rstrip(".")
        if ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]):  # then it must be an IP address
            ipaddress.ip_address(host)
    except ValueError:
        return False
    usual = parts.scheme in ("http", "https") and port != 0
    return usual and bool(_PLACE.fullmatch(parts.netloc)) and not _NOT_IN_ADDRESS.search(text)


def _endpoint_name(scheme: str) -> str:
    """The variable that says where the service is; empty: it is where the cloud has it."""
    return next((name for name in _ENDPOINTS[scheme] if os.environ.get(name)), "")


def _endpoint(scheme: str) -> str:
    return os.environ.get(_endpoint_name(scheme), "")


def _meaning(text: str, scheme: str) -> str:
    """What went wrong and the cure, from an error's text, of which only known words are shown."""
    asked = _ASKED.search(text)
    host = asked.group(1).rpartition("@")[2] if asked else ""
    status, code = _STATUS.search(text), _CODE.search(text)
    if "Missing" in text and ("AccessKey" in text or "Account" in text):
        return f"its credentials are not complete: give the syncer {_SETTINGS[scheme]}"
    number, name = int(status.group(1)) if status else 0, code.group(1) if code else ""
    said = f"{number} {name}".strip()
    # The client asks for a role's credentials.
    if any(word in text for word in ("token file", "POST REDACTED", "AssumeRole")):
        why = f" ({said})" if number else ""
        return (
            f"the credentials of its identity could not be had{why}: look at the token and the role "
            "(AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN), and at the way to the cloud's token service"
        )
    if any(place in text.split("\n", 1)[0] for place in _METADATA):
        return (
            f"no credentials were found: give the syncer {_SETTINGS[scheme]} in its environment "
            "(syncer.podTemplate), or an identity of the cloud's"
        )
    if "scheme is not allowed" in text or "URLs must use https" in text:
        without = f"; one without TLS is given as {_WHERE[scheme]}=http://…" if _ENDPOINTS[scheme] else ""
        return f"its address is no https:// address{without}"
    if not number:
        return _not_reached(text, host, _WHERE[scheme])
    if name in _ELSEWHERE or number in (301, 307, 308):
        return f"the bucket is in another region ({said}): set AWS_REGION"
    if number in (401, 403):
        return (
            f"access denied ({said}): the syncer's credentials must allow to list the bucket, and to get, "
            "put and delete objects"
        )
    if name in ("NoSuchBucket", "InvalidBucketName", "ContainerNotFound"):
        return f"there is no such bucket ({said}): make it, or correct syncer.storage.uri"
    if not name and number in (400, 404, 405, 501):
        return f"{host} does not speak this protocol ({said}): correct the endpoint ({_WHERE[scheme]})"
    return f"{host} answers {said}"


def _not_reached(text: str, host: str, endpoint: str) -> str:
    broke_off = "response body error" in text  # such a text names no host
    if not host and not broke_off:
        return "the URI (syncer.storage.uri) or the settings in the environment are not understood"
    why = "it does not answer as it should"
    for word, meaning in (
        ("dns error", "its name is not known"),
        ("InvalidCertificate", "its certificate is not trusted"),
        ("TimedOut", "it does not answer in time"),
        ("timed out", "it does not answer in time"),
        ("Timeout", "it does not answer in time"),
        ("Connect", "no connection"),
    ):
        if word in text:
            why = meaning
            break
    return (
        f"{host or 'the service'} cannot be reached ({why}): correct the endpoint ({endpoint}), or "
        "wait until it is back"
    )
