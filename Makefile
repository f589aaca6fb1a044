# `make serve` and `make test` install what they need into .venv; the second run finds it there.
VENV := .venv
PYTHON ?= python3
PORT ?= 8000
# Processes that run tests; Ray and the applications have more of their own.
WORKERS ?= 2
PYTEST = $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
STAMP := $(VENV)/installed
SOURCES := $(wildcard kernels runtime cluster deployments tests benchmarks examples)

.PHONY: serve test test-all soak lint clean
.DELETE_ON_ERROR:

# The application of `serve run wingbeat.deployments.app:build`, on any port, and with an orderly end.
serve: $(STAMP)
	$(VENV)/bin/wingbeat serve --port $(PORT)

# A small case of every feature.
test: $(STAMP)
	$(PYTEST)

# What `make test` runs, then the rest of every table and what takes a while.
test-all: test
	$(PYTEST) -m 'slow and not gpu'

# 20,000 hostile requests to the whole application.
soak: $(STAMP)
	$(VENV)/bin/python -m pytest -m soak

lint: $(STAMP)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without a GPU the constraint pins torch; to get a wheel without CUDA, point pip at an index that has one.
$(STAMP): pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	if nvidia-smi -L >/dev/null 2>&1; then \
		$(VENV)/bin/pip install --quiet -e '.[test,bench]'; \
	else \
		$(VENV)/bin/pip install --quiet -e '.[test,bench]' -c constraints/cpu.txt; \
	fi
	touch $@
