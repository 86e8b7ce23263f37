"""Which steps' responses may be generated ahead of training, with which weights, and which wait to be trained on.

The weights of version v are those after v steps; step s trains weights of version s - 1. Responses that begin with
version v and train in step s have the age s - 1 - v. Each step's prompts are its own from the start, in the order of
the data: a step may begin to generate once the newest weights are no more than the allowed age behind it, and it trains
on exactly what was generated for it. So nothing is too old when its turn comes, nothing is left over, and which prompts
a step has does not depend on how fast anything was. Rejected: a buffer that training takes the oldest from and that
throws away what has become too old, which loses prompts, and long responses more often than short ones.
"""


class Lookahead[T]:
    """Bookkeeping alone: no threads, no clock."""

    def __init__(self, first_step: int, last_step: int, max_age: int) -> None:
        """The weights are those that `first_step` trains."""
        self.version = first_step - 1
        self._next, self._last_step, self._max_age = first_step, last_step, max_age
        self._versions: dict[int, int] = {}
        """Of the weights with which a step's responses began, until they are taken."""
        self._results: dict[int, T] = {}

    def start(self) -> int | None:
        """The next step that may generate now, which is then under way; None where each must wait for new weights."""
        step = self._next
        if step > self._last_step or step - 1 - self.version > self._max_age:
            return None
        self._next += 1
        self._versions[step] = self.version
        return step

    def finish(self, step: int, result: T) -> None:
        """What a step that was under way has generated."""
        assert step in self._versions, "under way"
        assert step not in self._results, "under way"
        self._results[step] = result

    def is_ready(self, step: int) -> bool:
        """Whether it can be taken."""
        return step in self._results

    def take(self, step: int) -> tuple[T, int]:
        """What was generated for the step that trains now, and its age; once."""
        assert step == self.version + 1, "the weights that it trains are the newest"
        return self._results.pop(step), self.version - self._versions.pop(step)

    def renew(self) -> None:
        """The weights have been trained by one more step."""
        self.version += 1

    @property
    def num_under_way(self) -> int:
        """Steps that have started and not finished."""
        return len(self._versions) - len(self._results)

    @property
    def waiting(self) -> list[T]:
        """What waits for its step, in order."""
        return [self._results[step] for step in sorted(self._results)]
