"""Forms of records, and which tokens of a conversation are learned."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.data.chat import BadRecordError, ChatEncoder, Row, parse_conversation, parse_preference
from nemo_rl_offload.data.tokenizer import load_tokenizer, make_byte_tokenizer
from nemo_rl_offload.errors import DataError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}[thought]{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(template: str | None) -> Any:
        folder: Path = tmp_path_factory.mktemp("bytes")
        make_byte_tokenizer(folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        return load_tokenizer(folder)

    return make


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Any) -> Any:
    return make_tokenizer(TEMPLATE)


def learned(tokenizer: Any, row: Row) -> str:
    pairs = zip(row.token_ids, row.is_learned, strict=True)
    return str(tokenizer.decode([token for token, is_learned in pairs if is_learned]))


TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("ab <>\né", max_size=6)), min_size=1, max_size=6
)


@given(turns=TURNS, num_given=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_assistant_turns_are_learned_with_their_end(
    tokenizer: Any, turns: list[tuple[str, str]], num_given: int
) -> None:
    turns = [("user", "a"), *turns]
    messages = [{"role": role, "content": text} for role, text in turns]
    row = ChatEncoder(tokenizer, None)(messages, num_given)
    assert tokenizer.decode(row.token_ids) == "".join(f"<{role}>{text}<|im_end|>\n" for role, text in turns)
    expected = [f"{text}<|im_end|>\n" for role, text in turns[num_given:] if role == "assistant"]
    assert learned(tokenizer, row) == "".join(expected)


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    encoder = ChatEncoder(tokenizer, None)
    assert learned(tokenizer, encoder([user("a"), assistant("b")])) == "[thought]b"
    with pytest.raises(BadRecordError, match="rewrites earlier ones; end the conversation after the turn to learn"):
        encoder([user("a"), assistant("b"), user("c"), assistant("d")])


def test_a_template_that_refuses(make_tokenizer: Any) -> None:
    encoder = ChatEncoder(make_tokenizer("{{ raise_exception('only users') }}"), None)
    with pytest.raises(BadRecordError, match="is refused by the chat template: only users"):
        encoder([user("a"), assistant("b")])


def test_prompt_template(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(None)
    encoder = ChatEncoder(tokenizer, "Q: {question}\nA:")
    row = encoder([user(" one? "), assistant(" 1")])
    assert tokenizer.decode(row.token_ids) == "Q: one?\nA: 1<|im_end|>"
    assert learned(tokenizer, row) == " 1<|im_end|>"
    with pytest.raises(BadRecordError, match="not one question and one answer"):
        encoder([user("a"), assistant("b"), user("c")])
    with pytest.raises(DataError, match=r"data\.prompt_template: null takes the tokenizer's chat template"):
        ChatEncoder(tokenizer, None)


CONVERSATION = [user("a"), assistant("b")]


@pytest.mark.parametrize(
    "content",
    [
        {"messages": CONVERSATION, "id": 3},
        {"prompt": "a", "completion": "b"},
        {"prompt": [user("a")], "completion": [assistant("b")]},
    ],
)
def test_forms_of_conversations(content: dict[str, Any]) -> None:
    assert parse_conversation(content) == CONVERSATION


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
        {
            "context": [user("a")],
            "completions": [
                {"rank": 1, "completion": [assistant("c")]},
                {"rank": 0, "completion": [assistant("b")]},
            ],
        },
    ],
)
def test_forms_of_preferences(content: dict[str, Any]) -> None:
    assert parse_preference(content) == ([user("a")], [assistant("b")], [assistant("c")])


def ranked(*ranks: Any) -> list[Any]:
    return [{"rank": rank, "completion": [assistant("b")]} for rank in ranks]


@pytest.mark.parametrize(
    ("parse", "content", "words"),
    [
        (parse_conversation, {"text": "a", "id": 1}, "neither messages nor prompt and completion; it has text, id"),
        (parse_conversation, {}, "it has no key"),
        (parse_conversation, {"messages": []}, "messages is not a list of messages"),
        (parse_conversation, {"messages": "a"}, "messages is not a list of messages"),
        (parse_conversation, {"messages": [user("a")]}, "no assistant turn to learn"),
        (parse_conversation, {"messages": [assistant("a")]}, "begins with an assistant turn"),
        (parse_conversation, {"messages": [{"role": "user"}]}, "a message without text in 'content'"),
        (parse_conversation, {"messages": [{"role": "bot", "content": "a"}]}, "the role 'bot'; roles are system"),
        (parse_conversation, {"prompt": 3, "completion": "b"}, "prompt is not a list of messages or text"),
        (parse_preference, {"messages": CONVERSATION}, "neither chosen and rejected nor context and completions"),
        (parse_preference, {"prompt": "a", "chosen": "b", "rejected": None}, "rejected is not a list"),
        (parse_preference, {"chosen": CONVERSATION, "rejected": CONVERSATION}, "chosen adds no assistant turn"),
        (parse_preference, {"chosen": CONVERSATION, "rejected": [user("c"), assistant("b")]}, "do not begin alike"),
        (parse_preference, {"context": [user("a")], "completions": []}, "not two with the rank 0"),
        *(
            (parse_preference, {"context": [user("a")], "completions": ranked(*ranks)}, "not two with the rank 0")
            for ranks in (([0], 1), (False, True), (0, None), (0, 1, 1))
        ),
    ],
)
def test_bad_records(parse: Any, content: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRecordError, match=words):
        parse(content)
