"""Which group backward will want next.

A *pass* is one forward of one model, or of one model chunk: its groups in the order of their commits. It begins with a
commit and ends
- when the key of its first group is committed again,
- when its backward begins, or
- when the caller says so (`end_pass`): who runs chunks one after another must, since nothing else tells where the first
  one ends.

Backward walks a pass from its last group to its first, and then enters another: that of the next microbatch in a
pipeline, or of another chunk. Inside a pass the order is known. Which pass follows is learned from the last time: by
the names of its first and last group, and by whether the oldest or the newest of several such passes was taken. A wrong
guess costs time, never correctness.

How long the device takes from one boundary to the next depends on the pipeline's *phase*. A stage waits for others
while the pipeline fills and while it drains, and not in between. So intervals are learned by phase:
- FILLS until the first backward; where that comes is expected from last time;
- DRAINS from the last forward on, which is known if there are as many microbatches as last time;
- FULL in between.
"""

import weakref
from collections.abc import Iterator

from nemo_rl_offload.offload.slots import ForwardPass, Group, Key, Phase

FILLS, FULL, DRAINS = range(3)


class BackwardOrder:
    """Passes that are alive, and what was learned about their sequence."""

    def __init__(self) -> None:
        self._current: ForwardPass | None = None
        self._waiting: list[ForwardPass] = []  # not begun; oldest first
        self._successors: dict[Key, tuple[Key, bool]] = {}  # first key of a pass: last key of the next, newest of them
        self._last_keys: set[Key] = set()  # by which a pass is known to be complete
        self._lengths: dict[Key, int] = {}  # eligible groups of the latest pass that began with this key
        self._is_filling = True  # no backward has begun since no pass was alive;
        self._num_passes = self._usual_num_passes = 0  # how many have begun since then, and how many did last time
        self._full_at: tuple[Key, int] | None = None  # the last commit before the first backward, and how many waited
        self.latest: Group | None = None  # reached last; its node may be gone
        self.version = 0
        """Another one whenever `upcoming`, or how long it takes, may have become another than it was to be."""

    def commit(self, group: Group) -> None:
        """Place `group` at the end of the pass it belongs to."""
        current = self._current
        if current is None or current.begun or group.key == current.first_key:
            current = self._current = ForwardPass(group.key)
            self.version += 1
            self._waiting = [each for each in self._waiting if any(ref() for ref in each.groups)]
            if not self._waiting:
                self._is_filling, self._usual_num_passes, self._num_passes = True, self._num_passes, 0
            self._num_passes += 1
            self._waiting.append(current)
        if not self._last_keys.isdisjoint((group.key, current.last_key)):
            self.version += 1
        group.pass_, group.index = current, len(current.groups)
        current.last_key = group.key
        current.groups.append(weakref.ref(group))

    def goes_on(self, pass_: ForwardPass | None, key: Key) -> bool:
        """Whether a commit by `key` would belong to `pass_`."""
        return pass_ is not None and pass_ is self._current and not pass_.begun and key != pass_.first_key

    def end_pass(self) -> None:
        """The next group begins a pass."""
        self._current = None

    def reached(self, group: Group) -> None:
        """Backward is at `group`."""
        pass_ = group.pass_
        if not pass_.begun:
            self._lengths[pass_.first_key] = pass_.num_eligible
            if self.latest is not None and group.key == pass_.last_key:
                self._learn(self.latest.pass_, pass_)
            if self._is_filling and self._waiting:
                self._is_filling, self._full_at = False, (self._waiting[-1].last_key, len(self._waiting))
            self.version += 1
            pass_.begun = True
            if pass_ in self._waiting:
                self._waiting.remove(pass_)
            pass_.phase = self.phase
        group.reached = True
        self.latest = group

    @property
    def phase(self) -> Phase:
        """How many passes wait for their backward, and whether a pipeline fills, is full, or drains."""
        if self._is_filling:
            return len(self._waiting), FILLS
        return len(self._waiting), DRAINS if self._num_passes >= self._usual_num_passes else FULL

    def first_backward_follows(self, group: Group) -> bool:
        """Whether the next boundary after a commit of `group` is expected to be the first backward."""
        return self._is_filling and self._full_at == (group.key, len(self._waiting))

    def usual_length(self, pass_: ForwardPass) -> int | None:
        """How many eligible groups the latest such pass had, of those whose backward came."""
        return self._lengths.get(pass_.first_key)

    def upcoming(self, group: Group) -> Iterator[Group]:
        """Groups that backward is expected to reach after `group`, soonest first."""
        pass_: ForwardPass | None = group.pass_
        index = group.index
        entered: list[ForwardPass] = []
        while pass_ is not None:
            yield from pass_.before(index)
            pass_ = self._next(pass_, entered)
            if pass_ is not None:
                entered.append(pass_)
                index = len(pass_.groups)

    def _next(self, pass_: ForwardPass, entered: list[ForwardPass]) -> ForwardPass | None:
        last_key, newest = self._successors.get(pass_.first_key, (None, False))
        alike = [each for each in self._waiting if each.last_key == last_key and each not in entered]
        return (alike[-1] if newest else alike[0]) if alike else None

    def _learn(self, former: ForwardPass, following: ForwardPass) -> None:
        alike = [each for each in self._waiting if each.last_key == following.last_key]
        newest = self._successors.get(former.first_key, (None, False))[1]
        if len(alike) > 1:
            newest = alike[-1] is following
        self._successors[former.first_key] = following.last_key, newest
        self._last_keys.add(following.last_key)
