# Every target sets up what it needs in .venv, once; nothing has to be installed before.
#
#   make demo        the main job on the reference engine: cold and cache-served, side by side
#   make test        every test, those on a real vLLM and on a real SGLang included
#   make test-sglang those on a real SGLang alone
#   make test-gpu    copies between a GPU and the arena, byte for byte; says so where there is no GPU
#   make bench-gpu   the same, how fast
#   make check       format, lint, types, import contracts
#   make docs        the docs site, in docs/_build/html
#   make bench       costs beside the machine's own limits
#   make demo-vllm   the main job on a real vLLM
#   make clean       remove .venv and what was built
#
# Settings (make test NAME=value, or in the environment):
#   PYTHON       the Python that .venv is made with: 3.11 or newer
#   TORCH_INDEX  address of PyTorch's CPU wheel index, for machines where `pip install torch` takes a CUDA build of
#                several GB (Linux on x86_64, as a rule); pytorch.org's "get started" page shows it
#   PYTEST_ARGS  what to pass to pytest: PYTEST_ARGS="tests/cli -x"; with it, `make test` leaves SGLang's tests out
#   GPU_REPORT   the page that bench-gpu writes beside what it prints: gpu.md; docs/benchmarks is where it belongs
#   GPU_SECONDS  after which test-gpu and bench-gpu are stopped, each: 300
#   GPU_PYTHON   a Python with NumPy, pytest, pytest-timeout and a CUDA build of torch, for test-gpu and bench-gpu; without
#                it they make one in .venv/gpu, which takes several GB

PYTHON ?= $(shell tools/find-python)
TORCH_INDEX ?=
PYTEST_ARGS ?=

VENV := .venv
GPU_PYTHON ?= $(VENV)/gpu/bin/python
GPU_REPORT ?= gpu.md
GPU_SECONDS ?= 300
HAS_GPU := $(wildcard /dev/nvidiactl)
BIN := $(VENV)/bin
INSTALL := tools/pip-install $(VENV)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo demo-vllm bench bench-gpu engines test test-sglang test-gpu check check-format check-lint check-types check-imports docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.light
	$(BIN)/lmcache demo

bench: $(VENV)/.light
	$(BIN)/lmcache bench

demo-vllm: $(VENV)/.vllm
	@if [ -s $(VENV)/no-vllm ]; then cat $(VENV)/no-vllm; exit 1; fi
	$(BIN)/lmcache demo --engine vllm

# both run, so that one failure does not hide another; one after the other, for many tests have deadlines
test: $(VENV)/.dev $(VENV)/.redis $(VENV)/.iproute2 engines
	@cat $(VENV)/no-vllm $(VENV)/no-redis $(VENV)/no-iproute2
	$(BIN)/python -m pytest $(PYTEST_ARGS); status=$$?; \
	    $(if $(strip $(PYTEST_ARGS)),true,$(MAKE) test-sglang) || status=1; exit $$status

test-sglang: $(VENV)/.sglang
	@if [ -s $(VENV)/no-sglang ]; then cat $(VENV)/no-sglang; \
	    else set -x; $(VENV)/sglang/bin/python -m pytest tests/engines/sglang $(PYTEST_ARGS); fi

# what they need beside the sources is not set up where there is no GPU, nor for somebody's own Python
GPU_SETUP := $(if $(HAS_GPU),$(if $(filter $(VENV)/gpu/bin/python,$(GPU_PYTHON)),$(VENV)/.gpu))
NO_GPU := no NVIDIA GPU is here (/dev/nvidiactl)

# what runs on a machine that is lent for minutes says what it has seen before it is stopped
GPU_RUN = PYTHONPATH=.$(if $(PYTHONPATH),:$(PYTHONPATH)) PYTHONUNBUFFERED=1 timeout -s INT -k 30 $(GPU_SECONDS) $(GPU_PYTHON)

# -W default: warnings of whatever torch and Triton are there are nobody's failure
test-gpu: $(GPU_SETUP)
	$(if $(HAS_GPU),$(GPU_RUN) -m pytest -W default -p no:cacheprovider tests/gpu $(PYTEST_ARGS),@echo "tests/gpu is skipped: $(NO_GPU)")

bench-gpu: $(GPU_SETUP)
	$(if $(HAS_GPU),$(GPU_RUN) -m lmcache bench --device cuda --markdown $(GPU_REPORT),@echo "$(NO_GPU)"; exit 1)

check: check-format check-lint check-types check-imports

check-format: $(VENV)/.dev
	$(BIN)/ruff format --check .

check-lint: $(VENV)/.dev
	$(BIN)/ruff check .

check-types: $(VENV)/.dev
	$(BIN)/mypy

check-imports: $(VENV)/.dev
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) docs/_build build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# ------------------------------------------------------------------------------------------- set-up, a stamp for each step

# The command line, the server and the reference engine: seconds.
$(VENV)/.light: pyproject.toml tools/find-python tools/pip-install
	@[ -n "$(PYTHON)" ] || { tools/find-python; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e '.[numpy]'
	@touch $@

# Tests, linters, docs: well under a minute.
$(VENV)/.dev: $(VENV)/.light
	@echo "installing test and development tools"
	@$(INSTALL) -e '.[dev]'
	@touch $@

# A real vLLM: about four minutes. Leaves the reason in .venv/no-vllm, empty where vLLM is there.
$(VENV)/.vllm: tools/install-vllm tools/pip-install | $(VENV)/.light
	@TORCH_INDEX='$(TORCH_INDEX)' tools/install-vllm $(VENV)
	@touch $@

# A real SGLang, in an environment of its own: about four minutes. Leaves the reason in .venv/no-sglang, empty where it is
# there.
$(VENV)/.sglang: tools/install-sglang tools/sglang-requirements.txt tools/pip-install | $(VENV)/.light
	@TORCH_INDEX='$(TORCH_INDEX)' tools/install-sglang $(VENV)
	@touch $@

# Both, side by side: each is minutes, in an environment of its own.
engines: $(VENV)/.dev
	@$(MAKE) --silent $(VENV)/.sglang & sglang=$$!; \
	    $(MAKE) --silent $(VENV)/.vllm; vllm=$$?; wait $$sglang && exit $$vllm

# Torch in its CUDA build, in an environment of its own: minutes, and several GB.
$(VENV)/.gpu: pyproject.toml tools/pip-install | $(VENV)/.light
	@echo "installing torch for CUDA in $(VENV)/gpu"
	@$(PYTHON) -m venv $(VENV)/gpu
	@tools/pip-install $(VENV)/gpu -e '.[test]' torch
	@touch $@

# A real redis-server, unless there is one: seconds. Leaves the reason in .venv/no-redis, empty where it is there.
$(VENV)/.redis: tools/unpack-debian | $(VENV)/.light
	@tools/unpack-debian $(VENV) redis redis-server "tests on a real redis" redis-server redis-cli
	@touch $@

# ip, which makes a second host out of a network namespace, unless it is there: seconds. As for redis.
$(VENV)/.iproute2: tools/unpack-debian | $(VENV)/.light
	@tools/unpack-debian $(VENV) iproute2 iproute2 "tests on another host" ip
	@touch $@
