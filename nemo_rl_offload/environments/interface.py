"""What an environment is: something that reads conversations and says what each is worth, and whether it goes on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

Message = dict[str, str]
"""``role`` (user, assistant) and ``content``."""


class Episode(NamedTuple):
    """A conversation whose last message is a response to be scored."""

    entry: Mapping[str, object]
    """The problem as its data set has it: what a scorer needs."""
    messages: list[Message]
    """The question, and by turns responses and observations."""
    finished: bool = True
    """Whether the response has an end: one of its tokens, or a stop string."""


class Score(NamedTuple):
    """What an environment says about a response."""

    reward: float
    is_correct: bool
    scorer_error: bool
    """The scorer failed on the response, which then counts as wrong."""
    observation: str | None = None
    """What the model is told next; None ends the episode."""
    parts: Mapping[str, float] | None = None
    """Several rewards by name, which `reward` is made of; None: there is one. The same names for all responses to a
    prompt."""
    last_reward: float | None = None
    """Of a conversation of several turns, what the last one is worth, which `is_correct` is about; None: `reward`."""
    answer: str | None = None
    """What was found as the response's answer, by which responses vote; None: nothing."""
    is_masked: bool = False
    """Nothing is learned from the response, whose reward counts among those of its prompt."""
    faults: Mapping[str, tuple[tuple[int, int], ...]] | None = None
    """By name, begin and end of the parts of the response that have a fault which has an advantage of its own."""


UNFINISHED = Score(0.0, is_correct=False, scorer_error=False)
"""Of a response without an end, which no environment is asked about."""


class Environment(Protocol):
    """Scores responses; an instance lives in each process of an `EnvironmentPool`. Needs nothing from earlier calls.

    Its arguments are the keys of its section. A static method `prepare(section)`, where it has one, is called before
    the processes start, in the driver, and returns the arguments.
    """

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        """Return one score for each episode's last message, in order; a pool's processes ask about one at a time.

        Raises:
            WorkerError: it cannot go on; the message says why, and names what the user can mend. Of anything else that
                it raises, the response counts 0 and the run goes on.
        """
