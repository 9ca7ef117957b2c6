# `make` lists the targets. Everything runs from .venv, which scripts/setup builds once
# and returns from at once when it is up to date.

PYTHON_VENV := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo audit test test-all check clean venv

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

setup: venv ## build .venv with everything needed (PYTHON=... chooses the interpreter)
	@echo "Ready. Next: make demo"

demo: venv ## show on a real model what is reused and what it saves
	@.venv/bin/stemkv demo

audit: venv ## attack identity, exactness and isolation of the embedded model
	@.venv/bin/stemkv audit all

test: venv ## run the tests, without the slow ones
	@$(PYTHON_VENV) -m pytest -m "not slow" -n 2 --dist loadfile

test-all: venv ## run all tests
	@$(PYTHON_VENV) -m pytest

check: venv ## lint, formatting, types
	@scripts/check

clean: ## remove .venv, caches and built packages
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@scripts/setup
