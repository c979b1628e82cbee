# `make demo` and `make test` set up everything they need: a virtual environment of their own, with
# the tested versions of constraints.txt. Run again, they start at once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: setup demo test quick lint types docs wheel clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev,tutorials]"
	touch $@

demo: $(READY)
	$(BIN)/python -m tutorials.hotspots --short

test: $(READY) lint types
	$(BIN)/python -m pytest -q -n $(WORKERS)

quick: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

wheel: $(READY)
	$(BIN)/python -m build --no-isolation --wheel

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
