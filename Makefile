# `make serve` and `make test` install what they need into .venv; the second run finds it there.
VENV := .venv
PYTHON ?= python3
# A Python that somebody names has to be the one that made .venv.
GIVEN_PYTHON := $(if $(filter file,$(origin PYTHON)),,$(PYTHON))
PORT ?= 8000
# Of `make serve`: a name of `wingbeat fetch`, a folder or a file; demo is the pair in examples/demo_pair.
MODEL ?= smollm2
# Processes that run tests without Ray. Those on Ray's one cluster have one more; they mostly wait.
WORKERS ?= 2
PYTEST := $(VENV)/bin/python -m pytest
SIDE_BY_SIDE := --no-print-directory --keep-going --jobs=2 with-ray without-ray
# The packages of serving, and these with what tests and benchmarks need.
SERVING := $(VENV)/serving
STAMP := $(VENV)/installed
SOURCES := $(wildcard kernels runtime cluster deployments tests benchmarks examples src docs)
# Of all processes that import a file, the first one compiles it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-all test-models test-versions test-without with-ray without-ray chaos soak lint docs clean anew
.DELETE_ON_ERROR:

# The application of `serve run wingbeat.deployments.app:build`, on any port, and with an orderly end. Where there is no
# network for the model, the demo pair takes its place.
serve: $(SERVING)
	@set -- $(filter-out demo,$(MODEL)); \
	if [ "$$*" = smollm2 ] && ! $(VENV)/bin/wingbeat fetch smollm2 >/dev/null; then \
		echo 'The demo pair is served in its place.' >&2; set --; \
	fi; \
	exec $(VENV)/bin/wingbeat serve "$$@" --port $(PORT)

# A small case of every feature.
test: $(STAMP)
	$(MAKE) $(SIDE_BY_SIDE) TIER='not slow and not soak and not gpu'

# What `make test` runs, then what takes a while and, of every table, the rows in which two values meet.
test-all: test
	$(MAKE) $(SIDE_BY_SIDE) TIER='slow and not soak and not gpu and not chaos'

with-ray:
	$(PYTEST) -m '($(TIER)) and ray' $$(grep -rl --include='*.py' 'pytest.mark.ray' tests)

without-ray:
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m '($(TIER)) and not ray'

# Two published models, fetched by pip (350 MB) and kept in ~/.cache/wingbeat-test-models or $WINGBEAT_TEST_MODELS: served
# in every dtype, and held against transformers. Half an hour, most of it where a CPU has no units for half precision.
test-models: $(STAMP)
	$(VENV)/bin/pip install --quiet 'gguf>=0.17' 'sentencepiece>=0.2'
	$(VENV)/bin/python -m tests.models.published
	$(PYTEST) -m '' --timeout=3600 tests/models

# The wheel alone, without extras, with the lowest and with the newest version of every library that pyproject.toml
# allows (torch's is fixed where there is no GPU): ten minutes, and pip's index has to be within reach.
test-versions: $(STAMP)
	$(VENV)/bin/python -m tests.versions.environments build/versions

# A copy of the tree without each optional feature, and without all at once: what is left passes `make test` and serves.
test-without: $(STAMP)
	$(VENV)/bin/python -m tests.without --each --all

# Whatever an application consists of is killed, stopped and cut off under load: half an hour.
chaos: $(STAMP)
	$(PYTEST) tests/chaos -m chaos

# 20,000 hostile requests to the whole application, whole grids, and the benchmarks that serve.
soak: $(STAMP)
	$(PYTEST) -m soak

lint: $(STAMP)
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

# With an environment that cannot be used as it is, its stamps count for nothing.
ifneq ($(shell .ci/install check '$(GIVEN_PYTHON)' $(VENV) && echo usable),usable)
$(SERVING) $(STAMP): anew
endif

$(SERVING): pyproject.toml constraints/cpu.txt
	@GIVEN_PYTHON='$(GIVEN_PYTHON)' .ci/install into '$(PYTHON)' $(VENV)
	@touch $@

$(STAMP): pyproject.toml constraints/cpu.txt
	@GIVEN_PYTHON='$(GIVEN_PYTHON)' .ci/install into '$(PYTHON)' $(VENV) '[test,bench,tensorrt-rtx]'
	@touch $(SERVING) $@
