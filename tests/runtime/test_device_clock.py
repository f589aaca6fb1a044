"""Stretches of a device's work: counted once the device has passed them, and never waited for."""

from wingbeat.runtime.device_clock import MOST_PENDING, DeviceClock


class Device:
    """Reaches an event when it is told to; each stretch takes it a quarter of a second."""

    def __init__(self) -> None:
        self.given = self.reached = 0

    def event(self) -> "Event":
        return Event(self)


class Event:
    """As torch's."""

    def __init__(self, device: Device) -> None:
        self.device, self.place = device, 0

    def record(self) -> None:
        self.device.given += 1
        self.place = self.device.given

    def query(self) -> bool:
        return self.place <= self.device.reached

    def elapsed_time(self, other: "Event") -> float:
        assert other.query()
        return 250.0 * (other.place - self.place)


def stretch(clock: DeviceClock, stage: str) -> None:
    clock.end(stage, clock.begin())


def test_what_the_device_has_not_reached_is_counted_later():
    device = Device()
    clock = DeviceClock("cpu", device.event)
    for stage in ("verify", "accept", "verify"):
        stretch(clock, stage)
    assert clock.seconds == {}
    device.reached = 4
    assert clock.seconds == {"verify": 0.25, "accept": 0.25}
    device.reached = 6
    assert clock.seconds == {"verify": 0.5, "accept": 0.25}
    clock.reset()
    assert clock.seconds == {}


def test_a_device_far_behind_is_left_alone_and_measured_again_when_it_has_caught_up():
    device = Device()
    clock = DeviceClock("cpu", device.event)
    for _ in range(MOST_PENDING + 10):
        stretch(clock, "verify")
    assert device.given == 2 * MOST_PENDING
    device.reached = device.given
    stretch(clock, "verify")
    device.reached = device.given
    assert clock.seconds == {"verify": 0.25 * (MOST_PENDING + 1)}


def test_without_events_the_hosts_clock_counts():
    clock = DeviceClock("cpu")
    outer = clock.begin()
    stretch(clock, "inner")
    clock.end("outer", outer)
    assert clock.seconds["outer"] >= clock.seconds["inner"] > 0
