# Everything starts here; `make` alone lists the targets. Recipes are POSIX sh and use .venv by path, so nothing has to
# be activated, and each target sets up what it needs.

PYTHON ?= python3.11
PORT   ?= 8888
BIN    := .venv/bin

.PHONY: help setup demo lab test test-fast bench bench-card gpu-day notebooks docs doctor clean
.DEFAULT_GOAL := help

# Tests, demo, benchmarks and notebooks docs use what is in the repository and in the environment, never the network.
demo test test-fast bench bench-card gpu-day notebooks docs: export HF_HUB_OFFLINE = 1
demo test test-fast bench bench-card gpu-day notebooks docs: export TRANSFORMERS_OFFLINE = 1
demo test test-fast bench bench-card gpu-day notebooks docs: export HF_DATASETS_OFFLINE = 1
demo test test-fast bench bench-card gpu-day notebooks docs lab: export HF_HUB_DISABLE_TELEMETRY = 1
# Tokenizers warn when a process that used their threads forks, as data loaders do.
demo test test-fast bench bench-card gpu-day notebooks docs lab: export TOKENIZERS_PARALLELISM = false

# Images of containers say that no compiled modules are to be written. Then every process would compile anew what it imports:
# four seconds for PyTorch, with its optimizers. So they go where they are in nobody's way.
ifdef PYTHONDONTWRITEBYTECODE
demo lab test test-fast bench bench-card gpu-day notebooks docs doctor: export PYTHONPYCACHEPREFIX = $(CURDIR)/.venv/compiled
demo lab test test-fast bench bench-card gpu-day notebooks docs doctor: export PYTHONDONTWRITEBYTECODE =
endif

help: ## list the targets (default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  settings: PYTHON=$(PYTHON) (3.11 to 3.13, for setup), PORT=$(PORT) (for lab), ARGS= (for demo, test, test-fast, notebooks)"

setup: .venv/.stamp ## make .venv and install everything into it, in the tested versions

# The stamp is younger than the last complete installation, so a change of dependencies installs again.
# Nothing is compiled now: modules are when they are first imported, and most of what is installed never is.
# The pip that comes with Python 3.11 takes half as long again.
.venv/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "setup needs Python 3.11, 3.12 or 3.13 and tried $(PYTHON); name another: make setup PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt --upgrade pip
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e ".[test,browser]"
	@touch $@

demo: .venv/.stamp ## run the demonstration without a browser; it prints what it measured and ends with a report
	$(BIN)/python -m workbench demo $(ARGS)

lab: .venv/.stamp ## open JupyterLab on 127.0.0.1, with its token, at the first notebook
	$(BIN)/python -m workbench lab --port $(PORT)

# Tests keep all cores busy, and kernels of notebooks compute on all of them too: threads that wait give their core away.
test test-fast: export OMP_WAIT_POLICY = passive

# One process more than there are cores, since tests wait for kernels and pages. More than four would take turns for memory, and
# for a GPU. A file's tests stay in one process.
WORKERS = $(shell n=$$(nproc 2>/dev/null || echo 3); [ $$n -lt 4 ] && echo $$((n + 1)) || echo 4)

test: .venv/.stamp ## run the tests, in up to four processes (ARGS="-m slow" for the long ones)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# tests/support/fast.py says which.
test-fast: .venv/.stamp ## run a quick sample of the tests, from every folder but browser and notebooks
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --fast $(ARGS)

# Helpers start with an underscore; the card and the plan for a GPU run the others. A benchmark that needs what is not here (a GPU)
# says so and exits with 2.
bench: .venv/.stamp ## run every benchmark in turn
	@for file in benchmarks/[!_]*.py; do \
	  case $$file in */card.py|*/gpu_day.py) continue;; esac; \
	  echo "== $$file"; $(BIN)/python "$$file" || [ $$? -eq 2 ] || exit 1; \
	done

bench-card: .venv/.stamp ## measure the figures of docs/BENCH_CARD.md on this machine, in 20 minutes (ARGS=--again: all anew)
	$(BIN)/python benchmarks/card.py $(ARGS)

gpu-day: .venv/.stamp ## run the plan of 25 minutes for a GPU (ARGS=--plan prints it, ARGS=--dry tries it without one)
	$(BIN)/python benchmarks/gpu_day.py $(ARGS)

notebooks: .venv/.stamp ## execute the notebooks and store them with their outputs (ARGS=--check only judges them)
	$(BIN)/python -m workbench notebooks $(ARGS)

# Sphinx is not needed by anything else, so it is installed by the first build.
docs: .venv/.stamp .venv/.docs ## build the documentation site in out/site; warnings are errors
	$(BIN)/python docs/site/build.py $(ARGS)

.venv/.docs: .venv/.stamp
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

doctor: .venv/.stamp ## check versions, widgets, devices and room, with advice
	$(BIN)/python -m workbench doctor

clean: ## remove caches and build outputs (.venv stays; `rm -r .venv` removes that too)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
