"""What somebody who may create DiLoCoJobs in one namespace can do to the operator of all: nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from kopf._cogs.clients import api, auth, fetching, watching
from kopf._cogs.configs.configuration import OperatorSettings
from kopf._cogs.structs import credentials, references

from diloco_operator.job import read_job
from diloco_protocol.common import bounded_json
from diloco_protocol.common.bounded_json import MAX_DEPTH, TOO_DEEP, is_deep, prune


@pytest.fixture
def installed() -> Iterator[None]:
    before = json._default_decoder  # type: ignore[attr-defined]
    bounded_json.install()
    yield
    json._default_decoder = before  # type: ignore[attr-defined]


def nested(depth: int, *, lists: bool = False) -> str:
    return "[" * depth + "1" + "]" * depth if lists else '{"a":' * depth + "1" + "}" * depth


def a_job(name: str, template: str) -> str:
    meta = json.dumps({"name": name, "namespace": "ns", "uid": name, "resourceVersion": "7"})
    spec = f'{{"regions": [{{"learners": 1}}], "learners": {{"podTemplate": {{"x": {template}}}}}}}'
    return f'{{"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {meta}, "spec": {spec}}}'


@pytest.mark.parametrize("depth", [MAX_DEPTH, 300, 990, 1200, 200_000])
@pytest.mark.parametrize("lists", [False, True])
def test_what_is_nested_too_deeply_is_read_without_it(installed: None, depth: int, lists: bool) -> None:
    text = f'{{"before": "[{{\\\\\\"", "deep": {nested(depth, lists=lists)}, "after": [{{}}, "}}"]}}'
    read = json.loads(text)
    assert (read["before"], read["after"]) == ('[{\\"', [{}, "}"])
    assert TOO_DEEP in json.dumps(read)
    assert json.loads(text.encode()) == read


def test_what_is_not_is_read_as_ever(installed: None) -> None:
    for text in (nested(MAX_DEPTH), "[" + ",".join([nested(50)] * 50) + "]", '"' + "[" * 500 + '"', "[]", "1"):
        assert not is_deep(text)
        assert json.loads(text) == json.JSONDecoder().decode(text)
    for wrong in ("[" * 500, "]" * 500, nested(500)[:-3], '{"a":' * 500 + '"', ""):
        with pytest.raises(ValueError):
            json.loads(wrong)
    assert json.loads(prune(nested(MAX_DEPTH + 1)))


@pytest.mark.promise(
    "A job that is nested too deeply is invalid with that reason, and kopf lists and watches all others",
    section="Hostile callers",
)
@pytest.mark.parametrize("depth", [150, 900, 5000])
def test_a_job_nested_too_deeply_is_invalid_by_name(installed: None, depth: int) -> None:
    job = read_job(json.loads(a_job("deep", nested(depth))))
    assert job.document is None and job.name == "deep"
    assert job.problems == (f"spec: is nested more than {MAX_DEPTH} levels deep, and cannot be read",)
    assert read_job(json.loads(a_job("sane", "1"))).problems != job.problems


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An API server whose list and whose watch have a job nested 1200 deep beside others."""
    request = (await reader.readuntil(b"\r\n\r\n")).decode()
    jobs = [a_job("one", "1"), a_job("deep", nested(1200)), a_job("two", "1")]
    if "watch=true" in request.split("\r\n")[0]:
        body = "\n".join(f'{{"type": "ADDED", "object": {job}}}' for job in jobs) + "\n"
    else:
        body = f'{{"kind": "DiLoCoJobList", "metadata": {{"resourceVersion": "9"}}, "items": [{", ".join(jobs)}]}}'
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
    writer.write(f"{head}\r\n\r\n{body}".encode())
    await writer.drain()
    writer.close()


@pytest.mark.promise(
    "A job that is nested too deeply is invalid with that reason, and kopf lists and watches all others",
    section="Hostile callers",
)
async def test_kopf_lists_and_watches_all_other_jobs(installed: None) -> None:
    """kopf's own functions, against a server."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    resource = references.Resource("diloco.io", "v1alpha1", "dilocojobs", namespaced=True)
    vault = credentials.Vault({"x": credentials.ConnectionInfo(server=f"http://127.0.0.1:{port}")})
    auth.vault_var.set(vault)
    settings: Any = OperatorSettings()
    logger: Any = logging.getLogger("test")
    try:
        listed = [
            item["metadata"]["name"]
            async for items, _ in fetching.fetch_objs(
                settings=settings, resource=resource, namespace=None, logger=logger
            )
            for item in items
        ]
        assert listed == ["one", "deep", "two"]
        pause: Any = asyncio.get_running_loop().create_future()
        watched = [
            event["object"]["metadata"]["name"]
            async for event in watching.watch_objs(
                settings=settings, resource=resource, namespace=None, since="9", operator_pause_waiter=pause
            )
        ]
        assert watched == ["one", "deep", "two"]
        assert api.json.loads(nested(1200))
    finally:
        await vault.close()
        server.close()


@pytest.mark.promise(
    "A job that is nested too deeply is invalid with that reason, and kopf lists and watches all others",
    section="Hostile callers",
)
def test_the_program_reads_so() -> None:
    """Installed by the program itself, before it reads anything."""
    code = (
        "import json, sys; from diloco_operator import __main__ as program; sys.argv = ['x', '--no-such-option']\n"
        "try:\n    program.main()\nexcept SystemExit:\n    print(json.loads('[' * 5000 + ']' * 5000) is not None)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "True", ran.stderr
