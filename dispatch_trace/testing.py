"""Parity in tests: `assert_match` for two traces, `Regression` for a model and a golden trace in its repo.

A golden trace holds statistics, sketches and hashes and no tensors, so that it can be committed; paths of
source files stand in it relative to the project. The pytest fixture `trace_regression` (`pytest_plugin`) is a
`Regression`. Nothing here imports pytest.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dispatch_trace.alignment import Alignment, align
from dispatch_trace.errors import ConfigError
from dispatch_trace.report.table import size
from dispatch_trace.session import Trace

_INCONCLUSIVE = ("fail", "pass")


def assert_match(
    ref: Trace | str | os.PathLike[str],
    target: Trace | str | os.PathLike[str],
    *,
    inconclusive: str = "fail",
    **options: Any,
) -> Alignment:
    """Asserts that two traces match within noise.

    Args:
      ref, target: as of `dt.align`.
      inconclusive: "fail", or "pass" where only a divergence is to fail.
      **options: of `dt.align` (rename, declared, tolerance, exact, ...).
    Returns: the alignment.
    Raises:
      AssertionError: they do not; its message is the first screen of the alignment.
      DispatchTraceError: as of `dt.align`.
    """
    if inconclusive not in _INCONCLUSIVE:
        raise ConfigError(
            f"inconclusive={inconclusive!r}: expected one of {', '.join(map(repr, _INCONCLUSIVE))}."
        )
    found = align(ref, target, **options)
    if found.verdict == "diverged" or (found.verdict == "inconclusive" and inconclusive == "fail"):
        raise AssertionError(f"the traces do not match\n\n{found.table()}")
    return found


class MissingGolden(AssertionError):
    """There is no golden trace to compare with."""


class Regression:
    """Holds what a model computes against a golden trace.

        def test_port(trace_regression):
            trace_regression(model, tokens)

        def test_generation(trace_regression):
            with trace_regression.recording(model):
                model.generate(tokens)

    Args:
      folder: where golden traces lie.
      scratch: where the runs to compare are recorded.
      name: of the golden trace, without its ending.
      root: of the project: source files below it are named relative to it.
      update: write the golden trace instead of comparing with it.

    Attributes:
      written: golden traces that were written.
      alignment: the last comparison.
    """

    def __init__(
        self, folder: Path, scratch: Path, *, name: str, root: Path | None = None, update: bool = False
    ) -> None:
        self._folder, self._scratch, self._name = folder, scratch, name
        self._root = Path.cwd() if root is None else root
        self._update = update
        self.written: list[Path] = []
        self.alignment: Alignment | None = None

    def path(self, name: str = "") -> Path:
        """Of a golden trace.

        Args:
          name: tells several in one test apart.
        """
        words = f"{self._name}-{name}" if name else self._name
        return self._folder / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', words).strip('-')}.trace"

    def __call__(
        self,
        model: Any,
        *args: Any,
        name: str = "",
        level: str = "op",
        inconclusive: str = "fail",
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Alignment | None:
        """Runs `model(*args, **kwargs)` once, without gradients, and compares.

        Args:
          name, level, inconclusive, options: as of `recording`.
        Returns: the alignment; None where the golden trace was written.
        """
        import torch

        with (
            self.recording(model, name=name, level=level, inconclusive=inconclusive, options=options),
            torch.no_grad(),
        ):
            model(*args, **kwargs)
        return self.alignment

    @contextlib.contextmanager
    def recording(
        self,
        model: Any = None,
        *,
        name: str = "",
        level: str = "op",
        inconclusive: str = "fail",
        options: dict[str, Any] | None = None,
    ) -> Iterator[Any]:
        """Records what runs inside, and compares it at the end.

        Args:
          model: as of `dt.record`.
          name: tells several golden traces of one test apart.
          level: "op", or "module" for a smaller golden trace that names modules only.
          inconclusive, options: as of `assert_match`, options as a dict.
        Raises:
          MissingGolden: there is none. AssertionError: they differ beyond noise.
        """
        from dispatch_trace.recorder import record

        golden = self.path(name)
        if not self._update and not golden.exists():
            raise MissingGolden(
                f"there is no golden trace {self._shown(golden)}. `pytest --trace-update` writes it; look at "
                "it (`dispatch-trace show`), then commit it."
            )
        target = self._scratch / golden.name
        self.alignment = None
        options_of_golden: dict[str, Any] = {"save": "stats", "params": "stats", "sketch": "narrow"}
        with record(target, model, level=level, overwrite=True, **options_of_golden) as recording:
            tracer = recording._tracer
            assert tracer is not None
            find = tracer.find_source
            tracer.find_source = lambda depth=2: self._relative(find(depth + 1))  # type: ignore[assignment]
            yield recording
        if self._update:
            golden.parent.mkdir(parents=True, exist_ok=True)
            if golden.exists():
                shutil.rmtree(golden)
            shutil.move(target, golden)
            self.written.append(golden)
            return
        try:
            self.alignment = assert_match(golden, target, inconclusive=inconclusive, **(options or {}))
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n\nlook further: dispatch-trace align {self._shown(golden)} {target}\n"
                "where the change is meant: pytest --trace-update"
            ) from None

    def _relative(self, source: tuple[str, int] | None) -> tuple[str, int] | None:
        """A source line without the path of somebody's disk."""
        if source is None:
            return None
        file = Path(source[0])
        for base in (self._root, *(p for p in file.parents if p.name in ("site-packages", "dist-packages"))):
            if file.is_relative_to(base):
                return file.relative_to(base).as_posix(), source[1]
        return file.name, source[1]

    def _shown(self, path: Path) -> str:
        return os.path.relpath(path, self._root)


def golden_size(path: str | os.PathLike[str]) -> str:
    """The size of a trace's files, for people."""
    from dispatch_trace.programs import size_on_disk

    return size(size_on_disk(Path(path)))


__all__ = ["MissingGolden", "Regression", "assert_match", "golden_size"]
