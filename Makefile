# Every target runs `make install` first; that does nothing once the virtualenv is up to date.
#   PYTHON=python3.12   interpreter for a new virtualenv (>= 3.11)
#   VENV=dir            virtualenv to create or reuse
#   DEVICE=cpu|gpu      which vLLM to install; found out by default
#   WORKERS=N           processes that the tests run in, 0 for this one; each needs some 3 GiB
#                       (default: 2; 0 where there is a GPU, which engines cannot share)
#   ARGS="..."          extra arguments for pytest or the benchmark

VENV ?= .venv
export VENV PYTHON DEVICE WORKERS

# Keeps the repository root off sys.path: its `kernels` folder would shadow Hugging Face's package.
export PYTHONSAFEPATH := 1
# Compiled code is kept, or every process that a test starts would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install test test-slow test-timing test-gpu test-versions test-cluster check cluster site soak bench clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

install:  ## Create the virtualenv and install what this machine needs
	@.ci/install

test: install  ## Run the fast tests, including those on vLLM's engine with a tiny model
	$(VENV)/bin/pytest $$(.ci/parallel) $(ARGS)

test-slow: install  ## Run the tests that the fast run leaves out, with every seed; for a release
	$(VENV)/bin/pytest $$(.ci/parallel) -m "slow and not gpu and not timing" $(ARGS)

test-timing: install  ## Run the tests that compare times; leave the machine to them
	$(VENV)/bin/pytest -m timing $$(grep -rl --include='*.py' mark.timing tests) $(ARGS)

test-gpu: install  ## Run the tests that need a CUDA device
	$(VENV)/bin/pytest -m gpu $(ARGS)

test-versions: install  ## Run the tests that know vLLM on all its supported releases; for a release
	.ci/versions

check: install  ## Run the linter, the format check and the type checker
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	.ci/typecheck

test-cluster: install  ## Run the tests that start two engines and the gateway on Ray Serve
	$(VENV)/bin/pytest -n 0 -m "ray and slow" tests/cluster $(ARGS)

cluster: install  ## Two CPU replicas of a tiny model on Ray Serve, requests, and one replica killed
	$(VENV)/bin/python benchmarks/run.py gateway --only kill $(ARGS)

site: install  ## Make the documentation into a site, build/site; links that lead nowhere end it
	.ci/site

soak: install  ## Half an hour of everything at once on the real engine: what grows, what is lost
	$(VENV)/bin/python benchmarks/run.py soak $(ARGS)

bench: install  ## Run the benchmark
	$(VENV)/bin/python -m sola_sched.bench $(ARGS)

clean:  ## Remove virtualenvs, build products and caches
	rm -rf .venv .venv-* build dist *.egg-info .typecheck
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
