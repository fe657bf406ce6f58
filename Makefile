# `make` lists the targets. `make demo` and `make test` set everything up by themselves.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := syncer,worker,operator,dev,tensorboard,report
# An index to take torch from, as the install page of pytorch.org gives it for
# your CPU or CUDA version; empty: the index that pip is set up with.
TORCH_INDEX ?=
# An S3 for tests, in an environment of its own: tests/s3/server.py says why.
S3_SERVICE := $(VENV)/s3-service
# Further buckets for tests. Their packages are large, so they are installed only on request.
BUCKET_SERVICES := $(VENV)/bucket-services
AZURITE := azurite@3.35.0
# What builds the site of docs/, in an environment of its own: nothing else needs it.
SITE := $(VENV)/site
TORCH := $(shell sed -n 's/^torch==/torch==/p' requirements.lock)
# Modules with compiled loops: compiled once here, not by each of the processes that a test run starts together.
KERNELS := diloco_protocol.arrays.codec_kernels, diloco_syncer.numerics.median, diloco_syncer.numerics.merge, diloco_syncer.numerics.outer
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -qq

DEMO_JOB ?= examples/tiny-gpt.yaml
DEMO_DIR ?= runs/demo
DEMO_CHAOS ?= 30s:kill:local-1
# Words for pytest, for instance PYTEST_ARGS="-k ledger -x".
PYTEST_ARGS ?=
# How many tests run at once (0: in one process, for --pdb and -s). Each has processes of its own.
# One more than there are processors, as many of them wait for something.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
PYTEST := $(BIN)/python -m pytest
AT_ONCE := -n $(JOBS) --dist worksteal
# Tests start hundreds of processes: they share compiled modules, also where the environment (many
# containers' does) tells Python to keep none.
export PYTHONDONTWRITEBYTECODE :=
BENCHES := merge codec wire overlap encodings memory bandwidth
BENCH_ARGS ?=

##@ Begin here
.PHONY: help
help: ## List these targets, by purpose
	@awk -F':.*## ' '/^##@/ {print "\n" substr($$0, 5)} \
	  /^[a-z][a-z0-9 -]*:.*## / {if (length($$1) > 16) {print "  " $$1; $$1 = ""}; printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMP) $(S3_SERVICE)/.installed ## Make .venv and install everything, pinned (TORCH_INDEX=URL chooses the build of torch)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "This needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 | grep Python || echo not there)." >&2; \
	  echo "Name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "Could not make $(VENV): some systems keep venv in a package of its own (python3-venv)." >&2; exit 1; }
	@echo "Installing into $(VENV), the first time in some minutes: 1 of 3, torch (the largest)"
	@$(PIP_INSTALL) -c requirements.lock $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) --no-deps) $(TORCH)
	@echo "2 of 3, this project and the packages that it uses"
	@$(PIP_INSTALL) -c requirements.lock -e '.[$(EXTRAS)]'
	@echo "3 of 3, compiling the kernels that merge and encode"
	@$(BIN)/python -c 'import $(KERNELS); from diloco_protocol.arrays.kernels import compile_all; compile_all()'
	@touch $@

$(S3_SERVICE)/.installed: tests/s3/requirements.txt | $(STAMP)
	@test -x $(S3_SERVICE)/bin/python || $(BIN)/python -m venv $(S3_SERVICE)
	@$(S3_SERVICE)/bin/python -m pip install --disable-pip-version-check -qq -r $<
	@touch $@

.PHONY: demo
demo: $(STAMP) ## Train a small model with three learners, kill one, and show what happens (2-3 minutes)
	@if [ -e $(DEMO_DIR)/report.json ] && ! grep -Eq '"outcome": *"interrupted"' $(DEMO_DIR)/report.json; then \
	  rm -rf $(DEMO_DIR); fi
	$(BIN)/diloco run $(DEMO_JOB) --workdir $(DEMO_DIR) --chaos $(DEMO_CHAOS)

.PHONY: recording
recording: $(STAMP) ## Record the demo in a terminal, as a picture that plays (docs/pictures/demo.svg)
	$(BIN)/python tools/recording.py --svg docs/pictures/demo.svg --title "make demo" -- $(MAKE) --no-print-directory demo

##@ Tests
.PHONY: test
test: $(STAMP) $(S3_SERVICE)/.installed ## Run the quick tests (within 5 minutes on two cores)
	$(PYTEST) $(AT_ONCE) -m "not slow" tests/integration tests/unit $(PYTEST_ARGS)

.PHONY: bucket-services
bucket-services: $(STAMP) ## Install what tests of gs://, az:// and a second S3 need (200 MB, with npm); else they are skipped
	@test -x $(BUCKET_SERVICES)/bin/python || $(BIN)/python -m venv $(BUCKET_SERVICES)
	@$(BUCKET_SERVICES)/bin/python -m pip install --disable-pip-version-check -qq -r tests/buckets/requirements.txt
	@npm install --silent --no-audit --no-fund --prefix $(BUCKET_SERVICES) $(AZURITE)

UNIT_TESTS := test-protocol test-syncer test-worker test-operator test-cli
.PHONY: $(UNIT_TESTS)
test-protocol test-syncer test-worker test-operator test-cli: $(STAMP) $(S3_SERVICE)/.installed ## Run one package's unit tests (each within a minute)
	$(PYTEST) $(AT_ONCE) -m "not slow" tests/unit/$(@:test-%=%) $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: $(STAMP) $(S3_SERVICE)/.installed ## Run the slow tests (a quarter of an hour on two cores)
	$(PYTEST) $(AT_ONCE) -m "slow and not e2e" tests/integration tests/unit $(PYTEST_ARGS)

# Words for the next one: TEST=tests/unit/worker/net/test_client.py STRESS_ARGS="--times 50 --busy 4".
TEST ?=
STRESS_ARGS ?=
.PHONY: stress
stress: $(STAMP) ## Run one test many times beside busy processes (TEST=…), and show the first failing log
	@test -n "$(TEST)" || { echo "Name a test: make stress TEST=tests/unit/…/test_x.py::test_y" >&2; exit 2; }
	$(BIN)/python tools/stress.py $(TEST) $(STRESS_ARGS)

# Words for the next one: NIGHTLY_ARGS="--only 'e2e-*' --minutes 60", --list.
NIGHTLY_ARGS ?=
.PHONY: nightly
nightly: $(STAMP) $(S3_SERVICE)/.installed ## Run what .ci/run has no time for, part by part (hours; continues where it stopped)
	$(BIN)/python tools/nightly.py $(NIGHTLY_ARGS)

# Words for tools/mutants.py: MUTANTS_ARGS="--only 'rounds-*'", --list, --jobs 2.
MUTANTS_ARGS ?=
.PHONY: mutants
mutants: $(STAMP) $(S3_SERVICE)/.installed ## Break the code on purpose, a line at a time: a test must notice (half an hour; continues where it stopped)
	$(BIN)/python tools/mutants.py $(MUTANTS_ARGS)

GPU_FOUND = $(BIN)/python -c "import torch; n = torch.cuda.device_count(); print('gpu-check:', \
    f'a learner of {n} ranks, one on each CUDA device, by NCCL' if n > 1 else 'a learner of 2 ranks that share the CUDA \
    device, by gloo' if n else 'NO GPU IS CHECKED, torch finds no CUDA device: a learner of 2 ranks on the CPU, by gloo')"
.PHONY: gpu-check
gpu-check: $(STAMP) ## Check the worker on all CUDA devices (docs/gpu-checklist.md)
	@$(GPU_FOUND)
	$(PYTEST) -n 0 -m gpu tests/integration/worker/test_gpu.py tests/integration/worker/test_gpu_ranks.py $(PYTEST_ARGS)
	@$(GPU_FOUND)

##@ Images and clusters
# The cluster for the next ones: localkube ($LOCALKUBE or on PATH), kind, or current (KUBECONFIG).
CLUSTER ?=
# Of the images: their tag (empty: the project's version).
IMAGE_TAG ?=

.PHONY: images
images: ## Build the images with docker, podman or localkube (CLUSTER=kind:NAME|localkube:NAME loads them; IMAGE_TAG, TORCH_INDEX)
	CLUSTER="$(if $(findstring :,$(CLUSTER)),$(CLUSTER))" IMAGE_TAG="$(IMAGE_TAG)" TORCH_INDEX="$(TORCH_INDEX)" tools/images.sh build

.PHONY: chart
chart: $(STAMP) ## Check the chart: lint, render, tests; with KUBECONFIG also a dry run on that cluster (needs helm)
	$(BIN)/python tools/chart.py check
	$(BIN)/python tools/generate.py --check charts manifests
	$(PYTEST) -q tests/unit/project/test_chart.py tests/unit/project/test_chart_rendered.py

# Words for pytest: E2E_ARGS="-m 'ci and not regions'" is the part that .ci/run runs.
E2E_ARGS ?=
# IMAGES_BUILT=1: they are, and are not looked at again.
IMAGES_BUILT ?=
E2E_NEEDS := $(STAMP) $(if $(IMAGES_BUILT),,images)

.PHONY: e2e
e2e: $(E2E_NEEDS) ## Run the tests on a real cluster (CLUSTER=localkube|kind|current; about an hour)
	CLUSTER=$(CLUSTER) $(PYTEST) tests/e2e -m "e2e and not regions" -s $(E2E_ARGS)

.PHONY: e2e-regions
e2e-regions: $(E2E_NEEDS) ## Run the tests of one job across several clusters (CLUSTER=localkube|kind)
	CLUSTER=$(CLUSTER) $(PYTEST) tests/e2e -m regions -s $(E2E_ARGS)

.PHONY: cluster-demo
cluster-demo: $(STAMP) ## The tour on a real cluster (CLUSTER=localkube|kind|current)
	VENV=$(VENV) tools/cluster_demo.sh $(CLUSTER)

.PHONY: regions-demo
regions-demo: $(STAMP) ## One job over two clusters (CLUSTER=localkube|kind)
	VENV=$(VENV) tools/regions_demo.sh $(CLUSTER)

##@ Code
.PHONY: lint
lint: $(STAMP) ## Check style, types, import rules, structure, and whether generated files are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy bench/*.py tools/crd_schema.py
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/structure.py --check
	$(BIN)/python tools/generate.py --check

.PHONY: format
format: $(STAMP) ## Format the code and sort its imports
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

##@ Measurements
.PHONY: bench
bench: $(STAMP) ## Measure merge, codec, wire, overlap, encodings, memory and bandwidth, each against its references (BENCH_ARGS=--quick)
	@for name in $(BENCHES); do echo "== $$name"; $(BIN)/python bench/$$name.py $(BENCH_ARGS); done

# Words for the two below: TRIAL_ARGS="--sizes small --seeds 2". Results are kept in bench/results/trials.jsonl: commit it.
TRIAL_ARGS ?=
.PHONY: quality
quality: $(STAMP) ## Compare the quality with data-parallel training's (hours; continues where it stopped; TRIAL_ARGS=--quick)
	$(BIN)/python bench/quality.py $(TRIAL_ARGS)

.PHONY: ablations
ablations: $(STAMP) ## Vary outer optimizer, adoption, merge, cadence, encoding, … each at its best rate (hours; continues where it stopped)
	$(BIN)/python bench/ablations.py $(TRIAL_ARGS)

.PHONY: heterogeneous
heterogeneous: $(STAMP) ## Run learners of several speeds, and ones that come for a third of the run (half an hour; BENCH_ARGS=--quick)
	$(BIN)/python bench/heterogeneous.py $(BENCH_ARGS)

.PHONY: bench-operator
bench-operator: $(STAMP) ## Measure the operator with 500 jobs on simulated nodes (localkube; half an hour; BENCH_ARGS=--quick)
	$(BIN)/python bench/operator_load.py $(BENCH_ARGS)

##@ Generated files
.PHONY: generate
generate: $(STAMP) ## Write every generated file that is not current: stubs, manifests, pages, tables (tools/generate.py lists them)
	$(BIN)/python tools/generate.py --write

$(SITE)/.installed: pyproject.toml requirements.lock
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python tools/requirements.py --extra docs >$(SITE)/requirements.txt
	@$(SITE)/bin/python -m pip install --disable-pip-version-check -qq -c requirements.lock -r $(SITE)/requirements.txt
	@touch $@

.PHONY: site
site: $(SITE)/.installed ## Build docs/ as a site in build/site; a link or an anchor that leads nowhere fails it
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict
	@echo "build/site/index.html"

.PHONY: lock
lock: $(STAMP) ## Write requirements.lock from what is installed in .venv
	$(PIP_INSTALL) -e '.[$(EXTRAS),datasets,docs]'
	$(BIN)/python tools/lock.py

##@ Releases
# Of dist: the repository's address and the tag, for the README's links; without them the links are plain text.
REPOSITORY ?=
REF ?= main
.PHONY: dist
dist: $(STAMP) ## Build sdist and wheel in dist/ (REPOSITORY=https://HOST/OWNER/NAME and REF=v1.2.3 for absolute links)
	$(BIN)/python tools/dist.py $(if $(REPOSITORY),--repository "$(REPOSITORY)" --ref "$(REF)")

# Words for the next one: WHEEL_ARGS="--extra base --extra local".
WHEEL_ARGS ?=
.PHONY: wheel-check
wheel-check: $(STAMP) ## Install the wheel in empty environments, one for each extra, and use it there (a quarter of an hour)
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python tools/wheel_check.py $(WHEEL_ARGS)

# The version to set: VERSION=1.2.3; empty: print it.
VERSION ?=
.PHONY: version
version: $(STAMP) ## Print the version, or set it in every file (VERSION=1.2.3), with what is made from them
	$(BIN)/python tools/version.py $(VERSION)
	$(if $(VERSION),$(MAKE) --no-print-directory generate)

##@ Tidying up
.PHONY: clean
clean: ## Remove caches, build products and runs/demo (not .venv)
	rm -rf build dist $(DEMO_DIR) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .numba_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
