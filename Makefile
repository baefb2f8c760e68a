PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test check format clean
.DEFAULT_GOAL := help

help:            ## show this list
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+): .*## /  make \1\t/'

# Install once per change of what is installed.
$(VENV)/.%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

train: $(VENV)/.train ## train a small Llama on real text with Dash: two to three minutes on a CPU
	$(BIN)/dash-shampoo train --model tiny

check: $(VENV)/.dev ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.dev check ## install what the tests need, lint, type-check, test
	$(BIN)/python -m pytest

format: $(VENV)/.dev ## rewrite the code in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what make made
	rm -rf $(VENV) runs .mypy_cache .ruff_cache
