# The words of this project; CI uses the same ones.
.PHONY: help demo test lab lint bench setup clean

PY := .venv/bin/python
T ?= tests
# The image that tests boot is kept between runs.
export FORKD_TEST_HOME ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/forkd/tests

help:
	@echo "make demo   fork one warmed VM into 100 (sets everything up first)"
	@echo "make test   lint, types, import rules and the whole test suite; T=path::test for a part of it"
	@echo "make lab    the tests that need KVM, root and cgroup v2, in a machine that has them; T=path::test, CMD='a command'"
	@echo "make bench  measure, write bench/results.json and the charts in docs/"
	@echo "make lint   the static checks only"

setup:
	@tools/setup dev

demo:
	@tools/setup server
	@.venv/bin/forkd demo $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

test: lint
	$(PY) -m pytest $(T) $(ARGS)
ifeq ($(T)$(ARGS),tests)
	$(PY) -m lab
endif

# As it was typed: what has a $ in it is for the shell there.
lab: export LAB_COMMAND := $(value CMD)
lab: setup
	$(PY) -m lab $(if $(value CMD),--shell "$$LAB_COMMAND",$(T) -- $(ARGS))

bench: setup
	$(PY) -m bench $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
