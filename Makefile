# The commands for users and developers. Everything runs in .venv, which need not be activated.

BIN := .venv/bin
STAMP := .venv/.installed
RECORDED := .venv/.recorded
CODE := pgwal_pipeline pgwal_pipeline_tests bench
# Hundreds of processes load the same modules. Compiling them each time would take a tenth of the tests' time.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install demo test tests lint bench soak image image-test clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(RECORDED) ## .venv with the pipeline, a Postgres, a Java and Delta's jars; quick the second time

# The stamp is written last, so that an interrupted installation is done again.
$(STAMP): pyproject.toml constraints.txt .ci/install
	@.ci/install
	@$(BIN)/python -m pgwal_pipeline.spark.jars
	@touch $@

$(RECORDED): $(STAMP)
	@$(BIN)/python -m pgwal_pipeline.spark.record_classes
	@touch $@

demo: install ## embedded Postgres, a live workload, the pipeline and Dagster's UI
	@$(BIN)/pgwal demo

test: $(STAMP) ## lint, types and every test
	@$(MAKE) --no-print-directory --jobs 2 install tests

# The first time, the tests run while Spark's classes are recorded, which keeps one core busy.
tests: lint
	@$(PYTEST) -m 'not soak and not image' -n 4 --dist worksteal

lint: $(STAMP) ## ruff and pyright
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/pyright

bench: install ## the benchmarks; results go to artifacts/
	@$(BIN)/python -m bench

soak: install ## tests that take hours: rounds of chaos, random changes and kills, and further variants of the tests
	@$(PYTEST) -m soak --timeout 0

image: ## the container images, by a Docker engine
	@.ci/image

# Installs and starts an engine on a Debian machine that has none, as root.
image-test: install ## the images and docker-compose.yaml, built, started and judged
	@.ci/engine
	@.ci/image
	@$(PYTEST) -m image -v -rA pgwal_pipeline_tests/image

clean: ## remove what was built and the demo's data; the lake and .dagster stay
	rm -rf .venv .demo build dist .pytest_cache .ruff_cache .hypothesis
	find pgwal_pipeline pgwal_pipeline_tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
