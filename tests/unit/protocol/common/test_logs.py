"""What is left out of the logs."""

from __future__ import annotations

import io
import logging

from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-untyped]

from diloco_protocol.common import logs


def test_a_caller_that_left_while_its_call_ended_is_no_error() -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    out = io.StringIO()
    try:
        logs.configure("json", {}, level="INFO", packages=(), stream=out)
        for operation in ("SendStatusFromServerOperation", "ReceiveMessageOperation"):
            try:
                raise ExecuteBatchError(f'Failed "execute_batch": (<grpc._cython.cygrpc.{operation} object at 0x7f>,)')
            except ExecuteBatchError:
                logging.getLogger("grpc._cython.cygrpc").exception("raised in core by servicer method")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(False)
    (line,) = out.getvalue().splitlines()
    assert "ReceiveMessageOperation" in line and "Traceback" in line
