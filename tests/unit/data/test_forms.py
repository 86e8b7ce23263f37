"""Forms of records: whatever the form, a prompt stands once, or the record is refused with its reason."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.data.forms import (
    BadRecordError,
    UndecidedPairError,
    parse_conversation,
    parse_preference,
    parse_tools,
    repeats_prompt,
)

Content = dict[str, Any]
Turns = list[dict[str, Any]]


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def dialogue(turns: Turns) -> str:
    speakers = {"user": "Human", "assistant": "Assistant"}
    return "".join(f"\n\n{speakers[turn['role']]}: {turn['content']}" for turn in turns)


def ranked(*ranks: Any, answers: tuple[str, ...] = ("b", "c")) -> list[Any]:
    return [
        {"rank": rank, "completion": [assistant(answer)]}
        for rank, answer in zip(ranks, (*answers, "d")[: len(ranks)], strict=True)
    ]


CONVERSATION = [user("a"), assistant("b")]
PROMPTS: list[Turns] = [
    [user("a")],
    [system("s"), user("a")],
    [user("a"), assistant("x"), user("a")],
    [system("s"), user("q"), assistant("x"), user("a")],
    [user("use it"), assistant("calls"), {"role": "tool", "content": "5"}],
]
PAIRS_OF_MESSAGES: dict[str, Callable[[Turns, Turns, Turns], Content]] = {
    "answers alone": lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r},
    "no prompt": lambda p, c, r: {"chosen": p + c, "rejected": p + r},
    "prompt of null": lambda p, c, r: {"prompt": None, "chosen": p + c, "rejected": p + r},
    "prompt repeated": lambda p, c, r: {"prompt": p, "chosen": p + c, "rejected": p + r},
    "repeated in one": lambda p, c, r: {"prompt": p, "chosen": p + c, "rejected": r},
    "repeated in the other": lambda p, c, r: {"prompt": p, "chosen": c, "rejected": p + r},
    "repeated without system": lambda p, c, r: {"prompt": p, "chosen": bare(p) + c, "rejected": bare(p) + r},
    "system in the answers": lambda p, c, r: {"prompt": bare(p), "chosen": p + c, "rejected": p + r},
    "system in one answer": lambda p, c, r: {"prompt": bare(p), "chosen": p + c, "rejected": r},
    "system in a column": lambda p, c, r: {"system": said_by_system(p), "chosen": bare(p) + c, "rejected": bare(p) + r},
    "system in both": lambda p, c, r: {"system_prompt": said_by_system(p), "prompt": p, "chosen": c, "rejected": r},
    "last turn repeated": lambda p, c, r: {"prompt": p, "chosen": p[-1:] + c, "rejected": p[-1:] + r},
    "other spaces": lambda p, c, r: {"prompt": spaced(p), "chosen": p + c, "rejected": spaced(p) + r},
    "other keys": lambda p, c, r: {"prompt": p, "chosen": keyed(p) + c, "rejected": p + r, "messages": p + c},
    "ranks": lambda p, c, r: {
        "context": p,
        "completions": [{"rank": 1, "completion": r}, {"rank": 0, "completion": c}],
    },
    "ranks with the prompt": lambda p, c, r: {
        "context": p,
        "completions": [{"rank": 2, "completion": p + c}, {"rank": 7, "completion": p + r}],
    },
    "input": lambda p, c, r: {
        "input": {"messages": p, "tools": [], "parallel_tool_calls": True},
        "preferred_output": c,
        "non_preferred_output": r,
    },
    "input repeated": lambda p, c, r: {
        "input": {"messages": p},
        "preferred_output": p + c,
        "non_preferred_output": p + r,
    },
    "compared": lambda p, c, r: {
        "context": p,
        "response1": r[0]["content"],
        "response2": c[0]["content"],
        "overall_preference": 2,
    },
    "compared the other way": lambda p, c, r: {
        "context": p,
        "response1": c[0]["content"],
        "response2": r[0]["content"],
        "overall_preference": -1,
    },
    "compared, with chosen beside": lambda p, c, r: {
        "context": p,
        "response1": c[0]["content"],
        "response2": r[0]["content"],
        "overall_preference": -3.0,
        "chosen": c[0]["content"],
        "rejected": r[0]["content"],
    },
    "strength": lambda p, c, r: {
        "prompt": p,
        "response_1": c[0]["content"],
        "response_2": r[0]["content"],
        "preference_strength": -2,
    },
    "strength the other way": lambda p, c, r: {
        "prompt": p,
        "response_1": r[0]["content"],
        "response_2": c[0]["content"],
        "preference_strength": 3,
    },
    "the better by its number": lambda p, c, r: {
        "prompt": p,
        "response_0": c[0]["content"],
        "response_1": r[0]["content"],
        "better_response_id": 0,
        "safer_response_id": 1,
    },
    "the better by its number, the other way": lambda p, c, r: {
        "prompt": p,
        "response_0": r[0]["content"],
        "response_1": c[0]["content"],
        "better_response_id": 1,
        "safer_response_id": 0,
    },
}
"""What a record looks like from a prompt, a chosen and a rejected answer."""


def bare(turns: Turns) -> Turns:
    return [turn for turn in turns if turn["role"] != "system"]


def said_by_system(turns: Turns) -> str | None:
    return next((turn["content"] for turn in turns if turn["role"] == "system"), None)


def spaced(turns: Turns) -> Turns:
    return [turn | {"content": f" {turn['content']}\n"} for turn in turns]


def keyed(turns: Turns) -> Turns:
    return [turn | {"name": None, "score": 3} for turn in turns]


def shown(turns: Turns) -> Turns:
    """Without other keys and white space around the text."""
    return [{"role": turn["role"], "content": turn["content"].strip()} for turn in turns]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda turns: "-".join(turn["content"] for turn in turns))
@pytest.mark.parametrize("form", PAIRS_OF_MESSAGES)
def test_forms_of_pairs(form: str, prompt: Turns) -> None:
    content = PAIRS_OF_MESSAGES[form](prompt, [assistant("b")], [assistant("c")])
    parsed = parse_preference(content)
    assert [shown(turns) for turns in parsed] == [prompt, [assistant("b")], [assistant("c")]]  # type: ignore[arg-type]


WORDS = st.text("ab ", min_size=1, max_size=4).filter(str.strip)


@given(
    before=st.lists(st.tuples(WORDS, WORDS), max_size=2),
    texts=st.tuples(WORDS, WORDS, WORDS),
    after=st.lists(st.tuples(WORDS, WORDS), max_size=1),
    form=st.sampled_from(
        ["answers alone", "prompt repeated", "repeated in one", "system in the answers", "ranks with the prompt"]
    ),
)
@settings(max_examples=200, deadline=None)
def test_no_turn_is_lost_or_doubled(
    before: list[tuple[str, str]], texts: tuple[str, str, str], after: list[tuple[str, str]], form: str
) -> None:
    question, better, worse = texts
    prompt = [turn for asked, said in before for turn in (user(asked), assistant(said))] + [user(question)]
    more = [turn for asked, said in after for turn in (user(asked), assistant(said))]
    chosen, rejected = [assistant(better), *more], [assistant(worse), *more]
    content = PAIRS_OF_MESSAGES[form](prompt, chosen, rejected)
    if chosen == rejected:
        with pytest.raises(UndecidedPairError):
            parse_preference(content)
        return
    asked, *answers = parse_preference(content)
    assert [asked + answer for answer in answers] == [prompt + chosen, prompt + rejected]


TEXT_PAIR = {"chosen": "b", "rejected": "c"}
HUMAN = "\n\nHuman: a\n\nAssistant:"


@pytest.mark.parametrize(
    "content",
    [
        TEXT_PAIR | {"prompt": "a"},
        TEXT_PAIR | {"prompt": [user("a")]},
        {"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("c")]},
        {"prompt": "a", "chosen": [*CONVERSATION], "rejected": [user("a"), assistant("c")]},
        {"prompt": " a\n", "chosen": [*CONVERSATION], "rejected": [user("a"), assistant("c")]},
        {"prompt": "a", "chosen": [*CONVERSATION], "rejected": "c"},
        {"chosen": f"{HUMAN} b", "rejected": f"{HUMAN} c"},
        {"chosen": f"{HUMAN[2:]} b", "rejected": f"{HUMAN} c\n"},
        {"prompt": HUMAN, "chosen": " b", "rejected": " c"},
        {"prompt": f"{HUMAN} ", "chosen": "b", "rejected": "c"},
        {"prompt": "\n\nHuman: a", "chosen": "\n\nAssistant: b", "rejected": "\n\nAssistant: c"},
        {"prompt": HUMAN, "chosen": f"{HUMAN} b", "rejected": f"{HUMAN} c"},
        {"prompt": "a", "chosen": f"{HUMAN} b", "rejected": f"{HUMAN} c"},
        *(TEXT_PAIR | {name: "a", "system": ""} for name in ("question", "problem", "input", "instruction")),
        {"question": "x", "chosen": [*CONVERSATION], "rejected": [user("a"), assistant("c")]},
        {"question": "x", "chosen": f"{HUMAN} b", "rejected": f"{HUMAN} c"},
        {"context": "a", "response1": "b", "response2": "c", "overall_preference": -2},
        {"context": "a", "completions": ranked(0, 1)},
        {"context": [user("a")], "completions": ranked(3, 4)},
        {"instruction": "a", "completions": [{"response": r, "overall_score": s} for r, s in (("c", 2.5), ("b", 8))]},
        {
            "instruction": "a",
            "models": ["x", "y", "z"],
            "completions": [
                {"response": "x", "overall_score": 5.5},
                {"response": "b", "overall_score": 9.0},
                {"response": "c", "overall_score": 1.0},
            ],
        },
    ],
)  # fmt: skip
def test_forms_of_pairs_with_text(content: Content) -> None:
    assert parse_preference(content) == ([user("a")], [assistant("b")], [assistant("c")])


@pytest.mark.parametrize(
    "turns",
    [
        [user("a")],
        [user("a"), assistant("x"), user("a")],
        [user("Human: said\nthis"), assistant("x\n\ny"), user("")],
    ],
)
def test_dialogues_as_text(turns: Turns) -> None:
    chosen, rejected = (dialogue([*turns, assistant(answer)]) for answer in "bc")
    assert parse_preference({"chosen": chosen, "rejected": rejected}) == (turns, [assistant("b")], [assistant("c")])
    whole = [*turns, assistant("b")]
    assert parse_conversation({"prompt": f"{dialogue(turns)}\n\nAssistant:", "completion": " b"}) == whole
    assert parse_conversation({"prompt": f"{dialogue(turns)}\n\nAssistant:", "completion": chosen}) == whole


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("I", "I am", "You are"),
        ("I", "I am", "I was"),
        ("The sky is", " blue.", " green."),
        ("Say hi", "Say hi", "Say hi twice"),
        ("a", "Human: b", "Assistant: c"),
        ("a", "He wrote:\n\nHuman: b\n\nAssistant: c", "c"),
        ("a", "", "c"),
        ("a", "x y", "x  y"),
        (" a ", " b ", " c "),
    ],
)
def test_text_is_taken_as_it_is(prompt: str, chosen: str, rejected: str) -> None:
    expected = ([user(prompt)], [assistant(chosen)], [assistant(rejected)])
    assert parse_preference({"prompt": prompt, "chosen": chosen, "rejected": rejected}) == expected
    given = {"prompt": expected[0], "chosen": expected[1], "rejected": expected[2]}
    assert parse_preference(given) == expected
    whole = {"chosen": expected[0] + expected[1], "rejected": expected[0] + expected[2]}
    assert parse_preference(whole) == parse_preference({"prompt": prompt} | whole) == expected


def test_turns_that_both_share_belong_to_the_prompt_of_one_question() -> None:
    first, second = (
        [user("a"), assistant("x"), user("b"), assistant("y")],
        [*CONVERSATION[:1], assistant("x"), user("b")],
    )
    for prompt in ("a", "b", [user("a")]):
        content = {"prompt": prompt, "chosen": first, "rejected": [*second, assistant("z")]}
        assert parse_preference(content) == (second, [assistant("y")], [assistant("z")])


@pytest.mark.parametrize(
    "content",
    [
        {"messages": CONVERSATION, "id": 3, "tools": None, "label": 0},
        {"messages": CONVERSATION, "prompt": "a", "prompt_id": "x", "chosen": CONVERSATION, "tools": []},
        {"messages": [user("a"), assistant("b") | {"weight": 1}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": "x"},
        {"conversations": CONVERSATION},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "b", "label": True},
        {"messages": CONVERSATION, "weight": 1.0},
        {"messages": CONVERSATION, "weight": "70 kg"},
        {"prompt": [user("a")], "completion": [assistant("b")]},
        {"prompt": "a", "completion": CONVERSATION},
        {"prompt": "a\n", "completion": CONVERSATION},
        {"prompt": [user("a")], "completion": CONVERSATION},
        {"prompt": HUMAN, "completion": " b"},
        {"prompt": "a", "completion": f"{HUMAN} b"},
    ],
)
def test_forms_of_conversations(content: Content) -> None:
    parsed = parse_conversation(content)
    assert shown(parsed) == CONVERSATION  # type: ignore[arg-type]


def test_pairs_of_sharegpt_are_read_as_their_message_says() -> None:
    question, right, wrong = (
        {"from": who, "value": text} for who, text in (("human", "a"), ("gpt", "b"), ("gpt", "c"))
    )
    r = {"conversations": [question], "chosen": right, "rejected": wrong}
    with pytest.raises(BadRecordError) as caught:
        parse_preference(r)
    written = eval(str(caught.value).partition("anew as ")[2], {"r": r})
    assert parse_preference(written) == ([user("a")], [assistant("b")], [assistant("c")])


LONG = [system("s"), user("a"), assistant("x"), user("b"), assistant("y")]


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": LONG[:4], "completion": LONG},
        {"prompt": LONG[1:4], "completion": LONG},
        {"prompt": LONG[:4], "completion": LONG[1:]},
        {"prompt": LONG[:4], "completion": LONG[3:]},
        {"prompt": LONG[:3], "completion": LONG[3:]},
        {"prompt": LONG[:2], "completion": LONG[2:]},
        {"prompt": LONG[:1], "completion": LONG[1:]},
        {"prompt": "a", "completion": LONG},
        {"prompt": "b", "completion": LONG},
        {"prompt": "b", "completion": LONG, "system": "s"},
        {"messages": LONG[1:], "system": "s"},
        {"messages": LONG, "system_prompt": "s"},
    ],
)
def test_longer_conversations_stand_once(content: Content) -> None:
    assert parse_conversation(content) == LONG


def test_a_prompt_of_helpsteer2_has_its_turns() -> None:
    prompt = "a\n<extra_id_1>Assistant\nx\n\ny\n<extra_id_1>User\nb\n"
    content = {"prompt": prompt, "response_1": "c", "response_2": "d", "preference_strength": -1}
    turns = [user("a"), assistant("x\n\ny"), user("b\n")]
    assert parse_preference(content) == (turns, [assistant("c")], [assistant("d")])
    content["prompt"] = f"<extra_id_1>User\n{prompt}"
    assert parse_preference(content) == (turns, [assistant("c")], [assistant("d")])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("<extra_id_0>System\nbe\n<extra_id_1>User\nhi", "has <extra_id_0> where no turn"),
        ("hi\n<extra_id_1>System\nyo\n<extra_id_1>User\nq", "has <extra_id_1> where no turn"),
        ("<extra_id_0>System\nbe", "has <extra_id_0> where no turn"),
        ("a\n<extra_id_1>User\nb", "not the user's and the assistant's in turn"),
    ],
)
def test_other_marks_of_helpsteer2_are_refused(prompt: str, words: str) -> None:
    content = {"prompt": prompt, "response_1": "c", "response_2": "d", "preference_strength": -1}
    with pytest.raises(BadRecordError, match=words):
        parse_preference(content)


def test_a_pair_of_chosen_and_rejected_is_one_whatever_else_it_keeps() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    others = {"response_1": "c", "response_2": "b", "preference_strength": -1}
    others |= {"response_0": "c", "better_response_id": 0}
    assert parse_preference(pair | others) == parse_preference(pair)


def test_an_id_may_be_a_float_as_columns_with_gaps_are() -> None:
    content = {"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 1.0}
    assert parse_preference(content) == ([user("a")], [assistant("c")], [assistant("b")])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"context": "a", "response1": "b", "response2": "c", "overall_preference": 0}, "tie"),
        ({"context": "a", "response1": "b", "response2": "b", "overall_preference": 1}, "identical"),
        ({"prompt": "a", "response_1": "b", "response_2": "c", "preference_strength": 0}, "tie"),
        ({"prompt": "a", "response_0": "b", "response_1": "b", "better_response_id": 0}, "identical"),
        ({"context": "a", "completions": ranked(1, 1)}, "tie"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 7.5, "score_rejected": 7.5}, "tie"),
        ({"context": "a", "completions": ranked(0, 1, answers=("b", "b"))}, "identical"),
        ({"instruction": "a", "completions": [{"response": text, "overall_score": 3} for text in "bc"]}, "tie"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "identical"),
        ({"prompt": "a", "chosen": CONVERSATION, "rejected": "b"}, "identical"),
        ({"chosen": CONVERSATION, "rejected": CONVERSATION}, "identical"),
        ({"chosen": CONVERSATION, "rejected": [user("a "), assistant("b")]}, "identical"),
        ({"chosen": f"{HUMAN} b", "rejected": f"{HUMAN} b"}, "identical"),
    ],
)
def test_pairs_that_teach_nothing(content: Content, why: str) -> None:
    with pytest.raises(UndecidedPairError) as caught:
        parse_preference(content)
    assert caught.value.why == why


ASKED = {"prompt": "a", "rejected": [user("a"), assistant("c")]}
COMPARED = {"context": "a", "response1": "b", "response2": "c"}
BY_NUMBER = {"prompt": "a", "response_0": "b", "response_1": "c"}


@pytest.mark.parametrize(
    ("parse", "content", "words"),
    [
        (parse_conversation, {"text": "a", "id": 1}, "neither messages nor prompt and completion; it has text, id"),
        (parse_conversation, {}, "it has no key"),
        (parse_conversation, {"messages": []}, "messages is not a list of messages"),
        (parse_conversation, {"messages": "a"}, "messages is not a list of messages"),
        (parse_conversation, {"messages": dialogue(CONVERSATION)}, "messages is not a list of messages"),
        (parse_conversation, {"messages": [user("a")]}, "no assistant turn to learn"),
        (parse_conversation, {"messages": [assistant("a")]}, "begins with an assistant turn"),
        (parse_conversation, {"messages": [{"role": "user"}]}, "a message without text in 'content'"),
        (parse_conversation, {"messages": [{"from": "human", "said": "a"}]}, "'content'; it has from, said"),
        (parse_conversation, {"conversations": [{"from": "tools", "value": "a"}]}, "the role 'tools'; roles are"),
        (
            parse_preference,
            {"conversations": [], "chosen": {}, "rejected": {}},
            "a pair in ShareGPT's form; write each",
        ),
        (parse_conversation, {"messages": ["a", "b"]}, "a message without text in 'content'$"),
        (
            parse_conversation,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "of parts, those of text alone are read, and it has image_url",
        ),
        (parse_conversation, {"messages": [{"role": "user", "content": []}]}, "text alone are read, and it has none"),
        (
            parse_conversation,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}, "a"]}]},
            "text alone are read, and it has none, text",
        ),
        (parse_conversation, {"messages": [{"role": "bot", "content": "a"}]}, "the role 'bot'; roles are system"),
        (parse_conversation, {"messages": [user("a"), assistant("b") | {"weight": 0}]}, "turn of weight 0"),
        (parse_conversation, {"messages": [user("a"), assistant("b") | {"weight": 0.5}]}, "turn of weight 0.5"),
        (parse_conversation, {"messages": CONVERSATION, "functions": [{"name": "f"}]}, "has functions, which the chat"),
        (parse_conversation, {"messages": CONVERSATION, "images": ["x.png"]}, "has images, which the chat"),
        (
            parse_conversation,
            {"messages": [user("a") | {"images": ["x.png"]}, assistant("b")]},
            "has a message with images; text alone is read",
        ),
        (parse_conversation, {"messages": [user("a"), assistant("b") | {"train": False}]}, "turn with train false"),
        (parse_conversation, {"messages": CONVERSATION, "chat_template_kwargs": {"a": 1}}, "has chat_template_kwargs"),
        (parse_conversation, {"messages": LONG, "system": "other"}, "two different system prompts"),
        (parse_conversation, {"messages": CONVERSATION, "system": ["s"]}, "system is not text"),
        (parse_conversation, {"prompt": 3, "completion": "b"}, "prompt is not a list of messages or text"),
        (parse_conversation, {"prompt": None, "completion": "b"}, "prompt is not a list of messages or text"),
        (parse_conversation, {"prompt": "a", "completion": "b", "label": False}, "label false"),
        (parse_conversation, {"messages": CONVERSATION, "label": False}, "label false"),
        (parse_conversation, {"messages": CONVERSATION, "weight": 0}, "has the weight 0, and"),
        (parse_conversation, {"messages": CONVERSATION, "weight": math.nan}, "has the weight nan, and"),
        (parse_conversation, {"prompt": "a", "completion": "b", "weight": 0.5}, "has the weight 0.5, and"),
        (parse_preference, {"prompt": "q", "chosen": "a", "rejected": "b", "weight": 0}, "has the weight 0, and"),
        (parse_preference, {"prompt": "q", "chosen": "a", "rejected": "b", "label": False}, "label false"),
        (parse_conversation, {"prompt": "a", "completions": ["b"], "labels": [True]}, "has neither messages nor"),
        (parse_conversation, {"prompt": "z", "completion": CONVERSATION}, "does not begin with the prompt"),
        (parse_conversation, {"prompt": [user("z")], "completion": LONG}, "does not begin with the prompt"),
        (parse_conversation, {"prompt": "a", "completion": [user("a")]}, "no assistant turn to learn"),
        (parse_conversation, {"prompt": "a", "completion": [assistant("hi"), *CONVERSATION]}, "would stand twice"),
        (parse_conversation, {"prompt": [system("t"), user("a")], "completion": LONG}, "two different system prompts"),
        (parse_preference, {"messages": CONVERSATION}, "neither chosen and rejected nor another form of a pair"),
        (parse_preference, {"question": "a", "response_j": "b", "response_k": "c"}, "it has question, response_j"),
        (parse_preference, COMPARED, "it has context, response1, response2"),
        (parse_preference, {"prompt": "a", "chosen": "b", "rejected": None}, "rejected is not a list"),
        (parse_preference, TEXT_PAIR, "chosen is text without a prompt"),
        (parse_preference, {"chosen": "The sky is blue.", "rejected": "The sky is green."}, "text without a prompt"),
        (parse_preference, TEXT_PAIR | {"question": "a", "input": "d"}, "text without a prompt"),
        (parse_preference, {"system": "s", "chosen": [assistant("b")], "rejected": [assistant("c")]}, "begin alike"),
        (parse_preference, {"chosen": CONVERSATION, "rejected": CONVERSATION + LONG[3:]}, "chosen adds no assistant"),
        (parse_preference, {"chosen": CONVERSATION, "rejected": [user("c"), assistant("b")]}, "do not begin alike"),
        (
            parse_preference,
            {"chosen": [system("s"), *CONVERSATION], "rejected": [system("s"), user("c"), assistant("b")]},
            "chosen and rejected do not answer the same prompt: chosen goes on with a user turn",
        ),
        (
            parse_preference,
            {"chosen": LONG[1:], "rejected": [*LONG[1:3], user("z"), assistant("y")]},
            "chosen and rejected do not answer the same prompt",
        ),
        (
            parse_preference,
            ASKED | {"chosen": [user("z"), assistant("b")]},
            "chosen holds a conversation that does not",
        ),
        (parse_preference, ASKED | {"prompt": "z", "chosen": CONVERSATION}, "does not begin with the prompt"),
        (parse_preference, ASKED | {"prompt": "z", "chosen": "b"}, "rejected holds a conversation that does not"),
        (parse_preference, ASKED | {"chosen": [user("a")]}, "chosen adds no assistant turn"),
        (parse_preference, ASKED | {"chosen": [user("a"), user("b"), assistant("b")]}, "goes on with a user turn"),
        (parse_preference, ASKED | {"chosen": [system("s"), *CONVERSATION]}, "have different system prompts"),
        (
            parse_preference,
            {
                "prompt": "a",
                "chosen": [system("s"), *CONVERSATION],
                "rejected": [system("t"), user("a"), assistant("c")],
            },
            "have different system prompts",
        ),
        (
            parse_preference,
            {"prompt": [system("t"), user("a")], "chosen": [system("s"), *CONVERSATION], "rejected": "c"},
            "two different system prompts",
        ),
        (
            parse_preference,
            {
                "prompt": "a",
                "chosen": [assistant("hi"), *CONVERSATION],
                "rejected": [assistant("hi"), *ASKED["rejected"]],
            },
            "chosen and rejected have the prompt after an assistant turn",
        ),
        (parse_preference, TEXT_PAIR | {"prompt": CONVERSATION}, "ends with an assistant turn"),
        (parse_preference, TEXT_PAIR | {"prompt": f"{HUMAN} Sure,"}, "ends with an assistant turn"),
        (parse_preference, {"prompt": "a", "chosen": [], "rejected": "c"}, "chosen is not a list of messages or text"),
        (parse_preference, {"chosen": f"{HUMAN} b", "rejected": "\n\nHuman: z\n\nAssistant: b"}, "do not begin alike"),
        (parse_preference, COMPARED | {"overall_preference": None}, "overall_preference is None"),
        (parse_preference, COMPARED | {"overall_preference": "1"}, "overall_preference is '1'"),
        (parse_preference, COMPARED | {"overall_preference": True}, "overall_preference is True"),
        *(
            (parse_preference, BY_NUMBER | {"better_response_id": better}, f"better_response_id is {better}, not 0 for")
            for better in (None, True, 2, -1)
        ),
        (parse_preference, COMPARED | {"overall_preference": float("nan")}, "overall_preference is nan"),
        (parse_preference, COMPARED | {"overall_preference": 1, "context": None}, "context is not a list"),
        (
            parse_preference,
            {"input": "a", "preferred_output": "b", "non_preferred_output": "c"},
            "input.messages is not",
        ),
        (
            parse_preference,
            {
                "input": {"messages": [user("a")], "functions": [{}]},
                "preferred_output": "b",
                "non_preferred_output": "c",
            },
            "has functions",
        ),
        (parse_preference, {"context": [user("a")], "completions": []}, "not two with a whole number as rank"),
        *(
            (parse_preference, {"context": [user("a")], "completions": ranked(*ranks)}, "not two with a whole number")
            for ranks in (([0], 1), (False, True), (0, None), (0, 1, 1), (0.0, 1))
        ),
        *(
            (parse_preference, {"instruction": "a", "completions": completions}, "not several with a response")
            for completions in (
                None,
                ["b", "c"],
                [{"response": "b", "overall_score": 1}],
                [{"response": "b", "overall_score": 1}, {"response": "c"}],
                [{"response": "b", "overall_score": 1}, {"response": "c", "overall_score": float("nan")}],
            )
        ),
        (
            parse_preference,
            {"instruction": "a", "completions": [{"overall_score": score} for score in (1, 2)]},
            "response of the highest score is not a list of messages or text",
        ),
    ],
)
def test_bad_records(parse: Any, content: Content, words: str) -> None:
    with pytest.raises(BadRecordError, match=words):
        parse(content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"prompt": "The sky is", "chosen": "The sky is blue.", "rejected": "The sky is\ngreen."}, True),
        ({"prompt": " a b\n", "completion": "a b c"}, True),
        ({"context": "a b", "response1": "a b c", "response2": "a b d"}, True),
        ({"prompt": "a b", "response_1": "a b c", "response_2": "a b d"}, True),
        ({"prompt": "a b", "response_0": "a b c", "response_1": "a b d"}, True),
        ({"prompt": "a b", "chosen": "a b c", "rejected": "d"}, False),
        ({"prompt": "a b", "completion": "c"}, False),
        ({"prompt": "", "completion": "c"}, False),
        ({"prompt": HUMAN, "chosen": f"{HUMAN} b", "rejected": f"{HUMAN} c"}, False),
        ({"prompt": [user("a")], "completion": "a b"}, None),
        ({"prompt": "a", "completion": [assistant("a b")]}, None),
        ({"messages": CONVERSATION}, None),
    ],
)
def test_text_that_repeats_its_prompt(content: Content, expected: bool | None) -> None:
    assert repeats_prompt(content) is expected


def test_a_message_that_only_calls_tools_has_an_empty_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    assert parse_conversation({"messages": [user("a"), call]}) == [user("a"), {**call, "content": ""}]
    with pytest.raises(BadRecordError, match="a message without text in 'content'"):
        parse_conversation({"messages": [user("a"), {**call, "tool_calls": []}]})


def test_parts_of_text_are_one_text() -> None:
    """OpenAI's form of a message's content."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    said = [user(parts), assistant("c")]  # type: ignore[arg-type]
    assert parse_conversation({"messages": said}) == [user("a b"), assistant("c")]
    shared = [{"from": "human", "value": parts}, {"from": "gpt", "value": "c"}]
    assert parse_conversation({"conversations": shared}) == [user("a b"), assistant("c")]


TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    ("value", "tools"),
    [
        (TOOLS, TOOLS),
        ('[{"type": "function", "function": {"name": "add"}}]', TOOLS),
        ([], None),
        (None, None),
        ("", None),
    ],
)
def test_tools_are_a_list_or_its_json(value: object, tools: object) -> None:
    assert parse_tools({"tools": value}) == parse_tools({"input": {"messages": [], "tools": value}}) == tools
    assert parse_tools({}) is None


@pytest.mark.parametrize("value", ["[", "{}x", {"name": "add"}, ["add"], 3])
def test_tools_of_another_form_are_refused(value: object) -> None:
    with pytest.raises(BadRecordError, match="has tools that are"):
        parse_tools({"tools": value})


@pytest.mark.parametrize(
    ("record", "hint"),
    [
        ({"prompt": "x", "choosen": "a", "rejected": "b"}, "; did you mean 'chosen' by choosen?"),
        ({"promt": "x", "chosen": "a", "rejected": "b"}, "; did you mean 'prompt' by promt?"),
        ({"prompt": "x", "Chosen": "a", "rejectd": "b"}, "'chosen' by Chosen?; did you mean 'rejected' by rejectd?"),
        ({"prompt": "x", "chosen_model": "a", "choosen": "b"}, "choosen; did you mean 'chosen' by choosen?"),
        ({"prompt": "x", "chosen": "a", "rejected": 3, "rejected_by": "c"}, "rejected"),
        ({"prompt": "x", "answer": "a", "rejected": "b"}, "it has prompt, answer, rejected"),
        ({"prompt": "x", "chosen": 3, "rejected": "b"}, "chosen"),
    ],
)
def test_a_column_of_a_pair_that_is_misspelt_is_named(record: dict[str, object], hint: str) -> None:
    with pytest.raises(BadRecordError) as error:
        parse_preference(record)
    assert hint in str(error.value)
    assert ("did you mean" in str(error.value)) == ("did you mean" in hint)
