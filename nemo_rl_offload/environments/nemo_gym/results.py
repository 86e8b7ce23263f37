"""What an episode of NeMo-Gym was: which of the model's turns it is made of, what they were worth, what was wrong.

Its result is what an agent's `/run` returns: a response in OpenAI's form, of whose items those that end a turn of the
model have its token ids, and the reward (`reward`, several by name under `reward_components`). The ids are those that
the model was given and has drawn, so that nothing is encoded again.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_offload.errors import WorkerError


@dataclass(frozen=True)
class ModelTurn:
    """One turn of the model."""

    prompt_ids: tuple[int, ...]
    """All that came before it."""
    token_ids: tuple[int, ...]
    has_invalid_tool_call: bool
    """A call is left in its text: none was made."""
    has_malformed_thinking: bool
    """Thinking is left in its text, or was begun twice."""


@dataclass(frozen=True)
class GymResult:
    """An episode that has ended."""

    turns: tuple[ModelTurn, ...]
    """Each continues what the one before ended with; none where the model was never asked, or had no room, or where
    they do not."""
    reward: float
    parts: Mapping[str, float] | None
    is_flagged: bool
    """Its environment says that nothing should be learned from it."""
    is_rewritten: bool = False
    """A turn does not continue the one before: the agent has rewritten or left out what was said."""


def read_result(result: Mapping[str, Any], patterns: Sequence[str], thinking_tags: Sequence[str]) -> GymResult:
    """Read what an agent has returned.

    Raises:
        WorkerError: it has no reward, or one that is not finite.
    """
    reward = result.get("reward")
    if not isinstance(reward, int | float) or isinstance(reward, bool):
        raise WorkerError(f"NeMo-Gym returned an episode without a reward; it has {', '.join(result)}.")
    parts = result.get("reward_components")
    named = {str(name): float(value) for name, value in parts.items()} if parts else None
    if not all(map(math.isfinite, (reward, *(named or {}).values()))):
        raise WorkerError(f"NeMo-Gym returned an episode whose reward is not finite: {reward}, {named}.")
    items = (result.get("response") or {}).get("output") or []
    turns = tuple(_turns([item for item in items if item.get("generation_token_ids")], patterns, thinking_tags))
    pairs = [(before.prompt_ids + before.token_ids, now.prompt_ids) for before, now in itertools.pairwise(turns)]
    is_rewritten = any(now[: len(seen)] != seen for seen, now in pairs)
    flagged = bool(result.get("mask_sample"))
    return GymResult(() if is_rewritten else turns, float(reward), named, flagged, is_rewritten)


def _turns(items: Sequence[Mapping[str, Any]], patterns: Sequence[str], tags: Sequence[str]) -> Iterator[ModelTurn]:
    for item in items:
        said, thought = _text(item.get("content")), _text(item.get("summary"))
        text = said or (thought if item.get("type") == "reasoning" else "")
        malformed = any(tag in said for tag in tags) if said else any(text.count(tag) > 1 for tag in tags)
        yield ModelTurn(
            tuple(map(int, item["prompt_token_ids"])),
            tuple(map(int, item["generation_token_ids"])),
            any(pattern in text for pattern in patterns),
            malformed,
        )


def _text(parts: Any) -> str:
    first = parts[0] if isinstance(parts, list) and parts else {}
    return str(first.get("text") or "") if isinstance(first, Mapping) else ""
