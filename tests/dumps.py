"""Makes dumps of other tools by running real models under hooks that write what those tools write.

The layouts are those that the tools document; nothing of theirs is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn


def write_step(
    replica: Path,
    name: str,
    modules: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    *,
    req_ids: Sequence[str] = ("a",),
    positions: Sequence[int] | None = None,
    meta: Any = None,
    time_s: float | None = None,
) -> Path:
    """One step: a directory for each module with one file for each tp rank, and the metadata.

    Args:
      replica: `dp{N}`.
      modules: by directory name ("" is the step itself), a tensor or one for each tp rank.
      positions: None for 0, 1, … as the name says.
      meta: instead of the metadata; "" for none.
      time_s: of the metadata's file.
    """
    step = replica / name
    for directory, tensors in modules.items():
        (step / directory).mkdir(parents=True, exist_ok=True)
        for tp, tensor in enumerate([tensors] if isinstance(tensors, torch.Tensor) else tensors):
            torch.save(tensor, step / directory / f"rank{tp}.pt")
    step.mkdir(parents=True, exist_ok=True)
    if positions is None:
        positions = range(int(name.split("_")[1][1:]))
    file = step / f"{name}_meta.json"
    found = {"req_ids": list(req_ids), "positions": list(positions), "dp_rank": int(replica.name[2:])}
    if meta != "":
        file.write_text(json.dumps(found if meta is None else meta))
        if time_s is not None:
            os.utime(file, (time_s, time_s))
    return step


def values(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3)), generator=torch.Generator().manual_seed(seed))


@contextmanager
def hooked(
    model: nn.Module,
    left: Callable[[str, nn.Module, Any], None],
    entered: Callable[[str, tuple[Any, ...], dict[str, Any]], None] | None = None,
) -> Iterator[None]:
    """Calls `left(path, module, output)` as modules return, the root included."""
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_hook(lambda m, i, o, path=path: left(path, m, o)))
        if entered is not None:
            handles.append(
                module.register_forward_pre_hook(
                    lambda m, a, k, path=path: entered(path, a, k), with_kwargs=True
                )
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sglang_dump(
    folder: Path, model: nn.Module, runs: Iterable[Mapping[str, Any]], *, exp: str = "dump_1"
) -> Path:
    """SGLang's dumper in its non-intrusive mode "all": inputs and outputs of every module, in order."""
    state = {"step": 0, "index": 0}

    def dump(name: str, value: torch.Tensor) -> None:
        state["index"] += 1
        tags = {"step": state["step"], "rank": 0, "dump_index": state["index"], "name": name}
        tags["recompute_status"] = "disabled"
        path = folder / exp / ("___".join(f"{key}={item}" for key, item in tags.items()) + ".pt")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"value": value.clone(), "meta": {**tags, "world_size": 1}}, path)

    def tensors(value: Any) -> dict[str, torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return {"": value}
        if not isinstance(value, (tuple, list)):
            return {}
        found = [item for item in value if isinstance(item, torch.Tensor)]
        return {"": found[0]} if len(found) == 1 else {str(i): item for i, item in enumerate(found)}

    def write(path: str, sub: str, value: Any) -> None:
        for key, tensor in tensors(value).items():
            dump("non_intrusive__" + ".".join(part for part in (path, sub, key) if part), tensor)

    def entered(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in [*enumerate(args), *kwargs.items()]:
            write(path, f"inputs.{name}", value)

    with hooked(model, lambda path, _, out: write(path, "output", out), entered):
        for inputs in runs:
            with torch.no_grad():
                model(**inputs)
            state["step"] += 1
    return folder


def sglang_passes(folder: Path, model: nn.Module, runs: Iterable[Mapping[str, Any]], *, pid: int = 7) -> Path:
    """SGLang's dump of one file a pass: leaves and the module `model`, whose return writes the file."""
    rank = folder / f"TP0_PP0_Rank0_pid{pid}"
    rank.mkdir(parents=True)
    current: dict[str, Any] = {}
    number = 0

    def left(path: str, module: nn.Module, output: Any) -> None:
        nonlocal number
        if not path or (list(module.children()) and path != "model"):
            return
        if path == "model":
            torch.save(dict(current), rank / f"Pass{number:05d}.pt")
            current.clear()
            number += 1
        if not isinstance(output, (torch.Tensor, tuple)):
            output = next(iter(output.values()))
        tensors = [output] if isinstance(output, torch.Tensor) else list(output)
        current[path] = tensors[0] if len(tensors) == 1 else tensors

    with hooked(model, left):
        for inputs in runs:
            with torch.no_grad():
                model(**inputs)
    return folder


def nxd_capture(
    folder: Path,
    model: nn.Module,
    modules: Sequence[str],
    runs: Iterable[Mapping[str, Any]],
    *,
    inputs: bool = False,
) -> Path:
    """NxD Inference's capture: outputs (and first inputs) of chosen modules, one flat file each."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, Any] = {"capture_session": {"version": "1.0"}, "tensors": {}}
    for step, given in enumerate(runs, start=1):
        start = f"captured_tensors_{'cte' if step == 1 else 'tkg'}_step_{step}_module_"

        def save(path: str, what: str, value: Any, start: str = start) -> None:
            tensor = value if isinstance(value, torch.Tensor) else value[0]
            if path in modules:
                torch.save(tensor.detach().cpu(), folder / f"{start}{path}_{what}.pt")
                metadata["tensors"][f"{start}{path}_{what}.pt"] = {"module_name": path}

        def entered(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], save: Any = save) -> None:
            first = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            if inputs and first is not None:
                save(path, "input", first)

        with (
            hooked(model, lambda path, _, out, save=save: path and save(path, "output", out), entered),
            torch.no_grad(),
        ):
            model(**given)
    (folder / "capture_metadata.json").write_text(json.dumps(metadata))
    return folder


def fastvideo_trace(
    file: Path, model: nn.Module, runs: Iterable[Mapping[str, Any]], *, steps: bool = True
) -> Path:
    """FastVideo's activation trace: a line of statistics for each tensor that a module returned."""
    measures: dict[str, Callable[[torch.Tensor], Any]] = {
        "abs_mean": lambda t: float(t.float().abs().mean()),
        "sum": lambda t: float(t.float().sum()),
        "min": lambda t: float(t.float().min()),
        "max": lambda t: float(t.float().max()),
        "mean": lambda t: float(t.float().mean()),
        "std": lambda t: float(t.float().std()),
        "shape": lambda t: list(t.shape),
        "dtype": lambda t: str(t.dtype),
    }

    def flat(value: Any, name: str = "out") -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                yield from flat(item, f"{name}[{index}]")
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from flat(item, f"{name}.{key}")

    with file.open("a") as sink:
        for step, inputs in enumerate(runs):

            def left(path: str, _: nn.Module, out: Any, step: int = step) -> None:
                for name, tensor in flat(out) if path else ():
                    line = {"module": path, "tensor": name, "step": step if steps else None}
                    line |= {what: measure(tensor) for what, measure in measures.items()}
                    sink.write(json.dumps(line) + "\n")

            with hooked(model, left), torch.no_grad():
                model(**inputs)
    return file
