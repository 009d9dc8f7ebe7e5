#!/usr/bin/env python
"""`python tools/align.py REF TARGET` is `dispatch-trace align REF TARGET`, from a checkout too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dispatch_trace.cli import main

if __name__ == "__main__":
    sys.exit(main(["align", *sys.argv[1:]]))
