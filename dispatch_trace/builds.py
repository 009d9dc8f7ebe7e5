"""C++ compiled once for this machine and cached, in the background; needs no torch.

Guarantees: whoever asks never waits unless they want to; where there is no C++ compiler, no place for the
build, or DISPATCH_TRACE_KERNEL is off, there is none and nothing is said. A build goes on when the program
ends, and no two processes make the same one at the same time. It lies in `$XDG_CACHE_HOME/dispatch_trace` (or
`~/.cache/dispatch_trace`), in a directory that only its owner may write to, under a name made of everything
that it depends on. What is compiled can always be done without: it must give the same results.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from dispatch_trace.processor import build_target

SWITCH = "DISPATCH_TRACE_KERNEL"
_OFF = ("0", "false", "no", "off", "")
_BUILD = (
    'own=$1 made=$2 final=$3; shift 3; nice "$@" && mv "$made" "$final"; code=$?; rm -rf "$own"; exit $code'
)
_BUILD_S = 300.0

Loaded = TypeVar("Loaded")


class Plan(NamedTuple):
    """How a file is compiled.

    Attributes:
      stem: what the build's file name begins with.
      source: the C++ file.
      headers: files of ours that it includes.
      flags: options of the compiler.
      libraries: what follows the source in the command.
      facts: what else the build depends on.
    """

    stem: str
    source: Path
    flags: Sequence[str]
    headers: Sequence[Path] = ()
    libraries: Sequence[str] = ()
    facts: Sequence[str] = ()


class Build(Generic[Loaded]):
    """One build of this process: looked for once, made in the background where it is missing.

    Args:
      plan: how it is made; may raise OSError where it cannot be.
      load: what is made of its path; raises OSError or ImportError where it is not what it should be.

    Attributes:
      why_not: why there is none; "" where there is one, or it is not known yet.
    """

    def __init__(self, plan: Callable[[], Plan], load: Callable[[Path], Loaded]) -> None:
        self._plan = plan
        self._load = load
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loaded: Loaded | None = None
        self.why_not = ""

    def find(self, wait: bool = False) -> Loaded | None:
        """What was loaded; None where there is none, or none yet.

        Args:
          wait: until it is built.
        """
        if self._loaded is None and not self.why_not:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._make, name="dispatch_trace build", daemon=True
                    )
                    self._thread.start()
            if wait:
                self._thread.join()
        return self._loaded

    def _make(self) -> None:
        try:
            self._loaded = self._load(_built(self._plan()))
        except (OSError, ImportError, AttributeError, subprocess.SubprocessError) as error:
            self.why_not = f"{type(error).__name__}: {error}"


def _built(plan: Plan) -> Path:
    """The path of the build, made where it is missing.

    Raises:
      OSError, ImportError, subprocess.SubprocessError: it cannot be had.
    """
    if os.environ.get(SWITCH, "on").strip().lower() in _OFF:
        raise OSError(f"{SWITCH} is off")
    if sys.byteorder != "little":
        raise OSError("this machine is big-endian")
    compiler = _compiler()
    command = [compiler, *plan.flags, str(plan.source), *plan.libraries]
    facts = [compiler, *plan.flags, *plan.libraries, *plan.facts]
    facts += [path.read_text(encoding="utf-8") for path in (plan.source, *plan.headers)]
    facts += [platform.machine(), build_target(), str(Path(compiler).resolve().stat().st_mtime_ns)]
    name = f"{plan.stem}-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:24]}.so"
    folder = _folder()
    final = folder / name
    if not final.exists():
        _make_alone(folder, final, command)
    return final


def _make_alone(folder: Path, final: Path, command: Sequence[str]) -> None:
    """Builds, or waits until another process has built."""
    import fcntl  # not everywhere

    # The build holds the lock as well, and lets go of it when it ends, however that comes about.
    place = folder / f"{final.name}.lock"
    lock = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.exists():
            return
        own = tempfile.mkdtemp(prefix="build-", dir=folder)
        made = os.path.join(own, final.name)
        # By a shell in a session of its own: a short program would else begin anew each time.
        shell = ["sh", "-c", _BUILD, "sh", own, made, str(final), *command, "-o", made]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            shell,
            stdin=quiet,
            stdout=quiet,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(lock,),
        ) as build:
            _, errors = build.communicate(timeout=_BUILD_S)
        if build.returncode:
            raise OSError(f"{command[0]} failed: {errors.decode(errors='replace')[:500]}")
    finally:
        place.unlink(missing_ok=True)  # who waits for it still has it open, and looks for the build first
        os.close(lock)


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


__all__ = ["SWITCH", "Build", "Plan"]
