"""The operator's flags and environment: the only definition; docs/operator.md is written from it.

Every setting is a flag (``--http``) and a variable (``DILOCO_OPERATOR_HTTP``). Flags beat the environment, the
environment beats the defaults. What is wrong is a ``SettingsError`` that names the flag or variable and the cure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from diloco_operator.model import RELEASE, PlanSettings
from diloco_protocol.common.http_server import AddressError, split_address
from diloco_protocol.common.logs import FORMATS, LEVELS

PREFIX = "DILOCO_OPERATOR_"
# What a cluster puts into every pod's environment for a Service called diloco-operator.
_SERVICE_LINKS = re.compile(PREFIX + r"(SERVICE_(HOST|PORT)|PORT)(_.*)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


class SettingsError(Exception):
    """A setting is wrong; the message names the flag or variable, the value and the cure."""


def _checked(convert: Callable[[str], Any], holds: Callable[[Any], object], expected: str) -> Callable[[str], Any]:
    """A reader of texts: what ``convert`` makes of one, if ``holds``. It raises ValueError otherwise."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if holds(value := convert(text)):
                return value
        raise ValueError(f"expected {expected}")

    return read


def _number(low: float, high: float) -> Callable[[str], Any]:
    return _checked(float, lambda value: low <= value <= high, f"a number from {low:g} to {high:g}")


def _digits(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError
    return int(text)


def _whole(low: int, high: int) -> Callable[[str], Any]:
    return _checked(_digits, lambda value: low <= value <= high, f"a whole number from {low} to {high}")


def _word(*words: str) -> Callable[[str], Any]:
    by_small = {word.lower(): word for word in words}
    return _checked(lambda text: by_small.get(text.lower()), bool, f"one of {', '.join(words)}")


_name = _checked(
    str,
    lambda text: _NAME.fullmatch(text) and len(text) <= 63,
    "a name of small letters, digits and dashes, at most 63 characters",
)
_image = _checked(str, lambda text: re.fullmatch(r"\S{1,1024}", text), "an image's name, such as diloco-worker:0.1.0")
_OBJECT = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_object_name = _checked(
    str,
    lambda text: re.fullmatch(_OBJECT, text) and len(text) <= 253,
    "an object's name: small letters, digits, dashes and dots, at most 253 characters",
)
_path = _checked(str, lambda text: text.startswith("/"), "an absolute path")


def _several(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(dict.fromkeys(read(part) for part in re.split(r"[,\s]+", text.strip()) if part))


def _address(text: str) -> str:
    try:
        split_address(text, "")
    except AddressError as error:
        raise ValueError("expected HOST:PORT, such as [::]:7720") from error
    return text


def _setting(default: Any, read: Callable[[str], Any], takes: str, text: str, shown: str = "") -> Any:
    return field(default=default, metadata={"read": read, "takes": takes, "text": text, "shown": shown})


@dataclass(frozen=True, slots=True)
class Settings(PlanSettings):
    """Everything that can be set; first what the plan depends on."""

    cluster: str | None = _setting(
        None,
        _name,
        "NAME",
        "This cluster's name, as jobs over several clusters write it in `syncer.cluster` and `regions[].cluster`. "
        "Without a name, only jobs that name no cluster are placed here.",
        shown="none",
    )
    namespace: str = _setting("diloco-system", _name, "NAME", "The operator's own namespace; its root key is there.")
    syncer_image: str = _setting(
        f"diloco-syncer:{RELEASE}",
        _image,
        "IMAGE",
        "Image of the syncer, for jobs that start from now on; running jobs keep theirs.",
    )
    worker_image: str = _setting(
        f"diloco-worker:{RELEASE}",
        _image,
        "IMAGE",
        "Image of learners and evaluators, for jobs that start from now on.",
    )
    image_pull_policy: str = _setting(
        "IfNotPresent",
        _word("Always", "IfNotPresent", "Never"),
        "POLICY",
        "imagePullPolicy of these images: Always, IfNotPresent or Never.",
    )
    metrics_namespace: str | None = _setting(
        None,
        _name,
        "NAME",
        "The namespace whose pods may scrape jobs' metrics (NetworkPolicy); none: all namespaces.",
        shown="none",
    )
    pull_secrets: tuple[str, ...] = _setting(
        (),
        _several(_object_name),
        "A,B",
        "Pull secrets for the pods of all jobs; they must exist in each job's namespace. A job's podTemplates can add "
        "more.",
        shown="none",
    )
    priority_class: str | None = _setting(
        None,
        _object_name,
        "NAME",
        "PriorityClass for pods whose podTemplates name none; none: the cluster's default.",
        shown="none",
    )
    watch_namespaces: tuple[str, ...] = _setting(
        (),
        _several(_name),
        "A,B",
        "Namespaces whose jobs the operator looks after; empty: all, which needs a ClusterRole. "
        "With names, Roles in these namespaces are enough. The operator then cannot read nodes, and notices a lost "
        "node only by its silent pods.",
        shown="all",
    )
    resync_seconds: float = _setting(
        20.0, _number(5, 300), "SECONDS", "The longest time between two looks at a job when nothing happens."
    )
    workers: int = _setting(8, _whole(1, 64), "N", "Jobs that are looked at in parallel.")
    api_threads: int = _setting(8, _whole(1, 64), "N", "Parallel requests to the API server (watches not counted).")
    api_timeout_seconds: float = _setting(15.0, _number(1, 120), "SECONDS", "The longest time for one such request.")
    syncer_calls: int = _setting(32, _whole(1, 512), "N", "Parallel calls to syncers and learners.")
    syncer_timeout_seconds: float = _setting(3.0, _number(0.5, 30), "SECONDS", "The longest time for one such call.")
    lease: str = _setting(
        "diloco-operator",
        _name,
        "NAME",
        "The Lease, in the operator's own namespace, by which several operators elect a leader. Use one name for all "
        "operators that look after the same jobs, and another for all others.",
    )
    http: str = _setting("[::]:7720", _address, "HOST:PORT", "Where `/healthz`, `/readyz` and `/metrics` are served.")
    key_file: str = _setting(
        "/etc/diloco/key/key",
        _path,
        "FILE",
        "The root key, from the Secret `diloco-operator-key`. If there is none, the operator creates the Secret.",
    )
    log_level: str = _setting("INFO", _word(*LEVELS), "LEVEL", "The lowest level that is logged.")
    log_format: str = _setting("json", _word(*FORMATS), "FORMAT", "json: one object per line; text: for people.")

    @property
    def watches_nodes(self) -> bool:
        """Nodes belong to no namespace: only an operator of the whole cluster reads them."""
        return not self.watch_namespaces


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def fields() -> tuple[dataclasses.Field[Any], ...]:
    """The settings, each with ``takes``, ``text`` and ``shown`` in its metadata."""
    return tuple(field for field in dataclasses.fields(Settings) if "read" in field.metadata)


def shown_default(setting: dataclasses.Field[Any]) -> str:
    """A setting's default, for people."""
    if setting.metadata["shown"]:
        return str(setting.metadata["shown"])
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def parser() -> argparse.ArgumentParser:
    """Of the command line; values are read by ``load``, so that flags and environment err alike."""
    made = argparse.ArgumentParser(
        prog="python -m diloco_operator",
        description="The operator creates the pods, services and volumes of each DiLoCoJob and repairs them when they "
        "fail. It finds the API server by its pod's ServiceAccount, else by KUBECONFIG or ~/.kube/config.",
        epilog="Every flag can be set as a variable too, such as --watch-namespaces as "
        f"{variable('watch_namespaces')}; the flag overrides the variable. More is in docs/operator.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for setting in fields():
        text = setting.metadata["text"].replace("%", "%%")
        made.add_argument(
            flag(setting.name),
            metavar=setting.metadata["takes"],
            default=None,
            help=f"{text} [{variable(setting.name)}; {shown_default(setting)}]",
        )
    return made


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """The settings from a command line and an environment. Raises SettingsError with all that is wrong.

    An empty variable counts as absent, so that a manifest may leave one in.
    """
    given = vars(parser().parse_args(arguments))
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for setting in fields():
        text, origin = given[setting.name], flag(setting.name)
        if text is None:
            text, origin = environment.get(variable(setting.name)) or None, variable(setting.name)
        if text is None:
            continue
        try:
            values[setting.name] = cast("Callable[[str], Any]", setting.metadata["read"])(text)
        except ValueError as error:
            wrong.append(f"{origin}={text!r}: {error}")
    known = {variable(setting.name) for setting in fields()}
    wrong += [
        f"{name}: there is no such setting; see python -m diloco_operator --help"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in known and not _SERVICE_LINKS.fullmatch(name)
    ]
    if wrong:
        raise SettingsError("\n".join(wrong))
    return Settings(**values)
