"""The compiled functions of `kernel.cpp`, built once for this machine and cached; needs no torch.

What they compute the plain paths do as well: `moments` and `chunks` statistics and sketches, `align.row_sums`
differences. A build that does not give the sketch's check value is not used. Calls let go of the interpreter
lock. How it is built stands in `builds`.
"""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

import numpy as np

from dispatch_trace import sketch as sketches
from dispatch_trace.builds import Build, Plan
from dispatch_trace.sketch import BLOCK, BLOCKS_PER_CHUNK, LENGTHS, SEED_BLOCK, SEED_POSITION, K

_SOURCE = Path(__file__).with_name("kernel.cpp")
# Contraction may change the last bits of sums; the sketch has no products.
_FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fno-trapping-math", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-shared", "-fPIC"),
)
# Kinds of values by torch's names, in the order of kernel.cpp. Booleans are bytes.
KINDS = {
    name: kind
    for kind, name in enumerate(
        (
            *("float32", "bfloat16", "float16", "float64"),
            *("int16", "int32", "int64", "uint16", "uint32", "uint64", "int8", "uint8"),
        )
    )
} | {"bool": 11}
TOTALS = np.dtype(
    [(name, "<i8") for name in ("n", "nan", "posinf", "neginf", "zeros")]
    + [(name, "<f8") for name in ("low", "high", "sum", "abs_sum", "sq_sum", "quad_sum")]
    + [(name, "<i8") for name in ("int_low", "int_high", "sum_high", "sum_low", "abs_high", "abs_low")]
)


class Library:
    """The compiled functions, on addresses; what each does stands in kernel.cpp."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
          OSError: the build cannot be loaded, or does not compute what it should.
        """
        library = ctypes.CDLL(str(path))
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self.add = library.dispatch_trace_add
        self.add.argtypes = (pointer, number, number, number, pointer, pointer)
        self.add_codes = library.dispatch_trace_add_codes
        self.add_codes.argtypes = (pointer, number, number, pointer, pointer, pointer)
        self.finish = library.dispatch_trace_finish
        self.finish.argtypes = (pointer, pointer)
        self.add_many = library.dispatch_trace_add_many
        self.add_many.argtypes = (pointer, number, pointer, pointer, pointer)
        self.compare = library.dispatch_trace_compare
        self.compare.argtypes = (pointer, number, pointer, number, number, number, real, pointer, pointer)
        self.compare.restype = ctypes.c_int64
        for function in (self.finish, self.add_many):
            function.restype = None
        library.dispatch_trace_init()
        if not self._gives_the_sketch():
            raise OSError(f"{path} does not compute the sketch")

    def _gives_the_sketch(self) -> bool:
        values = sketches.check_values()
        totals, sketch, found = np.zeros(1, dtype=TOTALS), np.zeros(K), np.empty(K, dtype=np.float32)
        addresses = totals.ctypes.data, sketch.ctypes.data
        if not self.add(values.ctypes.data, values.shape[0], KINDS["float32"], 0, *addresses):
            return False
        self.finish(found.ctypes.data, sketch.ctypes.data)
        return bool(zlib.crc32(found.astype("<f4").tobytes()) == sketches.SKETCH_PARAMETERS["check"])


def _plan() -> Plan:
    defines = {
        "K": K,
        "BLOCK": BLOCK,
        "BLOCKS": BLOCKS_PER_CHUNK,
        "LENGTHS": ",".join(map(str, LENGTHS)),
        "SEED_POSITION": f"{SEED_POSITION}u",
        "SEED_BLOCK": f"{SEED_BLOCK}u",
    }
    flags = (*_FLAGS, *(f"-D{name}={value}" for name, value in defines.items()))
    return Plan("kernel", _SOURCE, flags, sorted(_SOURCE.parent.glob("kernel_*.h")))


_THE_BUILD = Build(_plan, Library)


def find(*, wait: bool = False) -> Library | None:
    """The library; None where there is none, or none yet.

    Args:
      wait: until it is built, a few seconds once a machine.
    """
    return _THE_BUILD.find(wait)


def why_not() -> str:
    """Why there is no library; "" where there is one, or it is not known yet."""
    return _THE_BUILD.why_not


__all__ = ["KINDS", "TOTALS", "Library", "find", "why_not"]
