# Everything below needs Python >= 3.11 and make; `make env` brings the rest into .venv, pinned by hash.
.DEFAULT_GOAL := help
.PHONY: help env build native test lint check clean lock

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# The stamp is named after what decides the environment: the lock, the interpreter and where the folder stands.
KEY := $(if $(PYTHON),$(shell $(PYTHON) -c 'import hashlib, os, sys; \
	print(hashlib.sha256(open("requirements.lock", "rb").read() + sys.version.encode() + os.getcwd().encode()).hexdigest()[:16])'))
STAMP := $(VENV)/stamp-$(KEY)
EDITABLE := $(VENV)/editable-$(KEY)
PIP := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check
JOBS ?=
# Processes of the tests; 0 runs them in make's own terminal, for a debugger. PYTEST: more options for them.
WORKERS ?= auto
PYTEST ?=

help:
	@echo "make env      the pinned toolchain and test tools in .venv (about 2.3 GB)"
	@echo "make build    env, then the whole catalog for every target into aot_artifacts (incremental)"
	@echo "make native   env, then the C extension of runtime/native for every machine (committed; needed after a change of it)"
	@echo "make test     env, then the test suite, on every core (WORKERS=0: in one process)"
	@echo "make lint     env, then ruff and mypy"
	@echo "make check    env, then kiln check: do sources, toolchain, manifests and artifacts agree"
	@echo "make lock     resolve requirements.lock anew (needs uv)"
	@echo "make clean    remove .venv and caches; aot_artifacts stays"

env: $(EDITABLE)

$(STAMP): requirements.lock
	@test -n "$(PYTHON)" || { echo "make env: no Python >= 3.11 on PATH; install one or pass PYTHON=/path/to/python3" >&2; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r requirements.lock
	@touch $@

$(EDITABLE): pyproject.toml $(STAMP)
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

build: env
	$(BIN)/kiln build --out aot_artifacts $(if $(JOBS),--jobs $(JOBS))

native: env
	$(BIN)/python -m kiln.tools.native

test: env
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST)

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy

check: env
	$(BIN)/kiln check

lock:
	uv pip compile pyproject.toml --extra dev --universal --fork-strategy fewest --python-version 3.11 \
		--generate-hashes --no-header --no-emit-index-url --no-emit-find-links --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
