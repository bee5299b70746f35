# Stageloom. Everything runs from a fresh clone with Python >= 3.11, make and a network:
# the targets below build a virtual environment in .venv first, with the versions in constraints.txt.

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= out
# More options for pip, such as an index that serves CPU-only builds of torch.
PIP_ARGS ?=
# More options for pytest: make test PYTEST_ARGS='-n 0 -x -k zero_bubble'
PYTEST_ARGS ?= -n 2 --dist loadfile -m 'not slow'

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test check bench bench-plan bench-run bench-search golden docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.core ## compare all schedules at 8 ranks: table, timeline, pictures in out/
	$(BIN)/stageloom demo --out $(OUT)

test: $(VENV)/.torch ## run the whole test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.torch ## lint, format check, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

bench: $(VENV)/.torch ## run the benchmarks
	$(BIN)/python -m benchmarks

bench-plan: $(VENV)/.dev ## the planner's predictions beside published measurements, row by row
	$(BIN)/python -m benchmarks planning

bench-run: $(VENV)/.torch ## the runtime beside PyTorch's, on real processes
	$(BIN)/python -m benchmarks runtime

bench-search: $(VENV)/.torch ## the optimiser beside the published heuristics (takes many minutes)
	$(BIN)/python -m benchmarks search

golden: $(VENV)/.dev ## regenerate the golden texts (read the diff before you commit it)
	$(BIN)/python tools/golden.py

docs: $(VENV)/.dev ## regenerate the generated parts of the documentation
	$(BIN)/python tools/docs.py

clean: ## remove the virtual environment, outputs and caches
	rm -rf $(VENV) $(OUT) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --------------------------------------------------------- the environment, step by step

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "stageloom needs Python 3.11 or newer, but '$(PYTHON)' is not: install it, or name one with 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: install its venv package (Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "Making a virtual environment in $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing stageloom and what it needs"
	@$(PIP_INSTALL) -e '.[plot]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Installing the development tools"
	@$(PIP_INSTALL) -e '.[plot,search,dev]'
	@touch $@

$(VENV)/.torch: $(VENV)/.dev
	@echo "Installing PyTorch (the largest part; takes a while the first time)"
	@$(PIP_INSTALL) -e '.[plot,search,dev,torch]'
	@touch $@
