# Two commands are all the set-up there is: `make demo` and `make test`.
# Both make .venv/ first, once; a stamp file keeps later runs quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := .ci/constraints.txt
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
# Where no NVIDIA driver is present the CPU build is enough. Set TORCH_INDEX to the address of
# PyTorch's CPU wheels if the default index of this machine serves CUDA builds.
TORCH_INDEX ?=
TORCH_FLAGS := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)
comma := ,
EXTRAS := dev$(if $(wildcard /proc/driver/nvidia/version),$(comma)gpu,)

export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo placard test lint typecheck gpu-check browser-check clean

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mmserve needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH_FLAGS) $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

demo: $(STAMP)
	$(BIN)/mmserve demo

placard: $(STAMP)
	$(BIN)/mmserve demo placard

# What needs no server runs in JOBS processes of one thread each; servers and browsers one after the other.
JOBS ?= 2
test: lint typecheck
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/unit tests/parity
	$(BIN)/python -m pytest tests/e2e tests/gpu

lint: $(STAMP)
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .

# A type checker does not follow the package mapping of pyproject.toml: give it a tree of links, made
# anew each time so that no new file stays unchecked.
TREE := .mypy_tree
MYPY := ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache
.PHONY: $(TREE)
$(TREE):
	rm -rf $(TREE) && mkdir -p $(TREE)/mmserve
	cd $(TREE)/mmserve && ln -s ../../mmserve/* . && ln -s ../../preprocess ../../encoders ../../engine ../../models ../../demos .

STRICT := mmserve.core mmserve.preprocess mmserve.engine.scheduler mmserve.engine.kv
typecheck: $(STAMP) $(TREE)
	cd $(TREE) && $(MYPY) --strict --follow-imports=silent $(STRICT:%=-p %)
	cd $(TREE) && $(MYPY) -p mmserve

# No set-up: it must run where nothing can be fetched, by whatever Python has torch for the GPU.
# GPU_CHECK="--device cpu" tries it out without one; results lie in OUT.
OUT ?= build/gpu-check
GPU_CHECK ?=
gpu-check:
	$(PYTHON) .ci/gpu_check.py --out $(OUT) $(GPU_CHECK)

# Cameras of a real browser; without chromium (the Debian package) it is skipped, and says so.
browser-check: $(STAMP)
	$(BIN)/python -m pytest -rs tests/e2e/test_browser.py tests/e2e/test_browser_whip.py tests/e2e/test_placard_browser.py

clean:
	rm -rf $(VENV) $(TREE) build *.egg-info
