"""The compiled way to statistics and sketches: `kernel.cpp`, built once for this machine and cached.

Guarantees: counts, min, max and sketches have the bits of the plain path (`moments`, `chunks`, `sketch`),
sums agree to 1e-6 of `abs_sum`; a build that does not give the sketch's check value is not used. Where there
is no C++ compiler, no place for the build, or DISPATCH_TRACE_KERNEL is off, there is no kernel and nothing is
said: the plain path does the same in about five times the time. Calls let go of the interpreter lock.

The build is made in the background, and goes on when the program ends. It lies in
`$XDG_CACHE_HOME/dispatch_trace` (or `~/.cache/dispatch_trace`), in a directory that only its owner may write
to, under a name made of everything that it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dispatch_trace import sketch as sketches
from dispatch_trace.moments import ByteMoments, Totals, Value
from dispatch_trace.processor import build_target
from dispatch_trace.sketch import BLOCK, BLOCKS_PER_CHUNK, LENGTHS, SEED_BLOCK, SEED_POSITION, K

SWITCH = "DISPATCH_TRACE_KERNEL"
_OFF = ("0", "false", "no", "off", "")
_SOURCE = Path(__file__).with_name("kernel.cpp")
# Contraction may change the last bits of sums; the sketch has no products.
_FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fno-trapping-math", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-shared", "-fPIC"),
)
_BUILD = (
    'own=$1 made=$2 final=$3; shift 3; nice "$@" && mv "$made" "$final"; code=$?; rm -rf "$own"; exit $code'
)
_BUILD_S = 120.0

# Kinds of values, in the order of kernel.cpp.
_KINDS = {
    getattr(torch, name): kind
    for kind, name in enumerate(
        ("float32", "bfloat16", "float16", "float64", "int16", "int32", "int64", "uint16", "uint32", "uint64")
    )
}
_FIRST_INTEGER, _UINT64 = _KINDS[torch.int16], _KINDS[torch.uint64]
_TOTALS = np.dtype(
    [(name, "<i8") for name in ("n", "nan", "posinf", "neginf", "zeros")]
    + [(name, "<f8") for name in ("low", "high", "sum", "abs_sum", "sq_sum", "quad_sum")]
    + [(name, "<i8") for name in ("int_low", "int_high", "sum_high", "sum_low", "abs_high", "abs_low")]
)
_PART = np.dtype([("data", "<u8"), ("n", "<i8"), ("kind", "<i8")])


class Kernel:
    """The compiled functions."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
          OSError: the build cannot be loaded, or does not compute what it should.
        """
        library = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._add = library.dispatch_trace_add
        self._add.argtypes = (pointer, number, number, number, pointer, pointer)
        self._add_codes = library.dispatch_trace_add_codes
        self._add_codes.argtypes = (pointer, number, number, pointer, pointer, pointer)
        self._finish = library.dispatch_trace_finish
        self._finish.argtypes = (pointer, pointer)
        self._add_many = library.dispatch_trace_add_many
        self._add_many.argtypes = (pointer, number, pointer, pointer, pointer)
        for function in (self._finish, self._add_many):
            function.restype = None
        library.dispatch_trace_init()
        checked = Running(self, torch.float32, sketch=True)
        values = sketches.check_values()
        checked.add(values.ctypes.data, values.shape[0], 0)
        found = checked.sketch()
        if found is None or zlib.crc32(found.astype("<f4").tobytes()) != sketches.SKETCH_PARAMETERS["check"]:
            raise OSError(f"{path} does not compute the sketch")

    def many(
        self, tensors: Sequence[Tensor], *, sketch: bool
    ) -> list[tuple[dict[str, Value], sketches.Sketch | None] | None]:
        """Statistics and sketches of tensors that `takes_whole`, in one call.

        Returns: for each (statistics, sketch or None), or None where the plain path has to do it.
        """
        count = len(tensors)
        parts = np.array([(address(t), t.numel(), _KINDS[t.dtype]) for t in tensors], dtype=_PART)
        totals = np.empty(count, dtype=_TOTALS)
        table = np.empty((count, K), dtype=np.float32) if sketch else None
        done = np.empty(count, dtype=np.uint8)
        self._add_many(
            parts.ctypes.data,
            count,
            totals.ctypes.data,
            None if table is None else table.ctypes.data,
            done.ctypes.data,
        )
        rows: Any = zip(totals.tolist(), done.tolist(), parts["kind"].tolist(), strict=True)
        return [
            (_result(row, kind), None if table is None else table[i]) if fine else None
            for i, (row, fine, kind) in enumerate(rows)
        ]


class Running:
    """Statistics and sketch of one tensor that comes in parts.

    Attributes:
      chunk_dtype: of the parts, where they have to be copied.
      failed: the plain path has to do it; nothing here is of use then.
    """

    def __init__(self, kernel: Kernel, dtype: torch.dtype, *, sketch: bool) -> None:
        """Takes a dtype that `takes`."""
        self._kernel = kernel
        self._codes = ByteMoments(dtype) if dtype not in _KINDS else None
        self.chunk_dtype = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        if self._codes is not None:
            self.chunk_dtype = torch.uint8
        self._totals = np.zeros(1, dtype=_TOTALS)
        self._totals["low"], self._totals["high"] = np.inf, -np.inf
        self._kind = _KINDS.get(dtype, 0)
        self._sketch = np.zeros(K) if sketch else None
        self.failed = False

    def add(self, data: int, n: int, chunk: int, dtype: torch.dtype | None = None) -> None:
        """Takes in the next values, which begin with a chunk of the sketch.

        Args:
          data: address of n contiguous values.
          dtype: theirs, `chunk_dtype` by default.
        """
        sketch = None if self._sketch is None else self._sketch.ctypes.data
        if self._codes is not None:
            finite, counts = self._codes.finite.ctypes.data, self._codes.counts.ctypes.data
            done = self._kernel._add_codes(data, n, chunk, finite, counts, sketch)
        else:
            kind = _KINDS[dtype or self.chunk_dtype]
            done = self._kernel._add(data, n, kind, chunk, self._totals.ctypes.data, sketch)
        self.failed = self.failed or not done

    def stats(self, repeats: int = 1) -> dict[str, Value]:
        """Every element counted `repeats` times."""
        if self._codes is not None:
            return self._codes.result(repeats)
        return _totals(self._totals[0].item(), self._kind).result(repeats)

    def sketch(self) -> sketches.Sketch | None:
        """[K], or None where it was not asked for."""
        if self._sketch is None:
            return None
        found = np.empty(K, dtype=np.float32)
        self._kernel._finish(found.ctypes.data, self._sketch.ctypes.data)
        return found


def _totals(row: tuple[int | float, ...], kind: int) -> Totals:
    n, nan, posinf, neginf, zeros, low, high, total, absolute, square, quad = row[:11]
    if kind >= _FIRST_INTEGER:
        low, high, *halves = (int(value) for value in row[11:])
        if kind == _UINT64:
            low, high = low % 2**64, high % 2**64
        total, absolute = (halves[0] << 32) + halves[1], (halves[2] << 32) + halves[3]
        if not n:
            low, high = 0, -1
    return Totals(
        int(n), int(nan), int(posinf), int(neginf), int(zeros), low, high, total, absolute, square, quad
    )


def _result(row: tuple[int | float, ...], kind: int) -> dict[str, Value]:
    """`Totals.result` of a row, without the detour for floats."""
    if kind >= _FIRST_INTEGER:
        return _totals(row, kind).result()
    n, nan, posinf, neginf, zeros, low, high, total, absolute, square, quad = row[:11]
    undefined = low > high
    return {
        "n": n,
        "nan": nan,
        "posinf": posinf,
        "neginf": neginf,
        "zeros": zeros,
        "min": None if undefined else low + 0.0,  # + 0.0: no negative zero
        "max": None if undefined else high + 0.0,
        "sum": total,
        "abs_sum": absolute,
        "sq_sum": square,
        "quad_sum": quad,
    }


def takes_whole(tensor: Tensor) -> bool:
    """Whether `Kernel.many` takes a tensor (strided, without lazy conjugation or negation)."""
    return tensor.dtype in _KINDS and tensor.is_cpu and tensor.is_contiguous() and type(tensor) is Tensor


def address(tensor: Tensor) -> int:
    """Where the first element of a CPU tensor lies, for reading.

    Not `data_ptr()` or `numpy()`: both copy the memory of a lazy clone.
    """
    start: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return start + int(tensor.storage_offset()) * tensor.element_size()


# Building -----------------------------------------------------------------------------------------


class _Build:
    """The one build of this process: looked for once, made in the background where it is missing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.kernel: Kernel | None = None
        self.why_not = ""

    def find(self, wait: bool) -> Kernel | None:
        if self.kernel is None and not self.why_not:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._load, name="dispatch_trace kernel", daemon=True
                    )
                    self._thread.start()
            if wait:
                self._thread.join()
        return self.kernel

    def _load(self) -> None:
        try:
            self.kernel = Kernel(_built())
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            self.why_not = f"{type(error).__name__}: {error}"


_THE_BUILD = _Build()


def find(*, wait: bool = False) -> Kernel | None:
    """The kernel; None where there is none, or none yet.

    Args:
      wait: until it is built, a few seconds once a machine.
    """
    return _THE_BUILD.find(wait)


def why_not() -> str:
    """Why there is no kernel; "" where there is one, or it is not known yet."""
    return _THE_BUILD.why_not


def _built() -> Path:
    """The path of the build, made where it is missing.

    Raises:
      OSError, subprocess.SubprocessError: it cannot be had.
    """
    if os.environ.get(SWITCH, "on").strip().lower() in _OFF:
        raise OSError(f"{SWITCH} is off")
    if sys.byteorder != "little":
        raise OSError("this machine is big-endian")
    compiler = _compiler()
    defines = {
        "K": K,
        "BLOCK": BLOCK,
        "BLOCKS": BLOCKS_PER_CHUNK,
        "LENGTHS": ",".join(map(str, LENGTHS)),
        "SEED_POSITION": f"{SEED_POSITION}u",
        "SEED_BLOCK": f"{SEED_BLOCK}u",
    }
    command = [compiler, *_FLAGS, *(f"-D{name}={value}" for name, value in defines.items())]
    facts = [*command, _SOURCE.read_text(encoding="utf-8"), platform.machine(), build_target()]
    facts.append(str(Path(compiler).resolve().stat().st_mtime_ns))
    name = f"kernel-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:24]}.so"
    folder = _folder()
    final = folder / name
    if not final.exists():
        own = tempfile.mkdtemp(prefix="build-", dir=folder)
        made = os.path.join(own, name)
        # By a shell in a session of its own: a short program would else begin anew each time.
        shell = ["sh", "-c", _BUILD, "sh", own, made, str(final), *command, str(_SOURCE), "-o", made]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            shell, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, start_new_session=True
        ) as build:
            _, errors = build.communicate(timeout=_BUILD_S)
        if build.returncode:
            raise OSError(f"{compiler} failed: {errors.decode(errors='replace')[:500]}")
    return final


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise OSError("no C++ compiler")


def _folder() -> Path:
    """A directory that nobody else can write to: what lies in it will be run."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "dispatch_trace"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise OSError(f"{folder} can be written to by others")
    return folder


__all__ = ["Kernel", "Running", "address", "find", "takes_whole", "why_not"]
