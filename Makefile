# Every target makes .venv first if it is missing or older than what it is made from: a fresh clone needs no other step.

PYTHON ?= python3
VENV := .venv/bin/python
READY := .venv/ready

.PHONY: help setup run test mutants lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## make .venv anew, or refresh it: PYTHON=python3.12 and SANDBOX_CUDA=12|13|none choose

run: $(READY) ## compile, launch and verify every kernel: ARGS="fwd_minimal --shape 1,12,512,64"
	$(VENV) -m sandbox run $(ARGS)

test: $(READY) ## the test suite: ARGS="-k causal"
	$(VENV) -m pytest -n auto --maxprocesses 8 $(ARGS)

mutants: $(READY) ## break the project in small ways; a test should notice each: ARGS="--sample 5"
	$(VENV) scripts/mutants.py $(ARGS)

lint: $(READY) ## ruff and mypy
	$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy

clean: ## remove .venv and whatever the tools left
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Written last by the script: an interrupted set-up leaves none.
$(READY): pyproject.toml scripts/setup.py
	$(PYTHON) scripts/setup.py

# ScoreOptions for by name, set-up always runs: its variables may have changed.
ifneq ($(filter setup,$(MAKECMDGOALS)),)
.PHONY: $(READY)
endif
