# Every target first creates .venv if it is missing or outdated; a fresh clone needs no other step.

PYTHON ?= python3
VENV := .venv/bin/python
READY := .venv/ready
MINIMAL := .venv/minimal
CUDA_SOURCES = $(shell git ls-files '*.cu' '*.cuh' '*.h' '*.cpp' ':!experiments')
MUTATION := .venv/mutation
PARALLEL := -n auto --dist worksteal

# Tests start commands: each would compile all of sandbox/ again.
unexport PYTHONDONTWRITEBYTECODE

# Two set-ups at a time would use the same .venv.
.NOTPARALLEL:

.PHONY: help setup run quick test test-all coverage mutants lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## create or update .venv; options: PYTHON=python3.12 SANDBOX_CUDA=12|13|none

run: $(MINIMAL) ## compile, launch and verify every kernel: ARGS="fwd_minimal --shape 1,12,512,64"
	$(VENV) -m sandbox run $(ARGS)

quick: lint ## lint, unit tests, and one small problem for each kernel
	SANDBOX_SAMPLE=quick $(VENV) -m pytest $(PARALLEL) $(ARGS)

test: $(READY) ## the test suite, with a sample of the largest parametrisations: ARGS="-k causal"
	$(VENV) -m pytest $(PARALLEL) $(ARGS)

test-all: $(READY) ## the complete suite, which takes hours, and random mutations
	SANDBOX_SAMPLE=all SANDBOX_WIDTHS=all SANDBOX_MAGNITUDES=all $(VENV) -m pytest $(PARALLEL) $(ARGS)
	$(MAKE) mutants ARGS="--sample 50 --tier all --least 90"
	$(MAKE) mutants ARGS="--written --least 100"

coverage: $(MUTATION) ## make test, and which tests execute which line: used by `make mutants`
	$(VENV) -m pytest $(PARALLEL) --cov --cov-context=test --cov-report=term --junitxml=build/tests.xml $(ARGS)

mutants: $(MUTATION) ## random small faults that a test should detect: ARGS="--sample 5 --seed 3"
	$(VENV) scripts/mutants.py $(ARGS)

lint: $(READY) ## no conflict markers; ruff, mypy and clang-format
	! git grep -nE '^(<{7}|>{7}) '
	$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy
	.venv/bin/clang-format --dry-run -Werror $(CUDA_SOURCES)

format: $(READY) ## format Python and CUDA sources
	$(VENV) -m ruff format
	.venv/bin/clang-format -i $(CUDA_SOURCES)

clean: ## remove .venv and the tools' caches
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The script writes this file last, so an interrupted setup does not create it.
$(READY): pyproject.toml scripts/setup.py
	$(PYTHON) scripts/setup.py

# In a fresh clone only what `run` needs.
$(MINIMAL): pyproject.toml scripts/setup.py
	$(PYTHON) scripts/setup.py minimal

# Only for these targets: large, or slow to import.
$(MUTATION): $(READY)
	$(VENV) -m pip install -qq --no-input --disable-pip-version-check -e ".[mutation]"
	touch $@

# An explicit `make setup` always runs, because its variables may have changed.
ifneq ($(filter setup,$(MAKECMDGOALS)),)
.PHONY: $(READY)
endif
