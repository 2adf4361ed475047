# DEVICE=gpu makes the targets below use vLLM's CUDA build, in an environment of its own.
DEVICE ?= cpu
VENV := $(if $(filter gpu,$(DEVICE)),.venv-gpu,.venv)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LISTENER := $(VENV)/.listener
RAY := $(VENV)/.ray
SITE := .venv-site/bin/python
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
# Behind it: the Python of an environment, and a lock.
UV_INSTALL = PYTHON="$(PYTHON)" scripts/uv.sh pip install --quiet --no-deps --require-hashes --python

.DEFAULT_GOAL := help
.PHONY: help env demo up test test-long test-chaos test-apart test-compose test-monitoring test-page prometheus chromium
.PHONY: ip iptables zsh fish chaos fuzz bench bench-gateway simulate rehearsal gpu train check site format wheels clean sbom licences audit vendor
.PHONY: test-beside test-tools test-training test-quality test-cluster test-clients test-cuda clients quality flite espeak-ng kustomize

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  DEVICE=gpu with any of them: the CUDA build instead of the CPU one"

env: $(READY) ## create the environment in .venv, if it is missing or out of date

$(READY): pyproject.toml deploy/client/pyproject.toml requirements/torch.lock requirements/cpu.lock requirements/dev.lock requirements/gpu.txt requirements/gpu.lock \
		requirements/uv.lock scripts/setup_env.sh scripts/uv.sh
	@test -n "$(PYTHON)" || { echo "No Python found; install Python 3.11, 3.12 or 3.13."; exit 1; }
	@PYTHON="$(PYTHON)" scripts/setup_env.sh --device "$(DEVICE)" --venv "$(VENV)"
	@touch $@

# The recognizer that listens to speech.
$(LISTENER): requirements/quality.lock $(READY)
	@$(UV_INSTALL) $(BIN)/python -r requirements/quality.lock
	@touch $@

# What places the processes of `omnirelay cluster`.
$(RAY): requirements/cluster.lock $(READY)
	@$(UV_INSTALL) $(BIN)/python -r requirements/cluster.lock
	@touch $@

# Each client program has an environment of its own; guidellm and vllm-omni find PyTorch, and vLLM, in the server's.
CLIENTS := $(patsubst requirements/clients/%.lock,.venv-clients/%/.ready,$(wildcard requirements/clients/*.lock))

.venv-clients/%/.ready: requirements/clients/%.lock | $(READY)
	@"$(PYTHON)" -m venv --clear $(@D)
	@$(UV_INSTALL) $(@D)/bin/python -r $<
	@$(if $(filter guidellm vllm-omni,$*),for packages in $(@D)/lib/python3.*/site-packages; do \
		echo "$(CURDIR)/$(VENV)"/lib/python3.*/site-packages >"$$packages/torch.pth"; done)
	@[ ! -d requirements/clients/$* ] || { cp requirements/clients/$*/package*.json $(@D) && cd $(@D) && \
		PATH="$$PWD/bin:$$PATH" npm ci --silent --no-audit --no-fund; }
	@touch $@

.venv-clients/node/.ready: requirements/clients/node/package-lock.json

clients: ## install the client programs that test-clients runs, each in an environment in .venv-clients
	@$(MAKE) --no-print-directory --jobs=$$(nproc) $(CLIENTS)

demo: env ## start the stack on the trained checkpoint and ask it three questions
	@$(BIN)/omnirelay demo

up: env ## run the stack in the foreground until Ctrl-C
	@$(BIN)/omnirelay up

# Tests start hundreds of processes, and pytest rewrites each of its files: what is compiled once is kept.
unexport PYTHONDONTWRITEBYTECODE

# Processes that run tests side by side, on two cores: each waits a good part of its time for those that it starts.
# They need up to 4 GB each, and the stack of one of them 5.
WORKERS ?= 3
# The absolute path reaches children of measured processes that work in another folder.
test: export COVERAGE_FILE := $(CURDIR)/.coverage
test: env ## run the suite; WORKERS=0 for one test at a time, COVER=1 with coverage, a third slower
	@$(BIN)/python -m pytest --numprocesses=$(WORKERS) --max-worker-restart=0 $(if $(COVER),--cov --cov-report=term)

test-long: env ## a whole benchmark, stacks that lose processes, 500 requests in a row, checkpoints of other sizes
	@$(BIN)/python -m pytest -m long --numprocesses=2 --max-worker-restart=0

test-chaos: env ## kill, freeze and fail processes under eight streams: the short form of chaos
	@$(BIN)/python -m pytest -m chaos tests/chaos

# Needs root: each process gets a network namespace of its own.
test-apart: env ip iptables ## each process on a host of its own: links that are cut, slow, or lose packets
	@$(BIN)/python -m pytest --capture=no -m apart tests/apart

# ARGS="--cells 10", ARGS="--soak 30": see `python -m tests.chaos --help`.
chaos: env ## every process x fault x state under eight streams; or a soak; a table in out/chaos.md
	@$(BIN)/python -m tests.chaos $(ARGS)

# ARGS="tcp http --seconds 60", ARGS="tcp --minimise": see `python -m tests.fuzz --help`.
fuzz: env ## let a fuzzer look for faults in every decoder, ten minutes each; what it finds is in out/fuzz
	@$(BIN)/python -m tests.fuzz $(ARGS)

test-compose: env $(LISTENER) ## test docker compose up for real: build, start, send, crash, stop
	@$(BIN)/python -m pytest --capture=no -m compose tests/compose

test-monitoring: env prometheus kustomize ## let the real Prometheus read the running stack; check alert rules and dashboard
	@$(BIN)/python -m pytest -m monitoring tests/monitoring

# PICTURE=docs/images/page.png keeps a picture of a conversation: look at it before it is committed.
test-page: export PAGE_PICTURE := $(PICTURE)
test-page: env chromium ## test the web page in Chromium, which is installed if it can be
	@$(BIN)/python -m pytest -m page tests/page

test-tools: env zsh fish kustomize ## completion in zsh and fish, and the manifests as kustomize renders them
	@$(BIN)/python -m pytest -m tools tests/tools

test-training: env ## the training of the default checkpoint, on models of a few thousand parameters
	@$(BIN)/python -m pytest -m training tests/training

# Two at a time: each waits a good part of its time for what it starts.
PARTS ?= quality clients page monitoring training tools
BESIDE = $(if $(filter quality,$(PARTS)),$(LISTENER) flite espeak-ng) $(if $(filter page,$(PARTS)),chromium) \
	$(if $(filter monitoring,$(PARTS)),prometheus kustomize) $(if $(filter tools,$(PARTS)),zsh fish kustomize) $(if $(filter clients,$(PARTS)),clients)
test-beside: env $(BESIDE) ## PARTS="page quality": these parts, two tests at a time
	@$(BIN)/python -m pytest --numprocesses=2 --max-worker-restart=0 -m "$$(echo $(PARTS) | sed 's/ / or /g')" \
		$(addprefix tests/,$(PARTS))

test-quality: env flite espeak-ng $(LISTENER) ## ask the trained checkpoint held-out questions, and listen: the short form of quality
	@$(BIN)/python -m pytest --capture=no -m quality tests/quality

test-cluster: env $(RAY) ## the stack on a real Ray cluster of four nodes: placement, scaling, lost and frozen nodes
	@$(BIN)/python -m pytest --capture=no -m cluster tests/cluster

# Several GB are installed; a GPU is not needed.
test-cuda: ## what a start on a GPU would choose, by vLLM's CUDA build
	@$(MAKE) --no-print-directory DEVICE=gpu env
	@.venv-gpu/bin/python -m pytest -m cuda tests/cuda

test-clients: env clients ## official SDKs, agent frameworks, proxies and load tools, as users run them, against one stack
	@$(BIN)/python -m pytest --capture=no -m clients tests/clients

# ARGS="DIR --count 20": see `python -m benchmarks.quality --help`.
quality: env flite espeak-ng $(LISTENER) ## measure how right and how intelligible answers are: a table in benchmarks/results
	@$(BIN)/python -m benchmarks.quality $(ARGS)

# ARGS="--size bench --clients 1 8": see `python -m benchmarks --help`.
bench: env ## measure beside transformers: tables, JSON and plots in benchmarks/results
	@$(BIN)/python -m benchmarks $(ARGS)

# ARGS="--streams 1 2000 --interfaces tcp": see `python -m benchmarks.gateway --help`.
bench-gateway: env ## measure the gateway alone, on one core, with thousands of streams and hundreds of replicas
	@$(BIN)/python -m benchmarks.gateway $(ARGS)

simulate: env ## simulate stacks of many replicas with measured step times: tables in benchmarks/results
	@$(BIN)/python -m benchmarks.simulation $(ARGS)

# ARGS="--size tiny", ARGS="--device cuda": the part `parity` of gpu, on a CPU if not said otherwise.
rehearsal: env ## load random weights of the released 3B's shapes stage by stage, and compare with transformers
	@$(BIN)/python -m benchmarks.gpu parity --device cpu --again --out out/rehearsal $(ARGS)

# ARGS="bare steps", ARGS="--again": see `python -m benchmarks.gpu --help`.
gpu: ## on a machine with a GPU: right, captured, how fast, kill -9: a report in out/gpu; resumed where it stopped
	@$(MAKE) --no-print-directory DEVICE=gpu env
	@.venv-gpu/bin/python -m benchmarks.gpu $(ARGS)

# Debian's packages behind these commands are installed if that can be.
prometheus: PACKAGES := prometheus
chromium: PACKAGES := chromium fonts-dejavu-core
ip: PACKAGES := iproute2
iptables: PACKAGES := iptables
zsh: PACKAGES := zsh
fish: PACKAGES := fish
flite: PACKAGES := flite
espeak-ng: PACKAGES := espeak-ng
# RUNLEVEL keeps Debian from starting a Prometheus of its own.
prometheus chromium ip iptables zsh fish flite espeak-ng:
	@command -v $@ >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { \
			echo "$@ is missing: run this as root on Debian, or install what Debian calls $(PACKAGES)."; exit 1; }; \
		export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $(PACKAGES); }

# Debian 12 has none.  Debian 13's runs there, too, and stays in a folder of this repository.
kustomize:
	@command -v $@ >/dev/null || [ -x .cache/debian-13/usr/bin/$@ ] || .ci/from-debian-13 .cache/debian-13 $@

AUDIT := .venv-audit/bin/python

$(AUDIT): requirements/audit.lock
	@"$(PYTHON)" -m venv --clear .venv-audit
	@$(UV_INSTALL) $@ -r requirements/audit.lock
	@touch $@

DESCRIBE = $(AUDIT) -W ignore -m cyclonedx_py $(1) --pyproject pyproject.toml --output-reproducible -o out/sbom-$(2).json
LOCKED = cat $(patsubst %,requirements/%.lock,$(1)) | $(call DESCRIBE,requirements -,$(2))

sbom: $(AUDIT) ## write what is locked, and what is installed, to out/sbom-*.json (CycloneDX)
	@mkdir -p out
	@$(call LOCKED,gateway,gateway)
	@$(call LOCKED,gateway webrtc,gateway-calls)
	@$(call LOCKED,torch cpu,stages-cpu)
	@$(call LOCKED,gpu,stages-gpu)
	@$(call LOCKED,torch cpu dev,development)
	@[ ! -x .venv/bin/python ] || $(call DESCRIBE,environment .venv/bin/python,environment-cpu)
	@[ ! -x .venv-gpu/bin/python ] || $(call DESCRIBE,environment .venv-gpu/bin/python,environment-gpu)
	@ls out/sbom-*.json

# Known: docs/licences.md tells of them; the metadata of the last three name none.
licences: $(AUDIT) env ## fail if an installed package has a licence that docs/licences.md must mention, or none
	@$(AUDIT) -m piplicenses --python $(BIN)/python --partial-match --fail-on "GPL;MPL-;Mozilla;Proprietary;UNKNOWN" \
		--ignore-packages certifi tqdm shtab pycountry soxr intel-openmp intel-cmplr-lib-ur hypothesis pathspec \
		atheris espeakng-loader oss-harmony >/dev/null

PINS = sed -n 's/^\([a-z0-9-]*==[^ \\]*\).*/\1/p' $(patsubst %,requirements/%,$(1)) | sort -u
AUDITED = $(PINS) >out/pins.txt; $(AUDIT) -m pip_audit --strict --disable-pip --no-deps --progress-spinner off -r out/pins.txt $(ARGS)

# Four sets, each with one version of a package.  ARGS="-s osv" asks osv.dev instead of PyPI.
audit: $(AUDIT) ## ask what is known against the locked packages; needs the internet itself, not a mirror
	@mkdir -p out
	@$(call AUDITED,torch.lock cpu.lock dev.lock quality.lock cluster.lock turns.lock)
	@$(call AUDITED,gpu.lock)
	@$(call AUDITED,audit.lock)
	@$(call AUDITED,site.lock)

# Browsers load them from the gateway, never from elsewhere.  For another version, renew the digests too.
VENDORED := marked@18.2.1/lib/marked.esm.js dompurify@3.4.18/dist/purify.min.js

vendor: ## fetch the web page's libraries again, as they were released
	@for each in $(VENDORED); do \
		name=$${each%%@*}; version=$${each#*@}; version=$${version%%/*}; \
		curl -fsS "https://registry.npmjs.org/$$name/-/$$name-$$version.tgz" | \
			tar -xzO "package/$${each#*/}" >"gateway/http/page/static/vendor/$${each##*/}"; \
	done
	@sha256sum --check scripts/vendor.sha256

# ARGS="vocoder --hours 2": one part, for so long; see docs/training.md.
train: env ## train the speaking checkpoint, for hours; resumed where it stopped
	@$(BIN)/python -m labs.training --state out/training $(ARGS)

check: env $(SITE) ## lint, formatting, types, the direction of imports, how much code there is, the documentation's links
	@echo "[1/6] ruff check"
	@$(BIN)/ruff check .
	@echo "[2/6] ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "[3/6] mypy (the first run takes longest)"
	@$(BIN)/mypy
	@echo "[4/6] lint-imports"
	@$(BIN)/lint-imports
	@echo "[5/6] lines of code"
	@$(BIN)/python scripts/count_code.py
	@echo "[6/6] documentation site"
	@$(MAKE) --no-print-directory --silent site

$(SITE): requirements/site.lock
	@"$(PYTHON)" -m venv --clear .venv-site
	@$(UV_INSTALL) $@ -r requirements/site.lock
	@touch $@

# What pages show or link to.  They keep their places, so that links lead to the same files here and in the site.
PAGES := $(addsuffix .md,README CHANGELOG CONTRIBUTING SECURITY benchmarks/README checkpoint/speaking/README) LICENSE docs \
	benchmarks/results examples deploy/config.example.yaml .github/workflows/ci.yaml scripts/count_code.py \
	gateway/requests/metrics.py shared/stage/metrics.py shared/transport/metrics.py \
	$(addprefix omnirelay/,content.py errors.py events.py protocol.py status.py tools.py) \
	$(addprefix gateway/http/,fields.py realtime/turn_detection.py $(addprefix openai/,chat_request.py responses.py speech.py transcription.py))

# `python3 -m http.server --bind 127.0.0.1 --directory out/site` shows it, with search.
site: env $(SITE) ## build the documentation site in out/site; fails on broken links, and on pages that mkdocs.yml lacks
	@rm -rf out/pages
	@mkdir -p out/pages
	@git ls-files -z $(PAGES) | xargs -0 cp --parents --target-directory=out/pages
	@$(BIN)/python -m scripts.reference out/pages
	@NO_MKDOCS_2_WARNING=1 $(SITE) -m mkdocs build --strict --clean --site-dir out/site

format: env ## put the code into the form that check wants
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# setuptools would put files that have been removed since into a wheel again.
wheels: env ## build the distributions omnirelay (client) and omnirelay-server into dist, and try them
	@rm -rf build deploy/client/build dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist deploy/client .
	@rm -rf build deploy/client/build
	@PYTHON="$(PYTHON)" scripts/try_wheels.sh
	@ls dist/*.whl

clean: ## remove the environments and everything that was generated
	rm -rf .venv .venv-gpu .venv-audit .venv-site .venv-clients out build deploy/client/build dist .cache *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
