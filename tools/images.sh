#!/usr/bin/env bash
# Build the container images with docker, podman or localkube, whichever is there, and put them into a cluster.
#
#   tools/images.sh build [ROLE...]                      operator, syncer and worker (or those named), as
#                                                        diloco-ROLE:TAG, and their sizes
#   tools/images.sh build-one DIR TAG [DOCKERFILE]       any image, e.g. one of your own FROM diloco-worker
#   tools/images.sh load CLUSTER [TAG...]                into kind:NAME or localkube:NAME (no tags: our three)
#   tools/images.sh tags                                 print the three names
#
# Environment: ENGINE (docker | podman | localkube; default: the first that answers), LOCALKUBE (the program, if it
# is not on PATH), IMAGE_TAG (default: the version in pyproject.toml), TORCH_INDEX, WORKER_EXTRAS, KERNEL_CPU,
# KERNEL_CPU_FEATURES and BASE_IMAGE as the Dockerfile says, CLUSTER (build: load into this kind:NAME or
# localkube:NAME afterwards).
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ROLES=(operator syncer worker)
LOCALKUBE=${LOCALKUBE:-$(command -v localkube || true)}

die() { echo "images: $*" >&2; exit 2; }
say() { echo "images: $*" >&2; }

version() { sed -n 's/^version = "\(.*\)"$/\1/p' "$ROOT/pyproject.toml" | head -1; }
TAG=${IMAGE_TAG:-$(version)}

engine() {
  if [ -n "${ENGINE:-}" ]; then
    case $ENGINE in docker|podman|localkube) ;; *) die "ENGINE is docker, podman or localkube, not '$ENGINE'";; esac
    [ "$ENGINE" != localkube ] || [ -n "$LOCALKUBE" ] || die "ENGINE=localkube needs the program: set LOCALKUBE to it"
    echo "$ENGINE"
  elif [ -n "$LOCALKUBE" ] && [[ ${CLUSTER:-} == localkube* ]]; then echo localkube
  elif docker info >/dev/null 2>&1; then echo docker
  elif podman info >/dev/null 2>&1; then echo podman
  elif [ -n "$LOCALKUBE" ]; then echo localkube
  else die "nothing to build with: start docker, or install podman, or set LOCALKUBE"; fi
}

# localkube's builds have this machine's settings of pip, and the folders that these name. An index that is a folder
# (file://…/simple) links to files beside it, so the folder above it is mounted too; and so is a file of constraints.
mounts_of_pip() {
  local settings path
  settings=$(python3 -m pip config list 2>/dev/null || true)
  {
    grep -oE "file://[^ ']+" <<<"$settings" | sed 's,^file://,,' | xargs -r -n 1 dirname
    sed -nE "s/^[^=]*\\.constraint='(.*)'$/\\1/p" <<<"$settings" | tr ' ' '\n'
  } | sort -u | while read -r path; do
    if [ -e "$path" ]; then echo "-v"; echo "$path:$path:ro"; fi
  done
}

# build_image DIR TAG DOCKERFILE ARGS...
build_image() {
  local dir=$1 tag=$2 file=$3 with start=$SECONDS folder; shift 3
  with=$(engine)
  case $with in
    docker) docker build -q -t "$tag" -f "$dir/$file" "$@" "$dir" >/dev/null ;;
    podman) podman build -q --format docker -t "$tag" -f "$dir/$file" "$@" "$dir" >/dev/null ;;
    localkube)
      folder=$dir
      if [ "$file" != Dockerfile ]; then # it builds what is called Dockerfile
        folder=$(mktemp -d); cp -R "$dir/." "$folder"; cp "$dir/$file" "$folder/Dockerfile"
      fi
      local mounts=(); mapfile -t mounts < <(mounts_of_pip)
      local log; log=$(mktemp)
      if ! "$LOCALKUBE" build "$folder" "$tag" "${mounts[@]}" "$@" >"$log" 2>&1; then
        tail -40 "$log" >&2; rm -f "$log"; die "$tag was not built"
      fi
      rm -f "$log"; [ "$folder" = "$dir" ] || rm -rf "$folder" ;;
  esac
  say "$tag built with $with in $((SECONDS - start)) s$(size "$with" "$tag")"
}

size() { # size ENGINE TAG: of all its layers, in MB
  local bytes=
  case $1 in
    docker|podman) bytes=$("$1" image inspect -f '{{.Size}}' "$2") ;;
    localkube) return 0 ;; # has no word for it
  esac
  echo ", $((bytes / 1000000)) MB"
}

build() {
  local role roles=("$@") args=() name
  [ $# -gt 0 ] || roles=("${ROLES[@]}")
  for name in BASE_IMAGE TORCH_INDEX WORKER_EXTRAS KERNEL_CPU KERNEL_CPU_FEATURES; do
    [ -z "${!name:-}" ] || args+=(--build-arg "$name=${!name}")
  done
  # x86-64-v3 is the Dockerfile's own; other kinds of processor have other names.
  [ -n "${KERNEL_CPU:-}" ] || [ "$(uname -m)" = x86_64 ] || args+=(--build-arg KERNEL_CPU=generic)
  for role in "${roles[@]}"; do
    [[ " ${ROLES[*]} " == *" $role "* ]] || die "no image '$role'; there are ${ROLES[*]}"
    build_image "$ROOT" "diloco-$role:$TAG" Dockerfile --target "$role" --build-arg "VERSION=$TAG" "${args[@]}"
  done
}

tags() { printf "diloco-%s:$TAG\n" "${ROLES[@]}"; }

load() {
  local cluster=$1 kind=${1%%:*} name=${1#*:} with archive tag; shift
  local tags=("$@"); [ $# -gt 0 ] || mapfile -t tags < <(tags)
  with=$(CLUSTER=$kind:$name engine)
  say "loading ${#tags[@]} images into $kind:$name (the worker's has torch: a minute or more)"
  case $kind in
    localkube)
      [ "$with" = localkube ] || die "a localkube cluster takes images that localkube built (ENGINE=localkube)"
      "$LOCALKUBE" load "$name" "${tags[@]}" >/dev/null 2>&1 || die "localkube did not load ${tags[*]} into $name" ;;
    kind)
      [ "$with" != localkube ] || die "a kind cluster takes images that docker or podman built"
      if [ "$with" = docker ]; then kind load docker-image --name "$name" "${tags[@]}"
      else
        for tag in "${tags[@]}"; do
          archive=$(mktemp --suffix=.tar); podman save -q -o "$archive" "$tag"
          kind load image-archive --name "$name" "$archive"; rm -f "$archive"
        done
      fi ;;
    *) die "CLUSTER is kind:NAME or localkube:NAME, not '$cluster'" ;;
  esac
  say "${tags[*]} loaded into $kind:$name"
}

words=${1:-help}; [ $# -eq 0 ] || shift
case $words in
  build) build "$@"; [[ ${CLUSTER:-} != *:* ]] || load "$CLUSTER" ;;
  build-one) [ $# -ge 2 ] || die "build-one DIR TAG [DOCKERFILE]"; build_image "$1" "$2" "${3:-Dockerfile}" ;;
  load) [ $# -ge 1 ] || die "load CLUSTER [TAG...]"; load "$@" ;;
  tags) tags ;;
  *) sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | sed -n 's/^# \{0,1\}//p'; exit 2 ;;
esac
