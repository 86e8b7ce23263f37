"""Which groups and slots stay on the device although their module is listed.

What `auto` chooses for a budget comes from `memory_budget`, which asks `solver`.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
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
    - What had no time to leave and come back in the last step, and what was copied though something else held it.
    - What had the time, but would have let compute wait, while the device has room for it. The room is that of the
      fullest step so far, and for each key's largest group so far. A larger one moves, for nobody knows what else grew.
    """

    fraction: float = 1.0
    kept_bytes_per_step: int = 0
    kept: Collection[Key] = frozenset()
    _kept_bytes_left: int = 0
    _too_short: frozenset[Key] = frozenset()
    _waiting: frozenset[Key] = frozenset()  # of these, what would let compute wait
    _most_bytes: dict[Key, int] = field(default_factory=dict)  # of a group
    _room_bytes: float = inf  # the least so far, had nothing stayed
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
            group.stayed = group.key not in self._waiting or group.saved_bytes <= self._most_bytes[group.key]
            if group.stayed:
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
        self._too_short = self._waiting = frozenset()

    def learn(
        self,
        groups: Sequence[GroupTimes],
        boundaries_ms: Sequence[float],
        timing: Timing,
        bound_bytes: int | None = None,
        unused_bytes: int | None = None,
    ) -> None:
        """Find the keys none of whose groups had the time to leave and come back, beside those that a plan moves.

        With a bound on what is under way also those for which compute would wait too long, while the device has room
        for them: `unused_bytes` is what nobody needed of it in that step, None where that is not known.
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
        waiting: set[Hashable] = set()
        if bound_bytes is not None and (bound_ms := timing.copy_ms(bound_bytes, out=True)) is not None:
            spread = fit_overlap(visits, boundaries_ms, bound_ms)
            if self._has_room(groups, spread, unused_bytes):
                moving, waiting = spread, moving - spread
        self._too_short = frozenset(times.group.key for times in groups) - moving
        self._waiting = self._too_short & waiting

    def _has_room(self, groups: Sequence[GroupTimes], moving: Collection[Hashable], unused_bytes: int | None) -> bool:
        """Whether all but these keys can stay, as far as is known."""
        for times in groups:
            key = times.group.key
            self._most_bytes[key] = max(self._most_bytes.get(key, 0), times.group.saved_bytes)
        if unused_bytes is None:
            return True
        stayed = [times for times in groups if times.group.stayed]
        self._room_bytes = min(self._room_bytes, unused_bytes + _most_at_once(stayed, {}))
        staying = [times for times in groups if times.group.key not in moving]
        return _most_at_once(staying, self._most_bytes) <= self._room_bytes


def _most_at_once(groups: Sequence[GroupTimes], most_bytes: Mapping[Key, int]) -> int:
    """How many bytes groups save at a time, at most, where each saves as many as its key saves at most."""
    changes = []
    for times in groups:
        num_bytes = most_bytes.get(times.group.key, times.group.saved_bytes)
        changes.append((times.committed_ms, num_bytes))
        if not isnan(times.reached_ms):
            changes.append((times.reached_ms, -num_bytes))
    return max(accumulate((change for _, change in sorted(changes)), initial=0))
