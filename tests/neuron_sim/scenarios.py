"""The faults that are recorded, and where each of them strikes. Imports nothing: tests read it, too."""

from __future__ import annotations

# Name of the trace -> what the compiler does to which module ("" for all).
FAULTS: dict[str, dict[str, str]] = {
    "plain": {},
    "decompositions": {"decompositions": ""},
    "bf16_matmuls": {"bf16_matmuls": ""},
    "dropped_mask": {"dropped_mask": "layers.1.self_attn"},
    "swapped_operands": {"swapped_operands": "layers.1.self_attn"},
    "narrow_integers": {"narrow_integers": "buckets"},
    "eager_fallback": {"eager_fallback": ""},
}
