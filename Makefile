# make demo   fine-tune the real CHGNet on the silica set and show spread beside error, in and out of distribution
# make test   ruff, mypy and pytest without the slow tests
# make test-slow   the tests marked slow
# make test-sevenn, make test-mace   the adapters that cannot share an environment, each in its own
# make bench  the speed tables of benchmarks/results/speed

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/installed
# One process per core with one thread each; each process takes about 2 GB of memory. make test WORKERS=0 runs serially.
WORKERS ?= logical
PYTEST = pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal

.PHONY: demo test test-slow test-sevenn test-mace bench clean

demo: $(INSTALLED)
	$(BIN)/pmlip demo

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/$(PYTEST) -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/$(PYTEST) -m slow

# the adapter's tests first: mace must be imported before e3nn
test-sevenn test-mace: test-%: .venv-%/installed
	.venv-$*/bin/$(PYTEST) tests/backbones/test_$*.py tests/backbones/test_backbones.py tests/noise/test_injection.py

bench: $(INSTALLED)
	$(BIN)/pmlip bench speed --out benchmarks/results/speed

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[chgnet,orb,report,torchsim,dev]'
	touch $@

.venv-%/installed: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --constraint constraints-$*.txt --editable '.[$*,report,dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-sevenn .venv-mace .mypy_cache .pytest_cache .ruff_cache .hypothesis
