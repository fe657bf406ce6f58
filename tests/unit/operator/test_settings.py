"""The operator's flags and environment."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from diloco_operator.model import PlanSettings
from diloco_operator.settings import Settings, SettingsError, fields, flag, load, shown_default, variable


def test_defaults() -> None:
    assert load([], {}) == Settings()


def test_flags_beat_the_environment_which_beats_defaults() -> None:
    environment = {variable("cluster"): "from-env", variable("workers"): "3"}
    found = load(["--cluster", "from-flag"], environment)
    assert (found.cluster, found.workers, found.api_threads) == ("from-flag", 3, Settings().api_threads)


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert load([], {variable("cluster"): "", variable("watch_namespaces"): ""}) == Settings()


def test_namespaces_are_split_at_commas_and_spaces() -> None:
    found = load([], {variable("watch_namespaces"): "a, b,a c"})
    assert found.watch_namespaces == ("a", "b", "c")
    assert not found.watches_nodes
    assert Settings().watches_nodes


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("cluster", "No Such", "small letters"),
        ("watch_namespaces", "a,B", "small letters"),
        ("syncer_image", "two words", "an image's name"),
        ("image_pull_policy", "Sometimes", "one of Always, IfNotPresent, Never"),
        ("resync_seconds", "soon", "a number from 5 to 300"),
        ("resync_seconds", "nan", "a number from 5 to 300"),
        ("resync_seconds", "4", "a number from 5 to 300"),
        ("workers", "0", "a whole number from 1 to 64"),
        ("workers", "1.5", "a whole number from 1 to 64"),
        ("http", "7720", "HOST:PORT"),
        ("http", "[::]:99999", "HOST:PORT"),
        ("key_file", "key", "an absolute path"),
        ("log_level", "LOUD", "one of DEBUG"),
        ("log_format", "xml", "one of json, text"),
    ],
)
def test_what_is_wrong_is_named_with_its_cure(name: str, value: str, cure: str) -> None:
    with pytest.raises(SettingsError, match=cure) as by_flag:
        load([flag(name), value], {})
    assert str(by_flag.value).startswith(f"{flag(name)}={value!r}")
    with pytest.raises(SettingsError, match=cure) as by_variable:
        load([], {variable(name): value})
    assert str(by_variable.value).startswith(f"{variable(name)}={value!r}")


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        load(["--workers", "x"], {variable("http"): "y", "DILOCO_OPERATOR_CLUSTR": "z"})
    assert len(str(error.value).splitlines()) == 3
    assert "DILOCO_OPERATOR_CLUSTR: there is no such setting" in str(error.value)


def test_what_a_cluster_sets_for_a_service_of_our_name_is_no_mistake() -> None:
    links = {
        "DILOCO_OPERATOR_SERVICE_HOST": "10.0.0.1",
        "DILOCO_OPERATOR_SERVICE_PORT": "7720",
        "DILOCO_OPERATOR_SERVICE_PORT_HTTP": "7720",
        "DILOCO_OPERATOR_PORT": "tcp://10.0.0.1:7720",
        "DILOCO_OPERATOR_PORT_7720_TCP_ADDR": "10.0.0.1",
    }
    assert load([], links) == Settings()


def test_all_that_the_plan_depends_on_can_be_set() -> None:
    known = {setting.name for setting in fields() if setting.metadata}
    planned = {setting.name for setting in dataclasses.fields(PlanSettings)} - {"release"}  # that is the program's
    assert planned < known == {f.name for f in fields()}
    assert isinstance(Settings(), PlanSettings)


def test_help_names_every_flag_and_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        load(["--help"], {})
    said = capsys.readouterr().out
    assert ended.value.code == 0
    for setting in fields():
        assert f"{flag(setting.name)} {setting.metadata['takes']}" in said
        assert f"[{variable(setting.name)}; {shown_default(setting)}]" in said


def test_what_stops_it_at_the_start_is_said_and_is_exit_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diloco_operator"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin", "HOME": "/nonexistent"},
    )
    assert done.returncode == 2, done.stderr
    assert "set KUBECONFIG" in done.stderr
