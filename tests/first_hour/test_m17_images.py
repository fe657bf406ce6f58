"""M17: without a registry no node pulls an image that somebody else could own, and releases publish everything.

On commit 8f0ca90 the chart's pods pulled names without a registry, and nothing published an image, a chart or a wheel.
"""

from __future__ import annotations

import re
import sys

import pytest
import yaml

from repository import ROOT, VERSION

sys.path.insert(0, str(ROOT / "tools"))

import chart

VALUES = (ROOT / "charts" / "diloco" / "values.yaml").read_text(encoding="utf-8")
IMAGES = [f"diloco-{role}:{VERSION}" for role in ("operator", "syncer", "worker")]
needs_helm = pytest.mark.skipif(
    chart.program("helm") is None, reason="helm is neither on PATH nor where $LOCALKUBE env says"
)


def policies(*words: str) -> set[str]:
    """How the chart's own pods get their images, and those of jobs."""
    text = chart.template(*words)
    own = re.findall(r"imagePullPolicy: (\w+)", text)
    assert own
    return {*own, *re.findall(r"name: DILOCO_OPERATOR_IMAGE_PULL_POLICY, value: (\w+)", text)}


@needs_helm
def test_m17_a_name_without_a_registry_is_never_pulled() -> None:
    assert policies() == {"Never"}
    assert policies("--set", "images.registry=registry.example.org/team") == {"IfNotPresent"}


@needs_helm
def test_m17_an_installation_without_a_registry_is_told_what_to_do() -> None:
    helm = chart.needed("helm")
    said = chart.run(helm, "install", "diloco", str(chart.CHART), "-n", "diloco-system", "--dry-run=client")
    notes = said.partition("NOTES:")[2]
    assert all(image in notes for image in IMAGES), notes
    assert "make images" in notes and "images.registry" in notes


def test_m17_a_release_publishes_images_chart_and_package() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    for part in ("docker/build-push-action", "cosign sign", "helm push", "pypa/gh-action-pypi-publish"):
        assert part in workflow, part
    assert yaml.safe_load(VALUES)["images"]["registry"] == "", "a release fills it in"
    filled = yaml.safe_load(chart.with_registry(VALUES, "registry.example.org/team"))
    assert filled["images"]["registry"] == "registry.example.org/team"
