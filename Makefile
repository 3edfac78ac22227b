PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(PY) -m pip install --quiet --constraint constraints.txt

# Tests run one process per core, so torch's own threads would only get in each other's way. They start many
# processes, each of which would compile the package anew where an environment forbids Python to keep what it compiled.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest
PYTEST_ARGS ?= -n logical
SWEEP_ARGS ?=
FUZZ_ARGS ?=
BENCH_ARGS ?=
MODELS_ARGS ?=

.PHONY: venv demo test check lint layers types sweep fuzz cuda bench models curves clean
.DELETE_ON_ERROR:

venv: $(INSTALLED)

# torch comes first and on its own: with it there, nothing that asks for "any torch" picks another build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) --no-build-isolation --editable '.[test,bench,dev]'
	touch $@

demo: venv
	$(PY) -m kernels.mlp

test: venv
	$(PYTEST) $(PYTEST_ARGS)

check: lint layers types

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

layers: venv
	$(VENV)/bin/lint-imports --no-cache

types: venv
	$(PY) -m mypy

# Every kernel x sharding x mesh x size; SWEEP_ARGS="--kernel matmul --mesh 2x2 --limit 100" takes a part of it.
sweep: venv
	OMP_NUM_THREADS=1 $(PY) -m tests.sweep $(SWEEP_ARGS)
	$(if $(SWEEP_ARGS),,OMP_NUM_THREADS=1 $(PY) -m tests.sweep_tiles)

# Random kernels, modules and files made wrong until Ctrl-C, or for FUZZ_SECONDS; FUZZ_ARGS="--seed 7 --cases 1" runs a number again.
fuzz: venv
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(FUZZ_ARGS)

# Every local kernel of the CUDA tests for every architecture, with nvcc.
cuda: venv
	$(PY) -m tests.targets.cuda.kernels

# Everything that has a peer, beside it; BENCH_ARGS="ranks gpu" runs some. `python -m benchmarks.bench_...` says more.
bench: venv
	$(PIP_INSTALL) '.[peers]'
	$(PY) -m benchmarks $(BENCH_ARGS)

# Architectures of transformers, timm, torchvision and diffusers, on their way to a mesh; MODELS_ARGS="--layouts 8 gpt2 llama" takes some.
models: venv
	$(PIP_INSTALL) '.[models]'
	OMP_NUM_THREADS=1 $(PY) -m tests.models $(MODELS_ARGS)
	OMP_NUM_THREADS=1 $(PY) -m tests.models.generation
	OMP_NUM_THREADS=1 $(PY) -m tests.models.training

# 50 steps of AdamW of seven models on seven meshes beside torch's; CURVES_ARGS="GPT MoE" takes some.
curves: venv
	OMP_NUM_THREADS=1 $(PY) -m tests.training_curves $(CURVES_ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
