"""``python -m diloco_syncer``: serve one job. Its exit codes: ``vocabulary.SyncerExit``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_protocol.common import logs
from diloco_protocol.common.cpu_quota import usable_cores
from diloco_protocol.common.http_server import AddressError
from diloco_protocol.common.process import raise_file_limit
from diloco_protocol.security.credentials import Credentials, CredentialsError, ListenError
from diloco_protocol.spec.load import JobError, read_job
from diloco_protocol.vocabulary import SyncerExit
from diloco_protocol.wire.control_auth import read_key

log = logging.getLogger("diloco_syncer")

# Parameters of mallopt(3), and what they are set to.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 4 << 20  # above a chunk of a transfer
_KEPT_BYTES = 32 << 20  # chunks that are under way at once

_EPILOG = """\
The store holds everything that must not be lost: merges, membership, ledger, the
event tape. It is a directory, or a bucket (s3://bucket/folder, gs:// or az://). Start the same
command on the same store again, and the job continues; learners reconnect.

exit codes: 0 ended, or stopped by SIGTERM with everything durable; 1 the job failed;
2 job, arguments or store content wrong; 3 a newer syncer has the store; 4 the store
cannot be written; 5 the credentials cannot be used.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m diloco_syncer",
        description="The syncer of one DiLoCoJob: collects learners' outer gradients, merges them, "
        "broadcasts the result, and keeps what must not be lost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--job", required=True, metavar="FILE", help="the job in normal form (JSON)")
    parser.add_argument("--store", required=True, metavar="DIR|URI", help="where the job's durable state lies")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="for learners (default %(default)s, any port)"
    )
    parser.add_argument(
        "--control", default="127.0.0.1:0", metavar="HOST:PORT", help="for signed calls of operator or runner"
    )
    parser.add_argument("--http", default="127.0.0.1:0", metavar="HOST:PORT", help="status page and metrics")
    parser.add_argument(
        "--export", metavar="HOST:PORT", help="serve the merged model here; a loopback address (default: not)"
    )
    parser.add_argument(
        "--stay", action="store_true", help="after the job's end serve status, report and export until SIGTERM"
    )
    parser.add_argument("--address-file", metavar="FILE", help="written whole when it serves: its addresses")
    parser.add_argument("--control-key-file", metavar="FILE", help="the key of signed calls; a shard has none")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--credentials", metavar="DIR", help="tls.crt, tls.key, ca.crt, join-token; none: plaintext")
    who.add_argument("--join-token-file", metavar="FILE", help="plaintext, for callers that show this token alone")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="of merges and norms (default: this process's cores, at most 16)",
    )
    pods = parser.add_argument_group("shards in pods of their own (syncer.shardPods)")
    pods.add_argument("--shards-listen", default="", metavar="HOST:PORT", help="they connect here; needs --credentials")
    pods.add_argument(
        "--shard-host",
        default="",
        metavar="NAME",
        help="where learners of this cluster reach shard {}, such as s-{}.ns",
    )
    pods.add_argument("--shard", type=int, default=0, metavar="N", help="be this shard")
    pods.add_argument("--syncer", default="", metavar="HOST:PORT", help="of that syncer's --shards-listen")
    # The syncer calls its own shards with these two and this one.
    parser.add_argument("--connections", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if not given.syncer and not given.control_key_file:
        parser.error("the following arguments are required: --control-key-file")
    if (given.shards_listen or (given.syncer and given.connections < 0)) and not given.credentials:
        parser.error("shards in pods of their own need --credentials")
    _log("", given.log_level)
    tune_allocator()
    raise_file_limit()
    # Before it serves there is nothing to bring to rest: whatever is in the store is whole. Said
    # explicitly, because the first process of a container has no default for this signal.
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        return _serve(given, sys.argv[1:] if arguments is None else arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    try:
        job = read_job(given.job)
        _log(job.metadata.name, given.log_level)
        key = b"" if given.syncer else read_key(given.control_key_file)
        credentials = Credentials.from_directory(given.credentials)
        if given.join_token_file is not None:
            credentials = Credentials.from_token_file(given.join_token_file)
    except JobError as error:
        for problem in error.problems:
            log.error("%s: %s", given.job, problem)
        return SyncerExit.CONFIGURATION
    except CredentialsError as error:
        log.error("%s", error)
        return SyncerExit.CREDENTIALS
    except OSError as error:
        log.error("%s", error)
        return SyncerExit.CONFIGURATION

    threads = given.threads or min(16, usable_cores())
    # Read when numpy is loaded, below. BLAS's own threads would take a core each between products (isotropic.py).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Late: compiled kernels and gRPC are not needed to find the mistakes above.
    from diloco_syncer.numerics.outer import OuterError
    from diloco_syncer.service import run
    from diloco_syncer.shards.process import ShardOptions, run_shard
    from diloco_syncer.startup import Options
    from diloco_syncer.store.base import HigherEpoch
    from diloco_syncer.store.records import FormatRefused
    from diloco_syncer.store.restore import StoreUnusable
    from diloco_syncer.store.tape import TapeError

    options = Options(
        job=job,
        store=given.store,
        listen=given.listen,
        control=given.control,
        http=given.http,
        address_file=Path(given.address_file) if given.address_file else None,
        control_key=key,
        credentials=credentials,
        threads=threads,
        export=given.export,
        stay=given.stay,
        pod=os.environ.get("DILOCO_POD", ""),
        command=(sys.executable, "-m", "diloco_syncer", *arguments),
        shards_listen=given.shards_listen,
        shard_host=given.shard_host,
    )
    try:
        if given.syncer:
            shard = ShardOptions(
                job,
                given.store,
                credentials,
                threads,
                shard=given.shard,
                syncer=given.syncer,
                connections=given.connections,
                listen=given.listen,
            )
            return asyncio.run(run_shard(shard))
        return asyncio.run(run(options))
    except (AddressError, ListenError, StoreUnusable, FormatRefused, OuterError) as error:
        log.error("%s", error)
        return SyncerExit.CONFIGURATION
    except CredentialsError as error:
        log.error("%s", error)
        return SyncerExit.CREDENTIALS
    except HigherEpoch as error:
        log.error("%s", error)
        return SyncerExit.SUPERSEDED
    except TapeError as error:  # another syncer wrote while this one began: again, from what is there now
        log.error("%s", error)
        return SyncerExit.STORE
    except OSError as error:
        log.error("the store cannot be used: %s", error.strerror or error)
        return SyncerExit.STORE
    except Exception as error:
        log.exception("a fault of this program")
        log.error("a fault of this program: %r", error)
        return SyncerExit.FAILED


def tune_allocator() -> None:
    """Have the allocator give freed arrays back to the system at once, and keep the memory of chunks, in one heap.

    By itself glibc takes arrays of up to 32 MiB, such as a fragment's, from heaps that it hardly shrinks: what a merge
    needed in passing would stay. So arrays are mapped one by one. That setting alone has a heap shrink whenever a chunk
    of an upload at its end is freed, and the kernel clear the same pages for the next: some 20 % of the time from a
    push to its verdict. And each thread would keep chunks in a heap of its own. Another C library has no such settings,
    and needs none.
    """
    with contextlib.suppress(OSError, AttributeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        allocator.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        allocator.mallopt(_M_ARENA_MAX, 1)


def _log(job: str, level: str) -> None:
    packages = ("diloco_syncer", "diloco_protocol")
    logs.configure("json", {"job": job}, level=level.upper(), packages=packages)


if __name__ == "__main__":
    sys.exit(main())
