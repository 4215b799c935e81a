"""`python -m scripts.replay …`."""

from __future__ import annotations

import sys

from scripts.replay.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
