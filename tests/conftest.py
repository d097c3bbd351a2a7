"""One Hypothesis profile for every test: the same examples on every run, and no clock in the verdict."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "edgeasync",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # it measures time, and time depends on the machine
)
settings.load_profile("edgeasync")
