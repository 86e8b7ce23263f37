"""Responses of later steps, generated while a step trains.

Each step that may generate (`lookahead`) plays its episodes in a thread of its own; all of them share the engines,
which work on whatever there is, and first on what came first. The main thread draws prompts, trains, and says when
weights may change: between two steps of the engines (`in_flight`), or when nothing is under way. In the latter case a
run is as reproducible as one that generates and trains by turns, since which weights drew what is no matter of time.

The data's place that belongs to a checkpoint is that after the last trained step's prompts: what was generated ahead is
not saved, and its prompts are drawn again.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemo_rl_offload.algorithms.lookahead import Lookahead
from nemo_rl_offload.algorithms.rollout import Rollout
from nemo_rl_offload.data.prompts import Prompt, TrainingPrompts

LOOK_S = 1.0


@dataclass(frozen=True)
class Collected:
    """What was generated for a step."""

    played: Rollout
    place: Mapping[str, int]
    """Of the data, after this step's prompts."""
    num_passes: int
    """Over the data, that are complete with this step's prompts; 0 where nobody limits them."""


class Collector:
    """Generates for steps to come; its data is that of a run which would generate and train by turns."""

    def __init__(
        self,
        data: TrainingPrompts,
        num_prompts: int,
        play: Callable[[int, list[Prompt]], Rollout],
        *,
        max_age: int,
        max_passes: int | None,
        in_flight: bool,
    ) -> None:
        """`play` lets a step's prompts be answered and scored, from any thread; after `max_passes` none are drawn."""
        self._data, self._num_prompts, self._play = data, num_prompts, play
        self._max_age, self._max_passes, self._in_flight = max_age, max_passes, in_flight
        self._changed = threading.Condition()
        self._ahead: Lookahead[Collected] | None = None
        self._failure: Exception | None = None
        self._place: Mapping[str, int] | None = None
        self.num_passes = 0
        """Over the data, that are complete with the last step that was trained; 0 where nobody limits them."""

    def state_dict(self) -> dict[str, int]:
        """The place in the data after the last step that was trained."""
        return self._data.state_dict() if self._place is None else dict(self._place)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self._data.load_state_dict(state)
        self._place = dict(state)
        self.num_passes = 0 if self._max_passes is None else self._data.num_passes

    def take(self, step: int, last_step: int) -> tuple[Rollout, int, list[Rollout]]:
        """Wait for what was generated for the step; with its age in steps, and what waits for later ones.

        The first call begins to generate; steps up to `last_step` will.

        Raises what a step's thread raised.
        """
        if self._ahead is None:
            self._ahead = Lookahead(step, last_step, self._max_age)
            self._begin(self._ahead)
        ahead = self._ahead
        self._wait(lambda: ahead.is_ready(step))
        with self._changed:
            collected, age = ahead.take(step)
            self._place, self.num_passes = collected.place, collected.num_passes
            return collected.played, age, [each.played for each in ahead.waiting]

    def renew(self, refit: Callable[[], None]) -> None:
        """Hand new weights over by `refit`, and generate for the steps that may have them."""
        assert self._ahead is not None, "a step has been taken"
        ahead = self._ahead
        if not self._in_flight:
            self._wait(lambda: not ahead.num_under_way)
        refit()
        with self._changed:
            ahead.renew()
        self._begin(ahead)

    def _begin(self, ahead: Lookahead[Collected]) -> None:
        while self._max_passes is None or self._data.num_passes < self._max_passes:
            with self._changed:
                step = ahead.start()
            if step is None:
                return
            prompts = self._data.next_batch(self._num_prompts)
            reached = self._data.state_dict(), 0 if self._max_passes is None else self._data.num_passes
            arguments = (ahead, step, prompts, reached)
            threading.Thread(target=self._collect, args=arguments, name=f"step {step}", daemon=True).start()

    def _collect(
        self, ahead: Lookahead[Collected], step: int, prompts: list[Prompt], reached: tuple[Mapping[str, int], int]
    ) -> None:
        try:
            played = self._play(step, prompts)
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            return
        with self._changed:
            ahead.finish(step, Collected(played, *reached))
            self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            while not is_so():
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(LOOK_S)
