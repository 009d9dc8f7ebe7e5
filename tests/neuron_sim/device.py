"""The simulated device in Python: the name `neuron`, the module `torch.neuron`, and the op tracker.

PrivateUse1 is renamed for the whole process and cannot be given back, so only programs that run in a
process of their own call `install()`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from neuron_sim import build


def install() -> ModuleType:
    """Makes this process one with a Neuron device. Returns `torch.neuron`."""
    extension = build.load()
    torch.utils.rename_privateuse1_backend("neuron")
    module = ModuleType("torch.neuron")
    module.__dict__.update(
        is_simulated=True,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda _: None,
        synchronize=lambda *_: None,
        # torch.manual_seed asks for these; the ops draw from the CPU's generator, which it seeds anyway.
        manual_seed_all=lambda _: None,
        _is_in_bad_fork=lambda: False,
        # What the real package offers to those who look for it.
        get_executed_ops=extension.executed_ops,
        get_fallback_ops=list,
        clear_op_tracking=extension.clear_executed_ops,
    )
    torch._register_device_module("neuron", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _name_the_device_to_dynamo()
    return module


def _name_the_device_to_dynamo() -> None:
    """Dynamo and the fake tensors ask an interface class for the current device of each device type."""
    from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

    class Interface(DeviceInterface):
        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def device_count() -> int:
            return 1

        @staticmethod
        def synchronize(device: Any = None) -> None:
            return None

    register_interface_for_device("neuron", Interface)
