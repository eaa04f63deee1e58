## make demo        train small models on jax_fastops and on jax.nn, and compare the two
## make test        the quick tests
## make test-slow   the exhaustive rest
## make test-all    both
## make test-settings  tests of the ops under JAX's strict settings of promotion
## make sanitize    tests of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer
## make soak-thread  random calls of 8 threads under ThreadSanitizer, on the CPU
## make bench       measure every op on the device that JAX has
## make docs        build the documentation into build/docs/html
## make docs-check  build it, and check its links, examples, commands and numbers
## make readme      put the results into the README's numbers and chart
## make new-op NAME=group_norm  write the skeleton of an op family, and list what is to be edited
## make format      format all sources
## make lint        check formatting and style
## make types       check the types of the public functions
## make wheel       build wheels into dist/: the package with CPU kernels and, with JAX_FASTOPS_CUDA=ON, a plugin
##                  with CUDA kernels
## make release     build sdist and wheels, audit them, and test the wheels in a fresh environment
## make cuda-nvcc   install a CUDA compiler from PyPI into the environment, for building
## make cudnn       install cuDNN into the environment, whose headers the CUDA module needs for attention
## make clean       remove what was built, and the environments
##
## Each target first sets up a virtual environment, from Python 3.11 or later, make and a C++ compiler. The
## environment has the compiled kernels and takes the Python files from here, so only edits of kernels need
## a build, which compiles what has changed. These variables choose what is built and installed:
##
##   PYTHON=python3         the interpreter to make the environment from
##   VENV=.venv             the environment
##   JAX_VERSION=0.8.0      the jax to install (default: the newest; the environment's name shows it)
##   JAX='jax[cuda13]'      the requirement for jax (default: jax, which has no GPU support)
##   JAX_FASTOPS_CUDA=AUTO  build CUDA kernels: ON, OFF or AUTO (if there is a CUDA compiler)
##                          (default: AUTO if nvidia-smi is on the PATH, else OFF)
##   CUDAARCHS=90           for these compute capabilities (default: 8.0, 9.0 and PTX for later ones)
##   PLUGIN=cuda12          the plugin that 'make wheel' and 'make release' build (default: cuda13). CUDACXX names
##                          an nvcc of this CUDA
##   WHEEL=dist/NAME.whl    install this wheel, or these, and build nothing
##   JOBS=2                 test processes (default: the cores, at most 8)
##   PYTEST_ARGS='-k vmap'  more arguments for pytest
##   DEMO_ARGS=--quick      arguments for the demo; likewise BENCH_ARGS, SOAK_ARGS

PYTHON ?= python3
JAX ?= jax
PLUGIN ?= cuda13
VENV ?= .venv$(if $(JAX_VERSION),-jax-$(JAX_VERSION))
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))

ifeq ($(JAX_FASTOPS_CUDA),)
override JAX_FASTOPS_CUDA := $(if $(shell command -v nvidia-smi 2>/dev/null),AUTO,OFF)
endif
export JAX_FASTOPS_CUDA
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
NATIVE := $(shell find src -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# Requirements in pyproject.toml, a line each: of some extras, or of what another table has under these names.
requirements = $(BIN)/python -c 'import tomllib; table = tomllib.load(open("pyproject.toml", "rb"))\
  $(or $(2),["project"]["optional-dependencies"]); print(*(r for n in "$(1)".split() for r in table[n]), sep="\n")'

.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-all test-settings sanitize sanitized soak-thread bench docs docs-check readme new-op \
  format lint types wheel release cuda-nvcc cudnn clean FORCE

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

demo: $(VENV)/.package
	$(BIN)/python demo $(DEMO_ARGS)

test: $(VENV)/.package
	$(BIN)/pytest -m "not slow" -n $(JOBS) $(PYTEST_ARGS)

test-slow: $(VENV)/.package
	$(BIN)/pytest -m slow -n $(JOBS) $(PYTEST_ARGS)

test-settings: $(VENV)/.package
	JAX_FASTOPS_TEST_SETTINGS=strict $(BIN)/pytest -m "(settings or transform) and not slow" \
	  -n $(JOBS) $(PYTEST_ARGS)

test-all: $(VENV)/.package
	$(BIN)/pytest -n $(JOBS) $(PYTEST_ARGS)

bench: $(VENV)/.package
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: $(VENV)/.docs $(VENV)/.package
	rm -rf build/docs/html
	$(BIN)/sphinx-build -b html -d build/docs/doctrees -W --keep-going docs build/docs/html

docs-check: docs
	JAX_PLATFORMS=cpu $(BIN)/python docs/check.py
	$(BIN)/python -m benchmarks readme --check

readme: $(VENV)/.package
	$(BIN)/python -m benchmarks readme

new-op:
	@$(PYTHON) .ci/new-op $(NAME)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

types: $(VENV)/.docs $(VENV)/.tools $(VENV)/.package
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	cd docs && PATH='$(abspath $(BIN))':"$$PATH" basedpyright --verifytypes jax_fastops --ignoreexternal

wheel: | $(BIN)/python
	rm -f dist/jax_fastops*.whl
	JAX_FASTOPS_CUDA=OFF $(PIP) wheel --no-deps --wheel-dir dist .
	$(if $(filter ON,$(JAX_FASTOPS_CUDA)),$(PIP) wheel --no-deps --wheel-dir dist ./plugins/$(PLUGIN))

release: $(VENV)/.release
	JAX='$(JAX)' PLUGIN='$(PLUGIN)' PATH='$(abspath $(BIN))':"$$PATH" .ci/release

cuda-nvcc: $(VENV)/.cuda-nvcc

cudnn: $(VENV)/.cudnn

clean:
	rm -rf build dist demo/out .venv .venv-jax-*

# ---- The kernels ---------------------------------------------------------------------------------
#
# They are compiled in a folder that stays, one for each interpreter and each set of the variables that
# choose what is built. The wheel that comes of it has the native modules, and a path to the Python files in
# this folder. The build requirements are in an environment of their own.

TAG := $(shell p=$(BIN)/python; [ -x $$p ] || p=$(PYTHON); $$p -c 'import sys; print(sys.implementation.cache_tag)')
BUILDER := build/builder-$(TAG)
VARIANT := $(shell echo '$(foreach v,JAX_FASTOPS_CUDA CUDAARCHS JAX_FASTOPS_CPU_ISAS JAX_FASTOPS_WERROR \
  JAX_FASTOPS_SANITIZE CC CXX CUDACXX CUDAHOSTCXX CXXFLAGS CUDAFLAGS LDFLAGS,$($(v));)' | cksum | cut -d' ' -f1)
BUILD := build/$(TAG)-$(VARIANT)
SOURCES := CMakeLists.txt pyproject.toml $(shell find src third_party cmake -type f)
PYTHON_FILES := $(shell find jax_fastops -name '*.py' -o -name '*.json')
# Builds a wheel into a folder, in which the objects stay. Further arguments are settings of scikit-build-core.
build_wheel = JAX_FASTOPS_CUDNN_INCLUDE="$${JAX_FASTOPS_CUDNN_INCLUDE-$(wildcard \
  $(abspath $(VENV))/lib/python*/site-packages/nvidia/cudnn/include)}" PATH="$$PATH:$(wildcard $(abspath $(VENV))/lib/python*/site-packages/nvidia/cu*/bin)" \
  $(BUILDER)/bin/python -c 'from scikit_build_core.build import build_wheel; \
  build_wheel("$(1)", {"build-dir": "$(1)/objects", $(2), $(3)})'

$(BUILDER)/.ready: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(BUILDER)
	$(call requirements,requires,["build-system"]) > $@.txt
	$(BUILDER)/bin/python -m pip install cmake ninja -r $@.txt
	@touch $@

# The stamp has the time of the start, so that sources changed meanwhile count as newer.
$(BUILD)/.built: $(SOURCES) $(BUILDER)/.ready
	@mkdir -p $(@D) && rm -f $(@D)/*.whl && touch $@.started
	$(call build_wheel,$(@D),"wheel.packages": [],"cmake.define.JAX_FASTOPS_EDITABLE": "ON")
	@mv $@.started $@

# ---- Sanitizers ----------------------------------------------------------------------------------
#
# A second copy of the package, with a CPU module that is instrumented, and built for this machine only.
# It precedes the installed one. The interpreter is not instrumented, so the run-time libraries are loaded
# before it; the C++ library too, whose exceptions they intercept. Python and XLA keep memory until the
# process ends, so leaks say nothing. Needs GCC. Tests of what only transforms a program are left out:
# they change nothing for the kernels, and take most of the time. A report does not say where memory was
# allocated, which is in XLA; to record that takes a tenth of the time.

SANITIZED := $(CURDIR)/build/sanitized
SANITIZERS_address := address;undefined
SANITIZERS_thread := thread
# Reports go to files: a test that takes the process down takes pytest's captured output with it.
REPORT := $(CURDIR)/build/sanitizer-report
library = $(shell $(CXX) -print-file-name=$(1))

sanitized: $(SANITIZED)-address/.built

$(SANITIZED)-%/.built: $(SOURCES) $(PYTHON_FILES) $(BUILDER)/.ready $(VENV)/.package
	@mkdir -p $(@D) && rm -f $(@D)-objects/*.whl && touch $@.started
	isa=$$($(BIN)/python -c 'import jax_fastops; print(jax_fastops.info()["modules"]["cpu"]["isa"])') && \
	CXX=$(CXX) JAX_FASTOPS_CUDA=OFF JAX_FASTOPS_SANITIZE='$(SANITIZERS_$*)' JAX_FASTOPS_CPU_ISAS=$$isa \
	  $(call build_wheel,$(@D)-objects,"cmake.build-type": "RelWithDebInfo")
	$(PIP) install --no-deps --upgrade --target $(@D) $(@D)-objects/*.whl
	@mv $@.started $@

sanitize: sanitized
	rm -f $(REPORT).*
	JAX_FASTOPS_TEST_PLATFORM=cpu PYTHONPATH=$(SANITIZED)-address \
	  ASAN_OPTIONS=detect_leaks=0:malloc_context_size=0:log_path=$(REPORT) \
	  UBSAN_OPTIONS=print_stacktrace=1:log_path=$(REPORT) \
	  LD_PRELOAD="$(call library,libasan.so) $(call library,libubsan.so) $(call library,libstdc++.so)" \
	  $(BIN)/pytest -m "kernels and not slow and not jax and not transform" -n $(JOBS) $(PYTEST_ARGS); \
	status=$$?; cat $(REPORT).* 2>/dev/null && status=1; exit $$status

# Without random addresses, which ThreadSanitizer of older GCCs does not support.
soak-thread: $(SANITIZED)-thread/.built
	rm -f $(REPORT).*
	JAX_PLATFORMS=cpu PYTHONPATH=$(SANITIZED)-thread \
	  XLA_FLAGS='--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true' \
	  TSAN_OPTIONS='suppressions=$(CURDIR)/tests/tsan.supp log_path=$(REPORT)' \
	  LD_PRELOAD="$(call library,libtsan.so) $(call library,libstdc++.so)" \
	  setarch -R $(BIN)/python tests/soak.py --largest 4096 $(SOAK_ARGS); \
	status=$$?; cat $(REPORT).* 2>/dev/null && status=1; exit $$status

# ---- The environment -----------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: set PYTHON (now: $(PYTHON))"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Rewritten only if it would change.
$(VENV)/.config: FORCE | $(BIN)/python
	@echo '$(JAX) $(JAX_VERSION) $(or $(WHEEL),$(BUILD))' | cmp -s - $@ || \
	  echo '$(JAX) $(JAX_VERSION) $(or $(WHEEL),$(BUILD))' > $@

$(VENV)/.requirements: pyproject.toml $(VENV)/.config
	$(call requirements,test demo bench train) > $@.txt
	$(PIP) install -r $@.txt '$(JAX)$(if $(JAX_VERSION),==$(JAX_VERSION))'
	@touch $@

# RECORD is newer if anything else has installed the package.
$(VENV)/.package: $(or $(WHEEL),$(BUILD)/.built) $(VENV)/.requirements \
    $(wildcard $(VENV)/lib/python*/site-packages/jax_fastops-*.dist-info/RECORD)
	@$(PIP) uninstall --quiet --yes jax_fastops-cuda12-plugin jax_fastops-cuda13-plugin 2>/dev/null
	$(PIP) install --quiet --no-deps --force-reinstall $(or $(WHEEL),$(BUILD)/*.whl)
	@touch $@

$(VENV)/.docs: $(VENV)/.requirements
	$(call requirements,docs) > $@.txt
	$(PIP) install -r $@.txt
	@touch $@

$(VENV)/.tools: pyproject.toml | $(BIN)/python
	$(call requirements,dev) > $@.txt
	$(PIP) install -r $@.txt
	@touch $@

$(VENV)/.release: pyproject.toml | $(BIN)/python
	$(call requirements,release) > $@.txt
	$(PIP) install -r $@.txt
	@touch $@

$(VENV)/.cuda-nvcc: pyproject.toml | $(BIN)/python
	$(call requirements,cuda-build) > $@.txt
	$(PIP) install -r $@.txt
	@touch $@

# Without its requirements, which are for those who run it.
$(VENV)/.cudnn: pyproject.toml | $(BIN)/python
	$(call requirements,cudnn) > $@.txt
	$(PIP) install --no-deps -r $@.txt
	@touch $@
