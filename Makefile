# Everything runs in a virtual environment of its own; nothing on the machine is taken for granted.
VENV ?= .venv
PY := $(VENV)/bin/python
SECONDS_OF_DEMO ?= 30
SEEDS ?= 100000
FUZZ_VENV ?= .venv-fuzz
N ?= 20
# Tests that share a server or a browser of their file run in one process, see tests/conftest.py. A process that dies
# ends the run.
PYTEST_OPTIONS := --dist loadgroup --no-loadscope-reorder --max-worker-restart=0 --durations=15
PYTEST := $(PY) -m pytest $(PYTEST_OPTIONS)
# Tests wait most of the time: several processes for each processor keep these busy.
PROCESSES := $(shell n=$$(( 4 * $$(nproc) )); echo $$(( n < 16 ? n : 16 )))
# pytest rewrites each file of tests once and keeps the result: without this, every process of a run does it at the same
# time.
COMPILE := $(PY) -m pytest --collect-only -qq tests >/dev/null
# Thousands of processes are started: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install tools demo test test-fast test-long test-repeat coverage programs fuzz-decoders fuzz-mdp chaos simulate simulate-mutants check lint types layers screenshots bench bench-full bench-core clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

$(VENV)/.installed: pyproject.toml
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[http]'
	touch $@

$(VENV)/.tools: $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	touch $@

install: $(VENV)/.installed ## install Unstuck into $(VENV)

tools: $(VENV)/.tools ## and what tests, linters and benchmarks need

demo: install ## a fleet of workers on SQLite, killed every few seconds, nothing lost
	$(VENV)/bin/unstuck demo --seconds $(SECONDS_OF_DEMO)

programs:
	@tools/test-programs.sh

test: tools programs ## every test with fixed seeds; the contract on both databases, other tests on one
	$(COMPILE)
	$(PYTEST) -n $(PROCESSES) -m "not long" tests
	$(PYTEST) -n 2 -m "not long" tests/desktop

test-fast: tools ## rules and the contract on SQLite, in less than a minute
	$(PYTEST) -n 2 -m "not long" --databases sqlite tests/unit tests/contract

test-long: tools programs ## everything on both databases with new seeds, and proofs that take minutes
	$(COMPILE)
	$(PYTEST) -n $(PROCESSES) --databases all --seed random tests
	$(PYTEST) -n 2 --databases all --seed random tests/desktop

test-repeat: tools programs ## `make test` N times (20); stops at the first failure and keeps its log
	@mkdir -p test-logs
	@for run in $$(seq $(N)); do \
		log=test-logs/$$(date +%Y%m%d-%H%M%S).log; \
		echo "run $$run of $(N): $$log"; \
		$(MAKE) --no-print-directory test >$$log 2>&1 || { tail -n 60 $$log; exit 1; }; \
		grep -h " passed" $$log; rm $$log; \
	done

coverage: export COVERAGE_FILE = $(CURDIR)/.coverage-data/data
coverage: tools programs ## branch coverage of src/ by `make test`; of a process that ends by SIGKILL it knows nothing
	rm -rf .coverage-data
	$(COMPILE)
	-$(PY) -m coverage run -m pytest $(PYTEST_OPTIONS) -n $(PROCESSES) -m "not long" tests
	-$(PY) -m coverage run -m pytest $(PYTEST_OPTIONS) -n 2 -m "not long" tests/desktop
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

lint: tools
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: tools
	$(VENV)/bin/mypy

layers: tools
	$(VENV)/bin/lint-imports

chaos: tools ## failovers, cut networks, hung servers, full disks and random kills, on both databases (CHAOS="--scenario NAME")
	$(PY) -m tests.chaos.__main__ --url sqlite $(CHAOS)
	$(PY) -m tests.chaos.__main__ --url postgresql $(CHAOS)

simulate: tools ## SEEDS fleets in virtual time under faults drawn from a seed (100,000)
	$(PY) -m tests.simulation --kept
	$(PY) -m tests.simulation --seeds $(SEEDS) $(SIMULATE)

simulate-mutants: tools ## bring old mistakes back: the simulation must find each within 1,000 seeds
	$(PY) -m tests.simulation --mutants --seeds 1000 $(SIMULATE)

fuzz-decoders: tools ## every decoder of foreign bytes under a fuzzer for a minute, with bounds on time and memory (FUZZ="--seconds 600")
	"$$(tests/bring_atheris.sh $(FUZZ_VENV) $(PY))" -m tests.fuzz_decoders --seconds 60 $(FUZZ)

fuzz-mdp: tools ## random and mutated frames at a broker for a minute
	$(PY) -m tests.mdp.fuzz --seconds 60 $(FUZZ)

check: lint types layers test ## lint, types, layers and tests in one: what must be green before a change is merged

screenshots: tools programs ## take the pictures of the docs from a running system
	$(PY) tools/screenshots.py

bench: tools ## a first look at every benchmark, about 5 minutes (PARTS=http, BENCH="--databases sqlite"; see bench/README.md)
	$(PY) -m bench --quick $(if $(PARTS),--parts $(PARTS)) $(BENCH)

bench-full: tools ## every benchmark at full length, about 20 minutes
	$(PY) -m bench $(if $(PARTS),--parts $(PARTS)) $(BENCH)

bench-core: tools ## workers and ledger at full length: throughput, CPU, latency, detection (BENCH="--only throughput")
	$(PY) -m bench --parts core $(BENCH)

clean:
	rm -rf $(VENV) $(FUZZ_VENV) fuzz-findings test-logs .coverage-data .mypy_cache .ruff_cache .pytest_cache
