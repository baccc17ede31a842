# Every target sets up what it needs, once. The first call takes minutes, the next ones no time.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV ?= .venv
# constraints/gpu.txt, with PYTHON=python3.12, is the environment that made the GPU results.
CONSTRAINTS ?= constraints/cpu.txt
PROFILE ?= profiles/local
# A package index for torch alone, such as https://download.pytorch.org/whl/cpu; by default pip's own.
TORCH_INDEX ?=
# Where Snakemake looks for a profile that is given by its name.
SNAKEMAKE_PROFILES := $(or $(XDG_CONFIG_HOME),$(HOME)/.config)/snakemake

# The name of the stamp says what was installed and where: a changed requirement or a moved folder sets up again.
STAMP_KEY := $(shell (cat pyproject.toml workflow/plugins/submitit/pyproject.toml $(CONSTRAINTS) constraints/common.txt; echo "$(CURDIR)") | sha256sum | cut -c1-16)
READY := $(VENV)/.ready-$(STAMP_KEY)
TOOLS := $(VENV)/.tools-$(STAMP_KEY)
SITE := $(VENV)/.site-$(STAMP_KEY)
ACTIVATE := export PATH="$(abspath $(VENV))/bin:$$PATH"
IS_SUPPORTED := -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# Tests start hundreds of processes, which are not to compile the project each for itself.
unexport PYTHONDONTWRITEBYTECODE
# The tensors of tests are small, so a second thread would only wait; tests/conftest.py says how many workers there are.
PYTEST := OMP_NUM_THREADS=1 pytest --numprocesses auto --maxprocesses 8 --durations 10

.PHONY: help setup try demo miniature test test-integration test-all check docs format bench profiles

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "make %-16s %s\n", $$1, $$2}'

setup: $(READY)  ## Make the virtual environment, if it is not there

try: $(READY)  ## See a trained model multiply 512 permutations after 32 in training, within a minute
	@$(ACTIVATE); implicit-llm try
	@echo "Before it, in each new shell: source $(VENV)/bin/activate"

demo: $(READY)  ## Run the word-problem slice of the paper on this machine, from the data to the report
	@echo "To watch it, in a second shell: source $(VENV)/bin/activate && implicit-llm status demo"
	@$(ACTIVATE); snakemake --profile $(PROFILE) --configfile workflow/config/demo.yaml
	@$(ACTIVATE); implicit-llm report demo --numbers
	@echo
	@echo "Open the report:    file://$(CURDIR)/results/demo/report/index.html"
	@echo "In each new shell:  source $(VENV)/bin/activate"
	@echo "Next:               implicit-llm status demo"

miniature: $(READY)  ## Run the whole paper in small, every figure and table; an hour of processor time
	@$(ACTIVATE); snakemake --profile $(PROFILE) --configfile workflow/config/miniature.yaml

test: $(TOOLS)  ## Run the tests, minutes
	@$(ACTIVATE); $(PYTEST) -m "not slow and not gpu and not integration"

test-integration: $(TOOLS)  ## Run the tests with packages that users bring
	@$(ACTIVATE); $(PYTEST) -m "integration and not slow and not gpu"

test-all: $(TOOLS)  ## Run all tests that this machine can run
	@$(ACTIVATE); $(PYTEST)

# Of Snakemake's complaints one is not followed: jobs run in this very environment, not in one for each rule.
check: $(TOOLS)  ## Check style, types, imports between packages, rules and language
	@$(ACTIVATE); ruff check .
	@$(ACTIVATE); ruff format --check .
	@$(ACTIVATE); mypy
	@$(ACTIVATE); lint-imports --no-logo --no-cache
	@$(ACTIVATE); snakefmt --check Snakefile workflow/rules
	@$(ACTIVATE); ! snakemake --lint 2>&1 | grep '^    \* ' | grep -v 'Specify a conda environment'
	@$(ACTIVATE); python tests/language.py

docs: $(SITE)  ## Build the documentation site: docs/_build/html/index.html
	@$(ACTIVATE); sphinx-build -n -W --keep-going -q -b html docs docs/_build/html
	@echo "Open the site: file://$(CURDIR)/docs/_build/html/index.html"

profiles:  ## Link the profiles where Snakemake finds them by name: snakemake --profile cluster
	@mkdir -p "$(SNAKEMAKE_PROFILES)"
	@for profile in $(filter-out profiles/default/,$(wildcard profiles/*/)); do \
	    name=$$(basename "$$profile"); link="$(SNAKEMAKE_PROFILES)/$$name"; \
	    if [ -e "$$link" ] && [ ! -L "$$link" ]; then echo "error: $$link is there and no link; move it away" >&2; exit 2; fi; \
	    ln -sfn "$(CURDIR)/profiles/$$name" "$$link"; echo "$$link -> $(CURDIR)/profiles/$$name"; \
	done

format: $(TOOLS)  ## Rewrite the sources in the project's style
	@$(ACTIVATE); ruff check --fix .; ruff format .; snakefmt Snakefile workflow/rules

bench: $(TOOLS)  ## Run the benchmarks; each prints a table
	@$(ACTIVATE); for script in tests/benchmarks/*.py; do echo "== $$script"; python -m "tests.benchmarks.$$(basename $$script .py)"; done

# Its name changes with its contents, so it has no prerequisites: a checkout that only changes file times installs nothing.
# torch comes first and by its exact version: left to the other packages, pip would take a build for GPUs.
$(READY):
	@$(PYTHON) $(IS_SUPPORTED) || { echo "error: $(PYTHON) is not Python 3.11 or 3.12; set PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments; type: sudo apt-get install python3-venv" >&2; exit 2; }
	@[ ! -e $(VENV)/bin/python ] || $(VENV)/bin/python $(IS_SUPPORTED) || { echo "error: the Python in $(VENV) is not 3.11 or 3.12; type: rm -r $(VENV)" >&2; exit 2; }
	@echo "Setting up $(VENV): a few minutes, once."
	@rm -f $(VENV)/.ready-* $(VENV)/.tools-* $(VENV)/.site-*
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "1 of 2: PyTorch"
	@$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$$(sed -n 's/^torch==//p' $(CONSTRAINTS)) --constraint $(CONSTRAINTS)
	@echo "2 of 2: all other packages"
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable ./workflow/plugins/submitit --editable '.[all]'
	@touch $@

# What the tests and checks need beside it, Triton among it, which the demo does without.
$(TOOLS): $(READY)
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable ./workflow/plugins/submitit --editable '.[dev]'
	@touch $@

$(SITE): $(READY)
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable ./workflow/plugins/submitit --editable '.[docs]'
	@touch $@
