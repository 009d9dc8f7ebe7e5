"""The extension module of `extension.cpp`, built once for a machine and a torch (`builds`).

Guarantees: nobody needs it. `capture.native` and `store.layouts` have it do what is done once for each op and
each value; without a compiler or the headers of Python, and until it is built, they do that themselves.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch

from dispatch_trace.builds import Build, Plan

_SOURCE = Path(__file__).with_name("extension.cpp")
_NAME = "dispatch_trace_extension"


def plan() -> Plan:
    """
    Raises:
      OSError: Python has no headers here.
    """
    home = Path(torch.__file__).parent
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise OSError(f"no headers of Python in {python}")
    headers = [home / "include", home / "include/torch/csrc/api/include", python]
    abi = int(torch.compiled_with_cxx11_abi())
    return Plan(
        "extension",
        _SOURCE,
        (
            *("-std=c++20", "-O2", "-w", "-fvisibility=hidden", "-shared", "-fPIC"),
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            *(f"-I{each}" for each in headers),
        ),
        sorted(_SOURCE.parent.glob("extension_*.h")),
        (f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
        (torch.__version__, str(torch.version.git_version), str(sysconfig.get_config_var("SOABI"))),
    )


def load(path: Path) -> ModuleType:
    """
    Raises:
      ImportError: the build is no such module.
    """
    loader = ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_THE_BUILD = Build(plan, load)


def find(*, wait: bool = False) -> ModuleType | None:
    """The module; None where there is none, or none yet. Starts its build where it is missing.

    Args:
      wait: until it is built, half a minute once a machine.
    """
    return _THE_BUILD.find(wait)


def why_not() -> str:
    """Why there is no module; "" where there is one, or it is not known yet."""
    return _THE_BUILD.why_not


__all__ = ["find", "load", "plan", "why_not"]
