# `make train` and `make test` do all the set-up they need: a virtual environment and the packages.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
NATIVE := CMakeLists.txt $(wildcard cpu_adam/src/* aio/src/*)

.PHONY: help train test test-slow check clean

help:
	@echo "make train      train a small GPT on real text (about two minutes on two cores)"
	@echo "make test       the fast tests (under two minutes)"
	@echo "make test-slow  the slow tests too"
	@echo "make check      ruff, mypy, sizes and layering"
	@echo "make clean      remove the virtual environment and caches"

train: $(READY)
	@$(BIN)/offload train $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n auto $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout 1800 $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_tidy.py

$(READY): pyproject.toml constraints.txt $(NATIVE)
	@echo "setting up $(VENV) (PyTorch and friends; once, some minutes)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	@touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
