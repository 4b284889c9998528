"""Values that objects keep are made without a lock that another thread, or a forked process, would wait for."""

import os
import threading

import pytest
from fault_injection import in_child

from memmap_buffer.cached import cached_property


class Slow:
    def __init__(self, begun=None, go_on=None):
        self.begun, self.go_on = begun, go_on

    @cached_property
    def value(self):
        """What it is."""
        if self.begun is not None:
            self.begun.set()
            self.go_on.wait(60)
        return object()


def test_a_value_is_made_once_and_may_be_given_up():
    slow = Slow()
    first = slow.value
    assert slow.value is first
    del slow.value
    assert slow.value is not first
    assert isinstance(Slow.value, cached_property)
    assert Slow.value.__doc__ == "What it is."


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_waits_for_no_thread_that_makes_one():
    slow = Slow(threading.Event(), threading.Event())
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert slow.begun.wait(60)
    assert in_child(lambda tell: Slow().value).status == 0
    slow.go_on.set()
    thread.join()
