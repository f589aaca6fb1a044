# Targets install their dependencies into .venv on first use. `make help` lists the targets.
VENV := .venv
PYTHON ?= python3
# An explicitly given PYTHON must have the version that created .venv; otherwise .venv is recreated.
GIVEN_PYTHON := $(if $(filter file,$(origin PYTHON)),,$(PYTHON))
PORT ?= 8000
# Model of `make serve`: a name known to `wingbeat fetch`, a folder or a file; demo is the pair in examples/demo_pair.
MODEL ?= smollm2
# Processes for tests without Ray. Tests with Ray share one cluster and run in one more process, which mostly waits.
WORKERS ?= 2
PYTEST := $(VENV)/bin/python -m pytest
SIDE_BY_SIDE := --no-print-directory --keep-going --jobs=2 with-ray without-ray
# Stamp files: packages for serving are installed; packages for tests and benchmarks are installed, too.
SERVING := $(VENV)/serving
STAMP := $(VENV)/installed
SOURCES := $(wildcard kernels runtime cluster deployments tests benchmarks examples src docs)
# Of all processes that import a file, the first one compiles it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-all test-models test-versions test-without with-ray without-ray chaos soak lint docs clean anew
.DELETE_ON_ERROR:
.DEFAULT_GOAL := serve

help: ## List the public targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# The same application as `serve run wingbeat.deployments.app:build`, on any port and with an orderly shutdown. If the
# default model cannot be fetched, the demo pair is served instead.
serve: $(SERVING) ## Serve MODEL (smollm2, demo, a folder or a file) on PORT (8000); the default target
	@set -- $(filter-out demo,$(MODEL)); \
	if [ "$$*" = smollm2 ] && ! $(VENV)/bin/wingbeat fetch smollm2 >/dev/null; then \
		echo 'The demo pair is served in its place.' >&2; set --; \
	fi; \
	exec $(VENV)/bin/wingbeat serve "$$@" --port $(PORT)

test: $(STAMP) ## Run a small test case of every feature
	$(MAKE) $(SIDE_BY_SIDE) TIER='not slow and not soak and not gpu'

# The slow tests include all pairs of values of every parametrized table.
test-all: test ## Run `make test`, then the slow tests
	$(MAKE) $(SIDE_BY_SIDE) TIER='slow and not soak and not gpu and not chaos'

with-ray:
	$(PYTEST) -m '($(TIER)) and ray' $$(grep -rl --include='*.py' 'pytest.mark.ray' tests)

without-ray:
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m '($(TIER)) and not ray'

# Serves two published models in every dtype and compares them with transformers. The models are fetched by pip (350 MB)
# and kept in ~/.cache/wingbeat-test-models or $WINGBEAT_TEST_MODELS. Takes half an hour, mostly for half precision on
# CPUs without units for it.
test-models: $(STAMP) ## Test two published models in every dtype (30 minutes, fetches 350 MB)
	$(VENV)/bin/pip install --quiet 'gguf>=0.17' 'sentencepiece>=0.2'
	$(VENV)/bin/python -m tests.models.published
	$(PYTEST) -m '' --timeout=3600 tests/models

# Tests the wheel without extras, with the lowest and with the newest version of every library that pyproject.toml allows
# (torch's version is fixed on machines without a GPU). Needs pip's index.
test-versions: $(STAMP) ## Test the wheel with the lowest and newest library versions (10 minutes)
	$(VENV)/bin/python -m tests.versions.environments build/versions

# Copies the tree without each optional feature, and without all of them; each copy must pass `make test` and serve.
test-without: $(STAMP) ## Test the tree without its optional features
	$(VENV)/bin/python -m tests.without --each --all

# Kills, stops and disconnects every process of an application under load.
chaos: $(STAMP) ## Test failures of every process under load (30 minutes)
	$(PYTEST) tests/chaos -m chaos

# Sends 20,000 hostile requests to an application, runs the complete parameter grids, and the benchmarks that serve.
soak: $(STAMP) ## Run the soak tests (about an hour)
	$(PYTEST) -m soak

lint: $(STAMP) ## Check format, style, types and import layers
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/basedpyright
	$(VENV)/bin/lint-imports --no-cache --no-logo

# The manual as a site in build/site, searchable, every link checked.
docs: $(STAMP)
	$(VENV)/bin/mkdocs build

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An unusable environment invalidates its stamps.
ifneq ($(shell .ci/install check '$(GIVEN_PYTHON)' $(VENV) && echo usable),usable)
$(SERVING) $(STAMP): anew
endif

$(SERVING): pyproject.toml constraints/cpu.txt
	@GIVEN_PYTHON='$(GIVEN_PYTHON)' .ci/install into '$(PYTHON)' $(VENV)
	@touch $@

$(STAMP): pyproject.toml constraints/cpu.txt
	@GIVEN_PYTHON='$(GIVEN_PYTHON)' .ci/install into '$(PYTHON)' $(VENV) '[test,bench,tensorrt-rtx]'
	@touch $(SERVING) $@
