"""Whose code Dynamo has compiled: the module at its top, and what lies below it, in names that others share.

Compiled code is not the property of one module. Dynamo compiles the `forward` of a class, and the next
instance of that class runs the same code with parameters of its own: what a graph knows of modules is
therefore kept as paths below the module at the top, and which module that is gets decided at each run, by the
parameters that come in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dispatch_trace.capture.frames import Frame, walk_modules
from dispatch_trace.capture.graph_plan import num_entries

Owner = tuple[str, str]  # path of a module, name of its parameter or buffer
Tables = dict[str, dict[int, list[Owner]]]  # by model, and id of the tensor


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """What is known of a piece of compiled code.

    Attributes:
      root: id of the module at its top when it was compiled, 0 where there is none.
      kind: class of that module.
      resumes: the code goes on after a graph break.
      entries: how often the code enters each module, by id.
      below: paths below the root of each module in `entries`, by id; empty for a module elsewhere.
      parameters: which input is which tensor of the root: position -> owners, their paths below the root.
    """

    root: int
    kind: type | None
    resumes: bool
    entries: Mapping[int, int]
    below: Mapping[int, tuple[str, ...]]
    parameters: Mapping[int, tuple[Owner, ...]]

    def base_path(self, tables: Tables, model: str, args: Sequence[Any], frame: Frame) -> str | None:
        """Path of the module that runs the code now; None where no tensor tells and no call is open for it.

        Args:
          tables: owners of every tensor of the recorded models.
          args: what the code is called with.
          frame: the innermost call that is open.
        """
        owners = tables.get(model, {})
        votes: Counter[str] = Counter()
        for position, known in self.parameters.items():
            now = owners.get(id(args[position])) if position < len(args) else None
            if now:
                votes.update({base for a in now for b in known if (base := _above(a, b)) is not None})
        if votes:
            return votes.most_common(1)[0][0]
        running = getattr(frame.module, "_orig_mod", frame.module)
        if self.kind is not None and type(running) is self.kind:
            return frame.path
        return None


def _above(now: Owner, known: Owner) -> str | None:
    """What comes before `known`'s path in `now`'s, where both are one tensor of one module."""
    (path, name), (below, known_name) = now, known
    if name != known_name:
        return None
    if not below:
        return path
    if path == below:
        return ""
    return path.removesuffix(f".{below}") if path.endswith(f".{below}") else None


def code_of(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> tuple[Code, torch.nn.Module | None]:
    """Describes what Dynamo is compiling.

    Args:
      module, inputs: Dynamo's graph and example inputs.
    Returns: the description, and the module at the top.
    """
    root, resumes = compiled_root()
    entries = num_entries(module.graph)
    below: dict[int, tuple[str, ...]] = {}
    parameters: dict[int, tuple[Owner, ...]] = {}
    if root is not None:
        for path, each, wraps in walk_modules(root):
            if id(each) in entries and not wraps and path not in below.get(id(each), ()):
                below[id(each)] = (*below.get(id(each), ()), path)
        owners = owners_of(root)
        parameters = {i: tuple(owners[id(t)]) for i, t in enumerate(inputs) if id(t) in owners}
    kind = None if root is None else type(root)
    code = Code(0 if root is None else id(root), kind, resumes, entries, below, parameters)
    return code, root


def owners_of(root: torch.nn.Module) -> dict[int, list[Owner]]:
    """(path, name) of every parameter and buffer, by id of the tensor."""
    owners: dict[int, list[Owner]] = {}
    for path, each, wraps in walk_modules(root):
        if not wraps:
            for table in (each._parameters, each._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        owners.setdefault(id(tensor), []).append((path, name))
    return owners


def compiled_root() -> tuple[torch.nn.Module | None, bool]:
    """The module whose code Dynamo is compiling, and whether that code goes on after a graph break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # not called by Dynamo
        return None, False
    if translator is None:
        return None, False
    code, values = translator.f_code, translator.f_locals
    resumes = code.co_name.startswith("torch_dynamo_resume_in")
    for name in code.co_varnames:
        value = values.get(name)
        if isinstance(value, tuple) and value:
            value = value[0]  # a decorated forward: `*args`
        if isinstance(value, torch.nn.Module):
            method = name == "self" or "forward" in code.co_name or _is_forward_of(value, code)
            return (value if method else None), resumes
    return None, resumes


def _is_forward_of(module: torch.nn.Module, code: Any) -> bool:
    return getattr(getattr(type(module), "forward", None), "__code__", None) is code


__all__ = ["Code", "Tables", "code_of", "compiled_root", "owners_of"]
