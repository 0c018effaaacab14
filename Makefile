# Two commands on a fresh machine: `make demo` and `make test`. Each can be interrupted and run again.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
REPRODUCTION ?= reproduction
DEMO ?= --draft_budget 1024
SERVE ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo serve reproduce test test-all mutants certify lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## fetch the default model and book, then self-speculation next to the baseline
	$(RUN) download.py
	$(RUN) convert_hf_checkpoint.py
	$(RUN) tests/selfspec_benchmark.py $(DEMO)
	@echo
	@echo "Try next (first: . $(VENV)/bin/activate)"
	@echo "  python tests/selfspec_benchmark.py --prompts FILE_OR_FOLDER --printoutput       your own text"
	@echo "  python tests/selfspec_benchmark.py --temperature 0.6 --verification coupled     the samples of plain decoding"
	@echo "  python tests/selfspec_benchmark.py --gamma auto --draft_budget auto             what pays best on this machine"
	@echo "  python tests/selfspec_benchmark.py --help                                       all else; README.md says more"

serve: $(VENV)/.installed  ## fetch the default model, then serve it on http://127.0.0.1:8000
	$(RUN) download.py
	$(RUN) convert_hf_checkpoint.py
	$(RUN) -m serving $(SERVE)

# An interrupted run goes on where it was. The cost model is measured at two gammas and with two repeats, since the sizes
# of the record in reproduce/results/ take 51 minutes.
SWEEP = $(RUN) -m reproduce.sweep --grid reproduce/grids

reproduce: $(VENV)/.installed-dev  ## tables of the paper, measured on this machine
	$(RUN) download.py
	$(RUN) convert_hf_checkpoint.py
	mkdir -p $(REPRODUCTION)
	$(SWEEP)/acceptance.toml --output $(REPRODUCTION)/acceptance.jsonl
	$(SWEEP)/speedups.toml --output $(REPRODUCTION)/speedups.jsonl
	$(SWEEP)/cost_model.toml --fixed 'drafters=["self@1", "self@3", "self@auto"]' --fixed repeats=2 --output $(REPRODUCTION)/cost_model.jsonl
	$(RUN) -m reproduce.tables acceptance $(REPRODUCTION)/acceptance.jsonl
	$(RUN) -m reproduce.tables speedups $(REPRODUCTION)/speedups.jsonl
	$(RUN) -m reproduce.tables cost_errors $(REPRODUCTION)/cost_model.jsonl
	$(RUN) -m reproduce.tables auto $(REPRODUCTION)/cost_model.jsonl
	$(RUN) -m reproduce.tables roofline
	$(RUN) -m reproduce.plot $(REPRODUCTION)/acceptance.jsonl --x draft_budget --y acceptance_rate --facet text --lines draft_policy prefix_len
	$(RUN) -m reproduce.plot $(REPRODUCTION)/speedups.jsonl --x B --y speedup decode_tokens_per_second

# One process more than there are cores: some tests wait for ranks and servers.
# The checks run next to the tests, and are shown after them.
test: $(VENV)/.installed-dev  ## checks and tests, slow ones left out
	@shown=$$(mktemp); $(MAKE) --no-print-directory lint > $$shown 2>&1 & checks=$$!; \
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $$($(RUN) -c 'import os; print(1 + (os.cpu_count() or 1))') --dist worksteal; \
	tests=$$?; wait $$checks; checks=$$?; cat $$shown; rm $$shown; exit $$((tests + checks))

test-all: lint  ## checks and every test; needs the default model (make demo fetches it)
	OMP_NUM_THREADS=1 WITNESS_SCENARIOS=27000 LLAMA_SCENARIOS=700 LAW_PAIRS=46000 INTERRUPTIONS=480 \
		$(RUN) -m pytest -m "" -n auto --dist worksteal $(PYTEST_ARGS)

mutants: $(VENV)/.installed-dev  ## put bugs into the source; a test has to fail because of each
	$(RUN) tests/support/mutants.py $(MUTANTS_ARGS)

certify: $(VENV)/.installed  ## the default model in float32 and bfloat16: flips against near-ties
	$(RUN) -m reproduce.certify --dtype float32 --tokens 4096
	$(RUN) -m reproduce.certify --dtype bfloat16 --tokens 4096

lint: $(VENV)/.installed-dev  ## ruff, mypy, and which way imports point
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

format: $(VENV)/.installed-dev  ## rewrite the sources in the project's format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:  ## remove the virtual environment and caches; checkpoints and data stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The marker .installing outlives an interrupted installation. pip takes a half-installed package for an
# installed one, so an environment that still carries the marker is made anew.
define install
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Foretoken needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.11" % sys.version_info[:2])'
	@if [ -e $(VENV)/.installing ] || [ ! -x $(RUN) ]; then rm -rf $(VENV); fi
	@mkdir -p $(VENV) && touch $(VENV)/.installing
	@[ -x $(RUN) ] || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -r $(1)
	$(if $(2),$(RUN) -m pip install --disable-pip-version-check --no-deps -r $(2))
	@rm $(VENV)/.installing
endef

$(VENV)/.installed: requirements.txt
	$(call install,requirements.txt)
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements.txt requirements-grammar.txt tests/requirements-parity.txt
	$(call install,requirements-dev.txt,tests/requirements-parity.txt)
	@touch $(VENV)/.installed $@
