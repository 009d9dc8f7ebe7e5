"""Records the ops inside graphs that the stand-in compiler made, one trace a fault.

    python tests/neuron_sim/record_taps.py FOLDER

leaves traces in FOLDER and `facts.json`.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch

import dispatch_trace as dt
from neuron_sim import backend, device
from neuron_sim.models import hashed_llama, tokens
from neuron_sim.scenarios import FAULTS


def main(folder: Path) -> None:
    compiler = backend.install(device.install())
    model, ids = hashed_llama(), tokens()
    with torch.no_grad(), dt.record(folder / "reference", model, save="tensors"):
        model(ids)
    on_device, device_ids = copy.deepcopy(model).to("neuron"), ids.to("neuron")
    graphs = {}
    for name, faults in FAULTS.items():
        if name == "eager_fallback":
            continue  # there is nothing compiled to tap
        torch._dynamo.reset()
        before = len(compiler.graphs)
        compiled = torch.compile(on_device, backend=dt.tap("neuron"), fullgraph=True)
        with (
            torch.no_grad(),
            compiler.with_faults(faults),
            dt.record(folder / name, compiled, save="tensors", check_outputs=False, on_error="raise"),
        ):
            compiled(device_ids)
        graphs[name] = len(compiler.graphs) - before
    (folder / "facts.json").write_text(json.dumps({"graphs": graphs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
