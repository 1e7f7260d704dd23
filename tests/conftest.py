"""What holds for all tests: how hypothesis draws examples, and that Ctrl-C ends what they start.

Profiles: ``default`` as hypothesis has it, without a deadline, for this would be a test of speed;
``ci`` draws the same examples each time; ``fuzz`` draws many more, new each time.
"""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "fuzz", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")

# A shell's background job ignores SIGINT and SIGQUIT, nohup SIGHUP; every process that they start
# inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(ignored, signal.SIG_DFL)
