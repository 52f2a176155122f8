"""The clock of an engine's work, on a clock of its own."""

from molt_ray.engine.policy.busy import BusyClock


def test_overlapping_requests_count_once_and_a_paused_engine_is_idle():
    time = [0.0]
    clock = BusyClock(now=lambda: time[0])
    time[0] = 5.0
    assert clock.seconds() == 0.0  # nothing in it yet
    with clock.request():
        time[0] = 7.0
        with clock.request():
            time[0] = 8.0
        assert clock.seconds() == 3.0
        clock.pause(True)
        time[0] = 20.0
        assert clock.seconds() == 3.0
        clock.pause(False)
        time[0] = 21.0
    time[0] = 30.0
    assert clock.seconds() == 4.0
