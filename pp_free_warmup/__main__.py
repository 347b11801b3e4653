"""The command line: ``python -m pp_free_warmup``, installed as ``pp-free-warmup``."""

from __future__ import annotations

import sys

from pp_free_warmup._cli import main

if __name__ == "__main__":
    sys.exit(main())
