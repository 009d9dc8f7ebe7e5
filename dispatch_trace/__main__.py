"""`python -m dispatch_trace` is `dispatch-trace`."""

from __future__ import annotations

import sys

from dispatch_trace.cli import main

if __name__ == "__main__":
    sys.exit(main())
