"""What a trace's header says of the program: versions, numerics, environment, models and their modules.

Guarantees: plain values only, nothing of the program kept, nothing set; a fact that cannot be had is None.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from typing import Any

import torch

from dispatch_trace import neuron
from dispatch_trace.capture.frames import walk_modules
from dispatch_trace.config import RecordOptions
from dispatch_trace.errors import ConfigError
from dispatch_trace.processor import processor_name
from dispatch_trace.schema import SCHEMA_VERSION
from dispatch_trace.sketch import NARROW_PARAMETERS, SKETCH_PARAMETERS
from dispatch_trace.store.layouts import dtype_name

# Environment that changes numerics; recorded, never set.
_ENVIRONMENT = neuron.ENVIRONMENT | {
    "ATEN_CPU_CAPABILITY",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
}


def current_rank() -> int:
    """Rank of this process: torch.distributed's where it runs, else $RANK, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    value = os.environ.get("RANK", "")
    return int(value) if value.isdigit() else 0


def plain_meta(meta: dict[str, Any] | None) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().tolist()
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple, set, range)):
            return [plain(v) for v in value]
        if hasattr(value, "tolist"):
            return value.tolist()
        raise ConfigError(
            f"meta: {value!r} is no plain value (None, bool, int, float, str, list, dict, tensor)."
        )

    return {k: plain(v) for k, v in (meta or {}).items()}


def trace_header(
    options: RecordOptions, models: dict[str, torch.nn.Module], meta: dict[str, Any]
) -> dict[str, Any]:
    from dispatch_trace import __version__

    world = int(os.environ.get("WORLD_SIZE", "1")) if os.environ.get("WORLD_SIZE", "1").isdigit() else 1
    lane = neuron.lane_of(device=device_of(models))
    return {
        "schema_version": SCHEMA_VERSION,
        "package_version": __version__,
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "start_time": time.time(),
        "command": [os.path.basename(a) if i == 0 else a for i, a in enumerate(sys.argv)],
        "lane": lane or "eager",
        "neuron": neuron.manifest() if lane else None,
        "compile_backend": None,
        "grad_enabled": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor_name(),
        "onednn": bool(torch.backends.mkldnn.enabled),
        "default_dtype": dtype_name(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "environment": {
            k: v for k, v in os.environ.items() if k in _ENVIRONMENT or k.startswith("TORCH_NEURONX_")
        },
        **model_fields(models),
        "options": options.header(),
        "sketch": _sketch_parameters(options.sketch),
        "world_size": world,
        "rank": current_rank(),
        "meta": meta,
    }


def model_fields(models: dict[str, torch.nn.Module]) -> dict[str, Any]:
    """What the header says of the root models: device, classes and the module table."""
    modules = _module_table(models)
    classes = {row["model"]: row["class"] for row in modules if row["path"] == ""}
    return {
        "device": device_of(models),
        "models": {name: {"class": classes[name], "training": m.training} for name, m in models.items()},
        "modules": modules,
    }


def device_of(models: dict[str, torch.nn.Module]) -> str:
    """Type of the device that the first model's first tensor lies on; "cpu" without one."""
    for model in models.values():
        for tensor in (*model.parameters(), *model.buffers()):
            return str(tensor.device.type)
    return "cpu"


def _module_table(models: dict[str, torch.nn.Module]) -> list[dict[str, Any]]:
    """A row for every path, shared modules too: model, path, class, parameters (name, shape, dtype)."""
    return [
        {
            "model": name,
            "path": path,
            "class": f"{type(module).__module__}.{type(module).__qualname__}",
            "parameters": _parameter_rows(module),
        }
        for name, model in models.items()
        for path, module, compiled in walk_modules(model)
        if not compiled
    ]


def _parameter_rows(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [
        {
            "name": key,
            "shape": None if torch.nn.parameter.is_lazy(tensor) else [int(s) for s in tensor.shape],
            "dtype": dtype_name(tensor.dtype),
            "buffer": buffer,
        }
        for buffer, tensors in ((False, module._parameters), (True, module._buffers))
        for key, tensor in tensors.items()
        if tensor is not None
    ]


def _sketch_parameters(wanted: bool | str) -> dict[str, Any] | None:
    if wanted == "narrow":
        return NARROW_PARAMETERS
    return SKETCH_PARAMETERS if wanted else None
