"""Names of slots, without torch: readers of other tools' dumps look for them before any tensor."""

from __future__ import annotations

import json
from typing import Any


def slot_key(key: Any) -> str:
    """What a key of a container adds to a slot name."""
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{json.dumps(key)}]"
    if isinstance(key, int) and not isinstance(key, bool):
        return f"[{key}]"
    return f"[{json.dumps(str(key))}]"
