"""What a release is made of: version, extras, the README of a package index, the chart's registry, workflows."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_protocol.spec.load import parse_job
from repository import ROOT, VERSION

sys.path.insert(0, str(ROOT / "tools"))

import chart
import dist
import nightly
import version
import wheel_check
import wheel_tries

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
URL = "https://git.example.org/them/it"


# ---------------------------------------------------------------- version


def test_every_file_has_the_version_of_the_project() -> None:
    assert version.current() == VERSION
    assert version.differences(VERSION) == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in {name for name, _ in (version.PYPROJECT, *version.FOLLOWERS)}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("wanted", ["2.10.0", "0.1.10"])
def test_a_version_is_set_in_every_file(copy: Path, wanted: str) -> None:
    version.set_version(wanted, copy)
    assert version.current(copy) == wanted
    assert version.differences(wanted, copy) == []
    assert len(version.differences(VERSION, copy)) == len(version.FOLLOWERS)
    version.set_version(VERSION, copy)
    for name, _ in (version.PYPROJECT, *version.FOLLOWERS):
        assert (copy / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.parametrize("wrong", ["", "v1.2.3", "1.2", "1.2.3rc1", "1.2.3-rc1", "1.2.3\n"])
def test_what_is_no_version_changes_nothing(copy: Path, wrong: str) -> None:
    with pytest.raises(SystemExit, match="is none"):
        version.set_version(wrong, copy)
    assert version.current(copy) == VERSION


# ---------------------------------------------------------------- package


def test_one_machine_needs_what_syncer_and_worker_need() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras["local"]) == {*extras["syncer"], *extras["worker"]}


def test_the_wheel_check_tries_every_extra_that_a_user_names() -> None:
    assert {*wheel_check.TRIED} - {"base"} == {*PROJECT["optional-dependencies"]} - wheel_check.NOT_FOR_USERS


def test_the_wheel_check_uses_the_packages_of_datasets_and_peft() -> None:
    """Its jobs are valid and its programs compile; the packages themselves are only there when it runs."""
    assert wheel_check.TRIED["datasets"] is wheel_tries.try_datasets and "local" in wheel_check.ALSO["datasets"]
    for name, text in vars(wheel_tries).items():
        if name.endswith("_JOB"):
            parse_job(text)
    for program in (wheel_tries.LOAD_ADAPTER, wheel_tries.WRITE_RECORDS):
        compile(program, "program", "exec")
    names: dict[str, Any] = {}
    exec(next(line for line in wheel_tries.WRITE_RECORDS.splitlines() if line.startswith("stories = ")), names)
    assert sum(len(story.encode()) + 1 for story in names["stories"]) == wheel_tries.TOKENS


def test_an_index_is_told_who_what_and_for_whom() -> None:
    assert PROJECT["authors"] and PROJECT["urls"]
    assert "Programming Language :: Python :: 3.11" in PROJECT["classifiers"]
    # With a license expression, which there is, such a line is an error.
    assert not any(line.startswith("License ::") for line in PROJECT["classifiers"])


def test_links_of_the_readme_lead_to_the_repository_at_the_tag() -> None:
    text = dist.for_an_index(README, URL, "v1.2.3")
    relative = [target for target in re.findall(r"\]\(([^)\s]*)\)", text) if not re.match(r"https?:|#", target)]
    assert relative == []
    assert f"![architecture]({URL}/raw/v1.2.3/docs/architecture.svg)" in text
    assert f"]({URL}/blob/v1.2.3/docs/job.md)" in text
    assert f"[examples/]({URL}/tree/v1.2.3/examples)" in text


def test_without_a_repository_links_are_words_and_code_stays() -> None:
    text = dist.for_an_index(
        "![a](b.svg)See [x [y]](docs/z.md#q) and [p](https://e.org).\n```\n[c](d.md)\n```\n", None, "main"
    )
    assert text == "See x [y] and [p](https://e.org).\n```\n[c](d.md)\n```\n"


@pytest.mark.slow
def test_sdist_and_wheel_hold_what_their_help_and_readme_name(tmp_path: Path) -> None:
    sdist, wheel = dist.build(tmp_path, URL, "v1.2.3")
    examples = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".yaml", ".py", ".Dockerfile")}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"decoupled_diloco-{VERSION}.dist-info/METADATA").decode()
    assert {name.rpartition("/")[2] for name in names if "/packaged_examples/" in name} == examples
    assert not [name for name in names if name.startswith(("tests", "tools", "bench", "docs"))]
    assert f"Project-URL: Repository, {URL}" in metadata and f"]({URL}/blob/v1.2.3/docs/job.md)" in metadata
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    linked = {target for target in re.findall(r"\]\(([^)#\s]+)", README) if ":" not in target}
    assert {target.rstrip("/") for target in linked} <= held


def test_addresses_of_the_repository_come_into_the_metadata() -> None:
    text = dist.with_urls((ROOT / "pyproject.toml").read_text(encoding="utf-8"), f"{URL}/", "v1.2.3")
    urls = tomllib.loads(text)["project"]["urls"]
    assert urls["Repository"] == URL and urls["Changelog"] == f"{URL}/blob/v1.2.3/CHANGELOG.md"
    assert urls.items() >= PROJECT["urls"].items()


# ---------------------------------------------------------------- chart


def test_a_releases_chart_has_its_registry() -> None:
    text = (ROOT / "charts/diloco/values.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["images"]["registry"] == ""
    values = yaml.safe_load(chart.with_registry(text, "registry.example.org:5000/them/diloco"))
    assert values["images"].pop("registry") == "registry.example.org:5000/them/diloco"
    before = yaml.safe_load(text)
    del before["images"]["registry"]
    assert values == before


@pytest.mark.parametrize("wrong", ["", "Registry.example.org", "oci://registry.example.org", 'a"b', "a b", "a/"])
def test_what_is_no_registry_is_refused(wrong: str) -> None:
    with pytest.raises(chart.Problem, match="is no registry"):
        chart.with_registry((ROOT / "charts/diloco/values.yaml").read_text(encoding="utf-8"), wrong)


# ---------------------------------------------------------------- workflows


def steps(workflow: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    return [step for job in document["jobs"].values() for step in job["steps"]]


def commands(workflow: Path) -> str:
    return "\n".join(step["run"] for step in steps(workflow) if "run" in step)


def test_each_purpose_has_a_workflow() -> None:
    assert [*WORKFLOWS] == ["ci", "docs", "nightly", "release"]
    for name, command in (("ci", ".ci/run"), ("docs", "make site"), ("nightly", "make nightly")):
        assert command in commands(WORKFLOWS[name])
    document = yaml.safe_load(WORKFLOWS["nightly"].read_text(encoding="utf-8"))
    patterns = document["jobs"]["parts"]["strategy"]["matrix"]["only"]
    for part in nightly.list_parts():  # images are a step of the jobs that need them
        assert part.name == "images" or any(fnmatch(part.name, pattern) for pattern in patterns), part.name


@pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=[*WORKFLOWS])
def test_a_workflow_is_bounded_may_little_and_names_what_is_there(workflow: Path) -> None:
    document = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert document["permissions"] == {"contents": "read"}
    assert document[True]  # `on`, as YAML reads it
    for name, job in document["jobs"].items():
        assert 0 < job["timeout-minutes"] <= (360 if workflow.stem == "nightly" else 180), name
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else {*needs} <= {*document["jobs"]}, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert re.fullmatch(r"[\w./-]+@[\w./]+", step.get("uses", "a@v1"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {target for line in re.findall(r"^([a-z][a-z -]*):(?!=)", makefile, re.M) for target in line.split()}
    text = commands(workflow)
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert target in targets, target
    for path in re.findall(r"(?:tools|\.ci)/[\w.]+", text):
        assert (ROOT / path).is_file(), path


def test_a_release_publishes_after_its_checks_under_no_name_of_its_own() -> None:
    document = yaml.safe_load(WORKFLOWS["release"].read_text(encoding="utf-8"))
    jobs = document["jobs"]

    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else {*needs}
        return direct.union(*(before(other) for other in direct))

    assert all("check" in before(name) for name in jobs if name != "check")
    assert {"package", "chart", "sign", "images"} <= before("index") and "index" in before("release")
    assert "make wheel-check" in str(jobs["check"]) and "make lint" in str(jobs["check"])
    text = WORKFLOWS["release"].read_text(encoding="utf-8")
    assert document["env"]["REGISTRY"] == "${{ vars.REGISTRY }}"
    assert "password:" not in str(jobs["index"])  # trusted publishing
    assert jobs["index"]["permissions"] == {"id-token": "write"}
    assert "sbom: true" in text and "cosign sign" in text
    roles = {image.removeprefix("diloco-") for image in ("diloco-operator", "diloco-syncer", "diloco-worker")}
    assert {*jobs["images"]["strategy"]["matrix"]["role"]} == roles
    assert jobs["images"]["strategy"]["matrix"]["arch"] == ["amd64", "arm64"]
