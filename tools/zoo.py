#!/usr/bin/env python
"""Runs the cases of a zoo directory (form: its README.md) and says how many are judged and captured right.

    python tools/zoo.py DIR [--only 01,02] [--save tensors|leaves|stats] [--json FILE]

Each case runs in a process of its own, through the public API only: it records `reference()` and `target()`,
aligns the two traces, and looks up every entry of `truth()` by its key. Nothing here knows a case.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 240
MAX_PARALLEL = 2
FORMS = ("values", "offsets", "dense", "unique", "last")
RESULT_MARK = "ZOO-RESULT "


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judges and captures the cases of a zoo directory.")
    parser.add_argument("dir", type=Path, metavar="DIR", help="directory of case files")
    parser.add_argument("--only", metavar="01,02", help="numbers of cases")
    parser.add_argument("--save", choices=("tensors", "leaves", "stats"), default="tensors")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one object a case")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="time limit for a case")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)  # DIR is one case: run it here
    options = parser.parse_args(arguments)
    if options.case:
        print(RESULT_MARK + json.dumps(run_case(options.dir, options.save)), flush=True)
        return 0
    files = find_cases(options.dir, options.only)
    if not files:
        parser.error(
            f"{options.dir} holds no case files" + (f" numbered {options.only}" if options.only else "")
        )
    rows = []
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        for row in pool.map(lambda f: run_in_process(f, options.save, options.timeout), files):
            rows.append(row)
            print(format_row(row), flush=True)
    print(closing_line(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def find_cases(folder: Path, only: str | None = None) -> list[Path]:
    """Case files in the order of their numbers."""
    files = sorted(folder.glob("[0-9]*.py"))
    if only is not None:
        numbers = {number.strip() for number in only.split(",")}
        files = [f for f in files if case_id(f) in numbers]
    return files


def case_id(file: Path) -> str:
    return file.stem.partition("_")[0]


def run_in_process(file: Path, save: str, timeout: float = TIMEOUT_S) -> dict[str, Any]:
    """`run_case` in a process of its own; a crash or time-out becomes the row's error."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), environment.get("PYTHONPATH")) if p)
    command = [sys.executable, str(Path(__file__).resolve()), str(file), "--case", "--save", save]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return empty_row(file) | {"error": f"time-out after {timeout:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith(RESULT_MARK):
            row: dict[str, Any] = json.loads(line.removeprefix(RESULT_MARK))
            return row
    tail = done.stderr.strip().splitlines()[-1:] or ["no output"]
    return empty_row(file) | {"error": f"exit status {done.returncode}: {tail[0]}"}


# One case ---------------------------------------------------------------------------------------------


def empty_row(file: Path) -> dict[str, Any]:
    return {
        "id": case_id(file),
        "group": None,
        "kind": None,
        "verdict": None,
        "found_module": None,
        "found_op": None,
        "found_label": None,
        "module_ok": None,
        "op_ok": None,
        "capture_ok": None,
        "error": None,
    }


def run_case(file: Path, save: str) -> dict[str, Any]:
    """Records, aligns and grades one case in this process."""
    row = empty_row(file)
    try:
        case = load_case(file)
        expect = case.EXPECT
        row["group"] = group_of(expect)
        row["kind"] = expect.get("kind")
        with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            traces = {which: Path(folder) / f"{which}.trace" for which in ("reference", "target")}
            for which, path in traces.items():
                record_run(file, which, path, save)
            grade_verdict(row, expect, traces)
            if hasattr(case, "truth"):
                row["capture_ok"], missing = grade_capture(load_case(file).truth(), traces)
                if not row["capture_ok"]:
                    row["missing"] = missing
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return row


def load_case(file: Path) -> Any:
    """A fresh copy of the case's module: no run sees what another left behind."""
    spec = importlib.util.spec_from_file_location(f"zoo_case_{case_id(file)}", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def group_of(expect: dict[str, Any]) -> str:
    if "must_capture" in expect:
        return "recorder"
    return "benign" if expect["where"] is None else "defect"


def record_run(file: Path, which: str, path: Path, save: str) -> None:
    import torch

    import dispatch_trace as dt

    case = load_case(file)
    with torch.no_grad():
        model = getattr(case, which)()
        inputs = case.inputs()
        watched = model if isinstance(model, torch.nn.Module) else None
        try:
            with dt.record(path, watched, save=save):
                model(*inputs)
        except dt.HookAfterCompileError:  # refused before anything ran; what a user does then
            with dt.record(path, watched, save=save, recompile=True):
                model(*inputs)


def grade_verdict(row: dict[str, Any], expect: dict[str, Any], traces: dict[str, Path]) -> None:
    import dispatch_trace as dt

    found = dt.align(
        traces["reference"],
        traces["target"],
        rename=expect.get("name_map"),
        rows=expect.get("row_map"),
        declared=expect.get("declared"),
        exact=bool(expect.get("strict", False)),
    )
    row["verdict"] = found.verdict
    first = found.first
    if first is not None:
        row["found_module"], row["found_op"], row["found_label"] = first.module, first.op, first.label
    where = expect["where"]
    if where is None:
        return
    diverged = found.verdict == "diverged" and first is not None
    row["module_ok"] = diverged and is_module_right(first, expect, traces)
    row["op_ok"] = diverged and is_op_right(first, expect)


def is_module_right(first: Any, expect: dict[str, Any], traces: dict[str, Path]) -> bool:
    where = expect["where"]
    if first.module in expect.get("accept_modules", ()):
        return True
    if first.label == "parameter" and owns_what_is_read(first, where, traces):
        return True
    return first.module == where["module"] and ("call" not in expect or first.call == expect["call"])


def owns_what_is_read(first: Any, where: dict[str, Any], traces: dict[str, Path]) -> bool:
    """Whether the finding's module owns a weight that the op of `where` reads."""
    import dispatch_trace as dt

    trace = dt.open(traces["target"])
    params = {(r.module, r.seq) for r in trace.find(kind="param") if r.module == first.module}
    owned = {seq for _, seq in params}
    for record in trace.find(module=where["module"], kind="op"):
        if where.get("op") in (None, record.overload) or base_name(where["op"]) == record.op:
            for slot in record.slots:
                if any(seq in owned for seq, _ in slot.producers):
                    return True
    return False


def is_op_right(first: Any, expect: dict[str, Any]) -> bool:
    where = expect["where"]
    if where.get("op") is None:
        return True
    accepted = {base_name(op) if op is not None else None for op in (where["op"], *expect.get("accept", ()))}
    return first.op in accepted


def base_name(op: str) -> str:
    """`aten.relu` for `aten.relu_.default`."""
    name = ".".join(op.split(".")[:2])
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


# truth() ----------------------------------------------------------------------------------------------


def grade_capture(truth: dict[str, Any], traces: dict[str, Path]) -> tuple[bool, list[str]]:
    """Whether one of the two traces holds every entry, bit-exact; and what is missing in the better one.

    `truth()` describes one of the programs; an op may stand in either.
    """
    problems = []
    for which in ("reference", "target"):
        wrong = [
            f"{key}: {why}" for key, value in truth.items() if (why := check_entry(key, value, traces, which))
        ]
        if not wrong:
            return True, []
        problems.append(wrong)
    return False, min(problems, key=len)


def check_entry(key: str, value: Any, traces: dict[str, Path], which: str) -> str:
    """ "" where the trace holds the entry, else why not."""
    import dispatch_trace as dt

    places = [traces[which]]
    if key.startswith("op:"):
        places += [path for path in traces.values() if path not in places]
    why = ""
    for path in places:
        try:
            for record, slot, form in find_entry(dt.open(path), key):
                if value is None:
                    return ""
                why = compare_value(record.tensor(slot), value, form)
                if not why:
                    return ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    return why or "no such key in the trace"


def find_entry(trace: Any, key: str) -> Iterator[tuple[Any, str, str]]:
    """(record, slot, form) of what a key names."""
    if key.startswith("op:"):
        name = key.removeprefix("op:")
        name, form = split_form(name)
        found = [r for r in trace.find(kind="op") if name in op_names(r)]
        if len(found) == 1:
            yield found[0], result_slot(found[0]), form
        return
    site = re.fullmatch(r"(?P<module>[^#@]*)#(?P<call>\d+|real)(?P<leaf>(/.*)?)", key)
    if site is not None:
        whole, (cut, form) = site["leaf"], split_form(site["leaf"])
        calls = [
            record
            for record in trace.find(kind="module", module=site["module"], grad_phase="fwd")
            if site["call"] == "real" or record.call == int(site["call"])
        ]
        for record in calls[-1:] if site["call"] == "real" else calls[:1]:
            for slot in leaf_slots(record, whole):
                yield record, slot, ""
            if form:
                for slot in leaf_slots(record, cut):
                    yield record, slot, form
        return
    param = re.fullmatch(r"(?P<path>[^#@]+)@(?P<step>\d+)", key)
    if param is not None:
        module, _, name = param["path"].rpartition(".")
        versions = list(trace.find(kind="param", module=module, name=name))
        record = version_at(versions, int(param["step"]), num_steps=len(trace.steps))
        if record is not None:
            yield record, "out", ""


def version_at(versions: list[Any], step: int, *, num_steps: int) -> Any:
    """A parameter as a step read it: its last record at or before it; in one step, its k-th value."""
    if num_steps <= 1:
        return versions[step] if step < len(versions) else None
    before = [record for record in versions if record.step <= step]
    return before[-1] if before else None


def op_names(record: Any) -> set[str]:
    overload = record.overload
    return {record.op, overload, overload.rpartition(".")[0]}


def result_slot(record: Any) -> str:
    """What an op returned, or the argument that it wrote."""
    outputs = [s for s in record.slots if s.role != "in" and s.is_tensor]
    returned = [s for s in outputs if s.role == "out"]
    return str((returned or outputs)[0].name)


def split_form(leaf: str) -> tuple[str, str]:
    head, slash, last = leaf.rpartition("/")
    return (head, last) if slash and last in FORMS else (leaf, "")


def leaf_slots(record: Any, leaf: str) -> list[str]:
    """Slot names that a path of indices, keys and fields may have (`/1/k` is `out[1].k`)."""
    parts = [part for part in leaf.split("/") if part]
    root = "out"
    if parts[:1] == ["in"]:
        root, parts = "in", parts[1:]
    names = [root]
    for part in parts:
        spelled = [f".{part}" if part.isidentifier() else f"[{json.dumps(part)}]"]
        if part.isdigit():
            spelled.insert(0, f"[{part}]")
        names = [name + end for name in names for end in spelled]
    present = {slot.name for slot in record.slots}
    return [name for name in names if name in present]


def compare_value(found: Any, truth: Any, form: str) -> str:
    """ "" where a recorded tensor is the true one, bit for bit, in the given form."""
    import torch

    if form == "values":
        found = found.values()
    elif form == "offsets":
        found = found.offsets()
    elif form == "dense":
        found = found.to_dense()
    elif form == "unique":
        found = torch.unique(found.as_strided((1,), (1,)) if not any(found.stride()) else found)
    elif form == "last":
        found = found[-1:]
    truth, found = truth.detach(), found.detach()
    if truth.dtype is torch.uint8 and found.dtype is not torch.uint8:
        found = found.contiguous().view(torch.uint8)  # a dtype without kernels, compared by its bytes
    if found.dtype != truth.dtype and form != "offsets":
        return f"dtype {found.dtype}, expected {truth.dtype}"
    if found.shape != truth.shape:
        return f"shape {list(found.shape)}, expected {list(truth.shape)}"
    if form == "offsets":
        found = found.to(truth.dtype)
    if form == "dense":  # where a sparse tensor holds nothing, the sign of zero is not kept
        return "" if torch.equal(found, truth) else "other values"
    return "" if same_bits(found, truth) else "other values"


def same_bits(a: Any, b: Any) -> bool:
    import torch

    if a.numel() == 0:
        return True
    a, b = (x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return bool(torch.equal(a, b))


# Report -----------------------------------------------------------------------------------------------


def format_row(row: dict[str, Any]) -> str:
    marks = {True: "ok", False: "MISS", None: "-"}
    found = "-"
    if row["found_label"] is not None:
        found = f"{row['found_label']} {row['found_module'] or '(root)'} {row['found_op'] or '-'}"
    columns = [
        f"{row['id']:>3}",
        f"{row['group'] or '-':<8}",
        f"{row['verdict'] or '-':<12}",
        f"module {marks[row['module_ok']]:<4}",
        f"op {marks[row['op_ok']]:<4}",
        f"capture {marks[row['capture_ok']]:<4}",
        found,
    ]
    if row["error"]:
        columns.append(f"ERROR {row['error']}")
    if row.get("missing"):
        columns.append(f"missing: {'; '.join(row['missing'][:3])}")
    return "  ".join(columns).rstrip()


def closing_line(rows: list[dict[str, Any]]) -> str:
    defects = [r for r in rows if r["group"] == "defect"]
    benign = [r for r in rows if r["group"] == "benign"]
    recorder = [r for r in rows if r["group"] == "recorder"]
    return (
        f"located {sum(bool(r['module_ok']) for r in defects)}/{len(defects)} modules, "
        f"{sum(bool(r['op_ok']) for r in defects)}/{len(defects)} ops; "
        f"false alarms {sum(r['verdict'] == 'diverged' for r in benign)}/{len(benign)}; "
        f"match {sum(r['verdict'] == 'match' for r in benign)}/{len(benign)}; "
        f"captured {sum(bool(r['capture_ok']) for r in recorder)}/{len(recorder)}; "
        f"errors {sum(r['error'] is not None for r in rows)}"
    )


if __name__ == "__main__":
    sys.exit(main())
