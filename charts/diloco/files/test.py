"""What `helm test` runs in its pod: the operator's /readyz, and whether the API server has DiLoCoJobs."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
READY = sys.argv[1]
SECONDS = 60.0


def served() -> str:
    """Empty, or what is wrong with the CRD."""
    host = f"{os.environ['KUBERNETES_SERVICE_HOST']}"
    host = f"[{host}]" if ":" in host else host
    address = f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}/apis/diloco.io/v1alpha1"
    with open(f"{ACCOUNT}/token") as file:
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {file.read()}"})
    trusted = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    try:
        with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:
            names = [resource["name"] for resource in json.load(answer)["resources"]]
    except urllib.error.HTTPError as error:
        return f"the API server says {error.code}: the CRD dilocojobs.diloco.io is not installed (crds.install)"
    return "" if "dilocojobs" in names else "the API server has diloco.io, but no dilocojobs"


def ready() -> str:
    """Empty, or why the operator is not ready."""
    try:
        with urllib.request.urlopen(READY, timeout=10) as answer:
            return "" if answer.status == 200 else f"{READY}: {answer.status}"
    except urllib.error.HTTPError as error:
        return f"{READY}: {error.code}: {error.read(2000).decode(errors='replace').strip()}"


def main() -> int:
    end, problems = time.monotonic() + SECONDS, [""]
    while problems and time.monotonic() < end:
        problems = []
        for check in (served, ready):
            try:
                problems += [problem] if (problem := check()) else []
            except OSError as error:
                problems.append(f"{check.__name__}: {error}")
        if problems:
            time.sleep(2)
    print("\n".join(problems) or "DiLoCoJobs are served, and the operator is ready")
    return 1 if problems else 0


sys.exit(main())
