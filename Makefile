# Everything a change is checked with, in a virtual environment of its own.
#
#   make demo      the random-walks example: SFT, then PPO
#   make test      the tests of every day; some of them: make test ARGS="tests/test_x.py -k y"
#   make test-all  what make test leaves out: fresh environments, planted bugs, real launches, every example
#   make reasoning installs reasoning-gym, without which the tests of that example are skipped; it needs a C compiler
#   make check     lint, types, test
#   make api       docs/plugin-api.md, the names that plugins may use, made again
#   make mutants   which checks of the kit find which bugs
#   make coverage  both test runs, with the lines and branches of trainkit/ that they reach
#   make parity    the losses beside TRL's
#   make bench     the benchmarks
#   make dist      wheels and source distributions in dist/, checked, installed and tried out
#   make test-lowest  make test, with the lowest versions of all dependencies that pyproject.toml allows

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
# the versions that are installed; the newest ones: make test VENV=.venv-newest PINS=
PINS = -c constraints.txt
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))

.DEFAULT_GOAL := check
.PHONY: demo test test-all reasoning coverage lint types check api mutants parity bench dist test-lowest

demo: $(VENV)/made
	$(BIN)/trainkit examples run randomwalks

# one thread: small matrices are slower on many, and sums come out in one order; a process for each core instead
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/pytest
# one file or one -k, without starting processes: make test ARGS="tests/test_x.py -k y"
SELECTED = $(or $(ARGS),-n auto --dist worksteal)

test: $(VENV)/made
	$(PYTEST) $(SELECTED)

test-all: $(VENV)/made
	$(PYTEST) -m "slow and not parity" $(SELECTED)

reasoning: $(VENV)/made
	$(BIN)/python -m pip install $(PINS) -e '.[reasoning]'

coverage: $(VENV)/made
	$(PYTEST) -n auto --dist worksteal -m "not parity" --cov=trainkit --cov-branch --cov-report=term $(ARGS)

lint: $(VENV)/made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/made
	$(BIN)/mypy
	$(BIN)/mypy .ci/*.py

check: lint types test

api: $(VENV)/made
	$(BIN)/python docs/make_plugin_api.py

mutants: $(VENV)/made
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=tests $(BIN)/python -m mutants

parity: $(BENCH)/made
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BENCH)/bin/pytest -m parity tests/parity

bench: $(VENV)/made $(BENCH)/made
	@for script in benchmarks/*.py; do \
	    if [ -e "$$script" ]; then echo "== $$script"; $(BIN)/python "$$script" || exit 1; \
	    else echo "there are no benchmarks"; fi; \
	done

dist: $(VENV)/made
	$(BIN)/python .ci/dist.py

test-lowest:
	mkdir -p build
	$(PYTHON) .ci/lowest.py > build/lowest.txt
	$(MAKE) test VENV=.venv-lowest PINS="-c build/lowest.txt"

# TRL, which trainkit is measured beside and never depends on
$(BENCH)/made: pyproject.toml constraints.txt
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install -c constraints.txt -e '.[bench,dev]' $(addprefix -e ,$(PLUGINS))
	touch $@

# made again whenever a dependency, or trainkit's version, could have changed
$(VENV)/made: pyproject.toml constraints.txt trainkit/__init__.py $(addsuffix /pyproject.toml,$(PLUGINS))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PINS) -e '.[dev]' $(addprefix -e ,$(PLUGINS))
	touch $@
