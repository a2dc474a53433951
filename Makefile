# The project's commands. Everything happens in .venv, made from pyproject.toml and constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
CPP := $(wildcard tests/fakes/*.cpp tests/fakes/*/*.c) $(shell find serve/plugin -name "*.cpp" -o -name "*.h")
SEEDS := pensieve a3c mvfst netsense autoccl
BENCHMARKS := $(wildcard benchmarks/bench_*.py)
# More than our two cores, since tests of jobs and of Slurm wait; four are faster, and late for limits.
WORKERS ?= 3
ONLY ?=
AGAINST ?=
ROOM ?= collect
SEED ?= 0
SECONDS ?= 60
# These files alone: to collect all tests takes a sixth of a slice.
SOAK = -v -m soak --soak-seed=$(SEED) $(shell grep -rl --include="test_*.py" "mark.soak" tests)
COMMIT = $(shell printf %d 0x$$(git -c safe.directory='*' rev-parse HEAD | cut -c1-7))
# Two threads on a busy machine spin against each other: one each is faster and repeatable.
export OMP_NUM_THREADS := 1
export MLFLOW_DISABLE_TELEMETRY := true
# Without compiled files each of hundreds of started Pythons compiles all of it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-traces test golden golden-write soak soak-slice check check-style check-types check-plugin check-layout format size bench bench-learning bench-seeds plugin install constraints clean

demo: install ## the whole pipeline, from measured data to the plugin's answers
	$(BIN)/python -P examples/demo.py

demo-traces: install ## published traces of PyTorch jobs as calls and steps
	$(BIN)/python -P examples/demo_traces.py

test: install ## all tests but soak: Python, C++, a job under a sanitizer; side by side
	$(BIN)/pytest -n $(WORKERS)

golden: install ## what the product says against what is kept in tests/golden/data; part of `make test`
	$(BIN)/pytest -n $(WORKERS) tests/golden

golden-write: install ## keep what it says now; ONLY=PREFIX for some
	$(BIN)/python -m tests.golden $(ONLY)

soak: install ## what takes long on purpose; ONLY= (as pytest's -k), SEED=, SECONDS=
	$(BIN)/pytest $(SOAK) --soak-seconds=$(SECONDS) -k "$(ONLY)"

soak-slice: install ## what two minutes of it reach, in an order that the commit gives
	timeout --signal=INT --kill-after=60 120 $(BIN)/pytest $(SOAK) --soak-seconds=10 \
	  -x --randomly-seed=$(COMMIT) || [ $$? = 124 ]

check: check-style check-types check-plugin check-layout ## format, lint, types, dead names, C++ warnings, layout

check-style: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/vulture
	$(BIN)/clang-format --style=file:serve/plugin/.clang-format --dry-run --Werror $(CPP)
	$(BIN)/python -m tests.vocabulary --check

check-types: install
	$(BIN)/mypy

check-plugin: install ## warnings are errors; the tests take this build
	$(BIN)/python -m tests.plugin_build

check-layout: install
	$(BIN)/pytest -p no:randomly tests/test_layout.py tests/test_docs.py

format: install ## write the format that `check` wants
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format --style=file:serve/plugin/.clang-format -i $(CPP)

size: install ## lines, statements, files and words; AGAINST=REV: and what changed since
	$(BIN)/python -m tests.size $(if $(AGAINST),--against $(AGAINST))

bench: install ## figures into out/bench/*.json
	for file in $(BENCHMARKS); do $(BIN)/python $$file || exit 1; done

bench-learning: install ## docs/results.md's figures into out/bench/learning.json; FULL=1 for all
	$(BIN)/python benchmarks/learning.py

bench-seeds: install ## docs/seeds.md, measured again on few seeds; FULL=1 for more
	for name in $(SEEDS); do $(BIN)/python benchmarks/bench_$$name.py || exit 1; done
	$(BIN)/python benchmarks/learning_tables.py

plugin: install ## out/plugin/libnccl-tuner-dynamiccl.so, and the libraries beside it
	$(BIN)/python -m dynamiccl.serve.build --dir out/plugin

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): a minute or two, or as long as torch takes to come"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade "pip>=25.1"
	@# Python compiles what is imported, a fifth of what pip would take a minute to compile.
	@$(BIN)/python -m pip install -qq --no-compile -c constraints.txt --group dev -e ".[all]"
	@touch $@

constraints: ## pin what is installed now
	(head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//') > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
