# Two commands from a bare clone: make demo, make test. Needs python3 >= 3.11 with venv and pip; nothing else.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-ci lint docs clean

demo: $(INSTALLED)
	$(VENV)/bin/fcil run method=hgp num-clients=10 hgp-batch-size=32

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -q

test-ci: $(INSTALLED)
	$(VENV)/bin/python -m pytest -q -m ci

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo site/index.html

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 >= 3.11 is needed: make PYTHON=python3.11")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build site ./*.egg-info .pytest_cache .ruff_cache .mypy_cache
