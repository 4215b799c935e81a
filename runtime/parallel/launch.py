"""One rank of a command: `torchrun --nproc-per-node 2 -m runtime.parallel.launch generate BUNDLE --prompt …`.

Rank 0 owns standard input and output; the other ranks say what they have to say on standard error.
"""

from __future__ import annotations

from runtime import bootstrap  # isort: skip  # t = 0

import os
import sys
from collections.abc import Sequence

from runtime.cli import main as run_command
from runtime.parallel.environment import rank_environment

assert bootstrap.T0_NS, "imported for its clock"


def main(argv: Sequence[str]) -> int:
    """Run a command of `coldframe` on this rank; returns its exit code."""
    if rank_environment().rank:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
    return run_command(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
