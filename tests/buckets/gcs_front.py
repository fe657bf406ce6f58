"""Google's XML API before fake-gcs-server, which knows all of it but uploads. Not a test; tests/bucket_services.py
starts it: ``python gcs_front.py PORT-FILE SERVER [CERTIFICATE KEY]``.

An upload becomes one of the JSON API, with its precondition (``x-goog-if-generation-match``). Everything else is passed
on as it is. Objects, listings and exclusive creation are fake-gcs-server's own.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

BOUNDARY = b"a-boundary-that-is-in-no-object"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body of an answer go out together
    service = 0  # the port of fake-gcs-server

    refuse = 0  # so many further requests are refused, as of somebody who asks too often

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/refuse":
            Handler.refuse = json.loads(body)["count"]
            return self._answer(200, b"")
        if Handler.refuse:
            Handler.refuse -= 1
            return self._answer(429, b"<Error><Code>TooManyRequests</Code></Error>")
        method, path = self.command, self.path
        bucket, _, name = urllib.parse.unquote(urllib.parse.urlsplit(path).path).lstrip("/").partition("/")
        upload = method == "PUT" and name
        if upload:
            query = {"uploadType": "multipart", "name": name}  # of another kind it forgets the precondition
            if generation := self.headers.get("x-goog-if-generation-match"):
                query["ifGenerationMatch"] = generation
            method, path = "POST", f"/upload/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}"
            body = b"\r\n".join(
                (
                    *(b"--" + BOUNDARY, b"Content-Type: application/json", b"", json.dumps({"name": name}).encode()),
                    *(b"--" + BOUNDARY, b"Content-Type: application/octet-stream", b"", body),
                    b"--" + BOUNDARY + b"--\r\n",
                )
            )
        sent = {key: value for key, value in self.headers.items() if key.lower() == "range"}
        if upload:
            sent["Content-Type"] = f"multipart/related; boundary={BOUNDARY.decode()}"
        service = http.client.HTTPConnection("127.0.0.1", self.service, timeout=60)
        service.request(method, path, body, sent)
        answer = service.getresponse()
        data = answer.read()
        if upload and answer.status == 404:
            data = b"<Error><Code>NoSuchBucket</Code></Error>"  # as Google's says it
        service.close()
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(key, value)
        if upload and answer.status == 200:
            stored = json.loads(data)
            self.send_header("ETag", stored["etag"])
            self.send_header("x-goog-generation", stored["generation"])
        self.send_header(
            "Content-Length", str(len(data)) if method != "HEAD" else answer.getheader("Content-Length", "0")
        )
        self.end_headers()
        if method != "HEAD":
            self.wfile.write(data)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def log_message(self, *_: object) -> None:
        pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def main(port_file: str, server: str, *tls: str) -> None:
    Handler.service = free_port()
    public = f"127.0.0.1:{Handler.service}"  # the host under which it expects this API's requests
    words = (
        "-public-host",
        public,
        "-scheme",
        "http",
        "-host",
        "127.0.0.1",
        "-backend",
        "memory",
        "-log-level",
        "error",
    )
    fake = subprocess.Popen([server, *words, "-port", str(Handler.service)])
    while True:  # whoever started this program ends it when nothing moves
        try:
            socket.create_connection(("127.0.0.1", Handler.service), 1).close()
            break
        except OSError:
            if fake.poll() is not None:
                raise
            time.sleep(0.02)
    front = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        front.socket = context.wrap_socket(front.socket, server_side=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    temporary = Path(f"{port_file}.tmp")
    temporary.write_text(str(front.server_address[1]))
    os.replace(temporary, port_file)
    try:
        front.serve_forever()
    finally:
        fake.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
