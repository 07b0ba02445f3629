"""An expert server process that computes with tests/rigs/fake_kernels.py."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from node.expert_server.__main__ import main  # noqa: E402
from rigs import fake_kernels  # noqa: E402

main(kernels=fake_kernels)
