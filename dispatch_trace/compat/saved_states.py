"""Activations that a user saved by hand: a tuple, list or dict of tensors in one file, read as they are.

    torch.save(model(ids, output_hidden_states=True).hidden_states, "states.pt")
    torch.save({"model.layers.0": …, "lm_head": …}, "acts.pt")      np.savez(…)      safetensors.save_file(…)

A sequence of states is the root's output `hidden_states`; the names of a dict are paths of modules, but for
those by which transformers names what a model returns. Nothing says in which order modules ran.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dispatch_trace.compat.dump import DumpRank, DumpRecord, DumpSlot, make_header
from dispatch_trace.compat.order import in_path_order, natural
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import StepInfo
from dispatch_trace.slot_names import slot_key
from dispatch_trace.store.reader import RankReader

NAME = "saved-states"
FORMAT = "file of saved activations"
_STATES = "hidden_states"
_NUMBERED = re.compile(r"(?:(?:arr|hidden_states?|states?|layers?)[._]?)?(\d+)")
_SHARD = re.compile(r"shard-\d+\.safetensors")
# What transformers' models return, by the names of its output classes.
_RETURNED = re.compile(
    r"logits|loss|last_hidden_state|pooler_output|start_logits|end_logits|image_embeds|text_embeds|"
    r"((encoder_|decoder_)?(hidden_states|attentions)|cross_attentions|encoder_last_hidden_state)([._\[].*)?"
)

LOSSES = (
    "outputs of one run without inputs, ops, parameters and repeated calls, as far as they were saved",
    "in which order modules ran is not known",
)


def detect(path: Path) -> str | None:
    """None: no such file; "": one; else what is wrong with what looks like one."""
    if not path.is_file():
        return None
    if _SHARD.fullmatch(path.name) and any(path.parent.glob("index-*.msgpack")):
        return f"{path} is a shard of a trace: give the trace's directory, {path.resolve().parent.parent}."
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    if path.suffix == ".npy":
        return "" if head.startswith(b"\x93NUMPY") else f"{path} is no NumPy file."
    if head.startswith(b"PK\x03\x04"):
        return _detect_zip(path)
    if path.suffix == ".safetensors":
        length = int.from_bytes(head[:8], "little")
        sound = len(head) > 8 and head[8:9] == b"{" and length + 8 <= path.stat().st_size
        return (
            "" if sound else f"{path} is no whole safetensors file: it was cut short, or is something else."
        )
    if path.suffix in (".pt", ".pth", ".bin") and head.startswith(b"\x80"):
        return ""  # the older form of torch.save
    if path.suffix in (".pt", ".pth", ".npz"):
        return f"{path} is neither a file of torch.save nor a NumPy file."
    return None


def open_ranks(path: Path) -> list[RankReader]:
    """Opens a file.

    Raises:
      TraceFormatError: it holds no tensor, is cut short, or needs unpickling of something else.
    """
    slots, modules, problems = _read(path)
    if not slots and not modules:
        wrong = "; ".join(problems) or "nothing of it is a tensor"
        raise TraceFormatError(
            f"{path} holds no activations: {wrong}. Save a tuple, list or dict of tensors, as "
            "outputs.hidden_states is."
        )
    records: list[DumpRecord] = []
    paths = {**modules, **({"": slots} if slots else {})}
    for module, opened in in_path_order(paths):
        records.append(
            DumpRecord(
                kind="module",
                seq=len(records),
                step=0,
                module=module,
                call=0,
                opened=opened,
                slots=tuple(paths[module]),
            )
        )
    header = make_header(
        records,
        name=NAME,
        format=FORMAT,
        notices=LOSSES,
        outputs="first",
        calls="last",
        states=any(slot.name.startswith(f"out.{_STATES}[") for slot in slots),
    )
    return [DumpRank(path, 0, header=header, steps=[StepInfo(step=0)], records=records, problems=problems)]


def _detect_zip(path: Path) -> str | None:
    """Whether a zip file is one of torch.save or np.savez."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        if path.suffix in (".pt", ".pth", ".npz"):
            return f"{path} is cut short: it has no directory at its end. Save it again."
        return None
    if any(name.endswith("data.pkl") for name in names) or (names and all(n.endswith(".npy") for n in names)):
        return ""
    return None


def _read(path: Path) -> tuple[list[DumpSlot], dict[str, list[DumpSlot]], list[str]]:
    """Slots of the root's outputs, slots by module, and what is wrong."""
    from dispatch_trace.compat.tensor_files import NpzTensor, PtContainer, SafetensorsTensor

    if path.suffix == ".npy":
        return [DumpSlot("out", "out", NpzTensor(path, ""))], {}, []
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as file:
                names = list(file.keys())
        except (SafetensorError, OSError) as error:
            return [], {}, [f"{path.name} cannot be read: {error}"]
        return (*_by_name({name: SafetensorsTensor(path, name) for name in names}), [])
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        if names and path.suffix != ".pt":
            return (*_by_name({name: NpzTensor(path, name) for name in names}), [])
    container = PtContainer(path)
    if container.problem:
        return [], {}, [f"{path.name} {container.problem}"]
    return (*_from_object(container), [])


def _from_object(container: Any) -> tuple[list[DumpSlot], dict[str, list[DumpSlot]]]:
    """What `torch.save` was given: a tensor, a sequence of states, or a dict."""
    import torch

    from dispatch_trace.nested import flatten

    value = container.content

    def slots(item: Any, name: str) -> list[DumpSlot]:
        return [
            DumpSlot(where, "out", container.at(tensor))
            for where, tensor in flatten(item, name)
            if isinstance(tensor, torch.Tensor)
        ]

    if not isinstance(value, Mapping):
        return slots(value, "out" if isinstance(value, torch.Tensor) else f"out.{_STATES}"), {}
    if all(isinstance(key, int) for key in value) or _are_states([str(key) for key in value]):
        ordered = [value[key] for key in sorted(value, key=lambda key: natural(str(key)))]
        return slots(ordered, f"out.{_STATES}"), {}
    returned: list[DumpSlot] = []
    modules: dict[str, list[DumpSlot]] = {}
    for key, item in value.items():
        name = str(key)
        if _RETURNED.fullmatch(name):
            returned += slots(item, f"out{slot_key(name)}")
        elif found := slots(item, "out"):
            modules[name] = found
    return returned, modules


def _by_name(sources: Mapping[str, Any]) -> tuple[list[DumpSlot], dict[str, list[DumpSlot]]]:
    """The same of tensors with flat names."""
    names = sorted(sources, key=natural)
    if _are_states(names):
        return [DumpSlot(f"out.{_STATES}[{i}]", "out", sources[name]) for i, name in enumerate(names)], {}
    returned = [name for name in names if _RETURNED.fullmatch(name)]
    return (
        [DumpSlot(_output_name(name), "out", sources[name]) for name in returned],
        {name: [DumpSlot("out", "out", sources[name])] for name in names if name not in returned},
    )


def _are_states(names: list[str]) -> bool:
    """Whether names count from 0: a sequence that had to be given names."""
    found = [_NUMBERED.fullmatch(name) for name in names]
    numbers = sorted(int(match[1]) for match in found if match)
    return bool(names) and numbers == list(range(len(names)))


def _output_name(name: str) -> str:
    """ "hidden_states.3" and "hidden_states_3" are out.hidden_states[3]."""
    if match := re.fullmatch(r"(.*?)[._\[](\d+)\]?", name):
        return f"out{slot_key(match[1])}[{match[2]}]"
    return f"out{slot_key(name)}"
