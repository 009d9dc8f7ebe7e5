"""Lower precision that the user says is meant: `declared="matmul operands bf16"`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dispatch_trace.align.canon import family, short
from dispatch_trace.errors import ConfigError
from dispatch_trace.judge.estimates import roundoff
from dispatch_trace.schema import StoredRecord

_GROUPS = {
    "matmul": ("linear", "conv", "attention"),
    "linear": ("linear",),
    "gemm": ("linear",),
    "conv": ("conv",),
    "attention": ("attention", "softmax"),
    "softmax": ("softmax", "log_softmax"),
    "norm": ("layer_norm", "rms_norm", "group_norm", "batch_norm"),
    "all": (),
    "everything": (),
}
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "tf32": "float16",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
_WHAT = ("operands", "inputs", "outputs", "results")
_HELP = (
    "Write WHICH (matmul, linear, conv, attention, softmax, norm, all, or an op such as aten.mm), then "
    "operands or outputs, then a dtype (bf16, fp16, tf32, fp8), as 'matmul operands bf16'."
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """Rules of the form (families or op names, on operands, unit roundoff)."""

    rules: tuple[tuple[tuple[str, ...], bool, float], ...] = ()
    text: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, given: str | Iterable[str] | None) -> Declaration:
        """Reads what a user declared.

        Raises:
          ConfigError: a rule that cannot be read.
        """
        texts = [] if given is None else [given] if isinstance(given, str) else list(given)
        rules = []
        for text in texts:
            for part in filter(None, (p.strip() for p in re.split(r"[;,\n]", text))):
                rules.append(_rule(part))
        return cls(tuple(rules), tuple(texts))

    def operands(self, record: StoredRecord) -> float:
        """Unit roundoff that the op's inputs are declared to be rounded with; 0 where nothing is."""
        return self._find(record, True)

    def output(self, record: StoredRecord) -> float:
        """The same for its output."""
        return self._find(record, False)

    def _find(self, record: StoredRecord, operands: bool) -> float:
        found = 0.0
        for names, on_operands, unit in self.rules:
            if on_operands == operands and (
                not names or family(record.op) in names or record.op in names or short(record.op) in names
            ):
                found = max(found, unit)
        return found


def _rule(text: str) -> tuple[tuple[str, ...], bool, float]:
    words = text.lower().split()
    dtype = next((w for w in words if roundoff(_DTYPES.get(w, w.removeprefix("torch."))) > 0), None)
    what = next((w for w in words if w in _WHAT), "operands")
    which = [w for w in words if w not in _WHAT and w != dtype and w not in ("in", "are", "of")]
    if dtype is None or len(which) != 1:
        raise ConfigError(f"declared={text!r} cannot be read. {_HELP}")
    name = which[0].rstrip("s") if which[0] not in _GROUPS else which[0]
    names = _GROUPS[name] if name in _GROUPS else (which[0],)
    if name not in _GROUPS and not re.fullmatch(r"[\w.]+", which[0]):
        raise ConfigError(f"declared={text!r}: {which[0]!r} is neither a group of ops nor an op. {_HELP}")
    return names, what in ("operands", "inputs"), roundoff(_DTYPES.get(dtype, dtype.removeprefix("torch.")))
