# Everything a developer types. Every target that needs the environment builds it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# The oldest supported transformers, in an environment of its own.
OLD_TRANSFORMERS := 5.16
OLD_VENV := build/venv-transformers-$(OLD_TRANSFORMERS)

# Tests share their cores with other work: threads that wait should sleep, not spin.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: install peers demo test soak lint format check-bf16 check-transformers clean

install: $(VENV)/.installed

# torch comes first and pinned: resolved together with the rest, pip may fetch a build for GPUs of several gigabytes.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

# The rivals of `paceline bench --peer`: economize, and llama.cpp through node-llama-cpp, which goes into paceline's
# cache folder. Needs Node.js 20 or newer.
peers: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[peers]"
	sh -c "$$($(BIN)/python -c 'from paceline.bench.peers.node_packages import install_command as c; print(c())')"

demo: install
	$(BIN)/paceline demo

test: install lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check src tests examples .ci
	$(BIN)/ruff format --check src tests examples .ci
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/audit.py

format: install
	$(BIN)/ruff check --fix src tests examples .ci
	$(BIN)/ruff format src tests examples .ci

# 100 prompts of 128 tokens in bf16: every first difference from Hugging Face generate() must be a near-tie.
# Answers are kept in out/check-bf16, so an interrupted check goes on.
check-bf16: install
	$(BIN)/paceline check --dtype bf16 --limit 100 --max-new-tokens 128 --out out/check-bf16

# 200 requests from 16 clients, some of them rude (make test sends 48), and 300 made-up bodies an endpoint (25).
soak: install
	PACELINE_SOAK_REQUESTS=200 PACELINE_FUZZ_EXAMPLES=300 $(BIN)/python -m pytest tests/e2e/test_soak.py tests/e2e/test_fuzz.py

# The tests that touch transformers, on the oldest release that is supported (install covers the newest).
check-transformers: $(OLD_VENV)/.installed
	$(OLD_VENV)/bin/python -m pytest tests/conformance tests/integration tests/unit/targets $(wildcard tests/real)

$(OLD_VENV)/.installed: pyproject.toml
	test -x $(OLD_VENV)/bin/python || $(PYTHON) -m venv $(OLD_VENV)
	$(OLD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(OLD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" "transformers==$(OLD_TRANSFORMERS).*"
	touch $@

clean:
	rm -rf $(VENV) build out
