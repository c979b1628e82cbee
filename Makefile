# `make demo` and `make test` set up what they need, and no more: a virtual environment of their
# own, with the tested versions of constraints.txt. Run again, they start at once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo
# With progress bars on a terminal, and the name of each package elsewhere. What is imported is
# compiled when it is imported first, which is a small part of what is installed.
PIP := $(BIN)/pip --disable-pip-version-check install --no-compile --constraint constraints.txt
WORKERS ?= 2
# Tests start many processes: what these import is compiled once, whatever the user prefers.
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test suite quick lint types docs wheel sdist clean

setup: $(READY)

$(READY_DEMO): pyproject.toml constraints.txt
	@echo "Installing PyTorch and what the demo needs into $(VENV): a minute, or a few on a slow line."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable ".[demo]"
	touch $@

$(READY): $(READY_DEMO)
	@echo "Installing what tests, benchmarks and documentation need into $(VENV)."
	$(PIP) --no-build-isolation --editable ".[dev,tutorials]"
	touch $@

demo: $(READY_DEMO)
	$(BIN)/python -m tutorials.hotspots --short

# mypy takes a minute: it runs beside the tests.
test: $(READY) lint
	$(MAKE) --no-print-directory --jobs 2 types suite

suite: $(READY)
	CI=true $(BIN)/python -m pytest -q -n $(WORKERS)

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

sdist: $(READY)
	$(BIN)/python -m build --no-isolation --sdist

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
