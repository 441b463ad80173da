# aiockpt: `make demo` shows it, `make test` tests it, `make check` is what must be green before a change lands.
# Everything lives in .venv, which is made on first use and brought up to date when pyproject.toml or
# constraints.txt change. `make PYTHON=/path/to/python3.12 test` picks another interpreter.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Fastest first means one after the other, also under -j.
.NOTPARALLEL:

# The first interpreter that runs, is new enough and can make environments; empty when there is none.
# Names are tried by running them: a version manager's shim may exist and still refuse to start.
FIND_PYTHON = for p in python3.11 python3 python3.13 python3.12 python "$$HOME"/.local/bin/python3.1[1-3] \
	/usr/local/bin/python3.1[1-3] /opt/homebrew/bin/python3.1[1-3]; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { command -v "$$p"; break; }; done
PYTHON ?= $(shell $(FIND_PYTHON))

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
SOURCES := aiockpt tests $(wildcard examples benchmarks chaos)
PYTEST := $(BIN)/python -m pytest
# Options for pytest, as in `make test PYTEST_ARGS="-x -k crash"`; by default two tests run at a time.
PYTEST_ARGS ?= -n 2

.PHONY: help demo test quick check format static docs test-asyncio test-uvloop test-fast chaos soak bench bench-serve clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-13s %s\n' "$$name" "$$text"; done

demo: .venv/.with-examples ## train, kill, resume, and compare: the main job on real data
	$(BIN)/python examples/train.py

test: test-asyncio test-uvloop ## the whole suite, then its async tests on uvloop

quick: static test-fast ## for work in between: under 90 seconds

check: static docs test ## everything, fastest first: green means it may land

format: .venv/.with-dev ## rewrite the sources in the house's format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

static: .venv/.with-dev ## format check, lint, import contracts, types
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy $(SOURCES)

docs: .venv/.with-docs ## build the documentation; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-asyncio: .venv/.with-dev ## all tests, on asyncio's own loop
	AIOCKPT_TEST_LOOP=asyncio $(PYTEST) $(PYTEST_ARGS)

test-uvloop: .venv/.with-dev ## the async tests that are not slow, on uvloop
	AIOCKPT_TEST_LOOP=uvloop $(PYTEST) -m "asyncio and not slow" $(PYTEST_ARGS)

test-fast: .venv/.with-dev ## the tests that are not slow, on asyncio's own loop
	AIOCKPT_TEST_LOOP=asyncio $(PYTEST) -m "not slow" $(PYTEST_ARGS)

chaos: .venv/.with-chaos ## an outside crash-consistency suite over the training example (minutes)
	bash chaos/run.sh $(BIN)/python

soak: .venv/.with-examples ## 200 rounds of signals at random moments of a training run (an hour)
	$(BIN)/python chaos/soak.py

bench: .venv/.with-examples ## durable time against the disk's ceiling and against others (minutes)
	$(BIN)/python benchmarks/engine.py

bench-serve: .venv/.with-examples ## latencies of requests while checkpoints are loaded, against idle (minutes)
	$(BIN)/python benchmarks/serving.py

clean: ## remove the environment and everything built
	rm -rf .venv site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# ---------------------------------------------------------------- the environment

$(BIN)/python:
	@python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
		echo 'aiockpt needs Python 3.11 or newer with the venv module, and found none on PATH.' >&2; \
		echo 'Install it (Debian: apt install python3.11-venv) or say make PYTHON=/path/to/python3.11 ...' >&2; \
		exit 1; fi; \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "aiockpt needs Python 3.11 or newer; $$python is $$("$$python" -V 2>&1)." >&2; exit 1; }; \
	echo "making .venv with $$python" && "$$python" -m venv .venv

# A stamp a set of extras, newer than what it was made from: each is installed once.
.venv/.with-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing aiockpt[$*] into .venv"
	$(PIP) -e '.[$*]'
	@touch $@
