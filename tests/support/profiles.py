"""How many examples Hypothesis draws: a test says how many a whole run takes, the profile which share of them.

No time is asserted: neither of an example, nor of how long the drawing of its input takes.
"""

from typing import Any

from hypothesis import HealthCheck, settings

WHOLE = 100  # examples of a test that says nothing, in a whole run
settings.register_profile("whole", max_examples=WHOLE, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("whole"), max_examples=WHOLE // 5)  # what a person waits for
use = settings.load_profile


def examples(number: int, **options: Any) -> settings:
    """Settings of a test that takes `number` examples in a whole run, and fewer by as much as the profile has fewer."""
    return settings(max_examples=max(1, number * settings.default.max_examples // WHOLE), **options)
