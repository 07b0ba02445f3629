"""What of `kernels` needs no extension works without it, and what needs it says so."""

import subprocess
import sys

import pytest

from rigs import ROOT

_WITHOUT = "cpu_quota device_choice equivalence errors reference tolerances"


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", _WITHOUT.split())
def test_these_load_no_extension(module: str) -> None:
    assert _python(f"import sys, kernels.{module}; print('kernels._kernels' in sys.modules)") == "False\n"


@pytest.mark.parametrize("module", ["_kernels", "native", "expert_reference"])
def test_whoever_asks_first_gets_it_with_its_build_checked(module: str) -> None:
    code = f"import sys, kernels.{module}; print('kernels.native' in sys.modules or kernels.build_id() != '')"
    assert _python(code) == "True\n"


def test_every_public_name_is_there() -> None:
    assert _python("import kernels; print([n for n in kernels.__all__ if not hasattr(kernels, n)])") == "[]\n"


def test_without_a_build_the_error_says_what_to_do() -> None:
    hide = "import sys; sys.modules['kernels._kernels'] = None; import kernels\n"
    code = hide + "try: kernels.ExpertStore\nexcept ImportError as error: print(error)"
    assert "scripts/run or pip install builds it" in _python(code)
