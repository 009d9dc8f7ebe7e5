"""Python runs this file at startup where `dispatch-trace run` put its directory first on PYTHONPATH.

It starts the recorder (importing the package does, as the variables say so) and then runs the
`sitecustomize` that it hides. Nothing here may stop the program from starting.
"""

import importlib
import os
import sys


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    try:
        importlib.import_module("dispatch_trace")
    except ModuleNotFoundError as error:
        if error.name != "dispatch_trace":
            raise
        # Run from a checkout, or by another interpreter's: last on the path, so that it hides nothing.
        sys.path.append(os.path.dirname(os.path.dirname(here)))
        importlib.import_module("dispatch_trace")


def _run_hidden() -> None:
    """The sitecustomize that would have run without us, if there is one."""
    ours = sys.modules.pop(__name__, None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules[__name__] = ours


try:
    _start()
except Exception as error:
    sys.stderr.write(f"dispatch_trace: not recording this process: {type(error).__name__}: {error}\n")
_run_hidden()
