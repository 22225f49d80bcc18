# Every task of the project; each target works on a fresh clone.
.DEFAULT_GOAL := help
.PHONY: demo test test-all test-oldest test-gpu test-multi-gpu test-matrix test-parity \
  test-seams mutation sanitize sanitize-multi-gpu bench native-bench lint format wheel build-matrix clean help

PYTHON ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
CSRC := $(shell find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.cc' -o -name '*.h')
NATIVE_BENCH := $(wildcard benchmarks/native/*.* benchmarks/native/*/*.*)
WORKERS := -n auto --maxprocesses 4 --dist worksteal
export PYTHON

# Python files are used in place; only what is compiled or packaged asks for a new installation.
$(INSTALLED): pyproject.toml CMakeLists.txt tools/build_backend.py tools/develop.py \
    tools/check_ptxas.py $(CSRC) $(sort $(dir $(CSRC)))
	@python=$$(tools/find_python.sh) && "$$python" tools/develop.py
	@touch $@

demo: $(INSTALLED)  ## Run a whole layer on the devices there are, checked and timed
	@$(BIN)/python examples/demo.py

test: $(INSTALLED)  ## Run the tests that need no GPU, of slow ones a part (ARGS="-k plan": those whole)
	$(BIN)/python -m pytest $(WORKERS) $(or $(ARGS),--quick)

test-all: $(INSTALLED)  ## Run every test that needs no GPU
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-oldest: $(INSTALLED)  ## Run the same tests on the oldest supported jax
	$(BIN)/python tools/test_matrix.py --jax oldest $(ARGS)

test-gpu: $(INSTALLED)  ## Run the tests that need one GPU
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest -m gpu -n auto --maxprocesses 8 $(ARGS)

test-multi-gpu: $(INSTALLED)  ## Run the tests that need two GPUs or more
	$(BIN)/python -m pytest -m multi_gpu $(ARGS)

test-matrix: $(INSTALLED)  ## Run the tests on the oldest supported jax and on the newest
	$(BIN)/python tools/test_matrix.py $(ARGS)

test-parity: $(INSTALLED)  ## Check docs/models.md against the newest transformers (downloads torch)
	$(BIN)/python tools/test_parity.py $(ARGS)

test-seams: $(INSTALLED)  ## Check jaxmoe.seams against the libraries it is for (downloads them)
	$(BIN)/python tools/test_seams.py $(ARGS)

mutation: $(INSTALLED)  ## Make mistakes in the package that the tests should notice (ARGS="--sample 50")
	$(BIN)/python tools/mutation.py plan $(ARGS)
	$(BIN)/python tools/mutation.py cover
	$(BIN)/python tools/mutation.py run --end-s inf
	$(BIN)/python tools/mutation.py report

sanitize: $(INSTALLED)  ## Run a subset of the GPU tests under each compute-sanitizer tool
	@tools/sanitize.sh

sanitize-multi-gpu: $(INSTALLED)  ## Run a subset of the tests of several GPUs under memcheck
	@TOOLS=memcheck tools/sanitize.sh $(BIN)/python $$(grep -lE 'mark\.sanitizer' tests/test_multi_gpu*.py)

bench: $(INSTALLED)  ## Run the layer benchmark (ARGS="--suite ops" for another)
	$(BIN)/python -m benchmarks.run $(or $(ARGS),--suite layer)

native-bench: $(INSTALLED)  ## Build and run a kernel benchmark without JAX (ARGS="--help" BENCH=tgmm_bench)
	@PATH="$(CURDIR)/build/env/bin:$$PATH" && \
	cmake -S . -B build/native -DJAXMOE_CUDA=ON -DJAXMOE_NATIVE_BENCH=ON \
	  -DPython_EXECUTABLE="$(CURDIR)/build/env/bin/python" && \
	cmake --build build/native --target $(or $(BENCH),gemm_bench) --parallel "$$(nproc)"
	build/native/$(or $(BENCH),gemm_bench) $(ARGS)

lint: $(INSTALLED)  ## Check format, lint, types and spelling
	@status=0; run() { echo "$$1"; $(BIN)/$$1 || status=1; }; \
	run "ruff check ."; \
	run "ruff format --check ."; \
	run "clang-format --dry-run -Werror $(CSRC) $(NATIVE_BENCH)"; \
	run "pyright"; \
	run "codespell"; \
	exit $$status

format: $(INSTALLED)  ## Reformat everything in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC) $(NATIVE_BENCH)

wheel: $(INSTALLED)  ## Build the wheel into dist/
	$(BIN)/python -m pip wheel --no-deps -w dist .

build-matrix: $(INSTALLED)  ## Build the wheel in its three ways and check each
	$(BIN)/python tools/build_matrix.py

clean:  ## Remove .venv and everything built
	rm -rf .venv build dist

help:  ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18
