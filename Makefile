# make demo | test | numerical | arm | mutants | serve | lint | clean
# Set-up runs once; it runs again when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?=
ARGS ?= -n 2 --dist worksteal
SAMPLE ?= 40
SEED ?= 1
PACKAGES ?= engine plan text experts
QUESTION ?= Why is the sky blue? Answer in two sentences.

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests of arithmetic on a CPU: kernels, layers, experts on every path, families against transformers,
# the engine's answers. Tests that only move bytes or schedule are left out, and those of CUDA sources
# that are built for the CPU.
NUMERICAL := $(filter-out tests/kernels/test_triton% %/test_module_build.py, \
	$(wildcard tests/kernels/test_*.py tests/kernels/native/test_*.py tests/kernels/reference/test_*.py)) \
	$(wildcard tests/families/test_*.py) $(filter-out %/test_cuda_block.py,$(wildcard tests/layers/test_*.py)) \
	$(addprefix tests/engine/test_,engine.py engine_drafts.py engine_mtp.py engine_states.py pooling.py \
	prefixes.py sampler.py scheduler_exact.py) \
	$(addprefix tests/experts/test_,decode.py ffn.py prefill.py prefill_counted.py)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help setup demo test numerical arm mutants serve lint format clean

help:
	@echo "make demo       set up, fetch the default model, show its memory, answer a question"
	@echo "make test       set up, then lint, types and tests (ARGS=... for other options of pytest)"
	@echo "make numerical  the numerical tests alone, with torch's code for AVX2 and for any CPU"
	@echo "make arm        run the C++ kernels for ARM on an emulated CPU (needs a cross compiler and qemu-user)"
	@echo "make mutants    change SAMPLE functions of each of PACKAGES (0: all) and list what no test notices"
	@echo "make serve      set up and serve the default model (MODEL=... for another)"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite the code"
	@echo "make clean      remove what set-up and the tools made"

setup: $(READY)

# torch comes first and alone: other packages would bring another build of it, with gigabytes more.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[server,test]"
	@touch $@

demo: $(READY)
	$(BIN)/headroom pull $(MODEL)
	$(BIN)/headroom plan $(MODEL)
	$(BIN)/headroom run $(MODEL) "$(QUESTION)" --temperature 0 --max-tokens 120

test: $(READY) lint
	$(BIN)/python -m pytest $(ARGS)
ifneq ($(origin ARGS), command line)
	$(MAKE) --no-print-directory numerical
endif

# torch reads this variable when it is imported, and takes its code for AVX2, or for any CPU, as it would
# on a machine without AVX-512. The tests run our own C++ kernels on every instruction set of the CPU.
numerical: $(READY)
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest $(ARGS) $(NUMERICAL)
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest $(ARGS) $(NUMERICAL)

# The test is skipped where its tools are missing, so look for them first.
arm: $(READY)
	@command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64 || \
		{ echo "apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	$(BIN)/python -m pytest -m slow -k arm tests/kernels/native/test_module_build.py

$(VENV)/.mutation: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[mutation]"
	@touch $@

# A sample of 40 takes about an hour on two cores; SEED draws another one, SAMPLE=0 takes all.
mutants: $(VENV)/.mutation
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/run.py --sample $(SAMPLE) --seed $(SEED) $(PACKAGES)

serve: $(READY)
	$(BIN)/headroom serve $(MODEL)

lint: $(READY)
	$(BIN)/ruff check headroom tests benchmarks
	$(BIN)/ruff format --check headroom tests benchmarks
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix headroom tests
	$(BIN)/ruff format headroom tests

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis mutants
	find headroom tests -name __pycache__ -type d -prune -exec rm -rf {} +
