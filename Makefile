VENV ?= .venv
BIN := $(VENV)/bin
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: install demo sandbox test test-shuffled test-models models-page test-smoke test-thorough test-system test-gpu test-gpu-offline test-slow test-s3 chaos faults mutants nightly test-vllm vllm test-verifiers test-containers test-suites test-openai-agents check bench bench-vllm bench-gpu bench-ddpo reality curves docs screenshots site format
.DEFAULT_GOAL := test

$(VENV)/.base: pyproject.toml setup.py constraints.txt infra/environments/install.sh
	@echo "installing into $(VENV) (a minute or two)"
	@infra/environments/install.sh $(VENV)
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@infra/environments/install.sh $(VENV) dev
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	@infra/environments/install.sh $(VENV) docs
	@touch $@

install: $(VENV)/.base  ## install into .venv, and nothing else

demo: $(VENV)/.base  ## run the main job on this machine
	@$(BIN)/rheostat train configs/demo.toml $(ARGS)

sandbox:  ## bubblewrap, in which what policies write is run; installed where that is allowed
	@command -v bwrap >/dev/null || { apt-get -qq update && apt-get -qq install -y --no-install-recommends bubblewrap; }

# One more than there are cores, since tests also wait for processes that they start.
PARALLEL := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses 4 --dist loadscope --no-loadscope-reorder

# Dozens of processes start with the same modules, which need compiling once.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.dev  ## the default suite, on all cores, with the CPU seconds of its longest tests
	@$(BIN)/python -m pytest $(PARALLEL) --cpu-seconds 5 $(ARGS)

SEED := 1
SHUFFLED := build/shuffled
test-shuffled: export PYTHONDONTWRITEBYTECODE :=
test-shuffled: $(VENV)/.dev  ## the default suite in the random order of SEED=..., which finds tests that depend on earlier ones
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $(SHUFFLED) pytest-randomly==5.1.0
	@PYTHONPATH=$(SHUFFLED) $(BIN)/python -m pytest $(PARALLEL) --randomly-seed=$(SEED) $(ARGS)

test-smoke: export PYTHONDONTWRITEBYTECODE :=
test-smoke: $(VENV)/.dev  ## one whole run of each family, most of them killed on the way; vLLM's is `make test-vllm ARGS='-m "vllm and smoke"'`
	@$(BIN)/python -m pytest $(PARALLEL) --cpu-seconds 5 -m "smoke and not vllm" $(ARGS)

test-system: export PYTHONDONTWRITEBYTECODE :=
test-system: $(VENV)/.dev  ## whole runs, real clusters, ranks and servers, most of them killed, on all cores
	@$(BIN)/python -m pytest $(PARALLEL) --cpu-seconds 5 -m "system and not slow" $(ARGS)

test-thorough: export PYTHONDONTWRITEBYTECODE :=
test-thorough: $(VENV)/.dev  ## the costly tests and further cases that the default suite leaves out, on all cores
	@$(BIN)/python -m pytest $(PARALLEL) --cpu-seconds 5 -m "thorough and not system" $(ARGS)

test-slow: $(VENV)/.dev  ## the long tests: real kills, the demo on several seeds, GSM8K
	@$(BIN)/python -m pytest -m "slow and not vllm and not openai_agents and not gpu" $(ARGS)

test-models: $(VENV)/.dev  ## two iterations of every family of models from a tiny random directory, compared with plain transformers
	@$(BIN)/python -m pytest $(PARALLEL) -m "models and not slow" tests/models $(ARGS)

models-page: $(VENV)/.dev vllm  ## docs/models.md, written again from the stored results of test-models and vLLM's list of models
	@$(BIN)/python -m tests.models.page

test-s3: export RHEOSTAT_REQUIRE_S3 := 1
test-s3: $(VENV)/.dev  ## the store's promises and whole runs on servers: moto's, and Ceph's and Azurite, which it installs where it may
	@$(BIN)/python -m pytest $(PARALLEL) -m s3 $(ARGS)

nightly: $(VENV)/.dev $(VENV)/.docs sandbox  ## all tests that need no GPU, with a table of parts at the end; after an interrupt it continues (ARGS=--fresh starts over, ARGS='--only s3 slow-others' runs two parts)
	@MAKEFLAGS=--no-print-directory RHEOSTAT_REQUIRE_SANDBOX=1 RHEOSTAT_REQUIRE_CUDA_BUILD=1 python3 .ci/parts.py nightly $(ARGS)

MUTANTS := build/mutants
mutants: $(VENV)/.dev  ## how many of 300 random changes of the code the default suite notices; it resumes after an interrupt
	@mkdir -p $(MUTANTS)
	@$(BIN)/uv pip install -q --python $(BIN)/python --target $(MUTANTS)/cosmic-ray cosmic-ray==8.7.0
	@$(BIN)/uv pip install -q --python $(BIN)/python --target $(MUTANTS)/coverage coverage==7.17.4
	@[ -e $(MUTANTS)/mutants.json ] || PYTHONPATH=$(MUTANTS)/cosmic-ray $(BIN)/python -m bench.mutants --tree . --mutants $(MUTANTS)/mutants.json --draw 300 --seed 20260
	@PYTHONPATH=$(MUTANTS)/coverage $(BIN)/python -m bench.mutants --tree . --mutants $(MUTANTS)/mutants.json --results $(MUTANTS)/results.jsonl $(ARGS)

SEEDS := 1..20
chaos: $(VENV)/.dev  ## kills and full disks at random writes of a small run, by seeds; a failing one is named
	@$(BIN)/python -c "import sys; from tests.support.chaos_command import main; sys.exit(main())" --seeds $(SEEDS) $(ARGS)

faults: $(VENV)/.dev  ## docs/faults.md, written again from disturbed runs
	@$(BIN)/python -m bench.faults

vllm: $(VENV)/.base  ## the environment with vLLM, a separate one; found at once when it is there
	@$(BIN)/rheostat engine install vllm $(ARGS)

test-vllm: $(VENV)/.dev  ## the tests that need vLLM, and what they need; ARGS="-m 'vllm and not gpu'" for the long ones too
	@$(BIN)/rheostat engine install vllm
	@$(BIN)/python -m pytest -m "vllm and not slow" $(ARGS)

test-verifiers: $(VENV)/.dev  ## the tests that need the package verifiers, in a separate environment
	@$(BIN)/rheostat engine install verifiers
	@$(BIN)/python -m pytest -n 0 -m verifiers $(ARGS)

test-containers: $(VENV)/.dev  ## the tests of agents in containers, with podman and, if it is installed, docker's client
	@command -v podman >/dev/null || { apt-get -qq update && apt-get -qq install -y --no-install-recommends podman runc; }
	@$(BIN)/python -m pytest -n 0 -m containers $(ARGS)

test-suites: $(VENV)/.dev  ## the tests that need lm-eval, Inspect and verifiers, in separate environments
	@$(BIN)/rheostat engine install lm_eval
	@$(BIN)/rheostat engine install inspect
	@$(BIN)/rheostat engine install verifiers
	@$(BIN)/python -m pytest -n 0 -m suites $(ARGS)

# The version that docs/openai-agents.md describes. Its requests are the prompts that the demonstration's warm-up trains.
OPENAI_AGENTS := 0.24.0
$(VENV)-openai-agents/.done-$(OPENAI_AGENTS):
	@echo "installing openai-agents into $(VENV)-openai-agents"
	@python3 -m venv --clear $(VENV)-openai-agents
	@$(VENV)-openai-agents/bin/python -m pip --disable-pip-version-check install -q openai-agents==$(OPENAI_AGENTS)
	@touch $@

test-openai-agents: $(VENV)/.dev $(VENV)-openai-agents/.done-$(OPENAI_AGENTS)  ## the tests with agents of openai-agents, in a separate environment; ARGS="-m openai_agents" for the demonstration too
	@$(BIN)/python -m pytest -n 0 -m "openai_agents and not slow" $(ARGS)

check: $(VENV)/.dev  ## format, lint, types, imports
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@.ci/package.sh links build/view
	@$(BIN)/mypy
	@.ci/package.sh copies build/copies
	@cd build/copies && $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.base  ## write the generated pages again
	@$(BIN)/python -m rheostat.tasks.config.reference > docs/configuration.md
	@$(BIN)/python -m rheostat.flows.cli.reference

site: export NO_MKDOCS_2_WARNING := 1
site: export DISABLE_MKDOCS_2_WARNING := true
site: $(VENV)/.docs  ## the documentation as a site in build/site, without network; a broken link fails it
	@.ci/package.sh links build/view
	@$(BIN)/python -m mkdocs build
	@echo "open build/site/index.html"

bench: $(VENV)/.dev  ## compare with other trainers on this machine
	@$(BIN)/python -m bench $(ARGS)

reality: $(VENV)/.dev  ## placement of real processes with paced engines, against the simulator (12 minutes)
	@$(BIN)/python -m bench --only reality $(ARGS)

curves: $(VENV)/.dev  ## learning curves of the algorithms on three seeds (forty runs of the demo)
	@$(BIN)/python -m bench --only curves $(ARGS)

screenshots: $(VENV)/.dev  ## the pictures of the terminal and of reports, from runs that it trains first (ten minutes)
	@$(BIN)/python -m bench.pictures $(ARGS)
	@$(BIN)/python -m bench.screenshots

bench-vllm: $(VENV)/.dev  ## tokens per second through the whole path, against vLLM alone
	@$(BIN)/rheostat engine install vllm
	@$(BIN)/python -m bench --only vllm $(ARGS)

$(VENV)-trl/.done: bench/trl-vllm.txt
	@echo "installing TRL and its vLLM into $(VENV)-trl (some minutes)"
	@$(BIN)/python -m venv --clear $(VENV)-trl
	@$(VENV)-trl/bin/python -m pip --disable-pip-version-check install -q -r $<
	@touch $@

test-gpu: $(VENV)/.dev  ## the tests that need a GPU, with a table at the end; kernels without their packages are skipped, and named
	@$(BIN)/rheostat engine install vllm
	@$(BIN)/python -m pytest -n 0 -m gpu -rs $(ARGS)

test-gpu-offline:  ## those of them that need no vLLM, with the Python of PYTHON=... and without network
	@$${PYTHON:-python3} -m pytest -n 0 -p no:cacheprovider -m "gpu and not vllm" -rs $(ARGS)

bench-gpu: $(VENV)/.dev  ## whole iterations on one GPU, next to TRL with colocated vLLM; without network once installed
	@if nvidia-smi -L >/dev/null 2>&1; then $(BIN)/rheostat engine install vllm && $(MAKE) -s $(VENV)-trl/.done; fi
	@$(BIN)/python -m bench --only gpu $(ARGS)

$(VENV)-ddpo/.done: bench/ddpo.txt
	@echo "installing TRL's DDPOTrainer into $(VENV)-ddpo (some minutes)"
	@$(BIN)/python -m venv --clear $(VENV)-ddpo
	@# Without a GPU the CPU's build of torch, where the package index has it.
	@nvidia-smi -L >/dev/null 2>&1 || $(VENV)-ddpo/bin/python -m pip --disable-pip-version-check install -q --only-binary=:all: "$$(grep '^torch==' $<)+cpu" 2>/dev/null || true
	@$(VENV)-ddpo/bin/python -m pip --disable-pip-version-check install -q -r $<
	@touch $@

bench-ddpo: $(VENV)/.dev $(VENV)-ddpo/.done  ## epochs of learning to draw, next to TRL's DDPOTrainer; without network once installed
	@$(BIN)/python -m bench --only ddpo $(ARGS)
