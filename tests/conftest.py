import pytest

# So that a failed assertion in them shows its values, as one in a test does.
pytest.register_assert_rewrite("api_cases")
