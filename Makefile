# make test    parity, edge cases and, without measuring, the benchmarks, in parallel
# make perf    the benchmarks, compared with the baseline stored for this device
# make gate    the benchmarks of this tree against those of BASE (origin/main), in processes that take turns
# make aot     compile the kernels for every architecture there need not be; .ci/aot VERSION: with another Triton
# make sanitize  compute-sanitizer over our kernels (NVIDIA GPU and CUDA toolkit)
# make lint    ruff and mypy
# Each makes .venv first, unless PYTHON=… names an interpreter to use as it is: then nothing is installed.

WORKERS ?= auto
BASE ?= origin/main

ifdef PYTHON
READY :=
else
PYTHON := .venv/bin/python
READY := .venv/ready
endif

# Containers often set this. The tests start hundreds of processes, and each would compile again what it imports.
unexport PYTHONDONTWRITEBYTECODE
# And nothing of another pytest that started make, or of Python's switches, reaches the tests (see tests/conftest.py).
unexport PYTHONOPTIMIZE PYTHONSAFEPATH PYTHONWARNINGS PYTHONHASHSEED PYTEST_PLUGINS PYTEST_DISABLE_PLUGIN_AUTOLOAD
unexport PYTEST_XDIST_WORKER PYTEST_XDIST_WORKER_COUNT PYTEST_XDIST_TESTRUNUID PYTEST_CURRENT_TEST

.PHONY: test perf gate aot sanitize lint
test: $(READY)
	$(PYTHON) -m pytest -n $(WORKERS) --benchmark-disable

perf: $(READY)
	$(PYTHON) -m pytest -m perf --benchmark-compare

gate: $(READY)
	$(PYTHON) -m pytest -m perf --nsa-against $(BASE)

aot: $(READY)
	$(PYTHON) -m pytest -m aot -n $(WORKERS) --benchmark-disable

sanitize: $(READY)
	$(PYTHON) -m nsa.testing.sanitize

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

# The stamp comes last, so a broken installation is made again.
.venv/ready: pyproject.toml constraints.txt
	@echo "setting up .venv (once; minutes where torch has to be downloaded)"
	@python3 -m venv .venv || { echo "python3 cannot make a virtualenv (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	@.venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e ".[test,report,dev]"
	@.venv/bin/python -m compileall -q -j 0 -x "/(pip|setuptools|tests|testing)/" .venv/lib > /dev/null || true  # some files never compile
	@touch $@
