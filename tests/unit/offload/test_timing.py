"""Times are read when the device has passed everything that they come from, and not before."""

from nemo_rl_offload.offload import HostBackend
from nemo_rl_offload.offload.backends.base import Event
from nemo_rl_offload.offload.slots import ForwardPass, Group
from nemo_rl_offload.offload.stats import OffloadStats
from nemo_rl_offload.offload.timing import NUM_LATEST, Rates, Shortest, Timing


class Clock(HostBackend):
    """A device that has come as far as `now`; events are the numbers of its marks."""

    def __init__(self) -> None:
        self.now = self.marked = 0

    def mark(self) -> Event:
        self.marked += 1
        return self.marked

    def done(self, event: Event) -> bool:
        assert isinstance(event, int)
        return event <= self.now

    def elapsed_ms(self, start: Event, end: Event) -> float:
        assert isinstance(start, int)
        assert isinstance(end, int)
        assert max(start, end) <= self.now, "the device has not come so far"
        return float(end - start)


def test_a_step_is_read_when_the_device_has_passed_its_end_and_all_copies() -> None:
    clock, stats, read = Clock(), OffloadStats(), []
    timing = Timing(clock, stats, lambda groups, *_: read.append(groups))
    group = Group(("mlp", 0), [], 100)
    group.pass_, group.index = ForwardPass(group.key), 0
    timing.boundary(group, forward=True, phase=(1, 0))  # mark 1
    end = clock.mark()  # 2
    timing.copied(end, 100, out=True)
    timing.waits(end, out=True)  # mark 3, behind the last boundary; the step's end is 4
    timing.copied(6, 100, out=False)  # nobody waits for it
    for clock.now in range(6):
        timing.end_step()
        assert read == []
    clock.now = 6
    timing.end_step()
    assert len(read) == 1
    assert stats.copy_ms == 1.0 + 5.0


def test_the_second_observation_takes_the_place_of_the_first() -> None:
    rates = Rates[str]()
    seen = []
    for value in (1000.0, 2.0, 4.0, 3.0):
        rates.add("a", value)
        seen.append(rates["a"])
    assert seen == [1000.0, 2.0, 3.0, 3.0]


def test_the_shortest_of_the_latest_observations_counts() -> None:
    shortest = Shortest[str]()
    for value in (5.0, 2.0, *[3.0] * (NUM_LATEST - 1)):
        shortest.add("a", value)
    assert shortest["a"] == 2.0
    shortest.add("a", 4.0)
    assert shortest["a"] == 3.0
