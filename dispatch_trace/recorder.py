"""`record()`: picks the capture path for a model and ties it to the writer.

Guarantees: what `__enter__` did is undone in `__exit__`, whatever the program raises; the program's own
exceptions pass unchanged and the trace so far is kept; an empty recording is an error, never silence.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from dispatch_trace import neuron
from dispatch_trace.capture import native
from dispatch_trace.capture.compiled import Region, compile_context
from dispatch_trace.capture.frames import walk_modules
from dispatch_trace.capture.header import current_rank, device_of, model_fields, plain_meta, trace_header
from dispatch_trace.capture.inline import ACTIVE
from dispatch_trace.capture.meta import MetaRecorder
from dispatch_trace.capture.modules import ModuleRecorder
from dispatch_trace.capture.ops import OpRecorder
from dispatch_trace.capture.regions import Regions, check_fresh, find_regions, same_bits
from dispatch_trace.capture.roots import RootFinder
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.capture.values import ValueRecorder
from dispatch_trace.config import DEFAULT_MAX_PENDING_BYTES, RecordOptions, record_options
from dispatch_trace.errors import CaptureError, ConfigError
from dispatch_trace.patterns import select_modules
from dispatch_trace.store.remote import place
from dispatch_trace.store.writer import TraceWriter

if TYPE_CHECKING:
    from dispatch_trace.against import LiveJudge
    from dispatch_trace.live_stop import Divergence

_live: weakref.WeakSet[Tracer] = weakref.WeakSet()


def _stop_in_child() -> None:
    """A forked child (a data loader's worker) has no writer thread: it records nothing."""
    for tracer in list(_live):
        tracer.active = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)


class record:
    """Records what a model computes while the block runs.

        with dt.record("ref.trace", model, save="tensors") as rec:
            model(x)                                     # step 0
            with rec.step(phase="decode", req_ids=["a"]):
                model(y)                                 # step 1

    Args:
      path: directory of the trace; this process writes `rank{N}/` below it.
      model: a module, a dict of named modules, or None for the outermost module called.
      level: "op" (ops and modules) or "module" (no dispatch mode at all).
      save: "meta", "stats", "leaves" or "tensors", or a list of (pattern, save) pairs over module
        paths, the last match winning.
      stats: names of the statistics wanted; None for all.
      select: one pattern or several over module paths (full-match regular expressions, `layers.0-3`
        expands); with level "op" their submodules come along.
      ops: a regular expression on op base names (`aten\\.mm`), matched whole.
      steps: an int, a range, a set or a predicate of the step number.
      inputs: record input slots.
      params: "none", "stats" or "tensors"; by default "tensors" where `save` keeps data.
      sketch: keep a sketch of every value, by which two traces without data can be compared; "narrow": one of
        252 bytes instead of 1004, from which distances are known to 9 % instead of 4.5 %.
      meta: plain values for the header.
      recompile: compile a model again, with hooks, that has been compiled and run before.
      check_outputs: run a copy of each compiled model once without hooks, and compare what it returns bit
        for bit; it costs a second compilation and a copy of the model.
      overwrite: replace this process's `rank{N}/` if it is there.
      on_error: what a fault of the recorder does: "warn" once and go on, or "raise" at the end.
      max_bytes: stop storing data beyond this many bytes; statistics go on.
      max_pending_bytes: bound on what waits to be written, in bytes; the program waits beyond it.
      against: trace of a reference run; each record is judged against it as it is made, and the data of
        those that differ is kept, with that of the few around them (docs/live.md).
      on_divergence: what is done where the program parts from the reference: "note", "raise" a
        DivergenceError, "break" into the debugger, or a callable that is handed the `Divergence`.

    Attributes:
      divergences: what was found so far, with `against`.

    Raises:
      ConfigError, PatternError, NoMatchError, TraceExistsError: on entry.
      RenameError: on entry, or where the root is called: with `against` and modules of other names.
      HookAfterCompileError: on entry, where a compiled model has run before and `recompile` is off.
      CaptureError: at the end, where nothing was captured, or the recorder failed and
        `on_error="raise"`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | dict[str, torch.nn.Module] | None = None,
        *,
        level: str = "op",
        save: str | Sequence[tuple[str, str]] = "stats",
        stats: Iterable[str] | None = None,
        select: str | Iterable[str] | None = None,
        ops: str | None = None,
        steps: Any = None,
        inputs: bool = True,
        params: str | None = None,
        sketch: bool | str = True,
        meta: dict[str, Any] | None = None,
        recompile: bool = False,
        check_outputs: bool = True,
        overwrite: bool = False,
        on_error: str = "warn",
        max_bytes: int | None = None,
        max_pending_bytes: int = DEFAULT_MAX_PENDING_BYTES,
        against: str | os.PathLike[str] | None = None,
        on_divergence: str | Callable[[Any], object] = "note",
        rename: Any = None,
    ) -> None:
        self.path = place(path)
        self._models = _named_models(model)
        self._options = record_options(
            level=level,
            save=save,
            stats=stats,
            select=select,
            ops=ops,
            steps=steps,
            inputs=inputs,
            params=params,
            sketch=sketch,
            on_error=on_error,
        )
        if max_pending_bytes <= 0 or (max_bytes is not None and max_bytes < 0):
            raise ConfigError(
                f"max_pending_bytes={max_pending_bytes}, max_bytes={max_bytes}: expected bytes, above 0."
            )
        self._meta = plain_meta(meta)
        self._recompile = recompile
        self._check_outputs = check_outputs
        self._overwrite = overwrite
        self._max_bytes = max_bytes
        self._max_pending_bytes = max_pending_bytes
        if rename is not None and against is None:
            raise ConfigError("rename: rules are for against=; without it, give them to dt.align.")
        self._live = None if against is None else _live_judge(against, on_divergence, rename, self._options)
        self._tracer: Tracer | None = None
        self._modules: ModuleRecorder | None = None
        self._regions: Regions | None = None
        self._mode: OpRecorder | None = None
        self._finder: RootFinder | None = None  # set by a recording that nobody wrote into the program
        self._recursion_limit = 0

    def __enter__(self) -> record:
        if self._tracer is not None:
            raise ConfigError("this recording was entered before; make a new dt.record(...) for each block.")
        options = self._options
        models = self._models
        if options.select and models:
            paths = sorted({path for m in models.values() for path, _, _ in walk_modules(m)})
            for pattern in options.select:
                select_modules([pattern], paths)
        if self._live is not None and models:
            self._live.check_paths([path for m in models.values() for path, _, _ in walk_modules(m)])
        regions = find_regions(models.values())
        if not self._recompile:
            check_fresh(regions)
        if options.level == "op":
            neuron.refuse_dispatch_recorder(
                [type(r.body).__name__ for r in regions if not r.tapped], device=device_of(models)
            )
        make_writer: Any = TraceWriter
        if self._live is not None:
            make_writer = functools.partial(_watched_writer, self._live)
        writer: TraceWriter = make_writer(
            self.path,
            trace_header(options, models, self._meta),
            rank=current_rank(),
            overwrite=self._overwrite,
            stats=options.stats,
            sketch=options.sketch,
            max_bytes=self._max_bytes,
            max_pending_bytes=self._max_pending_bytes,
            on_fault=self._on_writer_fault,
        )
        tracer = self._tracer = Tracer(writer, options, models)
        tracer.root_adopted = self._on_root_adopted
        tracer.finder = self._finder
        if self._live is not None:
            self._live.attach(tracer)
        _live.add(tracer)
        self._regions = Regions(tracer, self._recompile, self._check_outputs)
        self._modules = ModuleRecorder(tracer, self._regions)
        # Two Python frames more for each module call: what ran without the recorder must run with it.
        self._recursion_limit = sys.getrecursionlimit()
        sys.setrecursionlimit(2 * self._recursion_limit)
        if options.level == "op":
            mode = self._mode_class()
            tracer.new_mode, tracer.notes_rows = functools.partial(mode, tracer), mode is not OpRecorder
        try:
            self._modules.install()
            self._modules.watch(regions)
            if regions:
                writer.amend_header(self._regions.header())
            if options.level == "op":
                if self._finder is None:
                    self._mode = tracer.new_mode()
                    self._mode.start()
                else:
                    tracer.start_lasting_mode = self._start_mode
            ACTIVE.append(tracer)
        except BaseException:
            self._undo()
            writer.close(aborted=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tracer = self._tracer
        assert tracer is not None
        silent = self._regions.not_captured() if self._regions is not None else ""
        absent = self._regions.never_ran() if self._regions is not None else []
        lines = sys.modules.get("dispatch_trace.lines")
        unseen = "" if lines is None else lines.silent_notice()
        if unseen:
            tracer.writer.amend_header({"notices": [unseen]})
        self._undo()
        self._models = {}
        tracer.close()
        tracer.writer.close(aborted=error is not None)
        if unseen:
            warnings.warn(f"dispatch_trace: {unseen}", RuntimeWarning, stacklevel=2)
        if error is not None:
            return
        if tracer.num_records == 0:
            raise CaptureError(self._why_empty(tracer))
        if silent:
            raise CaptureError(f"{self.path}: {silent}")
        if absent:
            warnings.warn(
                f"dispatch_trace: {len(absent)} of the modules that select={self._options.select!r} matches "
                f"never ran in compiled code: {', '.join(absent[:6])}",
                RuntimeWarning,
                stacklevel=2,
            )
        if tracer.faults and self._options.on_error == "raise":
            first = tracer.faults[0]
            raise CaptureError(
                f"{self.path}: the recorder failed {len(tracer.faults)} times and the trace is incomplete; "
                f"first: {type(first).__name__}: {first}"
            ) from first

    @property
    def divergences(self) -> list[Divergence]:
        return [] if self._live is None else list(self._live.divergences)

    @property
    def num_records(self) -> int:
        """How many records have been made so far."""
        return 0 if self._tracer is None else self._tracer.num_records

    def flush(self) -> None:
        """Returns when everything recorded so far is on disk."""
        if self._tracer is not None and self._tracer.active:
            self._tracer.flush_rows()
            self._tracer.writer.flush()

    def stop(self, reason: str) -> None:
        """Records nothing more in this block. The trace keeps what it has, says why, and is not complete."""
        if self._tracer is not None and self._tracer.active:
            self._tracer.active = False
            self._tracer.writer.drop(reason)

    @contextlib.contextmanager
    def step(self, **meta: Any) -> Iterator[None]:
        """Everything inside is one step, with this metadata (phase, req_ids, positions, …).

        Args:
          **meta: plain values or tensors (kept as nested lists).
        """
        tracer = self._tracer
        if tracer is None or not tracer.active:
            raise ConfigError("rec.step() outside the recording's block.")
        with tracer.own_ops(tracer.state):
            values = plain_meta(meta)
        tracer.enter_bracket(values)
        try:
            yield
        finally:
            tracer.leave_bracket()

    def _undo(self) -> None:
        tracer = self._tracer
        if tracer is not None:
            tracer.active = False
            if tracer in ACTIVE:
                ACTIVE.remove(tracer)
        if self._mode is not None:
            if tracer is not None and tracer.state.number == 0:  # else another thread's, and it is inactive
                self._mode.stop()
            self._mode = None
        if self._regions is not None:
            self._regions.release()
            self._regions = None
        if self._modules is not None:
            self._modules.remove()
            self._modules = None
        if sys.getrecursionlimit() == 2 * self._recursion_limit:
            sys.setrecursionlimit(self._recursion_limit)

    def _mode_class(self) -> type[OpRecorder]:
        options = self._options
        if not options.wants_values:
            return native.compiled(MetaRecorder)
        # Live, each record is judged when it is made; elsewhere rows need one kind of values for all.
        rows = self._live is None and options.inputs and not options.save_rules
        return native.compiled(ValueRecorder) if rows else OpRecorder

    def _start_mode(self) -> bool:
        """Puts the mode below all others of the thread that opened the recording, for good.

        Where others are on it would outlive them, and they would take it off the stack instead of
        themselves; False then, and the mode lasts for one call.
        """
        tracer = self._tracer
        if tracer is None or self._mode is not None or tracer.state.number != 0:
            return False
        if torch._C._len_torch_dispatch_stack():
            return False
        self._mode = tracer.new_mode()
        self._mode.start()
        return True

    def _on_root_adopted(self, name: str, root: torch.nn.Module) -> None:
        """The header was written before the root was known."""
        if self._live is not None:
            self._live.check_paths([path for path, _, _ in walk_modules(root)])
        if self._tracer is not None:
            fields = model_fields({name: root})
            self._tracer.writer.amend_header(fields if self._finder is None else self._finder.header(fields))

    def _on_writer_fault(self, error: Exception) -> None:
        if self._tracer is not None:
            self._tracer.fault(error)

    def _why_empty(self, tracer: Tracer) -> str:
        if tracer.num_calls and self._options.steps is not None:
            why = f"no step matched steps={self._options.steps!r}"
        elif tracer.num_calls:
            why = "the modules that were called are not among those selected"
        else:
            why = "the model was never called inside the block"
        return f"{self.path}: nothing was recorded: {why}."


def _live_judge(against: Any, on_divergence: Any, rename: Any, options: RecordOptions) -> LiveJudge:
    from dispatch_trace.live_writer import live_judge  # and aligner: a plain recording has no use for them

    return live_judge(against, on_divergence, rename, options, rank=current_rank())


def _watched_writer(judge: LiveJudge, *args: Any, **kwargs: Any) -> TraceWriter:
    from dispatch_trace.live_writer import WatchedWriter

    return WatchedWriter(*args, judge=judge, **kwargs)


def _named_models(model: Any) -> dict[str, torch.nn.Module]:
    if model is None:
        return {}
    models = model if isinstance(model, dict) else {"": model}
    for name, each in models.items():
        if not isinstance(each, torch.nn.Module) or not isinstance(name, str):
            raise ConfigError(
                "model: expected a torch.nn.Module, a dict of named modules or None, got "
                f"{type(each).__name__}{f' for {name!r}' if name else ''}."
            )
    return dict(models)


def check_observer(model: torch.nn.Module, *inputs: Any, **kwargs: Any) -> bool:
    """Runs the model with and without the recorder and says whether the outputs are equal bit for bit.

    The random state is set back before each run and after the last; a copy of the model runs, so that
    buffers and caches of the original stay as they are. Of a compiled model the run without the recorder
    has neither hooks nor taps (`dt.tap`) in its code.

    Args:
      model: any module that can be deep-copied, compiled or not.
      *inputs, **kwargs: what to call it with.
    Returns: True where every output tensor has the same bits.
    """
    import copy
    import tempfile

    from dispatch_trace.nested import flatten

    outputs = []
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        for recorded in (False, True):
            torch.set_rng_state(state)
            twin, (args, named) = copy.deepcopy(model), copy.deepcopy((inputs, kwargs))
            if recorded:
                with (
                    tempfile.TemporaryDirectory() as folder,
                    record(Path(folder) / "observer.trace", twin, recompile=True, check_outputs=False),
                ):
                    out = twin(*args, **named)
            else:
                bare = twin if compile_context(twin) is None else Region(twin).plain_copy()
                out = bare(*args, **named)
            outputs.append([v for _, v in flatten(out, "out") if isinstance(v, torch.Tensor)])
    plain, watched = outputs
    return len(plain) == len(watched) and all(same_bits(a, b) for a, b in zip(plain, watched, strict=True))


__all__ = ["check_observer", "current_rank", "record"]
