# Every target first creates .venv if it is missing or outdated; a fresh clone needs no other step.

PYTHON ?= python3
VENV := .venv/bin/python
READY := .venv/ready

.PHONY: help setup run test mutants lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## create or update .venv; options: PYTHON=python3.12 SANDBOX_CUDA=12|13|none

run: $(READY) ## compile, launch and verify every kernel: ARGS="fwd_minimal --shape 1,12,512,64"
	$(VENV) -m sandbox run $(ARGS)

test: $(READY) ## the test suite: ARGS="-k causal"
	$(VENV) -m pytest -n auto --maxprocesses 8 $(ARGS)

mutants: $(READY) ## mutation tests: small faults that a test should detect: ARGS="--sample 5"
	$(VENV) scripts/mutants.py $(ARGS)

lint: $(READY) ## ruff and mypy
	$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy

clean: ## remove .venv and the tools' caches
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The script writes this file last, so an interrupted setup does not create it.
$(READY): pyproject.toml scripts/setup.py
	$(PYTHON) scripts/setup.py

# An explicit `make setup` always runs, because its variables may have changed.
ifneq ($(filter setup,$(MAKECMDGOALS)),)
.PHONY: $(READY)
endif
