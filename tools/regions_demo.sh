#!/usr/bin/env bash
# One job over two clusters: images, certificates, the chart in each, and a link that is cut and healed.
#
#   tools/regions_demo.sh [localkube|kind]
#
# localkube: $LOCALKUBE or on PATH. With kind both clusters are containers of one network, and nothing is cut.
# The clusters stay, for looking around; the last lines say how to take them away.
set -euo pipefail
cd "$(dirname "$0")/.."
KIND=${1:-}
HUB=dilocohub FAR=dilocoeu
JOB=tiny-gpt FILE=manifests/regions/tiny-gpt.yaml
OUT=runs/regions-demo
BIN=${VENV:-.venv}/bin
LOCALKUBE=${LOCALKUBE:-$(command -v localkube || true)}

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
die() { echo "regions-demo: $*" >&2; exit 2; }
show() { printf '$ %s\n' "$*"; "$@"; }

if [ -z "$KIND" ]; then
  if [ -n "$LOCALKUBE" ]; then KIND=localkube; elif command -v kind >/dev/null; then KIND=kind; fi
fi
rm -rf $OUT; mkdir -p $OUT
say "Two clusters (${KIND:-none})"
case $KIND in
  localkube)
    [ -n "$LOCALKUBE" ] || die "CLUSTER=localkube needs the program: set LOCALKUBE to it"
    eval "$("$LOCALKUBE" env)"
    hub=$("$LOCALKUBE" up $HUB | tail -1) far=$("$LOCALKUBE" up $FAR | tail -1)
    make --no-print-directory images CLUSTER=localkube:$HUB
    tools/images.sh load localkube:$FAR
    ;;
  kind)
    command -v kind >/dev/null || die "CLUSTER=kind needs kind on PATH"
    for name in $HUB $FAR; do
      kind get clusters | grep -qx $name || kind create cluster --name $name
      kind get kubeconfig --name $name >$OUT/$name.kubeconfig
    done
    hub=$OUT/$HUB.kubeconfig far=$OUT/$FAR.kubeconfig
    make --no-print-directory images CLUSTER=kind:$HUB
    tools/images.sh load kind:$FAR
    ;;
  *) die "CLUSTER is localkube or kind: one machine has to carry two clusters" ;;
esac
for program in kubectl helm; do command -v $program >/dev/null || die "needs $program on PATH"; done

# One kubeconfig with the contexts that the guide speaks of.
export KUBECONFIG=$PWD/$OUT/kubeconfig
"$BIN/python" tools/contexts.py "$KUBECONFIG" hub="$hub" eu-1="$far"
address=$(kubectl --context hub get nodes -o jsonpath='{.items[0].status.addresses[?(@.type=="InternalIP")].address}'):30443

say "Certificates: an authority, and a folder for the syncer and for each region"
show "$BIN/diloco" certs init --out $OUT/pki
show "$BIN/diloco" certs issue $FILE --pki $OUT/pki
made=$OUT/pki/default/$JOB
show kubectl --context hub apply --server-side -f $made/syncer/secret.yaml -f $made/hub/secret.yaml
show kubectl --context eu-1 apply --server-side -f $made/eu-1/secret.yaml

say "The operator, in each cluster under its name"
for name in hub eu-1; do
  show helm --kube-context $name upgrade --install diloco charts/diloco -n diloco-system --create-namespace \
    --set cluster.name=$name --wait --timeout 5m
done

say "The same job in both"
show "$BIN/diloco" apply $FILE --set "syncer.endpoint.address=$address" --context hub --context eu-1
show kubectl --context eu-1 wait --for=condition=HubReachable --timeout=5m dilocojob/$JOB
show kubectl --context hub wait --for=condition=QuorumMet --timeout=5m dilocojob/$JOB
show "$BIN/diloco" status $JOB --context hub

if [ "$KIND" = localkube ]; then
  say "The far cluster is cut off for 30 seconds; training goes on, and it comes back by itself"
  ( sleep 20; "$LOCALKUBE" cut $FAR; sleep 30; "$LOCALKUBE" heal $FAR ) &
  trap 'kill %1 2>/dev/null || true; "$LOCALKUBE" heal $FAR 2>/dev/null || true' EXIT
fi
code=0
"$BIN/diloco" apply $FILE --set "syncer.endpoint.address=$address" --context hub --wait --timeout 1800 || code=$?
say "What happened"
show kubectl --context hub get dilocojobs
show kubectl --context hub describe dilocojob/$JOB
show kubectl --context eu-1 get dilocojobs
[ "$code" = 0 ] || exit "$code"

say "The model"
show "$BIN/diloco" export $JOB $OUT/model --context hub
cat <<EOF

The clusters are still there:  export KUBECONFIG=$KUBECONFIG   (contexts hub and eu-1)
Take the job away:             $BIN/diloco delete $JOB --context hub --context eu-1     (its volume stays)
Take the clusters away:        $([ "$KIND" = localkube ] && echo "$LOCALKUBE down $HUB; $LOCALKUBE down $FAR"; [ "$KIND" = kind ] && echo "kind delete clusters $HUB $FAR")
EOF
