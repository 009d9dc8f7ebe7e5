"""These tests need torch-xla, which does not load beside the torch of the others: `make test-xla`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]
