"""An expert server process that computes with tests/fake_kernels.py."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import fake_kernels  # noqa: E402

from node.expert_server.server import main  # noqa: E402

main(kernels=fake_kernels)
