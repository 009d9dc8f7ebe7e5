"""The script that a repro consists of: it reads its plan from the safetensors file beside it.

Kept under 40 lines with its title, so that somebody who is sent it reads it before running it.
"""

from __future__ import annotations

TENSORS = "tensors.safetensors"

SCRIPT = '''"""TITLE"""
import functools, itertools, json, pathlib, sys
import torch
from safetensors import safe_open

with safe_open(pathlib.Path(__file__).with_name("tensors.safetensors"), "pt") as file:
    stored = {name: file.get_tensor(name) for name in file.keys()}
    plan = json.loads(file.metadata()["plan"])
torch.set_num_threads(plan["threads"])
values = {name: torch.empty_strided(x.shape, plan["strides"].get(name, x.stride()), dtype=x.dtype).copy_(x)
          for name, x in stored.items()}
def decode(v):  # an argument: a tensor by name, one of torch's constants by name, or a plain value
    if isinstance(v, list): return [decode(x) for x in v]
    if not isinstance(v, dict): return v
    return values[v["tensor"]] if "tensor" in v else getattr(torch, v["torch"])
for step in plan["ops"]:
    op = functools.reduce(getattr, step["op"].split("."), torch.ops)
    out = op(**{name: decode(v) for name, v in step["args"].items()})
    values |= {name: out if isinstance(out, torch.Tensor) else out[i] for name, i in step["outs"]}

def error(a, b):  # (relative L2, worst element in units of the root mean square)
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    if a.shape != b.shape or (a.isfinite() != b.isfinite()).any(): return float("inf"), float("inf")
    off, b = (a - b)[b.isfinite()].abs(), b[b.isfinite()].abs()
    size = b.square().mean().sqrt().item() or 1e-300
    return (off.square().mean().sqrt().item() / size, off.max().item() / size) if len(off) else (0, 0)
seen = {name: values[key] for name, key in plan["compared"].items()}
found = {(a, b): error(seen[a], seen[b]) for a, b in itertools.combinations(seen, 2)}
for (a, b), (l2, worst) in found.items():
    print(f"{a:9} against {b:9}  relative L2 {l2:9.3g}  worst element {worst:9.3g}")
(l2, worst), floor = found.get(("recorded", "float64"), (0, 0)), found.get(("rerun", "float64"), (0, 0))
badly = l2 > max(plan["unit"], 3 * floor[0]) or worst > max(8 * plan["unit"], 3 * floor[1])
other = found.get(("recorded", "reference"), (0, 0))[0] > plan["limit"]
print("badly computed" if badly else "not what the reference has" if other else "no fault above noise")
sys.exit(int(badly or other))
'''
