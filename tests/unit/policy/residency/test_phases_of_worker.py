"""Peaks belong to the phase in which they were, and what may be held beside one never makes a new highest."""

from nemo_rl_offload.policy.residency.phases import Counter, DevicePeaks, PhasePeaks


class FakeAllocator:
    """Counts as torch's does."""

    def __init__(self, held: int = 0) -> None:
        self.held = self.highest = held

    def take(self, size: int) -> None:
        self.held += size
        self.highest = max(self.highest, self.held)

    def reset(self) -> None:
        self.highest = self.held

    @property
    def counter(self) -> Counter:
        return Counter(lambda: self.held, lambda: self.highest, self.reset, lambda: 2 * self.highest)


def touch(allocator: FakeAllocator, size: int) -> None:
    allocator.take(size)
    allocator.take(-size)


def test_a_peak_belongs_to_its_phase() -> None:
    allocator = FakeAllocator()
    peaks = PhasePeaks(allocator.counter)
    allocator.take(100)
    touch(allocator, 50)
    with peaks.phase("logprobs"):
        touch(allocator, 30)
    touch(allocator, 7)
    with peaks.phase("train"):
        touch(allocator, 500)
        with peaks.phase("optimizer_step"):
            touch(allocator, 20)
        touch(allocator, 3)
    with peaks.phase("logprobs"):
        touch(allocator, 10)
    assert peaks.peaks.reserved == 1200
    assert peaks.peaks.by_phase == {
        "loading": 150,
        "logprobs": 130,
        "between phases": 107,
        "train": 600,
        "optimizer_step": 120,
    }


def test_a_phase_that_fails_has_its_peak() -> None:
    allocator = FakeAllocator(10)
    peaks = PhasePeaks(allocator.counter)
    try:
        with peaks.phase("train"):
            touch(allocator, 90)
            raise RuntimeError
    except RuntimeError:
        pass
    assert peaks.peaks.by_phase["train"] == 100
    assert peaks.peaks.by_phase["between phases"] == 10


def test_room_is_what_the_highest_leaves_beside_the_pass() -> None:
    allocator = FakeAllocator(100)
    peaks = PhasePeaks(allocator.counter)
    assert peaks.room_bytes(within="train", beside="logprobs") == 0
    with peaks.phase("train"):
        touch(allocator, 400)
    assert peaks.room_bytes(within="train", beside="logprobs") == 0
    with peaks.phase("logprobs"):
        touch(allocator, 150)
    room = peaks.room_bytes(within="train", beside="logprobs")
    assert room == 250
    with peaks.phase("reference_logprobs"):
        allocator.take(room)
        touch(allocator, 150)
        allocator.take(-room)
    assert peaks.peaks.by_phase["reference_logprobs"] == peaks.peaks.by_phase["train"]
    allocator.take(300)
    assert peaks.room_bytes(within="train", beside="logprobs") == 0


def test_without_a_device_nothing_is_counted() -> None:
    peaks = PhasePeaks(None)
    with peaks.phase("train"):
        pass
    assert peaks.peaks == DevicePeaks({}, None)
    assert peaks.room_bytes(within="train", beside="logprobs") == 0
