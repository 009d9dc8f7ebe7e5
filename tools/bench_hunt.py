#!/usr/bin/env python3
"""A hunt in a large model against one full dump: runs, bytes written, seconds.

    python tools/bench_hunt.py [--hidden N] [--layers N] [--tokens N] [--dump]

The model is transformers' Llama with random weights; in the target one layer has GELU in place of SiLU. With
`--dump` both are recorded whole as well (`save="tensors"`) and aligned. Exit status 1 where the layer's
activation is not what is named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dispatch_trace as dt
from dispatch_trace.programs import size_on_disk


def build(hidden: int, layers: int, wrong: int | None) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    heads = max(1, hidden // 64)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=2 * hidden + hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        use_cache=False,
    )
    model = LlamaModel(config).eval()
    if wrong is not None:
        model.layers[wrong].mlp.act_fn = torch.nn.GELU()
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description="A hunt against one full dump.")
    parser.add_argument("--hidden", type=int, default=1024, help="default: 1024, 1.1 GB of weights")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dump", action="store_true", help="record and align both whole as well (4.3 GB)")
    options = parser.parse_args()
    wrong = options.layers // 2 + 1
    models = [build(options.hidden, options.layers, layer) for layer in (None, wrong)]
    ids = torch.randint(0, 1000, (1, options.tokens), generator=torch.Generator().manual_seed(1))

    def call(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model(ids)

    print(f"{'':10} {'runs':>4} {'written MB':>10} {'peak MB':>8} {'seconds':>8}  named")
    with tempfile.TemporaryDirectory() as folder:
        found = dt.hunt(
            lambda: call(models[0]),
            lambda: call(models[1]),
            folder=Path(folder) / "hunt",
            progress=lambda line: print(line, file=sys.stderr),
        )
        first = found.first
        runs = [run for each in found.rounds for run in each.runs]
        written = sum(run.num_bytes for run in runs)
        named = "nothing" if first is None else f"{first.module} {first.op or ''}"
        print(
            f"{'hunt':10} {len(runs):>4} {written / 1e6:>10.1f} {found.peak_bytes / 1e6:>8.1f} "
            f"{found.seconds:>8.0f}  {named}"
        )
        if options.dump:
            start, paths = time.perf_counter(), [Path(folder) / name for name in ("ref", "target")]
            for path, model in zip(paths, models, strict=True):
                with dt.record(path, model, save="tensors"):
                    call(model)
            dt.align(*paths)
            written = sum(map(size_on_disk, paths))
            seconds = time.perf_counter() - start
            print(f"{'full dump':10} {2:>4} {written / 1e6:>10.1f} {written / 1e6:>8.1f} {seconds:>8.0f}")
    return 0 if first is not None and first.module == f"layers.{wrong}.mlp.act_fn" else 1


if __name__ == "__main__":
    sys.exit(main())
