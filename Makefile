# SPDX-License-Identifier: Apache-2.0
# The two doors for a newcomer are `make demo` and `make test`; both start from a bare machine.
# Everything is built below build/, everything for Python lives in .venv; `make clean` and `make distclean`
# remove them.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV := $(CURDIR)/.venv
PYTHON := $(VENV)/bin/python
PREFIX := $(CURDIR)/build/prefix
export PATH := $(VENV)/bin:$(PATH)
# Where it is set, every process compiles PyTorch's modules anew: 12 of 18 seconds of a small script.
unexport PYTHONDONTWRITEBYTECODE

# What the Python package is built from.
PACKAGE_SOURCES := $(shell find src include python meson.build meson.options pyproject.toml -type f \
	! -name '*.pyc' 2>/dev/null)
VERSION := $(shell sed -n "s/^  version: '\(.*\)',/\1/p" meson.build)
PYTEST_FOLDERS := $(wildcard tests/python tests/tools tests/cli tests/server)
PYTEST_ARGS ?=
# Workers begin with tests that stand together, and take from each other at the end: none waits for another's last file.
IN_PARALLEL := -n auto --dist loadfile --durations=100 --durations-min=3
# Of the tests marked long a quarter, another one each week: tests/conftest.py.
TURN ?= $(shell date +%-V)
FUZZ_SECONDS ?= 20
SWEEP_SEED ?= 1
# Under thread checks 30 seconds were once too few for what took 18 alone.
SLOWED := --timeout-multiplier 4
VALGRIND := valgrind --quiet --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite,possible

MESON_RUN := meson test --print-errorlogs --no-suite gpu --no-suite soak
MESON_TEST := $(MESON_RUN) --no-rebuild
# Where another build has had every allocation fail.
FEW_FAILURES := MEMSCALE_OOM=few
# Clang's build runs what takes long under the sanitizers, too.
CLANG_LEAVES_OUT := --no-suite long --no-suite oom
# The rest has one thread: under thread checks it would show nothing that address checks do not. What these run is short, so
# that a build without optimization takes less time than it costs.
WITH_THREADS := --suite unit base/thread 'device/*' 'offload/*' 'optim/*' 'fingerprint/*' 'server/*'

# $(call configure,FOLDER,C COMPILER,C++ COMPILER,OPTIONS): configures a build folder once.
define configure
	@[ -f $(1)/build.ninja ] || CC=$(2) CXX=$(3) meson setup $(1) $(4) >$(1)-setup.log 2>&1 \
		|| { cat $(1)-setup.log; rm -rf $(1); exit 1; }
endef
# The same, and builds it.
define setup
	$(call configure,$(1),$(2),$(3),$(4))
	@ninja -C $(1) --quiet
endef
INSTALLED := --prefix=$(PREFIX) --libdir=lib

.PHONY: help
help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

# ---- for a newcomer ------------------------------------------------------------------------------

.PHONY: demo
demo: package ## train under a memory budget and see that it holds (a few minutes)
	@$(PYTHON) examples/python/demo.py

.PHONY: demo-short
demo-short: package ## the same with the smallest model
	@$(PYTHON) examples/python/demo.py --short

.PHONY: serve-demo
serve-demo: package library ## a memscale-server with three real runs in it, until Ctrl-C (two minutes)
	@MEMSCALE_SERVER=$(CURDIR)/build/gcc/server/memscale-server $(PYTHON) examples/python/demo/serve.py $(SERVE_DEMO_ARGS)

.PHONY: test tests
test: tests lint-fast ## build with gcc and clang and run all tests
tests: test-c test-examples test-python

# ---- building ------------------------------------------------------------------------------------

.PHONY: build
build: package library ## build the C library, the msc tool and the Python package

.PHONY: bootstrap-build bootstrap-test
bootstrap-build:
	@tools/bootstrap build
bootstrap-test:
	@tools/bootstrap test

.PHONY: library
library: bootstrap-build | build-folder
	$(call setup,build/gcc,gcc,g++,$(INSTALLED) -Dtests=false)

.PHONY: package
package: bootstrap-build
	@$(MAKE) .stamps/package

.stamps/package: $(PACKAGE_SOURCES) | build-folder
	@echo "building the Python package"
	@$(PYTHON) -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-deps \
		--config-settings=build-dir=build/python . >build/package.log 2>&1 || { cat build/package.log; exit 1; }
	@touch $@

.PHONY: build-folder
build-folder:
	@mkdir -p build

# ---- testing -------------------------------------------------------------------------------------

.PHONY: c-builds
c-builds: bootstrap-test | build-folder
	@! [ -f build/gcc/build.ninja ] || meson configure build/gcc -Dtests=true
	$(call setup,build/gcc,gcc,g++,$(INSTALLED))
	$(call setup,build/clang,clang,clang++,)

.PHONY: test-c
test-c: c-builds ## the C suites only, with gcc and clang
	@$(MESON_TEST) -C build/gcc
	@$(MESON_TEST) -C build/clang $(CLANG_LEAVES_OUT)

.PHONY: test-fast
test-fast: bootstrap-test | build-folder ## the C unit suite with gcc and the Python unit tests
	@! [ -f build/gcc/build.ninja ] || meson configure build/gcc -Dtests=true
	$(call setup,build/gcc,gcc,g++,$(INSTALLED))
	@$(MESON_TEST) -C build/gcc --suite unit --suite headers
	@$(MAKE) .stamps/package
	@$(PYTHON) -m pytest -q $(IN_PARALLEL) $(wildcard tests/python/unit tests/tools) $(PYTEST_ARGS)

.PHONY: test-examples
test-examples: c-builds ## examples/c, compiled against an installed library
	@meson install -C build/gcc --quiet --no-rebuild
	@tools/run_examples $(PREFIX) gcc

.PHONY: test-python test-all
test-python: c-builds ## the Python tests, against the installed package; of the long ones a quarter
	@$(MAKE) .stamps/package
	@MSC=$(CURDIR)/build/gcc/cli/msc $(PYTHON) -m pytest $(IN_PARALLEL) $(TURNS) $(PYTEST_FOLDERS) $(PYTEST_ARGS) \
		| tee build/pytest.log
test-python: TURNS := --turn $(TURN)
test-all: ## the same, and every long test 
	@$(MAKE) test-python TURNS=

.PHONY: test-server
test-server: c-builds ## memscale-server through its socket, the long tests too
	@$(PYTHON) -m pytest -q $(IN_PARALLEL) tests/server $(PYTEST_ARGS)

.PHONY: lint
lint: c-builds ## every static check
	@$(PYTHON) tools/lint.py

.PHONY: lint-fast
lint-fast: bootstrap-test
	@$(PYTHON) tools/lint.py --fast

.PHONY: sanitize
sanitize: c-builds ## C tests under address, undefined-behaviour and thread sanitizers and valgrind
	$(call configure,build/asan,clang,clang++,-Db_sanitize=address$(,)undefined -Db_lundef=false)
	@$(FEW_FAILURES) $(MESON_RUN) -C build/asan $(SLOWED) --suite unit --suite oom --suite fuzz-replay --no-suite longest
	$(call configure,build/tsan,clang,clang++,-Db_sanitize=thread -Db_lundef=false -Doptimization=0)
	@$(MESON_RUN) -C build/tsan $(SLOWED) $(WITH_THREADS) --no-suite long
	@$(MESON_TEST) -C build/gcc --suite unit --no-suite long --wrapper '$(VALGRIND)' --timeout-multiplier 10

.PHONY: sweep-sample
sweep-sample: package ## two minutes of tools/sweep.py: some model classes and situations, drawn by SWEEP_SEED (1)
	@$(PYTHON) tools/sweep.py --installed --sample 60 --seed $(SWEEP_SEED) --minutes 2 --jobs 2 --again \
		--json build/sweep-sample.jsonl

.PHONY: fuzz
fuzz: bootstrap-test | build-folder ## each fuzz target for FUZZ_SECONDS (20)
	$(call setup,build/fuzz,clang,clang++,-Dfuzz=true)
	@tools/run_fuzzers build/fuzz $(FUZZ_SECONDS)

.PHONY: bench
bench: package | build-folder ## the benchmarks, C and Python; appends to bench/results (several minutes)
	@PYTHON=$(PYTHON) MEMSCALE_BENCH_BUILD=$(CURDIR)/build/bench bench/run.sh

# ---- documentation -------------------------------------------------------------------------------

SITE_VENV := $(CURDIR)/.venv-site

.PHONY: site
site: package ## the documentation site and its front page, in build/site
	@$(MAKE) .stamps/site
	@$(SITE_VENV)/bin/python tools/build_site.py \
		--packages $$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

.stamps/site: requirements/site.txt
	@$(PYTHON) -m venv --clear $(SITE_VENV)
	@$(SITE_VENV)/bin/pip install --disable-pip-version-check --quiet -r $<
	@mkdir -p $(@D) && touch $@

# ---- releasing and tidying -----------------------------------------------------------------------

.PHONY: dist
dist: bootstrap-build ## source archive and wheel in dist/
	@mkdir -p dist
	@git archive --format=tar.gz --prefix=memscale-$(VERSION)/ -o dist/memscale-$(VERSION).tar.gz HEAD
	@$(PYTHON) -m pip wheel --disable-pip-version-check --quiet --no-build-isolation --no-deps -w dist .
	@ls -l dist

.PHONY: clean
clean: ## remove what was built
	@rm -rf build dist .stamps/package .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: distclean
distclean: clean ## remove the Python environment too
	@rm -rf .venv .venv-site .stamps

, := ,
