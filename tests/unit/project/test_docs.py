"""docs/protocol.md says what the code says: every message, reason, limit and test vector."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from diloco_operator.plan.conditions import condition_set
from diloco_protocol import vocabulary
from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.documents import Document, LearnerPage, StatusDocument, read_document
from diloco_protocol.security.identity import name as certificate_name
from diloco_protocol.vocabulary import ConnectionRefusal, PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk, control_auth, limits, sync_pb2
from diloco_worker.core.leases import order_within_block
from repository import ROOT

DOCS = ROOT / "docs"
PROTOCOL = (DOCS / "protocol.md").read_text(encoding="utf-8")
NAMES = [
    certificate_name("ns", "tiny", "syncer"),
    certificate_name("ns", "tiny", "learner"),
    certificate_name("ns", "tiny", "learner", "eu-1"),
]
PAGES = [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]
FOLDERS = (
    "protocol",
    "syncer",
    "worker",
    "operator",
    "cli",
    "tests",
    "tools",
    "bench",
    "examples",
    "charts",
    "manifests",
)
PROMETHEUS = ("increase", "rate")  # functions of its queries
LINK = re.compile(r"\]\(([^)#\s]*)(#([^)]*))?\)")
UNITS = {"": 1, "s": 1, "characters": 1, "KiB": 1 << 10, "KiB/s": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def prose_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)


def anchors_of(page: Path) -> set[str]:
    """What a link may name after ``#``: headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", sorted(sync_pb2.DESCRIPTOR.message_types_by_name))
def test_every_message_is_described(name: str) -> None:
    assert re.search(rf"`{name}(`| )", PROTOCOL), f"docs/protocol.md does not mention {name}"


@pytest.mark.parametrize("reason", [*(r.value for r in PushRefusal), TransferRefusal.PARTIAL, TransferRefusal.BUSY])
def test_every_reason_is_described(reason: str) -> None:
    assert f"| `{reason}` |" in PROTOCOL or f"`{reason}`" in PROTOCOL.split("And of transfers")[1][:200]


@pytest.mark.parametrize("uri", [name.uri for name in NAMES])
def test_the_names_in_certificates(uri: str) -> None:
    assert f"| `{uri}` |" in PROTOCOL.replace("NAMESPACE/NAME", "ns/tiny").replace("REGION", "eu-1")


def test_every_refusal_of_a_connection_is_described() -> None:
    table = PROTOCOL.split("**Refusals** of connections")[1].split("A Join that is refused")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    described = {word for row in rows for word in re.findall(r"`([a-z-]+)`", row)}
    parts = [*(ROOT / "syncer/diloco_syncer/server").rglob("*.py"), *(ROOT / "protocol/diloco_protocol").rglob("*.py")]
    source = "".join(part.read_text(encoding="utf-8") for part in parts)
    said = {refusal.value for refusal in ConnectionRefusal if f"ConnectionRefusal.{refusal.name}" in source}
    assert said == {refusal.value for refusal in ConnectionRefusal}
    assert described == said and len(said) > 20


def test_reasons_that_are_gone_are_not_described() -> None:
    table = PROTOCOL.split("## Why a push is refused")[1].split("And of transfers")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.M)) == {r.value for r in PushRefusal}


def test_the_limits_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| .* \| ([\d.]+) ?([A-Za-z/]*) \| `([A-Z_]+)` \|$", PROTOCOL, re.M)
    assert len(rows) >= 14
    for number, unit, constant in rows:
        assert int(number) * UNITS[unit] == (vars(vocabulary) | vars(limits))[constant], constant


def test_the_bounds_of_the_syncers_memory_are_those_of_the_code() -> None:
    text = (DOCS / "running-in-a-cluster.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| ([\d.]+) ?([A-Za-z/]*) \| `(\w+)\.([A-Z_]+)` \|$", text, re.M)
    assert len(rows) >= 12
    for number, unit, module, constant in rows:
        (path,) = [
            found
            for part in ("protocol/diloco_protocol/wire", "syncer")
            for found in (ROOT / part).rglob(f"{module}.py")
        ]
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
        assert int(number) * UNITS[unit] == getattr(importlib.import_module(name), constant), f"{module}.{constant}"


def test_the_encoding_vectors() -> None:
    small = np.array([1.0, -0.5, 0.25, 0.0, -1.0], np.float32)
    i = np.arange(1000)
    large = (((37 * i) % 101 - 50) / 64).astype(np.float32)
    for name in codec.ENCODINGS:
        hexes = re.search(rf"^\| `{name}` \| `([0-9a-f ]+)` \|$", PROTOCOL, re.M)
        assert hexes is not None
        assert codec.encode(small, name).tobytes() == bytes.fromhex(hexes.group(1))
        payload = codec.encode(large, name)
        decoded = codec.decode(payload, name, 1000)
        sums = f"`{bulk.checksum(payload):016x}` | `{bulk.checksum(decoded):016x}`"
        assert f"| `{name}` | {payload.size} | {sums} |" in PROTOCOL


def test_the_layout_example() -> None:
    tensors = [
        Tensor("head.bias", (10,), "float32"),
        Tensor("embed.weight", (20, 6), "float32", True),
        Tensor("body.weight", (9, 8), "bfloat16"),
    ]
    layout = Layout.build(tensors, 4)
    assert f"{layout.to_json()}\n{layout.digest}\n" in PROTOCOL


def test_the_signature_example() -> None:
    nonce = bytes(range(16))
    call = sync_pb2.SignedCall(method="checkpoint", body=b"{}", time_ms=1760000000000, nonce=nonce)
    (text,) = re.findall(r"the signature is `([0-9a-f]{64})`", PROTOCOL)
    call.signature = bytes.fromhex(text)
    control_auth.verify_call(b"0123456789abcdef", call, control_auth.NonceCache(), now_ms=1760000000000)


def test_the_data_order_example_by_another_generator() -> None:
    """numpy's legacy generator, seeded as the page says, is the second implementation."""
    pattern = r"For seed (\d+), data epoch (\d+), block (\d+) and ten sequences the order is ([\d, ]+)"
    found = re.search(pattern, PROTOCOL)
    assert found is not None
    seed, data_epoch, block = (int(found.group(n)) for n in (1, 2, 3))
    number = int.from_bytes(hashlib.sha256(f"{seed}:{data_epoch}:{block}".encode()).digest(), "big")
    words = [number >> shift & 0xFFFFFFFF for shift in range(0, number.bit_length(), 32)]
    uniform = np.random.RandomState(words).random_sample
    order = list(range(10))
    for last in range(9, 0, -1):
        other = int(uniform() * (last + 1))
        order[last], order[other] = order[other], order[last]
    assert order == [int(n) for n in found.group(4).split(",") if n.strip()]
    assert order == order_within_block(seed, data_epoch, block, 10)


def test_metrics_that_pages_name_exist() -> None:
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("monitoring.md", "running-in-a-cluster.md"))
    text += PROTOCOL
    parts = ("syncer/diloco_syncer/server/pages/metrics.py", "worker/diloco_worker/status_page.py")
    source = "".join((DOCS.parent / part).read_text(encoding="utf-8") for part in parts)
    names = set(re.findall(r"`(?:increase\()?diloco_([a-z_]+)[`{\[]", text)) - {"syncer", "worker"}
    assert len(names) >= 8
    for name in names:
        short = name.removesuffix("_total")
        of_worker = short.removeprefix("worker_")
        known = (short, f"diloco_{short}", short.removeprefix("slot_"), of_worker)
        assert any(f'"{candidate}"' in source for candidate in known), f"diloco_{name}"


def test_links_between_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target, _, anchor in LINK.findall(prose_of(page)):
            if "://" in target:
                continue
            found = (page.parent / target).resolve() if target else page
            assert found.exists(), f"{page.name} links to {target}, which is not there"
            if anchor and found.suffix == ".md":
                assert anchor in anchors_of(found), (
                    f"{page.name} links to {target}#{anchor}, a heading that is not there"
                )


def test_files_that_pages_name_exist() -> None:
    """From the repository's root, or the last part of some file's path."""
    paths = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for page in PAGES:
        for word in re.findall(r"`([\w./-]+)`", prose_of(page)):
            if word.partition("/")[0] in FOLDERS and "/" in word:
                assert (ROOT / word).exists(), f"{page.name} names {word}, which is not there"
            elif word.endswith(".py"):
                assert any(path.endswith(f"/{word}") for path in paths), f"{page.name} names {word}, which is not there"


def test_every_condition_is_explained() -> None:
    section = (DOCS / "operator.md").read_text(encoding="utf-8").partition("## Conditions")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", section, re.M)) == condition_set.ORDER


def test_files_that_comments_outside_python_name_exist() -> None:
    packages = "|".join(["diloco", *(f"diloco_{name}" for name in ("protocol", "syncer", "worker", "operator"))])
    named = 0
    for place in (ROOT / "Dockerfile", ROOT / "Makefile", *(ROOT / "charts").rglob("templates/*.*")):
        for word in re.findall(rf"\b(?:{packages})/[\w/]+\.py\b", place.read_text(encoding="utf-8")):
            named += 1
            assert list(ROOT.glob(f"*/{word}")), f"{place.name} names {word}, which is not there"
    assert named >= 2


def test_functions_that_pages_name_exist() -> None:
    defined = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            defined |= set(
                re.findall(
                    r"^ *(?:(?:async )?(?:def|class)|from .* import .* as) (\w+)",
                    path.read_text(encoding="utf-8"),
                    re.M,
                )
            )
    named = 0
    for page in PAGES:
        for call in re.findall(r"`((?:\w+\.)*\w+)\([^`]*\)`", prose_of(page)):
            package, _, function = call.rpartition(".")
            if package.partition(".")[0] not in ("torch", "grpc", "nn") and function not in PROMETHEUS:
                named += 1
                assert function in defined, f"{page.name} names {call}(), which is not there"
    assert named > 10


def test_sections_of_the_algorithm_that_code_cites_exist() -> None:
    headings = re.findall(r"^#{2,3} (?:(\d)\. )?(.*)$", (DOCS / "algorithm.md").read_text(encoding="utf-8"), re.M)
    numbers, titles = {number for number, _ in headings}, {title for _, title in headings}
    cited = 0
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            for number, title in re.findall(r"algorithm\.md,? section (\d)(?:\.\d)?(?:,\s+([A-Z]\w+))?", source):
                cited += 1
                assert number in numbers and (not title or title in titles), (
                    f"{path.name} cites section {number} {title}"
                )
    assert cited > 10


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    return re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def test_the_contracts_have_the_words_of_the_vocabulary() -> None:
    text = (DOCS / "contracts.md").read_text(encoding="utf-8")

    def first_column(heading: str) -> list[str]:
        rows = re.findall(r"^\| (`[^|]*`|\d+) \|", section(text, heading), re.M)
        return [word for row in rows for word in re.findall(r"[\w-]+", row)]

    assert sorted(first_column("Events")) == sorted(vocabulary.EventKind)
    assert first_column("Control calls") == list(vocabulary.ControlMethod)
    assert [int(code) for code in first_column("The syncer")] == list(vocabulary.SyncerExit)
    assert [int(code) for code in first_column("Workers") if code.isdecimal()] == list(vocabulary.WorkerExit)
    ports = [value for name, value in vars(vocabulary).items() if name.endswith("_PORT")]
    assert [int(word) for word in first_column("In a cluster") if word.isdecimal()] == ports


def test_the_contracts_have_what_programs_are_told() -> None:
    text = (DOCS / "contracts.md").read_text(encoding="utf-8")
    worker = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "worker").rglob("*.py"))
    variables = set(re.findall(r"\bDILOCO_[A-Z]+(?:_[A-Z]+)*\b", worker))
    assert variables and variables == set(re.findall(r"\bDILOCO_[A-Z]+(?:_[A-Z]+)*\b", section(text, "Workers")))
    syncer = (ROOT / "syncer/diloco_syncer/__main__.py").read_text(encoding="utf-8")
    flags = set(re.findall(r"add_argument\(\s*\"(--[a-z-]+)\"", syncer))
    assert flags and flags == set(re.findall(r"--[a-z-]+", section(text, "The syncer").split("```")[1]))


@pytest.mark.parametrize(
    ("heading", "model"), [("Status document", StatusDocument), ("The learner's page", LearnerPage)]
)
def test_the_examples_of_documents_are_read_by_the_products_reader(heading: str, model: type[Document]) -> None:
    text = section((DOCS / "contracts.md").read_text(encoding="utf-8"), heading)
    (example,) = re.findall(r"```json\n(.*?)```", text, re.S)
    document = read_document(model, example)
    assert document.model_dump(mode="json") == json.loads(example), "it has every field"


def test_the_algorithm_is_about_as_long_as_its_heading_says() -> None:
    """A reader plans an hour by it."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"^## The algorithm in ([\d,]+) lines$", text, re.M)
    files = re.findall(r"^\| \d \| `([^`]+)` \|", section(text, f"The algorithm in {said} lines"), re.M)
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert len(files) == 6 and abs(lines - int(said.replace(",", ""))) <= 100


def test_every_decision_is_in_the_index() -> None:
    folder = DOCS / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for page in sorted(folder.glob("*.md")):
        title = re.fullmatch(r"# (?:\d{3}: )?(.+)", page.read_text(encoding="utf-8").splitlines()[0])
        assert title, f"{page.name} begins with its title"
        if page.name != "README.md":
            assert re.search(rf"^- \[.*\]\({page.name}\) {re.escape(title.group(1))}$", index, re.M), page.name
