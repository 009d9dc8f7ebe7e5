"""AWS Neuron: which lane this process is on, what a trace's header says of it, and its loud errors.

Guarantees: no Neuron package is needed, and importing this file imports none; lanes are told by features,
never by versions; nothing is written to the environment or to the device. What is touched is what
NEURON.md, rule 2 lists: the name of the PrivateUse1 backend, `tensor.device.type`, four functions of
`torch.neuron`, and the op tracker's functions where `getattr` finds them. Leaves the capture itself to
`capture/`, and the wrapper for tracing compilers to `neuron_trace`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dispatch_trace.errors import CaptureError, ConfigError

Lane = Literal["lite", "native", "xla", "simulated"]

# Environment that changes numerics on Neuron (NEURON.md, rule 5); recorded, never set.
ENVIRONMENT = frozenset(
    {
        "NEURON_CC_FLAGS",
        "NEURON_COMPILER_OPT_LEVEL",
        "NEURON_LAUNCH_BLOCKING",
        "NEURON_LOGICAL_NC_CONFIG",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN",
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED",
        "NEURON_RT_NUMERICAL_ERRORS_VERBOSITY",
        "NEURON_FRAMEWORK_DEBUG",
        "NEURON_FUSE_SOFTMAX",
        "XLA_FLAGS",
        "XLA_IR_DEBUG",
        "XLA_HLO_DEBUG",
        "XLA_DISABLE_FUNCTIONALIZATION",
        "VLLM_NEURON_CPU_MODE",
    }
)
_ENVIRONMENT_PREFIX = "TORCH_NEURONX_"
# Distributions whose versions change what a Neuron run computes; those that are absent are left out.
_DISTRIBUTIONS = (
    "torch-neuronx",
    "libtorch-neuronx-lite",
    "neuronx-cc",
    "libneuronxla",
    "torch-xla",
    "neuronx-distributed",
    "neuronx-distributed-inference",
    "vllm-neuron",
    "nki",
)
DEVICE_TYPES = frozenset({"neuron", "xla"})
_BACKENDS = frozenset({"neuron", "vllm_neuron", "neuronx", "openxla"})


def lane(*, importing: bool = True) -> Lane | None:
    """The Neuron lane that this process can use, None without one.

    Asked anew on every call: a package may come in later.

    Args:
      importing: `torch_neuronx` may be imported to look for its `trace`. False asks only a package that
        the program has imported by itself, as a recorder around a stranger's program must.
    Returns: "lite" (the vLLM runtime; it renames PrivateUse1 too, so it is asked first), "native"
      (PrivateUse1 is called `neuron`), "xla" (`torch_neuronx.trace`), "simulated" (a test device of
      that name which says so: `torch.neuron.is_simulated`), None.
    """
    if _is_installed("libtorch_neuronx_lite"):
        return "lite"
    if torch._C._get_privateuse1_backend_name() == "neuron":
        return "simulated" if getattr(_device_module(), "is_simulated", False) else "native"
    if hasattr(_package("torch_neuronx", importing=importing), "trace"):
        return "xla"
    return None


def lane_of(*, device: str = "cpu", compile_backend: str | None = None) -> Lane | None:
    """The lane that one recording is on: the process's, where its model uses it, else None.

    The CPU reference of a Neuron model is recorded in a process that has a lane, and is on none.

    Args:
      device: `tensor.device.type` of the model's parameters.
      compile_backend: name of the `torch.compile` backend, None for an eager model.
    """
    if device not in DEVICE_TYPES and compile_backend not in _BACKENDS:
        return None
    return lane(importing=False)


def environment() -> dict[str, str]:
    """The variables that are set, of those that change numerics on Neuron."""
    return {k: v for k, v in os.environ.items() if k in ENVIRONMENT or k.startswith(_ENVIRONMENT_PREFIX)}


def manifest(
    *, compile_backend: str | None = None, num_graphs: int | None = None, importing: bool = False
) -> dict[str, Any]:
    """What a trace's header says of Neuron: plain values only.

    Args:
      compile_backend: name of the `torch.compile` backend in use.
      num_graphs: compiled graphs as the caller counted them; None asks the backend where it can tell.
      importing: as for `lane`.
    Returns: lane, versions (by distribution, installed ones only), backend, num_graphs, fallback_ops
      (op name -> calls that ran on the host; None where nothing tracks them), rank_map (rank, world
      size, local rank, device number) and environment.
    """
    tracked = op_tracking()
    return {
        "lane": lane(importing=importing),
        "versions": versions(),
        "backend": compile_backend,
        "num_graphs": tracked.num_graphs if num_graphs is None else num_graphs,
        "fallback_ops": tracked.fallback,
        "rank_map": rank_map(),
        "environment": environment(),
    }


def versions() -> dict[str, str]:
    """Versions of torch and of the Neuron packages that are installed, without importing any."""
    found = {"torch": str(torch.__version__)}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def rank_map() -> dict[str, Any]:
    """Where this process stands: its rank, the world's size, its rank on this host, its device's number."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "rank": torch.distributed.get_rank() if distributed else _number("RANK"),
        "world_size": torch.distributed.get_world_size() if distributed else _number("WORLD_SIZE"),
        "local_rank": _number("LOCAL_RANK"),
        "device": _current_device(),
    }


# -- what the backend says it did ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpTracking:
    """What Neuron's op tracker and its compiler have counted so far.

    Attributes:
      fallback: op name -> calls that ran on the host; None where nothing tells.
      executed: op name -> calls that ran one by one on the device; None where nothing tells.
      num_graphs: graphs that the backend compiled; None where nothing tells.
    """

    fallback: dict[str, int] | None = None
    executed: dict[str, int] | None = None
    num_graphs: int | None = None


def op_tracking() -> OpTracking:
    """Reads the op tracker, if this process has one. Clears nothing: the counts are the program's."""
    return OpTracking(_counts("get_fallback_ops"), _counts("get_executed_ops"), _num_graphs())


def check_compiled(before: OpTracking, *, num_graphs: int, where: str) -> None:
    """Makes sure that a compiled model ran compiled: on failure a backend may run the graph eagerly.

    Args:
      before: `op_tracking()` from before the model's first call.
      num_graphs: graphs that Dynamo has handed to the backend since then.
      where: what was run, for the message.
    Raises:
      CaptureError: ops fell back to the host, or the backend compiled fewer graphs than it was given.
    """
    now = op_tracking()
    fallen = Counter(now.fallback or {}) - Counter(before.fallback or {})
    if fallen:
        raise CaptureError(
            f"{where}: a compiled Neuron graph must not fall back, but {_listing(fallen)} ran on the host. "
            "Its values are not the device's. Find out why in the compiler's log, or record the eager model."
        )
    if now.num_graphs is None:
        return
    compiled = now.num_graphs - (before.num_graphs or 0)
    if compiled < num_graphs:
        eager = Counter(now.executed or {}) - Counter(before.executed or {})
        ran = f" Run one by one instead: {_listing(eager)}." if eager else ""
        raise CaptureError(
            f"{where}: expected {num_graphs} compiled Neuron graphs, the backend compiled {compiled}: a "
            f"graph fell back to eager execution in silence.{ran} Find out why in the compiler's log, or "
            "record the eager model."
        )


def refuse_dispatch_recorder(compiled_paths: Iterable[str], *, device: str) -> None:
    """Refuses `level="op"` around compiled Neuron code, which a dispatch mode cannot look into.

    Args:
      compiled_paths: module paths of the compiled parts; nothing is refused when there are none.
      device: `tensor.device.type` of the model.
    Raises:
      ConfigError: there are compiled parts and the device is Neuron's.
    """
    paths = [path or "the root" for path in compiled_paths]
    if paths and device in DEVICE_TYPES:
        raise ConfigError(
            f"level='op' around a compiled Neuron model ({', '.join(paths[:5])}): its graph runs below the "
            "dispatcher, so no op of it would be seen. Record with level='module', or compile with "
            "backend=dt.tap('neuron') for op-level values."
        )


def distinct_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to hand out of a graph that torch-xla compiles (backend "openxla"), of a tensor [*shape].

    A plain `clone()` of a value is that value to XLA, and outputs that are one value are returned once:
    all outputs after it then move up by one, the program's own among them (torch-xla 2.9.0; tests/xla
    shows it). A view of the copy makes it a value of its own and changes no bit.
    """
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(tensor.shape)


# -- touching Neuron -------------------------------------------------------------------------------------


def synchronize() -> None:
    """Waits for the device, where there is one that can be waited for."""
    wait = getattr(_device_module(), "synchronize", None)
    if callable(wait):
        wait()


def _device_module() -> Any:
    return getattr(torch, "neuron", None)


def _package(name: str, *, importing: bool) -> Any:
    """A package that is imported already or, where allowed, can be; None otherwise."""
    if name in sys.modules:
        return sys.modules[name]
    if not importing or not _is_installed(name):
        return None
    try:
        return importlib.import_module(name)
    except Exception:  # a broken install, or the index's placeholder, is no lane
        return None


def _is_installed(name: str) -> bool:
    if sys.modules.get(name) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _tracker(name: str) -> Any:
    """A function of the op tracker: builds have it in `torch.neuron` or in the package."""
    for home in (_device_module(), sys.modules.get("torch_neuronx")):
        found = getattr(home, name, None)
        if callable(found):
            return found
    return None


def _counts(name: str) -> dict[str, int] | None:
    ask = _tracker(name)
    if ask is None:
        return None
    ops = ask()
    if isinstance(ops, Mapping):
        return {str(op): int(n) for op, n in ops.items()}
    return dict(Counter(str(op) for op in ops))


def _num_graphs() -> int | None:
    ask = _tracker("get_dynamo_metrics")
    return None if ask is None else len(ask())


def _current_device() -> int | None:
    device = _device_module()
    if device is None:
        return None
    available = getattr(device, "is_available", None)
    current = getattr(device, "current_device", None)
    if not callable(available) or not callable(current) or not available():
        return None
    return int(current())


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else None


def _listing(ops: Mapping[str, int]) -> str:
    most = sorted(ops.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{op} ({n} calls)" if n > 1 else op for op, n in most[:5])
    return shown + (f" and {len(most) - 5} more" if len(most) > 5 else "")


__all__ = [
    "DEVICE_TYPES",
    "ENVIRONMENT",
    "Lane",
    "OpTracking",
    "check_compiled",
    "distinct_copy",
    "environment",
    "lane",
    "lane_of",
    "manifest",
    "op_tracking",
    "rank_map",
    "refuse_dispatch_recorder",
    "synchronize",
    "versions",
]
