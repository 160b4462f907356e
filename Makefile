# make demo    train on bundled digits and show what the covariance knows (no download)
# make test    the fast tests
# Everything below sets up .venv first, once.

# Real data sets, where a folder beside the repository has them.
SHARED := $(wildcard ../shared/data)
ifneq ($(SHARED),)
export COVARY_DATA ?= $(abspath $(SHARED))
endif

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test test-slow lint format docs package bench load results reproduce clean

help:
	@echo "make demo       train a network on bundled digits, measure it and write a report to look at"
	@echo "make test       run the fast tests (make test-slow: the slow ones)"
	@echo "make setup      create .venv with everything in it; the others do so when it is not there"
	@echo "make lint       ruff and mypy (make format: let ruff rewrite)"
	@echo "make bench      measure speed and memory as ratios: steps, epochs, replicas, a large table"
	@echo "make load       put a served run under load for MINUTES=30, and send it what no client should"
	@echo "make results    run the demo and measure accuracy against sampling, save results/benchmarks/*.json"
	@echo "make reproduce  an experiment of the paper, such as NAME=mechanism SCALE=smoke; without NAME, list them"
	@echo "make docs       build the documentation into site/"
	@echo "make package    build sdist and wheel, install the wheel apart from the repository, use it there"
	@echo "make clean      remove .venv and everything generated"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "covary needs Python 3.11 or newer, and there is no '$(PYTHON)' on this machine."; \
	  echo "Install it, or say where it is: make setup PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "covary needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version)."; \
	  echo "Say where a newer one is: make setup PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot create virtual environments (on Debian: apt install python3-venv)."; \
	  exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || \
	  echo "Note: no C compiler found; all but the torch.compile test will work."
	@echo "Setting up $(VENV): about 2 GB of packages, a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@

demo: setup
	$(BIN)/covary demo

# A process for each core, four at most; tests of one file stay in one, and share what they train.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: setup
	$(BIN)/python -m tests.packaging

MEASURED_SPEED = export compiled training replicas tracked converted tracking_probe sampling_cost lif dropout sources tables_speed
MEASURED_ACCURACY = demo against_sampling quadrature_accuracy parity tracking_trials uncertainty uci \
  verification spiking flips pendulum tables_accuracy tables_far

bench: setup
	@mkdir -p out
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-quiet --benchmark-json=out/bench.json -m '' -q
	$(BIN)/python -m benchmarks.summary out/bench.json
	for name in $(MEASURED_SPEED); do $(BIN)/python -m benchmarks.$$name || exit 1; done

# Of a quiet machine: it measures what two cores can do.
MINUTES ?= 30

load: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.serving_load --minutes $(MINUTES)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.serving_fuzz --requests 2000

results: setup
	for name in $(MEASURED_ACCURACY); do $(BIN)/python -m benchmarks.$$name || exit 1; done

# Beside the networks, so that a trial replaces no stored results; RESULTS=results/reproduction does.
SCALE ?= smoke
JOBS ?= 1
RESULTS ?= runs/reproduce/$(SCALE)/results

reproduce: setup
ifeq ($(origin NAME),command line)
	$(BIN)/python -m reproduction run $(NAME) --scale $(SCALE) --jobs $(JOBS) --results $(RESULTS)
else
	$(BIN)/python -m reproduction list
endif

clean:
	rm -rf $(VENV) site out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
