"""moto's S3, over HTTP, as a program: ``python server.py PORT_FILE [CERTIFICATE KEY]``; with the last two
over TLS. Its state is lost with it.

It runs in an environment of its own (``make setup`` makes it, from requirements.txt beside this file),
for botocore and the operator's client of Kubernetes want different versions of python-dateutil.

moto looks whether a key is there and writes it later; a real store does both at once. So requests are
carried out one after another, each after its body has been read. With DILOCO_S3_IAM=1 it checks
signatures and rights.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

if os.environ.get("DILOCO_S3_IAM") == "1":
    os.environ["INITIAL_NO_AUTH_ACTION_COUNT"] = "0"

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_one_at_a_time = threading.Lock()
_moto = DomainDispatcherApplication(create_backend_app)


class Handler(WSGIRequestHandler):
    timeout = 30  # seconds, for a connection that says nothing

    def log_request(self, *_: Any) -> None:
        """Not every request in the test's output."""


def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    with _one_at_a_time:
        return list(_moto(environ, start))


def main() -> None:
    tls = (sys.argv[2], sys.argv[3]) if len(sys.argv) > 2 else None
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler, ssl_context=tls)
    with open(f"{sys.argv[1]}.tmp", "w") as file:
        file.write(str(server.server_port))
    os.replace(file.name, sys.argv[1])
    server.serve_forever()


if __name__ == "__main__":
    main()
