"""What holds for all tests: how hypothesis draws its examples.

Profiles: ``default`` as hypothesis has it, without a deadline, for this would be a test of speed;
``ci`` draws the same examples each time; ``fuzz`` draws many more, new each time.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "fuzz", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")
