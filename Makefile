# `make demo` and `make test` do all their own set-up: they need Python >= 3.11, make and the package registries.
PYTHON ?= $(shell command -v python3.13 || command -v python3.12 || command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check lint soak clean system

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ClawGym needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[dev]' -c constraints.txt
	@touch $@

# One import tree for the tools that read folders instead of importing (pyright, import-linter).
.lint: FORCE
	@rm -rf .lint && mkdir .lint && cp -r clawgym .lint/ && cp -r tasks verifiers leaderboards .lint/clawgym/
FORCE:

lint: $(VENV)/.installed .lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	PYTHONPATH=.lint $(BIN)/lint-imports
