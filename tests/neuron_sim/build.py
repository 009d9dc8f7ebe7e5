"""Builds the simulated device once for each state of its source, and says why where it cannot be built."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

_SOURCE = Path(__file__).with_name("device.cpp")


def missing() -> str:
    """What is lacking to build the device, "" where nothing is."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"the simulated device needs a C++ compiler, and there is no {compiler!r} on the path"
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        return "the simulated device needs ninja to be built"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return f"the simulated device needs Python's headers in {sysconfig.get_path('include')}"
    return ""


def load() -> ModuleType:
    """The extension, built first where its source or torch has changed (about a minute).

    The name holds a hash of both, so it is also the name of a folder of its own in torch's cache of
    extensions, and a build is never mistaken for that of another source.
    """
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    with warnings.catch_warnings(), _ninja_on_path():
        warnings.simplefilter("ignore")  # torch's own remarks on compilers
        from torch.utils import cpp_extension

        module: ModuleType = cpp_extension.load(
            name=f"dispatch_trace_neuron_sim_{key}", sources=[str(_SOURCE)], extra_cflags=["-O1"]
        )
    return module


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """The package `ninja` puts its program next to Python's, which need not be on the path."""
    before = os.environ.get("PATH", "")
    scripts = sysconfig.get_path("scripts")
    os.environ["PATH"] = f"{before}{os.pathsep}{scripts}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
