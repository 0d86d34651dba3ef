# make demo   train the noise of the real CHGNet on a few DFT structures and show spread beside error
# make test   ruff, mypy and pytest: what CI runs
# make bench  the speed tables of benchmarks/results/speed

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/installed

.PHONY: demo test bench clean

demo: $(INSTALLED)
	$(BIN)/pmlip demo

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

bench: $(INSTALLED)
	$(BIN)/pmlip bench speed --out benchmarks/results/speed

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[chgnet,orb,report,dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
