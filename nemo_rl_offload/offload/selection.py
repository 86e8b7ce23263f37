"""Which groups and slots stay on the device although their module is listed.

What `auto` chooses for a budget comes from `memory_budget`, which asks `solver`.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, isnan

from nemo_rl_offload.offload.overlap import Visit, fit_overlap
from nemo_rl_offload.offload.slots import Group, Key, Place, Slot
from nemo_rl_offload.offload.timing import GroupTimes, Timing

RETRY_AFTER = 64


@dataclass(slots=True)
class Selection:
    """What stays, and why:

    - `kept`: keys that a plan keeps on the device.
    - `fraction` (Megatron-Core's `activation_offload_fraction`): of a pass's groups this share is offloaded, the
      earliest, once the pass's usual length is known.
    - `kept_bytes_per_step` (`delta_offload_bytes_across_pp_ranks` times the pipeline rank): so many bytes stay, of the
      first groups of a step.
    - What had no time to leave and come back in the last step, or would have let compute wait though the device had
      room, and what was copied though something else held it.
    """

    fraction: float = 1.0
    kept_bytes_per_step: int = 0
    kept: Collection[Key] = frozenset()
    _kept_bytes_left: int = 0
    _too_short: frozenset[Key] = frozenset()
    _ineffective: dict[Place, int] = field(default_factory=dict)  # passes left until the next try

    def __post_init__(self) -> None:
        self._kept_bytes_left = self.kept_bytes_per_step

    def end_step(self) -> None:
        self._kept_bytes_left = self.kept_bytes_per_step

    def eligible(self, key: Key) -> bool:
        """Whether such a group may move at all."""
        return key not in self._too_short and key not in self.kept

    def moving(self, own: list[Slot], group: Group, usual_length: int | None, has_room: bool = True) -> list[Slot]:
        """Those of a group's own slots that move: none, or those whose last copy freed its source; now and then the
        others are tried again. `usual_length` is that of the group's pass, in eligible groups. Without room, what has
        no time to leave moves all the same."""
        if not self.eligible(group.key) and (has_room or group.key in self.kept):
            return []
        pass_ = group.pass_
        pass_.num_eligible += 1
        if self._kept_bytes_left > 0:
            self._kept_bytes_left -= group.saved_bytes
            return []
        num_usual = usual_length or 0
        num_left_out = int(num_usual * (1 - self.fraction))
        if num_left_out and pass_.num_eligible > num_usual - num_left_out:
            return []
        if not self._ineffective:
            return own
        return [slot for slot in own if (place := slot.place) is not None and self._is_effective(place)]

    def _is_effective(self, place: Place) -> bool:
        left = self._ineffective.get(place)
        if left is None:
            return True
        if left == 0:
            del self._ineffective[place]
            return True
        self._ineffective[place] = left - 1
        return False

    def was_ineffective(self, place: Place) -> None:
        self._ineffective[place] = RETRY_AFTER

    def keep(self, keys: Collection[Key]) -> None:
        """Follow a plan, which knows better than what an earlier one left no time for."""
        self.kept = frozenset(keys)
        self._too_short = frozenset()

    def learn(
        self,
        groups: Sequence[GroupTimes],
        boundaries_ms: Sequence[float],
        timing: Timing,
        bound_bytes: int | None = None,
        unused_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Find the keys none of whose groups had the time to leave and come back, beside those that a plan moves.

        With a bound on what is under way also those for which compute would wait too long, while the device has room
        for them: `unused_bytes` is what nobody needed of it, None where that is not known.
        """
        visits = []
        groups = [times for times in groups if times.group.key not in self.kept]
        for times in groups:
            out_ms = timing.copy_ms(times.group.saved_bytes, out=True)
            in_ms = timing.copy_ms(times.group.saved_bytes, out=False)
            if out_ms is None or in_ms is None:
                return
            reached_ms = inf if isnan(times.reached_ms) else times.reached_ms
            forward = id(times.group.pass_)
            visits.append(Visit(times.committed_ms, reached_ms, out_ms, in_ms, forward, times.group.key))
        moving = fit_overlap(visits, boundaries_ms)
        if bound_bytes is not None and (bound_ms := timing.copy_ms(bound_bytes, out=True)) is not None:
            spread = fit_overlap(visits, boundaries_ms, bound_ms)
            room_bytes = unused_bytes()
            if room_bytes is None or _most_at_once(groups, moving - spread - self._too_short) <= room_bytes:
                moving = spread
        self._too_short = frozenset(times.group.key for times in groups) - moving


def _most_at_once(groups: Sequence[GroupTimes], keys: Collection[Hashable]) -> int:
    """How many bytes the groups of some keys save at a time, at most."""
    own = [times for times in groups if times.group.key in keys]
    changes = [(times.committed_ms, times.group.saved_bytes) for times in own]
    changes += [(times.reached_ms, -times.group.saved_bytes) for times in own if not isnan(times.reached_ms)]
    return max(accumulate((change for _, change in sorted(changes)), initial=0))
