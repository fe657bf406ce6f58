#!/usr/bin/env bash
# The whole tour on a real cluster: images, chart, a job, a deleted pod, the model at the end.
#
#   [IMAGE_REGISTRY=HOST/FOLDER] tools/cluster_demo.sh [localkube|kind|current]
#
# localkube: $LOCALKUBE or on PATH; kind: makes a cluster `diloco-demo`; current: the one of KUBECONFIG, whose
# nodes have the images, or pull them from IMAGE_REGISTRY. The cluster stays, for looking around; the last lines say how to take it away.
set -euo pipefail
cd "$(dirname "$0")/.."
KIND=${1:-}
NAME=dilocodemo
JOB=tiny-gpt
BIN=${VENV:-.venv}/bin
LOCALKUBE=${LOCALKUBE:-$(command -v localkube || true)}

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
die() { echo "cluster-demo: $*" >&2; exit 2; }
show() { printf '$ %s\n' "$*"; "$@"; }

if [ -z "$KIND" ]; then
  if [ -n "$LOCALKUBE" ]; then KIND=localkube; elif command -v kind >/dev/null; then KIND=kind; else KIND=current; fi
fi
say "A cluster ($KIND)"
case $KIND in
  localkube)
    [ -n "$LOCALKUBE" ] || die "CLUSTER=localkube needs the program: set LOCALKUBE to it"
    eval "$("$LOCALKUBE" env)"
    KUBECONFIG=$("$LOCALKUBE" up $NAME | tail -1)
    make --no-print-directory images CLUSTER=localkube:$NAME
    ;;
  kind)
    command -v kind >/dev/null || die "CLUSTER=kind needs kind on PATH"
    kind get clusters | grep -qx $NAME || kind create cluster --name $NAME
    KUBECONFIG=$(mktemp); kind get kubeconfig --name $NAME >"$KUBECONFIG"
    make --no-print-directory images CLUSTER=kind:$NAME
    ;;
  current) KUBECONFIG=${KUBECONFIG:-$HOME/.kube/config}; [ -r "$KUBECONFIG" ] || die "CLUSTER=current needs KUBECONFIG" ;;
  *) die "CLUSTER is localkube, kind or current, not '$KIND'" ;;
esac
export KUBECONFIG
for program in kubectl helm; do command -v $program >/dev/null || die "needs $program on PATH"; done

say "The operator"
show helm upgrade --install diloco charts/diloco -n diloco-system --create-namespace --wait --timeout 5m \
  --set "images.registry=${IMAGE_REGISTRY:-}"
say "A job"
show kubectl apply -f manifests/examples/$JOB.yaml
if ! show kubectl wait --for=condition=QuorumMet --timeout=5m dilocojob/$JOB; then
  kubectl describe dilocojob/$JOB
  exit 1
fi
show kubectl get dilocojobs
"$BIN/diloco" status $JOB || true

say "A learner's pod is deleted; training goes on"
( sleep 45; kubectl delete pod $JOB-local-1 --wait=false ) &
trap 'kill %1 2>/dev/null || true' EXIT
code=0
"$BIN/diloco" apply -f manifests/examples/$JOB.yaml --wait --timeout 1800 || code=$?
say "What happened"
show kubectl get dilocojobs
show kubectl describe dilocojob/$JOB
[ "$code" = 0 ] || exit "$code"

say "The model"
OUT=runs/cluster-demo
rm -rf $OUT
show "$BIN/diloco" export $JOB $OUT --context "$(kubectl config current-context)"
cat <<EOF

The cluster is still there:   export KUBECONFIG=$KUBECONFIG
Take the job away:            diloco delete $JOB      (its volume stays)
Take the cluster away:        $([ "$KIND" = localkube ] && echo "$LOCALKUBE down $NAME"; [ "$KIND" = kind ] && echo "kind delete cluster --name $NAME"; [ "$KIND" = current ] && echo "helm uninstall diloco -n diloco-system")
EOF
