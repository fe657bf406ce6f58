# One file, an image per role: --target operator | syncer | worker. `make images` builds all.
#
#   BASE_IMAGE           a Debian or Ubuntu with CPython below /usr/local, as the official python images are
#   TORCH_INDEX          the index to take torch from, as the install page of pytorch.org names it for
#                        your CPU or CUDA version; empty: the index that pip is set up with
#   WORKER_EXTRAS        extras of pyproject.toml for the worker, e.g. "worker datasets"
#   KERNEL_CPU           LLVM's name of the oldest CPU that shall run syncer and worker; the kernels of
#   KERNEL_CPU_FEATURES  codec and merge are compiled for it when the image is built
#   VERSION              what the labels say
#
# Layers go from what seldom changes to what often does: the dependencies that all roles share,
# the role's own, torch, and last our code and its compiled kernels. What is installed comes from
# lists that tools/requirements.py cuts out of pyproject.toml, at the versions of requirements.lock;
# a change elsewhere in pyproject.toml, or in the code, installs nothing anew.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

# ------------------------------------------------------------------ what all images begin with
FROM ${BASE_IMAGE} AS base
# Programs look up who runs them (torch's caches are named by it), so the user has a name.
RUN echo 'diloco:x:65532:65532:diloco:/tmp:/usr/sbin/nologin' >>/etc/passwd \
 && echo 'diloco:x:65532:' >>/etc/group
# The official images carry the standard library without byte code, and no program could keep
# it: a third of a syncer's start would be compiling that library.
RUN python -m compileall -q -j 0 -x '/(site-packages|test|tests|idlelib|lib2to3|tkinter|turtledemo|ensurepip)/' \
      "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
# The root file system is read-only in a cluster; /tmp is what can be written.
ENV HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# ------------------------------------------------------------------ dependencies, layer by layer
FROM base AS lists
WORKDIR /src
COPY pyproject.toml requirements.lock ./
COPY tools/requirements.py tools/
ARG WORKER_EXTRAS=worker
RUN mkdir /lists && cp requirements.lock /lists/lock \
 && python tools/requirements.py >/lists/common \
 && python tools/requirements.py --extra operator >/lists/operator \
 && python tools/requirements.py --extra syncer >/lists/syncer \
 && python tools/requirements.py --extra worker --only torch >/lists/torch \
 && python tools/requirements.py $(printf -- '--extra %s ' ${WORKER_EXTRAS}) --without torch >/lists/worker \
 && grep '^setuptools==' requirements.lock >/lists/build \
 && touch -d @0 /lists /lists/*

# pip installs below /install what is not below /usr/local yet; an image copies it to /usr/local.
FROM base AS pip
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=
COPY --from=lists /lists/lock /lists/lock

FROM pip AS common-install
COPY --from=lists /lists/common /lists/common
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --prefix=/install --no-warn-script-location -c /lists/lock -r /lists/common \
 && find /install -type d -path '*/numpy/*' -name tests -prune -exec rm -rf {} +

FROM base AS common
COPY --from=common-install /install /usr/local

FROM pip AS operator-install
COPY --from=common-install /install /usr/local
COPY --from=lists /lists/operator /lists/operator
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --prefix=/install --no-warn-script-location -c /lists/lock -r /lists/operator \
 && rm -rf /install/lib/python*/site-packages/kubernetes/aio
# The line above: a second client, for asyncio, half of that package. The operator uses the first.

FROM pip AS syncer-install
COPY --from=common-install /install /usr/local
COPY --from=lists /lists/syncer /lists/syncer
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --prefix=/install --no-warn-script-location -c /lists/lock -r /lists/syncer \
 && rm -rf /install/lib/python*/site-packages/numba/tests /install/lib/python*/site-packages/llvmlite/tests

FROM common AS compute
COPY --from=syncer-install /install /usr/local
ARG KERNEL_CPU=x86-64-v3
ARG KERNEL_CPU_FEATURES=
# numba keys its cache by source, CPU name and features, so the values are the same when the kernels
# are compiled and when they are used. diloco_protocol/arrays/kernel_cache.py says what the class is for.
ENV NUMBA_CACHE_DIR=/usr/local/share/diloco/kernels \
    NUMBA_CACHE_LOCATOR_CLASSES=diloco_protocol.arrays.kernel_cache.BuiltCacheLocator,InTreeCacheLocator,UserWideCacheLocator \
    NUMBA_CPU_NAME=${KERNEL_CPU} \
    NUMBA_CPU_FEATURES=${KERNEL_CPU_FEATURES}

FROM pip AS torch-install
COPY --from=common-install /install /usr/local
COPY --from=syncer-install /install /usr/local
COPY --from=lists /lists/torch /lists/torch
ARG TORCH_INDEX=
# From an index of its own comes torch alone; what it needs is on the usual one.
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ -n "${TORCH_INDEX}" ]; then \
      pip install --prefix=/install --no-warn-script-location -c /lists/lock --index-url "${TORCH_INDEX}" --no-deps -r /lists/torch; \
    else \
      pip install --prefix=/install --no-warn-script-location -c /lists/lock -r /lists/torch; \
    fi \
 && rm -rf /install/lib/python*/site-packages/torch/test \
 && find /install/lib/python*/site-packages/torch/bin -type f ! -name torch_shm_manager -delete
# The last two lines: programs and data of torch's own tests, and protoc, a fifth of that package.

FROM pip AS worker-install
COPY --from=common-install /install /usr/local
COPY --from=syncer-install /install /usr/local
COPY --from=torch-install /install /usr/local
COPY --from=lists /lists/torch /lists/worker /lists/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --prefix=/install --no-warn-script-location -c /lists/lock -r /lists/torch -r /lists/worker

# ------------------------------------------------------------------ our code
FROM pip AS code
COPY --from=lists /lists/build /lists/build
RUN --mount=type=cache,target=/root/.cache/pip pip install -c /lists/lock -r /lists/build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY syncer syncer
COPY worker worker
COPY operator operator
COPY cli cli
RUN pip install --prefix=/install --no-warn-script-location --no-deps --no-build-isolation --no-index .

FROM compute AS kernels
COPY --from=code /install /usr/local
RUN python -c 'import diloco_protocol.arrays.codec_kernels, diloco_protocol.arrays.codec, diloco_syncer.numerics.median, diloco_syncer.numerics.merge, diloco_syncer.numerics.outer; from diloco_protocol.arrays.kernels import compile_all; compile_all()' \
 && test -n "$(find "${NUMBA_CACHE_DIR}" -name '*.nbi')"

# ------------------------------------------------------------------ images
# Nothing is installed into the operator any more, and nothing built in the syncer: what the base has for that
# goes. pip stays in syncer and worker, for images of your own that begin with them.
FROM common AS operator
RUN python -m pip uninstall -y -q --root-user-action=ignore setuptools wheel pip \
 && rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip
COPY --from=operator-install /install /usr/local
COPY --from=code /install /usr/local
USER 65532:65532
EXPOSE 7720
ENTRYPOINT ["python", "-m", "diloco_operator"]
ARG VERSION=0
LABEL org.opencontainers.image.title="diloco-operator" \
      org.opencontainers.image.description="Operator of DiLoCoJobs: Decoupled DiLoCo on Kubernetes" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM compute AS syncer
RUN python -m pip uninstall -y -q --root-user-action=ignore setuptools wheel
COPY --from=code /install /usr/local
COPY --from=kernels /usr/local/share/diloco/kernels /usr/local/share/diloco/kernels
USER 65532:65532
EXPOSE 7700 7701 7702
ENTRYPOINT ["python", "-m", "diloco_syncer"]
ARG VERSION=0
LABEL org.opencontainers.image.title="diloco-syncer" \
      org.opencontainers.image.description="Syncer of a DiLoCoJob: merges what its learners learnt" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"

# The worker is also what images of your own begin from: FROM diloco-worker, then your script.
FROM compute AS worker
COPY --from=torch-install /install /usr/local
COPY --from=worker-install /install /usr/local
COPY --from=code /install /usr/local
COPY --from=kernels /usr/local/share/diloco/kernels /usr/local/share/diloco/kernels
WORKDIR /workspace
USER 65532:65532
EXPOSE 7710
ENTRYPOINT ["python", "-m", "diloco_worker"]
ARG VERSION=0
LABEL org.opencontainers.image.title="diloco-worker" \
      org.opencontainers.image.description="Learners and evaluator of a DiLoCoJob, and the library for loops of your own" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
