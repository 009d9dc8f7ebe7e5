"""The compiled functions of `kernel.cpp`, built once for this machine and cached; needs no torch.

What they compute the plain paths do as well: `moments` and `chunks` statistics and sketches, `align.row_sums`
differences. Where there is no C++ compiler, no place for the build, or DISPATCH_TRACE_KERNEL is off, there is
no library and nothing is said. A build that does not give the sketch's check value is not used. Calls let go
of the interpreter lock.

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
from pathlib import Path

import numpy as np

from dispatch_trace import sketch as sketches
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


class _Build:
    """The one build of this process: looked for once, made in the background where it is missing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.library: Library | None = None
        self.why_not = ""

    def find(self, wait: bool) -> Library | None:
        if self.library is None and not self.why_not:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._load, name="dispatch_trace kernel", daemon=True
                    )
                    self._thread.start()
            if wait:
                self._thread.join()
        return self.library

    def _load(self) -> None:
        try:
            self.library = Library(_built())
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            self.why_not = f"{type(error).__name__}: {error}"


_THE_BUILD = _Build()


def find(*, wait: bool = False) -> Library | None:
    """The library; None where there is none, or none yet.

    Args:
      wait: until it is built, a few seconds once a machine.
    """
    return _THE_BUILD.find(wait)


def why_not() -> str:
    """Why there is no library; "" where there is one, or it is not known yet."""
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


__all__ = ["KINDS", "TOTALS", "Library", "find", "why_not"]
