# The words of this project; CI uses the same ones.
.PHONY: help demo test test-long lab lint bench setup lock clean

PY := .venv/bin/python
T ?= tests
# Tests at a time: more than two cores can run, as those with VMs also wait.
WORKERS ?= 3
# The image that tests boot is kept between runs.
export FORKD_TEST_HOME ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/forkd/tests

help:
	@echo "make demo   fork one warmed VM into 100 (sets everything up first)"
	@echo "make test   lint, types, import rules and the whole test suite; T=path::test for a part of it, without lint"
	@echo "make test-long   the same with soak, fuzz and random-kill runs at full length"
	@echo "make lab    the tests that need KVM, root and cgroup v2, in a machine that has them; T=path::test, CMD='a command'"
	@echo "make bench  measure, write bench/results.json and the charts in docs/"
	@echo "make lint   the static checks only"
	@echo "make lock   refresh the versions and hashes of what set-up installs"

setup:
	@tools/setup dev

# What set-up installs, by version and hash.
lock: setup
	$(PY) tools/lock.py

demo:
	@tools/setup server image
	@.venv/bin/forkd demo $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) tools/unasync.py --check

ifeq ($(T)$(ARGS),tests)
test: lint
	$(PY) -m pytest tests -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(PY) -m lab
else
test: setup
	$(PY) -m pytest $(T) $(ARGS)
endif

test-long:
	FORKD_TEST_SIZE=full $(MAKE) test

# As it was typed: what has a $ in it is for the shell there.
lab: export LAB_COMMAND := $(value CMD)
lab: setup
	$(PY) -m lab $(if $(value CMD),--shell "$$LAB_COMMAND",$(T) -- $(ARGS))

bench: setup
	$(PY) -m bench $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
