"""What the project asks of an environment."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from repository import ROOT


def test_every_requirement_has_bounds_that_the_locked_version_is_within() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    pins = dict(
        line.split("==")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if line and not line.startswith("#")
    )
    for requirement in [Requirement(line) for line in [*lines, *document["build-system"]["requires"]]]:
        kinds = {specifier.operator for specifier in requirement.specifier}
        assert kinds == {">=", "<"}, f"{requirement}: it has no bound on one side"
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is not None:
            assert pin in requirement.specifier, f"{requirement}: the lock has {pin}"
        else:
            assert requirement.name == "setuptools", f"{requirement}: the lock lacks it"
