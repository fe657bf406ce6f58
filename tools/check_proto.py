"""Are the committed message classes what sync.proto says?

    python tools/check_proto.py            exit 1, with the difference, where they are not
    python tools/check_proto.py --write    regenerate them (`make proto`)

Protoc stamps its own version into what it generates. Those stamps are taken
out of both sides before comparing, so that only the definition counts.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOCOL = Path(__file__).resolve().parent.parent / "protocol"
SOURCE = "diloco_protocol/wire/sync.proto"
STUBS = ("sync_pb2.py", "sync_pb2.pyi")
STAMPS = (
    (re.compile(r"^# Protobuf Python Version: .*$", re.M), "# Protobuf Python Version: *"),
    (re.compile(r"(_runtime_version\.Domain\.PUBLIC,\n)(?:    \d+,\n){3}"), r"\1    *\n"),
)


def generate(out: Path) -> None:
    """Run protoc over sync.proto into `out`; raises SystemExit when it fails."""
    well_known = str(files("grpc_tools") / "_proto")
    arguments = ["protoc", f"-I{PROTOCOL}", f"-I{well_known}"]
    arguments += [f"--{plugin}={out}" for plugin in ("python_out", "pyi_out")]
    if protoc.main([*arguments, SOURCE]) != 0:
        raise SystemExit(f"protoc refused protocol/{SOURCE}; its words are above")


def normalised(path: Path) -> list[str]:
    """The file's lines without the generators' versions; a missing file has none."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    for pattern, replacement in STAMPS:
        text = pattern.sub(replacement, text)
    return text.splitlines()


def check() -> int:
    stale = 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        for name in STUBS:
            committed = PROTOCOL / "diloco_protocol" / "wire" / name
            fresh = Path(scratch) / "diloco_protocol" / "wire" / name
            names = (f"{name} (committed)", f"{name} (from sync.proto)")
            lines = (normalised(committed), normalised(fresh))
            difference = list(difflib.unified_diff(*lines, *names, lineterm="", n=1))
            if difference:
                stale += 1
                print("\n".join(line[:200] for line in difference[:40]))
    if stale:
        print(f"{stale} of {len(STUBS)} stubs differ from protocol/{SOURCE}: run make proto", file=sys.stderr)
    return 1 if stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="compare the committed stubs with sync.proto")
    parser.add_argument("--write", action="store_true", help="regenerate the stubs in place")
    if parser.parse_args().write:
        generate(PROTOCOL)
        return 0
    return check()


if __name__ == "__main__":
    sys.exit(main())
