# Everything runs from a virtual environment that `make setup` builds at the root of the checkout.

VENV ?= .venv
# The first Python on this machine that the engine can run on; `make PYTHON=/path/to/python3.11` names another.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.10; do \
	"$$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && echo "$$python" && break; \
	done)

# make demo
MODEL ?=
BACKEND ?= nixl
JSON ?=
ARGS ?=
# make chaos
TRACE ?=
REQUESTS ?= 10000
SEED ?= 1
# make test
# Some of the tests, in place of all.
TESTS ?=
PYTEST_ARGS ?=

# Else each process compiles the engine anew: 12 seconds of a core beside the 10 of its import.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.pd-radix-setup
MOONCAKE_STAMP := $(VENV)/.pd-radix-mooncake

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all chaos lint clean

help:
	@echo 'make setup   build $(VENV) with the engine, this package and the tools (about 12 GB, minutes; once);'
	@echo '             as root on Debian or Ubuntu also the system libraries of Mooncake, with apt-get'
	@echo 'make demo    the same chat with the decode prefix cache off and on, and what it saves (under 3 minutes)'
	@echo '               MODEL=Qwen/Qwen3-0.6B   another model than the small made one, on a machine with a GPU'
	@echo '               BACKEND=mooncake        another KV transfer backend'
	@echo '               JSON=FILE               write the figures there'
	@echo "               ARGS='--clients 8'      any option of pd-radix demo"
	@echo 'make lint    ruff and mypy'
	@echo 'make test    lint and tests, with real servers on this machine'
	@echo "               TESTS=test/srt/core PYTEST_ARGS='-k name'   some of them"
	@echo '               EXTRA=lora   those of the core without any extra, and those of this one (EXTRA=none: of none)'
	@echo 'make test-all  the same, and what takes longest: all cells over both backends, workers that die'
	@echo 'make chaos   a deployment of five under fire, over both backends: hours (what it judges: benchmark/chaos.py)'
	@echo '               SEED=7 REQUESTS=1000    another storm, a shorter one; ARGS=--schedule=300 only says what it would do'
	@echo '               TRACE=FILE              what is asked: a Mooncake-format trace, else a made one of that shape'
	@echo 'make clean   remove what these commands made, except $(VENV)'
	@echo 'PYTHON=...   the Python (3.10 to 3.12) to build $(VENV) from'

setup: $(STAMP) $(MOONCAKE_STAMP)

# Left half done (no network, Ctrl-C), it has no stamp and the next call carries on. To compile all of its 30,000 files
# takes a core for minutes; Python compiles those that it imports, which are a tenth, when it first does.
$(STAMP): pyproject.toml constraints.txt python/sglang_pd_radix.pth
	@test -n '$(PYTHON)' || { echo 'Python 3.10, 3.11 or 3.12 is needed and none was found: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	'$(PYTHON)' -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	@touch $@

# Mooncake is optional: where it cannot be installed (no root for its Debian libraries), its tests are skipped and say
# why, and the next call tries again.
$(MOONCAKE_STAMP): $(STAMP) python/sglang_pd_radix/supplied/mooncake_host.py
	@if $(BIN)/python -m sglang_pd_radix.supplied.mooncake_host --install --constraints constraints.txt; then touch $@; fi

demo: setup
	$(BIN)/pd-radix demo --work-dir build/demo --backend $(BACKEND) \
		$(if $(MODEL),--model '$(MODEL)') $(if $(JSON),--json '$(JSON)') $(ARGS)

# The patch files are checked apart, under their path in the checkout: to mypy they have the engine's module names.
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && \
	$(BIN)/mypy --explicit-package-bases python/sglang $(wildcard python/extras/*/sglang)

lint: setup
	$(LINT)

# The quick ones first, in three processes: the managers in them have threads that never end, as in the engine, and what
# all of them hold is more than the 20,000 descriptors that some hosts allow. All at once, and lint beside them: half of
# their time they wait. What all but one of them say comes when the last has ended. Status 5 of pytest: -k has left none.
# What failed is said again at the end, where whoever is shown the last lines only finds it. So that the three end
# together, some extras run with the core.
WITH_CORE = $(wildcard python/extras/host_tier python/extras/pegaflow)
ifneq ($(strip $(TESTS)),)
test: setup lint
	$(BIN)/python -m pytest $(TESTS) $(PYTEST_ARGS)
else ifneq ($(strip $(EXTRA)),)
test: setup lint
	SGLANG_PD_RADIX_EXTRAS=none $(BIN)/python -m pytest test/srt/core/unit $(PYTEST_ARGS)
	$(if $(filter-out none,$(EXTRA)),$(BIN)/python -m pytest python/extras/$(EXTRA) $(PYTEST_ARGS))
else
test: setup
	@mkdir -p build; rm -f build/tests-*; status=5; \
	ended() { if [ $$1 -ne 5 ]; then case $$status in 0|5) status=$$1;; esac; fi; }; \
	shown() { { $(BIN)/python -m pytest $$2 $(PYTEST_ARGS) 2>&1; echo $$? >build/tests-status; } | tee build/tests-$$1.log; \
		ended "$$(cat build/tests-status)"; }; \
	quiet() { $(BIN)/python -m pytest $$2 $(PYTEST_ARGS) >build/tests-$$1.log 2>&1 & pids="$$pids $$!"; }; \
	pids=; quiet tools test/srt/tools/unit; quiet extras 'python/extras $(WITH_CORE:%=--ignore=%)'; \
	( $(LINT) ) >build/tests-lint.log 2>&1 & lint=$$!; \
	trap 'kill $$pids $$lint 2>/dev/null; exit 130' INT TERM; \
	shown core 'test/srt/core/unit $(WITH_CORE)'; \
	for pid in $$pids; do wait $$pid; ended $$?; done; trap - INT TERM; \
	cat build/tests-tools.log build/tests-extras.log build/tests-lint.log; \
	if wait $$lint; then rm build/tests-lint.log; else ended 1; fi; \
	shown e2e 'test/srt/core/e2e test/srt/tools/e2e $(wildcard python/extras/*/tests/e2e)'; \
	cat build/tests-lint.log 2>/dev/null; grep -hE '^(FAILED|ERROR) ' build/tests-*.log; exit $$status
endif

test-all: override PYTEST_ARGS += -m ''
test-all: test

CHAOS = $(BIN)/python benchmark/chaos.py --requests $(REQUESTS) --seed $(SEED) $(if $(TRACE),--trace '$(TRACE)') $(ARGS)

chaos: setup
	@status=0; $(CHAOS) --backend nixl || status=$$?; \
		if $(BIN)/python -m sglang_pd_radix.supplied.mooncake_host; then $(CHAOS) --backend mooncake || status=$$?; \
		else echo 'Mooncake cannot be used here: left out' >&2; fi; exit $$status

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find benchmark python test -name __pycache__ -type d -prune -exec rm -rf {} +
