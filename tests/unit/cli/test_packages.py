"""A command whose packages are not installed says so before anything is started, with the extra to install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.packages import HERE, absent_packages, is_installed, packages_of
from repository import ROOT

EXAMPLE = ROOT / "examples" / "minimal.yaml"
INSTALL = "pip install 'decoupled-diloco[local]'"
Bare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """`diloco` as it is installed without extras: beside the packages that are here, less those of the extras."""
    left_out = {package.replace("-", "_") for extra in HERE for package in packages_of(extra)}
    assert {"torch", "numba", "prometheus_client"} <= left_out
    site = tmp_path_factory.mktemp("site-packages")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if entry.name.partition(".")[0].partition("-")[0].lower() not in left_out:
            (site / entry.name).symlink_to(entry)
    own = [str(ROOT / folder) for folder in ("cli", "operator", "protocol", "syncer", "worker")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*own, str(site)])}

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-m", "diloco.main", *map(str, arguments)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_a_run_is_refused_in_one_line(bare: Bare, tmp_path: Path) -> None:
    done = bare("run", EXAMPLE, "--workdir", tmp_path / "run")
    assert done.returncode == 2 and not done.stdout, done
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: diloco run needs ") and said.endswith(f"which are not installed: {INSTALL}")
    assert "torch" in said and "prometheus-client" in said
    assert not (tmp_path / "run").exists()


def test_a_plan_needs_them_for_the_jobs_own_model_alone(bare: Bare) -> None:
    done = bare("plan", EXAMPLE, "--step-seconds", "1")
    assert done.returncode == 2, done
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: diloco plan without --params needs ") and said.endswith(INSTALL)
    done = bare("plan", EXAMPLE, "--step-seconds", "1", "--params", "1B")
    assert done.returncode == 0 and "trained parameters" in done.stdout, done


@pytest.mark.parametrize(
    "command", [["export", "run", "model"], ["syncer", "serve", str(EXAMPLE)], ["learner", "join", "127.0.0.1:1"]]
)
def test_other_commands_have_no_traceback_either(bare: Bare, command: list[str]) -> None:
    done = bare(*command)
    assert done.returncode == 2, done
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: ") and said.endswith(INSTALL)


def test_validate_says_what_it_did_not_look_at(bare: Bare) -> None:
    done = bare("validate", EXAMPLE)
    assert done.returncode == 0 and "a valid job" in done.stdout, done
    assert "unchecked model, tokenizer and device: " in done.stdout and INSTALL in done.stdout


def test_the_extras_are_those_of_the_package_and_all_are_here() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in HERE:
        assert packages_of(extra) == [re.match("[A-Za-z0-9-]+", line)[0] for line in extras[extra]]  # type: ignore[index]
    assert set(extras["local"]) == {line for extra in HERE for line in extras[extra]}
    assert absent_packages(HERE) == [] and is_installed("prometheus-client") and not is_installed("no-such-package")
