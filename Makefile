# Two commands: `make demo` and `make test`.  Both set up .venv first; a second run starts at once.
#
# On Linux the package index's torch brings CUDA along.  Without a GPU this is much smaller:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
EDGEQ := $(BIN)/edgeq
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCE := models/tiny-llama
DEMO := build/demo/tiny-llama.edgeq

.PHONY: demo test test-exhaustive fuzz lint docs schema clean

demo: $(DEMO)
	@echo; echo "== what is in the file"
	$(EDGEQ) inspect $(DEMO) --verify
	@echo; echo "== generate"
	$(EDGEQ) run $(DEMO) -p "def read_file(path):" -n 96 --temp 0.7 --top-p 0.9 --seed 3
	@echo; echo "== before and after, on Python modules that the model was not trained with, in windows as long as its training had"
	$(EDGEQ) compare $(DEMO) --against $(SOURCE) --text code --window 256 --limit 16384
	@echo; echo "== speed"
	$(EDGEQ) bench $(DEMO) -p 128 -n 64 -d 0,512 -r 3

$(DEMO): $(wildcard edgeq/*.py converters/*.py converters/*/*.py) | $(VENV)/installed-convert
	@mkdir -p $(dir $(DEMO))
	@echo "== convert: 4 bits, a scale per 128 weights, by what is lost on a calibration text"
	$(EDGEQ) convert $(SOURCE) -o $(DEMO) --calibration built-in --bits 4 --group-size 128

# Files are dealt out whole, so that tests of a file share what they convert and compile.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed-test
	$(BIN)/python -m pytest $(PARALLEL) -m "not exhaustive"

test-exhaustive: $(VENV)/installed-test
	$(BIN)/python -m pytest $(PARALLEL) -m exhaustive

# Hostile files by the thousand, each kind for FUZZ_SECONDS; another SEED tries others.
FUZZ_SECONDS ?= 300
SEED ?= 0
fuzz: $(VENV)/installed-test
	nice -n 19 $(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) --seed $(SEED)

lint: $(VENV)/installed-test
	$(BIN)/python -m pytest tests/test_project.py tests/test_layering.py

docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

schema: $(VENV)/installed-test
	cd edgeq/schema && ../../$(BIN)/flatc --python --gen-object-api --gen-onefile --python-typing model.fbs

clean:
	rm -rf build .venv .mypy_cache .pytest_cache .ruff_cache *.egg-info

$(BIN)/python:
	$(PY) -m venv $(VENV)

$(VENV)/installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing edgeq[$*] into $(VENV)"
	$(INSTALL) --editable ".[$*]"
	@touch $@

# Arm without a board: an aarch64 Python and qemu under build/arm64, from Debian and the package index; no root needed.
# Without it the tests in the emulator are skipped and say so.
.PHONY: setup-arm64 test-arm64

setup-arm64: $(BIN)/python
	PYTHON=$(BIN)/python tests/arm/setup.sh

test-arm64: $(VENV)/installed-test
	$(BIN)/python -m pytest tests/arm -v
