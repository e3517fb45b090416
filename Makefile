# Everything runs in a virtual environment of its own; nothing on the machine is taken for granted.
VENV ?= .venv
PY := $(VENV)/bin/python
SECONDS_OF_DEMO ?= 30

.PHONY: help install demo test test-long chaos check lint types layers bench-core clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

$(VENV)/.installed: pyproject.toml
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	touch $@

install: $(VENV)/.installed ## install into $(VENV)

demo: install ## a fleet of workers on SQLite, killed every few seconds, nothing lost
	$(VENV)/bin/unstuck demo --seconds $(SECONDS_OF_DEMO)

test: install ## the whole suite, on both databases
	$(PY) -m pytest -n 4 -m 'not long' tests

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: install
	$(VENV)/bin/mypy

layers: install
	$(VENV)/bin/lint-imports

chaos: install ## 20 workers and 20,000 jobs while random processes are killed for a minute, on both databases
	$(PY) -m tests.crash.chaos --url sqlite $(CHAOS)
	$(PY) -m tests.crash.chaos --url postgresql $(CHAOS)

test-long: install ## proofs that take minutes: an outage longer than every lease, with default settings
	$(PY) -m pytest -m long tests

check: lint types layers test ## lint, types, layers and tests in one

bench-core: install ## what it does per second, what it costs, how soon it sees a death
	$(PY) -m bench.core $(BENCH)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
