"""What tests are built from: fakes, whole swarms and networks, and cases that several tests try.

Tests import from here and never from each other.
"""

from pathlib import Path

#: The checkout, and its tests.
ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests"
