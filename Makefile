# `make demo`, `make test` and `make check` do all their own set-up: they need Python >= 3.11.5, make and the package registries.
FIT := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11, 5))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(FIT)' 2>/dev/null && { command -v $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# Half of the time of a test is waiting.
WORKERS ?= 4

# Hundreds of Pythons begin here: each would compile the library, and every worker all tests, for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check interop gpu lint lock unit properties openclaw agents site screenshots soak system clean web

demo: $(VENV)/.demo
	$(BIN)/clawgym demo

# What a newcomer runs: the tests that need nothing but Python and Linux.
test: lint unit

# All other tests of the library.
check: openclaw
	@failed=0; set -x; \
	$(PARALLEL) -m "check and not alone" || failed=1; \
	$(BIN)/pytest -m alone || failed=1; \
	exit $$failed

# Every path that a GPU takes, with figures; see benchmarks/gpu.py. ARGS='--model FOLDER' takes a real model.
gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py $(ARGS)

# Only files whose hashes are in the lock are installed, and nothing that is not in it: --no-deps, and no build fetches
# anything (--no-build-isolation). `pip check` says whether something is missing.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation
LOCKED := $(INSTALL) --require-hashes -r requirements

$(VENV)/.demo: LOCK := demo.txt
$(VENV)/.installed: LOCK := test.txt
$(VENV)/.demo $(VENV)/.installed: pyproject.toml $(wildcard requirements/*.txt)
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11.5 with venv was found: apt-get install python3-venv, or make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(LOCKED)/build.txt
	$(LOCKED)/torch-cpu.txt 2>/dev/null || $(LOCKED)/torch.txt
	$(LOCKED)/$(LOCK)
	$(INSTALL) -e .
	$(BIN)/pip check
	@touch $@

# After a change of dependencies in pyproject.toml. WITH='--upgrade' takes the newest versions.
lock: $(VENV)/.installed
	$(BIN)/python requirements/lock.py $(WITH)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

# The adapters to other packages, each with the real package in an environment of its own: gigabytes and minutes.
# ROUTES='openenv trl' are only these.
interop: $(VENV)/.installed
	$(BIN)/clawgym interop check $(ROUTES)

# The script and the style sheet of the pages (clawgym/reporting/web, committed), from their sources in web/. Needs node.
web:
	cd web && npm ci --ignore-scripts --no-audit --no-fund && npm run build

# The documentation, with the pages that are made from the code; fails on any warning, such as a link that leads nowhere.
site: $(VENV)/.installed
	$(BIN)/properdocs build --strict --quiet

# The pictures of the documentation, from real runs.
screenshots: $(VENV)/.installed
	$(BIN)/python docs/screenshots.py

openclaw: $(VENV)/.installed
	@test "$$(uname)" != Linux || $(BIN)/clawgym agents install openclaw

# Other agent programs (AGENTS), and their tests with a scripted model.
AGENTS ?= aider claude-code codex gemini-cli mini-swe-agent opencode openhands qwen-code terminus
agents: $(VENV)/.installed
	for name in $(AGENTS); do $(BIN)/clawgym agents install $$name || exit 1; done
	$(BIN)/pytest -m agents -n 2 --timeout 600

# tests/conftest.py lists the tests of `make check`, and those that are tried once more where they fail (SLOW_MACHINE).
# Those marked `alone` would slow the others down: they run afterwards, one at a time. Each worker computes with one thread: two
# of a process wait for each other, and where other processes have the cores they wait for minutes.
PARALLEL = OMP_NUM_THREADS=1 $(BIN)/pytest --max-suite-reruns 12 -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=10

unit: $(VENV)/.installed
	$(PARALLEL) --hypothesis-profile=quick -m "not check and not alone and not agents"

# The property tests of `make test` again, with all their examples.
properties: $(VENV)/.installed
	$(PARALLEL) -m "hypothesis and not check and not alone"

# The invariants and the fuzzing at full length, and mutations of what changed since the last release: hours. Their last
# figures are kept in docs/results. Before there is a release: since what is published, or all.
SINCE ?= $(shell git describe --tags --abbrev=0 2>/dev/null || git merge-base HEAD origin/main 2>/dev/null || git rev-list --max-parents=0 HEAD | tail -1)
soak: openclaw properties
	cd tests && ../$(BIN)/python -m fuzz --seconds 180 --keep
	CLAWGYM_SOAK=10000 $(BIN)/pytest tests/invariants --timeout=0 -s
	$(BIN)/python benchmarks/mutations.py --since $(SINCE) --count 60

# What the tests can use beyond Python: a Docker engine, a clock that can be moved, libraries that a few public checkers try, and
# the programs of a desktop.
system:
	apt-get update -q
	apt-get install -q -y --no-install-recommends docker.io faketime postgresql python3 python3-pip python3-yaml python3-cryptography \
	  xvfb openbox chromium xfe fonts-dejavu-core

clean:
	rm -rf $(VENV) build runs site *.egg-info
