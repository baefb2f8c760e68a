PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help train test check fuzz bench-roots bench-step docs dist format clean
.DEFAULT_GOAL := help

help:            ## show this list
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+): .*## /  make \1\t/'

# Install once per change of what is installed.
$(VENV)/.%: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$*]'
	touch $@

train: $(VENV)/.train ## train a small Llama on real text with Dash: two to five minutes, as free as two cores are
	$(BIN)/dash-shampoo train --model tiny

check: $(VENV)/.dev ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.dev check ## install what the tests need, lint, type-check, test
	$(BIN)/python -m pytest

fuzz: $(VENV)/.dev ## ten thousand random cases of models, options, faults and interruptions
	FUZZ_EXAMPLES=10000 $(BIN)/python -m pytest tests/test_fuzz.py --timeout 7200

bench-roots: $(VENV)/.train ## measure every solver of inverse roots on this machine
	$(BIN)/dash-shampoo bench roots --out runs/bench

bench-step: $(VENV)/.train ## measure the optimizer's step with every solver
	$(BIN)/dash-shampoo bench step --out runs/bench

docs: $(VENV)/.docs ## build the documentation as a site that needs no network, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/linkchecker --no-status --config scripts/linkchecker.ini site/index.html

dist: $(VENV)/.dist ## build the sdist and the wheel, and try the wheel in an environment of its own
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python scripts/try_distribution.py dist $(CONSTRAINTS)

format: $(VENV)/.dev ## rewrite the code in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what make made
	rm -rf $(VENV) dist runs site .mypy_cache .ruff_cache
