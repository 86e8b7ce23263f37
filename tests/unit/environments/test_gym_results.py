"""What is read of an episode that an agent of NeMo-Gym returns."""

import math
from typing import Any

import pytest

from nemo_rl_offload.environments.nemo_gym.results import GymResult, ModelTurn, read_result
from nemo_rl_offload.errors import WorkerError

PATTERNS, TAGS = ("<tool_call>", "</tool_call>"), ("<think>", "</think>")


def item(prompt: list[int], tokens: list[int], **others: Any) -> dict[str, Any]:
    return {"type": "message", "prompt_token_ids": prompt, "generation_token_ids": tokens, **others}


def message(*texts: str) -> dict[str, Any]:
    return item([1], [2], content=[{"type": "output_text", "text": text} for text in texts])


def reasoning(*texts: str, **others: Any) -> dict[str, Any]:
    parts = [{"type": "summary_text", "text": text} for text in texts]
    return item([1], [2], **({"type": "reasoning", "summary": parts} | others))


def read(*items: dict[str, Any], **others: Any) -> GymResult:
    return read_result({"reward": 1.0, "response": {"output": list(items)}, **others}, PATTERNS, TAGS)


@pytest.mark.parametrize("reward", [{}, {"reward": None}, {"reward": True}, {"reward": False}, {"reward": "1.0"}])
def test_an_episode_has_a_reward(reward: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match=r"without a reward; it has .*response, note"):
        read_result({**reward, "response": {"output": []}, "note": 1}, PATTERNS, TAGS)


@pytest.mark.parametrize("reward", [0, 1, -2.5])
def test_a_reward_is_a_number(reward: float) -> None:
    found = read(reward=reward).reward
    assert found == reward
    assert isinstance(found, float)


@pytest.mark.parametrize(
    ("components", "parts"),
    [
        ({}, None),
        ({"reward_components": None}, None),
        ({"reward_components": {}}, None),
        ({"reward_components": {"form": 1, "answer": 0.5}}, {"form": 1.0, "answer": 0.5}),
    ],
)
def test_several_rewards_by_name(components: dict[str, Any], parts: dict[str, float] | None) -> None:
    assert read(**components).parts == parts


def test_an_environment_flags_an_episode() -> None:
    assert [read(**mark).is_flagged for mark in ({}, {"mask_sample": False}, {"mask_sample": True})] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("response", [{}, {"response": None}, {"response": {}}, {"response": {"output": None}}])
def test_an_episode_without_items_has_no_turns(response: dict[str, Any]) -> None:
    assert read_result({"reward": 0.5, **response}, PATTERNS, TAGS) == GymResult((), 0.5, None, False)


def test_items_without_drawn_tokens_are_no_turns() -> None:
    """What tools say, and the parts of a turn before the one that ends it."""
    found = read(
        {"type": "reasoning", "summary": [{"text": "<tool_call> <think> <think>"}]},
        item([1, 2], [3, 4], type="function_call", name="add", arguments="{}"),
        {"type": "function_call_output", "output": "7"},
        item([9], [], content=[{"text": "<think>"}]),
        item([1, 2, 3, 4, 5], [6], content=[{"text": "seven"}]),
    )
    assert found.turns == (ModelTurn((1, 2), (3, 4), False, False), ModelTurn((1, 2, 3, 4, 5), (6,), False, False))


def test_token_ids_may_be_text() -> None:
    (turn,) = read({"type": "message", "prompt_token_ids": ["1", 2], "generation_token_ids": ["3"]}).turns
    assert (turn.prompt_ids, turn.token_ids) == ((1, 2), (3,))


@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [
        ([1, 2, 3, 4, 5], True),
        ([1, 2, 3, 4], True),
        ([1, 2, 3], False),
        ([1, 2], False),
        ([1, 2, 3, 9, 5], False),
        ([1, 9, 3, 4, 5], False),
        ([0, 1, 2, 3, 4], False),
    ],
)
def test_each_turn_continues_what_the_one_before_ended_with(prompt: list[int], goes_on: bool) -> None:
    turns = item([1, 2], [3, 4]), item(prompt, [6]), item([*prompt, 6, 7], [8])
    if goes_on:
        assert [turn.token_ids for turn in read(*turns).turns] == [(3, 4), (6,), (8,)]
        return
    found = read(*turns)
    assert found.is_rewritten
    assert found.turns == ()


def test_every_turn_is_compared_with_the_one_before_it() -> None:
    assert read(item([1], [2]), item([1, 2, 3], [4]), item([1, 2, 3], [4])).is_rewritten
    assert not read(item([1], [2]), item([1, 2, 3], [4]), item([1, 2, 3, 4], [4])).is_rewritten


CALL, THINKING, BOTH, NONE = (True, False), (False, True), (True, True), (False, False)


@pytest.mark.parametrize(
    ("turn", "faults"),
    [
        (message("seven"), NONE),
        (message("tool_call think <tool_call"), NONE),
        (message("<tool_call>{"), CALL),
        (message("} </tool_call>"), CALL),
        (message("<think>seven"), THINKING),
        (message("so</think>seven"), THINKING),
        (message("<think><tool_call>"), BOTH),
        (message(""), NONE),
        (message("seven", "<think><tool_call>"), NONE),
        (message(), NONE),
        (item([1], [2]), NONE),
        (item([1], [2], content=None), NONE),
        (item([1], [2], content="<think><tool_call>"), NONE),
        (item([1], [2], content=["<think><tool_call>"]), NONE),
        (item([1], [2], content=[{"text": None}]), NONE),
        (item([1], [2], type="function_call", arguments="<tool_call>"), NONE),
        (reasoning("so"), NONE),
        (reasoning("<think>so"), NONE),
        (reasoning("so</think>"), NONE),
        (reasoning("<think>so</think>"), NONE),
        (reasoning("<think>so<think>"), THINKING),
        (reasoning("so</think>7</think>"), THINKING),
        (reasoning("so <tool_call>"), CALL),
        (reasoning("<think><tool_call><think>"), BOTH),
        (reasoning("so", "<tool_call>"), NONE),
        (reasoning("<think><think><tool_call>", type="message"), NONE),
        (reasoning("<think><think><tool_call>", content=[{"text": "seven"}]), NONE),
        (reasoning("so", content=[{"text": "<think>"}]), THINKING),
    ],
)
def test_faults(turn: dict[str, Any], faults: tuple[bool, bool]) -> None:
    """Text beside thinking has no tag at all; thinking alone has each at most once."""
    (found,) = read(turn).turns
    assert (found.has_invalid_tool_call, found.has_malformed_thinking) == faults


def test_patterns_and_tags_are_the_configurations() -> None:
    turn = message("[call] [thinks] <think> <tool_call>")
    result = {"reward": 1, "response": {"output": [turn]}}
    for patterns, tags in ((["[call]"], ["[thinks]"]), (["[calls]", "[call]"], ["[thought]", "[thinks]"])):
        (found,) = read_result(result, patterns, tags).turns
        assert (found.has_invalid_tool_call, found.has_malformed_thinking) == BOTH
    (found,) = read_result(result, [], []).turns
    assert (found.has_invalid_tool_call, found.has_malformed_thinking) == NONE


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_rewards_are_finite(number: float) -> None:
    for rewards in ({"reward": number}, {"reward": 1, "reward_components": {"form": number}}):
        with pytest.raises(WorkerError, match="finite"):
            read_result(rewards, PATTERNS, TAGS)
