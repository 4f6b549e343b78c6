# `make train` and `make test` do all the set-up they need: a virtual environment and the packages.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
NATIVE := CMakeLists.txt $(wildcard cpu_adam/src/* aio/src/* native/*)

.PHONY: help train test test-slow check sanitize clean

help:
	@echo "make train      train a small GPT on real text (about two minutes on two cores)"
	@echo "make test       the fast tests (two to two and a half minutes on two cores)"
	@echo "make test-slow  the slow tests too"
	@echo "make check      ruff, mypy, sizes and layering"
	@echo "make sanitize   the native file layer under AddressSanitizer, UBSan and ThreadSanitizer"
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

# Addresses are not randomized: ThreadSanitizer of GCC 12 does not know all layouts of new kernels.
ENGINE := $(filter-out aio/src/module.cpp,$(wildcard aio/src/*.cpp)) tests/src/engine_test.cpp
sanitize:
	@mkdir -p build
	@for kind in address,undefined thread; do \
		echo "== $$kind" && \
		$(CXX) -std=c++20 -O1 -g -Wall -Wextra -Wno-missing-field-initializers -fsanitize=$$kind \
			-fno-sanitize-recover=all -Iaio/src $(ENGINE) -pthread -o build/engine_test && \
		setarch -R build/engine_test build || exit 1; \
	done

$(READY): pyproject.toml constraints.txt $(NATIVE)
	@echo "setting up $(VENV) (PyTorch and friends; once, some minutes)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	@touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
