# Every target sets up what it needs inside .venv; nothing outside this folder is written to.
# The stamps in .venv make later runs quick and let the targets be called alone and in any order.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
UV     := $(VENV)/bin/uv
TORCH  := torch==2.13.0 trl==1.16.0 peft==0.21.2

HAS_UV      := $(VENV)/.has-uv
HAS_DEPS    := $(VENV)/.has-dependencies
HAS_PACKAGE := $(VENV)/.has-package
HAS_TORCH   := $(VENV)/.has-torch-trl-peft
HAS_TPU     := $(VENV)/.has-tpu-compiler
HAS_GPU     := $(VENV)/.has-gpu-compiler

# Extras in the lock: what tests run. wandb is only asked for by name.
LOCKED := draw serve gguf parquet tensorboard

# Programs that only tests of the server run, with versions of their own of what they need.
CLIENTS     := .clients
HAS_CLIENTS := $(CLIENTS)/.has-clients
HAS_VLLM    := $(CLIENTS)/.has-vllm
VLLM        := vllm==0.33.0

# What builds the documentation and checks its links, apart from what meshwright needs.
SITE        := .docs
HAS_SITE    := $(SITE)/.has-site
LYCHEE      := $(SITE)/bin/lychee --offline --no-progress --include-fragments

# Idle workers take tests over from the others; a worker's own tests stay in order, so that fixtures are shared.
WORKERS     ?= 2
IN_PARALLEL := -n $(WORKERS) --dist worksteal

# uv may use only the Python that made .venv, and trusts the certificates that this machine trusts, as pip does.
export UV_PYTHON_DOWNLOADS := never
export UV_SYSTEM_CERTS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport VIRTUAL_ENV
# Byte code kept on disk is most of what makes the second start of JAX faster than the first.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-elastic test-aot test-aot-tpu test-clients same check docs format lock setup clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-15s %s\n", $$1, $$2}'

demo: $(HAS_PACKAGE) ## set up, then measure this machine, plan, train and compare (three to five minutes)
	MESHWRIGHT_CACHE="$(CURDIR)/.cache" $(VENV)/bin/meshwright demo

test: $(HAS_PACKAGE) torch ## set up, then run the whole default tier of tests (WORKERS=2 processes), as CI does
	$(PY) -m pytest $(IN_PARALLEL) --durations=10

test-slow: $(HAS_PACKAGE) torch ## the full grids that the default tier has samples of, and the examples (PART=day/20: as CI does)
	$(PY) -m pytest -m slow $(IN_PARALLEL) --durations=10 $(PART:%=--part %)

test-elastic: $(HAS_PACKAGE) ## islands that train while something fails every 12 seconds (three minutes)
	$(PY) -m benchmarks.elastic --minutes 2 --calm 0.3 --every 12 --seeds 0 --require

test-aot: $(HAS_PACKAGE) $(HAS_TPU) $(HAS_GPU) ## compile real steps for TPUs and GPUs that are not here (5 GB of compilers)
	$(PY) -m pytest -m aot $(IN_PARALLEL)

test-aot-tpu: $(HAS_PACKAGE) $(HAS_TPU) ## the same for TPUs alone, which CI runs last (0.6 GB)
	$(PY) -m pytest -m aot $(IN_PARALLEL)

test-clients: $(HAS_PACKAGE) $(HAS_CLIENTS) $(HAS_VLLM) ## meshwright serve under openai, guidellm, lm-eval, vLLM's client, schemathesis, routers; a real model (2.2 GB)
	CLIENTS="$(CURDIR)/$(CLIENTS)" $(PY) -m pytest $(wildcard tests/clients/check_*.py)

same: $(HAS_PACKAGE) ## print every difference from the golden files (KINDS="steps plans losses commands proofs")
	$(PY) -m tests.golden.compare $(KINDS)

check: $(HAS_PACKAGE) ## what CI runs first: format, lint, types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(HAS_PACKAGE) ## rewrite the sources in the house format
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

# zensical keeps pages in .cache beside what `make demo` keeps there, and does not see that a docstring has changed. Links
# from docs/ to other files find them beside the pages; the theme's loaders of what no page uses lose their hosts; links
# are checked in a copy, from which none leads back into this folder.
docs: $(HAS_SITE) ## build the documentation into site/, and check its links and those of all Markdown
	rm -rf site $(SITE)/site .cache/[0-9]* .cache/*.json
	$(SITE)/bin/zensical build --strict
	mkdir site/benchmarks && cp -r benchmarks/results site/benchmarks && cp -r examples site
	find site -name '*.html' -exec sed -i -E 's#href="(\.\./)+docs/#href="../#; s#href="\.\./((\.\./)*(benchmarks|examples)/)#href="\1#' {} +
	find site -name '*.js' -exec sed -i -E 's#https://(unpkg\.com|cdn\.jsdelivr\.net|api\.github\.com)/#/#g' {} +
	! grep -rnE '<(script|img|iframe|source|video)[^>]* src="?(https?:)?//|<link[^>]* href="?(https?:)?//|@import|url\(.?(https?:)?//' \
		site --include='*.html' --include='*.css'
	cp -r site $(SITE)
	$(LYCHEE) --index-files index.html --root-dir "$(CURDIR)/$(SITE)/site" '$(SITE)/site/**/*.html'
	git ls-files -z '*.md' | xargs -0 $(LYCHEE)

setup: $(HAS_PACKAGE) ## only set up .venv

lock: $(HAS_UV) ## resolve requirements.lock again (UPGRADE=1 takes the newest versions)
	$(UV) pip compile pyproject.toml --group dev $(LOCKED:%=--extra %) --output-file requirements.lock $(if $(UPGRADE),--upgrade) \
		--universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--custom-compile-command "make lock" --quiet

clean: ## remove .venv and the caches; runs/ stays
	rm -rf $(VENV) $(CLIENTS) $(SITE) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .jax_cache .matrix dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# uv comes from its own hashed lines of the lock, by pip, since nothing else is there yet.
$(HAS_UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is too old or missing. meshwright needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	awk '/^uv==/ {on = 1} on {print} on && !/\\$$/ {exit}' requirements.lock > $(VENV)/uv.txt
	$(PY) -m pip install --quiet --require-hashes --requirement $(VENV)/uv.txt
	touch $@

# pip understands the same lock: it steps in where uv cannot reach the registry that pip is configured for.
$(HAS_DEPS): requirements.lock $(HAS_UV)
	$(UV) pip install --quiet --python $(PY) --require-hashes --requirement requirements.lock \
		|| $(PY) -m pip install --quiet --require-hashes --requirement requirements.lock
	touch $@

$(HAS_PACKAGE): pyproject.toml $(HAS_DEPS)
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# torch, with trl, is only the comparison partner in tests, so it is not in the lock: pip takes the CPU build where one is
# offered, while uv's universal resolution would bring the CUDA libraries. Without it those tests skip, saying so.
.PHONY: torch
torch: $(HAS_PACKAGE) ## bring torch and TRL, with which tests compare
	@test -e $(HAS_TORCH) || { $(PY) -m pip install --quiet --retries 2 $(TORCH) && touch $(HAS_TORCH); } \
		|| echo "$(TORCH) could not be installed: tests that compare with transformers and TRL will skip." >&2

# The compilers that `verify` uses, as large as they are, come with the version of JAX that is installed. They are
# not in the lock: libtpu and the CUDA libraries are proprietary, and only these targets want them.
$(HAS_TPU): | $(HAS_PACKAGE)
	$(PY) -m pip install --quiet --retries 2 "jax[tpu]==$$($(PY) -c 'import jax; print(jax.__version__)')"
	touch $@

$(HAS_GPU): | $(HAS_PACKAGE)
	$(PY) -m pip install --quiet --retries 2 "jax[cuda13]==$$($(PY) -c 'import jax; print(jax.__version__)')"
	touch $@

$(HAS_CLIENTS): tests/clients/requirements.txt | $(HAS_PACKAGE)
	test -x $(CLIENTS)/bin/python || $(PY) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --retries 2 $(firstword $(TORCH))
	$(UV) pip install --quiet --python $(CLIENTS)/bin/python --requirement $<
	touch $@

# Of vLLM, whose wheel has 321 MB, the files of its client alone. Without them that client is left out.
$(HAS_VLLM): $(HAS_CLIENTS)
	$(CLIENTS)/bin/python -m pip download --quiet --no-deps --only-binary :all: --dest $(CLIENTS)/wheel $(VLLM) \
		&& $(PY) tests/clients/vllm_bench.py $(CLIENTS)/vllm --unpack $(CLIENTS)/wheel/vllm-*.whl || true
	rm -rf $(CLIENTS)/wheel
	touch $@

$(HAS_SITE): docs/requirements.txt | $(HAS_UV)
	test -x $(SITE)/bin/python || $(PY) -m venv $(SITE)
	$(UV) pip install --quiet --python $(SITE)/bin/python --requirement $< \
		|| $(SITE)/bin/python -m pip install --quiet --requirement $<
	touch $@

# What is released, and what it runs on. Pythons that PATH lacks are passed over by wheel-test: PYTHONS="/path/to/python3.13 ..."
PYTHONS      ?= python3.11 python3.12 python3.13
MATRIX       ?= python3.11/0.10.2 python3.12/0.11.2 python3.12/0.12.0.1
MATRIX_TESTS := tests/core tests/plan/test_search.py tests/plan/test_plan_file.py tests/cost/test_train_step.py \
	tests/nn/attention/test_platform.py tests/nn/attention/test_choice.py::test_functions_with_captured_arrays_have_gradients \
	tests/cli/verbs/test_train.py::test_a_model_planned_on_the_way \
	tests/cli/verbs/test_verify.py::test_a_step_on_emulated_devices tests/cli/test_serve.py::test_the_verbs_compile_serve_and_drain

.PHONY: wheel wheel-test matrix release
wheel: $(HAS_UV) ## build the wheel and the source distribution in dist/
	rm -rf dist
	$(UV) build --quiet --build-constraints requirements.lock --require-hashes

wheel-test: wheel ## install the wheel in a new environment of each of PYTHONS, plan, and look at what that took
	$(PY) .ci/wheel.py dist/*.whl $(PYTHONS)

matrix: wheel-test ## then plan, train, verify and serve with each pair of MATRIX, a Python and a JAX (under 25 minutes; not in CI)
	set -e; for pair in $(MATRIX); do \
		env=.matrix/$${pair%/*}-jax$${pair#*/}; \
		$(UV) venv --quiet --clear --python $${pair%/*} $$env; \
		$(UV) pip install --quiet --python $$env/bin/python --group dev "$$(echo dist/*.whl)[all]" jax==$${pair#*/}; \
		echo "$$pair:"; JAX_COMPILATION_CACHE_DIR=$$env/cache $$env/bin/python -m pytest $(MATRIX_TESTS); \
	done

release: $(HAS_UV) ## check versions, changelog and what is built, and print the commands that tag and upload it
	$(PY) .ci/release.py
