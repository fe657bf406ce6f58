"""The message classes of sync.proto, generated (tools/generate.py).

Protoc stamps its own version into what it generates. Stubs that differ in those stamps alone are current, so that only
the definition counts.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOCOL = Path(__file__).resolve().parent.parent / "protocol"
SOURCE = "diloco_protocol/wire/sync.proto"
STAMPS = (
    (re.compile(r"^# Protobuf Python Version: .*$", re.M), "# Protobuf Python Version: *"),
    (re.compile(r"(_runtime_version\.Domain\.PUBLIC,\n)(?:    \d+,\n){3}"), r"\1    *\n"),
)


@functools.cache
def generated() -> dict[str, str]:
    """What protoc makes of sync.proto: the text of each file. Raises ValueError if it refuses the definition."""
    well_known = str(files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as out:
        arguments = ["protoc", f"-I{PROTOCOL}", f"-I{well_known}"]
        arguments += [f"--{plugin}={out}" for plugin in ("python_out", "pyi_out")]
        if protoc.main([*arguments, SOURCE]) != 0:
            raise ValueError(f"protoc refused protocol/{SOURCE}; its words are above")
        return {path.name: path.read_text(encoding="utf-8") for path in Path(out).rglob("*.py*")}


def without_stamps(text: str) -> str:
    """The text without the generators' versions."""
    for pattern, replacement in STAMPS:
        text = pattern.sub(replacement, text)
    return text


def stub(name: str, there: str) -> str:
    """The file as it is, if it is what sync.proto says, or else generated anew."""
    return there if without_stamps(there) == without_stamps(generated()[name]) else generated()[name]


STUBS: dict[str, Callable[[str], str]] = {
    name: functools.partial(stub, name) for name in ("sync_pb2.py", "sync_pb2.pyi")
}
