"""Rewards, and what a model is told next, from a Python function of the user's, named by its path.

The function is called as ``function(messages, entry, **params)`` with the conversation, whose last message is the
response, and the record of the data set. It returns the reward, which ends the episode, or a mapping with ``reward``,
or ``rewards``, several by name of which ``reward`` is the sum where it is not given; and any of ``observation`` (text
that the model reads next), ``done`` (default: there is no observation) and ``is_correct`` (default: the reward is above
0). What it keeps between calls is its own affair; each of several processes has its own, and a process may be replaced.

A response on which the function raises an exception, or which takes it too long, counts 0, is counted, and the run goes
on (`pool.py`): what models write can be anything. What is a mistake whatever they write ends the run: a function that
is not there or takes other arguments, before it starts, and a return value that it may not have.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.errors import ConfigError, WorkerError, nearest
from nemo_rl_offload.specs.reward_functions import CALL, OF_TRL

if TYPE_CHECKING:  # which a scorer's process need not wait for
    from nemo_rl_offload.config.schema import FunctionConfig

KEY = "env.function.path"
RETURNED = ("reward", "rewards", "observation", "done", "is_correct")
LARGEST_REWARD = 1e18
"""In size: float32 holds the squares of hundreds of them, as deviations of groups need."""


class FunctionEnvironment:
    """Calls the function; the arguments are those of the section ``env.function``.

    Modules are looked for in ``search_path`` too.

    Raises:
        ConfigError: there is no such function, or its module does not import.
    """

    def __init__(self, path: str, params: Mapping[str, object], search_path: Sequence[str] = ()) -> None:
        sys.path.extend(folder for folder in search_path if folder not in sys.path)
        self._path = path
        self._params = params
        self._function = load_function(path)

    @staticmethod
    def prepare(section: "FunctionConfig") -> dict[str, Any]:
        """Import the function in this process already, where an error is one; the others look where this one does."""
        assert section["path"] is not None, "checked with the configuration"
        search_path = [os.getcwd(), *sys.path]
        sys.path.extend(folder for folder in search_path if folder not in sys.path)
        function = load_function(section["path"])
        try:
            signature = inspect.signature(function)
            signature.bind([], {}, **section["params"])
            if OF_TRL in signature.parameters:
                raise TypeError(f"{OF_TRL} is a parameter of TRL's")
        except TypeError as error:
            raise ConfigError(
                f"{KEY}: {section['path']}{signature} cannot be called as function(messages, entry, **params) with "
                f"env.function.params: {error}. Mend it, or name another. {CALL}."
            ) from error
        except ValueError:  # some of those written in C tell nothing of their arguments
            pass
        return {**section, "search_path": search_path}

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        """Call the function for each episode.

        Raises:
            WorkerError: it returned something else than it may.
        """
        return [self._score(episode) for episode in episodes]

    def _score(self, episode: Episode) -> Score:
        returned = self._function(episode.messages, episode.entry, **self._params)
        try:
            return _as_score(returned)
        except (TypeError, ValueError, OverflowError) as error:
            response = episode.messages[-1]["content"]
            shown = response if len(response) <= 200 else f"{response[:200]}..."
            failure = WorkerError(
                f"{KEY}: {self._path} returned {f'{returned!r}'[:200]}: {error}. The response was {shown!r}."
            )
            failure.details = traceback.format_exc()
            raise failure from error


def load_function(path: str) -> Callable[..., object]:
    """Import the function of a path such as ``package.module:name``. Raises ConfigError where there is none."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{KEY}: '{module_name}' does not import: {problem}. Modules are looked for in {os.getcwd()} and in "
            "PYTHONPATH."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [other for other, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{KEY}: {module_name} ({module.__file__}) has no function '{name}'.{nearest(name, names)}")
    found: Callable[..., object] = function
    return found


def _as_score(returned: Any) -> Score:
    """Raises TypeError or ValueError with what is wrong."""
    values = returned if isinstance(returned, Mapping) else {"reward": returned}
    if unknown := [key for key in values if key not in RETURNED]:
        raise ValueError(f"unknown keys {unknown}; allowed: {', '.join(RETURNED)}")
    if "reward" not in values and values.get("rewards") is None:
        raise ValueError("the key reward is missing" + (", and rewards is None" if "rewards" in values else ""))
    parts: dict[str, float] | None = None
    if (several := values.get("rewards")) is not None:
        if not isinstance(several, Mapping) or not several:
            raise TypeError("rewards must be a mapping of names to numbers")
        parts = {str(name): _number(value) for name, value in several.items()}
    reward = _number(values["reward"]) if "reward" in values else sum((parts or {}).values())
    observation = values.get("observation")
    if not all(abs(number) <= LARGEST_REWARD for number in (reward, *(parts or {}).values())):
        raise ValueError(f"the reward must be finite, and between {-LARGEST_REWARD:g} and {LARGEST_REWARD:g}")
    if not isinstance(observation, str | None):
        raise TypeError("observation must be text or None")
    if _flag("done", values.get("done", observation is None)):
        observation = None
    elif not observation:
        raise ValueError("an episode that goes on needs an observation")
    is_correct = _flag("is_correct", values.get("is_correct", reward > 0))
    return Score(reward, is_correct, scorer_error=False, observation=observation, parts=parts)


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bytearray):
        raise TypeError("a reward must be a number, not text")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    """True or False, or what NumPy, torch or arithmetic have for them."""
    try:
        is_one = not isinstance(value, str | bytes | bytearray) and float(value) in (0.0, 1.0)
    except (TypeError, ValueError):
        is_one = False
    if not is_one:
        raise TypeError(f"{name} must be True or False")
    return bool(value)
