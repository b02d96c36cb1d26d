# `make run` and `make test` need only python3 (>= 3.11), pip and make: the virtual
# environment is made on first use and again when the pinned versions change.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test lint types docs examples bench wheel clean

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

wheel: $(READY)
	$(BIN)/python -m pytest -m packaging

bench: $(READY)
	$(BIN)/python benchmarks/step_cost.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
