# Every target makes its own environment in .venv; a second call reuses it.
#   make demo              train the demo model (DEMO_STEPS=360 goes on from its last checkpoint)
#   make demo-data         only the demo's corpus and tokenizer, which train_configs/*_tiny.toml use
#   make test              lint, types, tests; at most 12 minutes on two cores
#   make test-slow         what is beyond that: every example model, scripts in full, large kernels
#   make test-tiny         train the small sibling of every model on 4 ranks (slow)
#   make prove-conversion  convert weights larger than the memory allowed for it (40 GB of disk)
#   make check-kernels     compile every kernel for every architecture, without a GPU (-oldest: with
#                          the oldest triton; CHECK_ARGS="--only narrow" and the like narrow it)
#   TEST_WORKERS=2         test files that `make test` and `make test-slow` run at the same time
#   PYTHON=python3.12      the interpreter to make .venv with (3.11 or newer)
#   PIP_ARGS="..."         more arguments for pip, such as the index of torch's CPU builds

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_STEPS ?= 300
TEST_WORKERS ?= 2
OLDEST_TRITON := 3.6.0
CHECK_ARGS ?=
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: demo demo-data test test-slow test-tiny prove-conversion check-kernels check-kernels-oldest lint types format docs clean

demo: $(VENV)/.has-train
	$(BIN)/python scripts/demo.py --steps $(DEMO_STEPS)

demo-data: $(VENV)/.has-train
	$(BIN)/python scripts/demo.py --data-only

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

test-slow: $(VENV)/.has-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n $(TEST_WORKERS) --dist loadfile --timeout 1800

test-tiny: $(VENV)/.has-test
	$(BIN)/python -m pytest -m slow tests/titan/train/test_tiny_configs.py

check-kernels: $(VENV)/.has-test
	$(BIN)/python scripts/check_kernels.py $(CHECK_ARGS)

# The oldest triton that is supported, beside the installed one.
check-kernels-oldest: $(VENV)/triton-$(OLDEST_TRITON)
	PYTHONPATH=$< $(BIN)/python scripts/check_kernels.py $(CHECK_ARGS)

$(VENV)/triton-$(OLDEST_TRITON): | $(VENV)/.has-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  --no-deps --target $@ triton==$(OLDEST_TRITON)

prove-conversion: $(VENV)/.has-test
	$(BIN)/python -m pytest -m disk tests/titan/hf/test_large.py

lint: $(VENV)/.has-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.has-test
	$(BIN)/mypy

format: $(VENV)/.has-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.has-train
	$(BIN)/python -m titan_relay.config.reference > docs/config.md

clean:
	rm -rf $(VENV) outputs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.has-train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV), a minute or two ..."
	$(INSTALL) -e '.[train]'
	@touch $@

$(VENV)/.has-test: $(VENV)/.has-train
	@echo "Installing what the tests need ..."
	$(INSTALL) -e '.[train,test]'
	@touch $@
