import pytest
from hypothesis import HealthCheck, settings

# So that a failed assertion in them shows its values, as one in a test does.
pytest.register_assert_rewrite("api_cases")

# Both measure the machine, which may be busy.
settings.register_profile("swarm-node", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("swarm-node")
