"""The chart and what is made of it: README's table, manifests/install.yaml, and its checks.

    python tools/chart.py package --registry HOST/FOLDER [--out DIR]
                                 the chart as a release publishes it, and its install.yaml,
                                 both with the registry that has the release's images
    python tools/chart.py check  helm lint and helm template with each file of charts/diloco/ci;
                                 and what that makes, to the API server of KUBECONFIG, if that
                                 is set, as a dry run

tools/generate.py writes charts/diloco/README.md from the comments in values.yaml, and manifests/install.yaml from
the chart by `helm template`. helm and kubectl are taken from PATH, or from where `$LOCALKUBE env` says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "diloco"
NAMESPACE = "diloco-system"
NOT_CORE = ("PodMonitor", "PrometheusRule")  # kinds that a bare cluster does not have
HEADER = """\
# The operator without Helm: kubectl apply -f manifests/install.yaml
# Made of charts/diloco with its defaults (`make generate`); docs/operator.md says what to change.
"""


class Problem(Exception):
    """What is wrong, for the one who runs this."""


class Skipped(Exception):
    """Why something cannot be made here: a program is not installed."""


# ---------------------------------------------------------------- values and README


class Value(NamedTuple):
    """A documented value. ``default`` is what values.yaml has there, in JSON."""

    path: str
    default: str
    text: str


_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):")
_COMMENT = re.compile(r"^( *)# ?(.*)$")


def documented(text: str) -> Iterator[Value]:
    """The values of a values.yaml that a comment beginning with ``--`` precedes. Raises Problem."""
    document = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    words: list[str] = []
    for line in text.splitlines():
        comment, key = _COMMENT.match(line), _KEY.match(line)
        if comment and (words or comment[2].startswith("-- ")):
            if comment[2].startswith("-- "):
                words = []
            words.append(comment[2].removeprefix("-- ").strip())
            continue
        if key:
            indent = len(key[1])
            path = [*((i, name) for i, name in path if i < indent), (indent, key[2])]
            if words:
                names = [name for _, name in path]
                value: Any = document
                for name in names:
                    if not isinstance(value, dict) or name not in value:
                        raise Problem(f"values.yaml: no value {'.'.join(names)}, which a comment describes")
                    value = value[name]
                yield Value(".".join(names), json.dumps(value), " ".join(words))
        words = []


def table(text: str) -> str:
    """The table of README.md."""
    rows = ["| value | default | what it is |", "|---|---|---|"]
    for value in documented(text):
        default = value.default.replace("|", "\\|")
        rows.append(f"| `{value.path}` | `{default}` | {value.text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def values_table() -> dict[str, str]:
    """The generated part of README.md. Raises Problem."""
    return {"values": table((CHART / "values.yaml").read_text(encoding="utf-8"))}


# ---------------------------------------------------------------- programs


def program(name: str) -> str | None:
    """Where a program is; None: nowhere."""
    path = os.environ["PATH"]
    localkube = os.environ.get("LOCALKUBE") or shutil.which("localkube")
    if shutil.which(name) is None and localkube:
        said = subprocess.run([localkube, "env"], capture_output=True, text=True, timeout=300, check=False)
        found = re.search(r"PATH=([^:\s]+)", said.stdout)
        path = f"{path}:{found[1]}" if found else path
    return shutil.which(name, path=path)


def needed(name: str) -> str:
    """Where a program is. Raises Problem."""
    found = program(name)
    if found is None:
        raise Problem(f"needs {name}, which is not on PATH (nor with LOCALKUBE)")
    return found


def run(*command: str, stdin: str | None = None) -> str:
    """stdout of a command. Raises Problem with what it said."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise Problem(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def template(*words: str, namespace: str = NAMESPACE, release: str = "diloco") -> str:
    """What `helm template` makes of the chart. Raises Problem."""
    return run(needed("helm"), "template", release, str(CHART), "--namespace", namespace, *words)


# ---------------------------------------------------------------- manifests/install.yaml


def install_manifest(*words: str) -> str:
    """The chart's objects for `kubectl apply`, with their namespace, without what is Helm's own. ``words``: helm's.
    Raises Skipped without helm."""
    if program("helm") is None:
        raise Skipped("helm is neither on PATH nor where $LOCALKUBE env says")
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }
    lines = []
    for line in template("--no-hooks", *words).splitlines():
        if line.strip() == "helm.sh/resource-policy: keep" and lines[-1].strip() == "annotations:":
            lines.pop()
        elif line.strip() == "app.kubernetes.io/managed-by: Helm" or "helm.sh/" in line:
            continue
        elif line.strip() and not line.startswith("# Source: "):
            lines.append(line)
    return f"{HEADER}{yaml.safe_dump(namespace, sort_keys=False)}{chr(10).join(lines)}\n"


# ---------------------------------------------------------------- checks


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a rendered chart."""
    return [found for found in yaml.safe_load_all(text) if found]


def check() -> None:
    """Lint and render with every file of ci/, and try it on the API server of KUBECONFIG. Raises Problem."""
    helm = needed("helm")
    cluster = "KUBECONFIG" in os.environ
    kubectl = needed("kubectl") if cluster else ""
    for values in sorted((CHART / "ci").glob("*.yaml")):
        run(helm, "lint", str(CHART), "--strict", "--values", str(values))
        # A namespace that every cluster has: a dry run finds no other.
        rendered = documents(template("--values", str(values), namespace="default"))
        said = f"{values.name}: lint, {len(rendered)} objects"
        if cluster:
            known = [one for one in rendered if one["kind"] not in NOT_CORE]
            for one in known:
                if one["kind"] == "Pod":  # its own account would have to be there already
                    one["spec"]["serviceAccountName"] = "default"
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": known})
            run(
                kubectl,
                "apply",
                "--server-side",
                "--dry-run=server",
                "--force-conflicts",
                "--validate=strict",
                "--field-manager=chart-check",
                "-f",
                "-",
                stdin=text,
            )
            said += f", {len(known)} of them tried on the API server"
        print(said)
    if not cluster:
        print("no dry run on an API server: KUBECONFIG is not set")


def with_registry(values: str, registry: str) -> str:
    """values.yaml with ``registry`` as the default of images.registry. Raises Problem: it has no such line."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9._-]+)*", registry):
        raise Problem(f"{registry!r} is no registry: write HOST or HOST/FOLDER, in lower case")
    filled, count = re.subn(r'(?m)^  registry: ""$', f'  registry: "{registry}"', values)
    if count != 1:
        raise Problem(f'values.yaml has {count} lines `registry: ""` below images, not one')
    return filled


def package(registry: str, out: Path) -> None:
    """The chart's archive and install.yaml in ``out``, whose images are those of ``registry``."""
    helm = needed("helm")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / CHART.name
        shutil.copytree(CHART, copy)
        values = copy / "values.yaml"
        values.write_text(with_registry(values.read_text(encoding="utf-8"), registry), encoding="utf-8")
        print(run(helm, "package", str(copy), "--destination", str(out)).strip())
    (out / "install.yaml").write_text(install_manifest("--set", f"images.registry={registry}"), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("check", "package"))
    parser.add_argument("--registry", help="package: where the release's images are")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="package: where to (default: dist)")
    arguments = parser.parse_args()
    try:
        if arguments.what == "check":
            check()
            return 0
        if not arguments.registry:
            parser.error("package --registry HOST/FOLDER")
        package(arguments.registry, arguments.out)
        return 0
    except Problem as problem:
        print(f"chart: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
