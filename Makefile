# Everything a change is checked with, in a virtual environment of its own.
#
#   make demo      the random-walks example: SFT, then PPO
#   make examples-real  the example word_problems with SmolLM2-135M, which the package index has; a quarter of an hour
#   make test      the tests of every change; some of them: make test ARGS="tests/test_x.py -k y"
#   make test-all  all other tests: variants, fresh environments, planted bugs, real launches, every example, engines
#   make weekly    what takes too long for every commit: battery-full, coverage, parity, the lowest and the newest versions
#   make battery   the 50 checks of tests/reliability, with a table; those that take long on a sample drawn afresh
#   make battery-full the same, the whole rule of each
#   make engines   the tests with Ray and vLLM, in an environment of their own
#   make shards    the tests with DeepSpeed, in the environment of the engines
#   make browser   pages in headless Chromium: reports of runs, and the documentation site, which make docs builds
#   make test-gpu  the tests that need an NVIDIA GPU: VENV=.venv-gpu, with a torch for it and trainkit-vllm[gpu]
#   make gpu       figures of a GPU and its tests, in build/gpu: PYTHON with a torch for it, nothing installed
#   make extras    installs reasoning-gym, which needs a C compiler, and lm-eval, for make test-all
#   make check     lint, types, test
#   make tables    the tables of docs/coming-from-*.md from plugins/migrate/trainkit_migrate/
#   make docs      the documentation site in build/site, with every link and reference checked
#   make mutants   which checks of the kit find which bugs
#   make coverage  the lines and branches of trainkit/ that make test reaches, and those with the slow tests
#   make parity    the losses beside TRL's, and a step of each of TRL's trainers in the speed benchmark
#   make bench     the benchmarks; with them make speed
#   make speed     speeds beside other systems, and docs/distributed.md from them; some: make speed ARGS="--cases rloo"
#   make dist      wheels and source distributions in dist/, checked, installed and tried out
#   make test-lowest  make test, with the lowest versions of all dependencies that pyproject.toml allows
#   make test-newest  make test, with the newest versions that it allows

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
ENGINES := .venv-engines
# the versions that are installed
PINS = -c constraints.txt
# compiled modules are kept, whatever the environment says: tests and examples start many processes
export PYTHONDONTWRITEBYTECODE =
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))

.DEFAULT_GOAL := check
.PHONY: demo examples-real test test-all weekly weekly-tests battery battery-full test-gpu engines shards extras coverage lint types \
    check tables docs browser mutants parity bench speed gpu dist test-lowest test-newest

demo: $(VENV)/made-demo
	$(BIN)/trainkit examples run randomwalks

# gguf reads the file that the model is in; neither it nor the model is needed elsewhere
examples-real: $(VENV)/made
	$(BIN)/python -m pip install $(PINS) gguf
	test -f build/smollm2/config.json || $(BIN)/python examples/word_problems/smollm2.py build/smollm2
	$(BIN)/trainkit examples run word_problems --model build/smollm2 $(ARGS)

# one thread: small matrices are slower on many, and sums come out in one order; a process for each core instead
SETTINGS := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(SETTINGS) $(BIN)/pytest
PARALLEL := -n auto --dist worksteal
# one file or one -k, without starting processes: make test ARGS="tests/test_x.py -k y"
SELECTED = $(or $(ARGS),$(PARALLEL))

test: $(VENV)/made
	$(PYTEST) $(SELECTED)

test-all: extras
	$(PYTEST) -m slow $(SELECTED)
	$(if $(ARGS),,$(MAKE) engines shards)

weekly: weekly-tests battery-full coverage parity test-lowest test-newest

weekly-tests: extras
	$(PYTEST) -m weekly $(SELECTED)

battery: $(VENV)/made
	$(PYTEST) -m slow $(or $(ARGS),$(PARALLEL) tests/reliability)

battery-full: $(VENV)/made
	$(PYTEST) -m slow --full $(or $(ARGS),$(PARALLEL) tests/reliability)

# a file in each of two processes: every test starts servers and actors. conftest.py, which has no tests, has the options
PYTEST_ENGINES := $(SETTINGS) $(ENGINES)/bin/pytest -m engines
engines: $(ENGINES)/made
	$(PYTEST_ENGINES) $(or $(ARGS),-n 2 --dist loadfile plugins/ray plugins/vllm) tests/conftest.py
	$(if $(ARGS),,TRITON_INTERPRET=1 $(PYTEST_ENGINES) tests/test_kernels.py tests/conftest.py)

shards: $(ENGINES)/made
	$(PYTEST_ENGINES) $(or $(ARGS),-n 2 plugins/deepspeed) tests/conftest.py

# on CPUs they fail; tests/test_gpu.py runs one of them on a CPU, too
test-gpu: $(VENV)/made
	$(PYTEST) -m gpu $(or $(ARGS),tests/test_gpu.py)

# Chromium and its driver are programs of the system: apt-get install chromium chromium-driver
browser: $(VENV)/made docs
	$(BIN)/python -m pip install $(PINS) -e '.[browser]'
	$(PYTEST) -m browser $(or $(ARGS),tests/test_browser.py)

extras: $(VENV)/made-extras

coverage: extras
	$(PYTEST) $(PARALLEL) --cov=trainkit --cov-branch --cov-report=term
	$(PYTEST) $(PARALLEL) -m slow --cov=trainkit --cov-branch --cov-append --cov-report=term

lint: $(VENV)/made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/made
	$(BIN)/mypy
	$(BIN)/mypy .ci/*.py

check: lint types test

tables: $(VENV)/made
	$(BIN)/python docs/make_migrating.py

# without the notice of mkdocs-material about MkDocs 2, which is not released and which pyproject.toml excludes
docs: $(VENV)/made-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

mutants: $(VENV)/made
	$(SETTINGS) PYTHONPATH=plugins/kit/tests $(BIN)/python -m mutants $(ARGS)

parity: $(BENCH)/made
	$(SETTINGS) $(BENCH)/bin/pytest -m parity tests/parity tests/test_speed_benchmark.py

# make speed runs speed.py and its parts; the others draw what runs have written
APART := $(addprefix benchmarks/,beside_trl.py figures.py growth.py real_run.py speed.py)
bench: $(VENV)/made $(BENCH)/made
	@for script in $(filter-out $(APART),$(wildcard benchmarks/*.py)); do \
	    echo "== $$script"; $(BIN)/python "$$script" || exit 1; \
	done
	$(MAKE) speed

# with figures of this machine, if the file has those of another one: rm benchmarks/speed.json
speed: $(VENV)/made $(BENCH)/made
	missed=0; \
	$(BIN)/python benchmarks/speed.py --json benchmarks/speed.json --steps 3 --warmup 1 $(ARGS) || missed=$$?; \
	$(if $(ARGS),,$(BIN)/python benchmarks/growth.py --json benchmarks/speed.json --steps 3 --warmup 1 &&) \
	$(BIN)/python docs/make_performance.py && exit $$missed

# what it needs beside torch is in benchmarks/README.md; the rows of before are not measured again
gpu:
	$(PYTHON) benchmarks/gpu.py --known benchmarks/gpu.jsonl $(ARGS)

dist: $(VENV)/made
	$(BIN)/python .ci/dist.py

test-lowest:
	mkdir -p build
	$(PYTHON) .ci/lowest.py > build/lowest.txt
	$(MAKE) test VENV=.venv-lowest PINS="-c build/lowest.txt"

test-newest:
	$(MAKE) test VENV=.venv-newest PINS=

# TRL, which trainkit is measured beside and never depends on
$(BENCH)/made: pyproject.toml constraints.txt
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install -c constraints.txt -e '.[bench,dev]' $(addprefix -e ,$(PLUGINS))
	touch $@

# vLLM requires torchvision, torchaudio and torchcodec; the builds of them that pip finds need CUDA, and transformers,
# which imports what is installed of them, fails with them on a machine without it
EXTRAS := plugins/deepspeed[deepspeed] plugins/ray[ray] plugins/vllm[cpu]
WITH_ENGINES := $(filter-out plugins/deepspeed plugins/ray plugins/vllm,$(PLUGINS)) $(EXTRAS)
$(ENGINES)/made: pyproject.toml constraints.txt .ci/engines.py $(addsuffix /pyproject.toml,$(PLUGINS))
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	mkdir -p build
	$(PYTHON) .ci/engines.py > build/engines.txt
	$(ENGINES)/bin/python -m pip install -c build/engines.txt -e '.[dev]' $(foreach plugin,$(WITH_ENGINES),-e '$(plugin)')
	$(ENGINES)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

# without an environment to build each distribution in, which takes longer than to build it
EDITABLE = $(BIN)/python -m pip install --no-compile $(PINS) hatchling editables && \
    $(BIN)/python -m pip install --no-compile --no-build-isolation $(PINS)
# made again whenever a dependency, or trainkit's version, could have changed
PROJECTS := pyproject.toml constraints.txt trainkit/version.py $(addsuffix /pyproject.toml,$(PLUGINS))
$(VENV)/made-demo: $(PROJECTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(EDITABLE) -e . -e plugins/sft -e plugins/ppo -e plugins/report networkx
	touch $@

$(VENV)/made: $(PROJECTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(EDITABLE) -e '.[dev]' $(addprefix -e ,$(PLUGINS))
	$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true  # as pip would, but on all cores
	touch $@

$(VENV)/made-docs: $(VENV)/made
	$(BIN)/python -m pip install $(PINS) -e '.[docs]'
	touch $@

$(VENV)/made-extras: $(VENV)/made
	$(BIN)/python -m pip install $(PINS) -e '.[reasoning,eval]'
	touch $@
