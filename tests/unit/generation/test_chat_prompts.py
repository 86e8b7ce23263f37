"""Tokens of chats: what transformers makes of them, and behind a drawn turn what ChatML is by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers  # type: ignore[import-untyped]
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.generation.chat_prompts import BadChatError, ChatPrompts

Message = dict[str, Any]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|observation|>")
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("<", "/"), ("i", "n"), ("t", "h")]
TURN = "'<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n'"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}{% set text = m['content'] %}{{ " + TURN + " }}{% endfor %}" + PROMPT
STRIPPED = PLAIN.replace("m['content']", "m['content'] | trim")
OTHER_PROMPT = PLAIN.replace("assistant\n' }}", "assistant\n<think>\n' }}")
WITHOUT_DEVELOPER = PLAIN.replace("m in messages", "m in messages if m['role'] != 'developer'")
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
ANSWER = "{% set text = text.split('</think>')[-1].lstrip('\n') %}"
WITHOUT_THINKING = LAST_QUESTION + PLAIN.replace(
    "{{ ", "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}" + ANSWER + "{% endif %}{{ ", 1
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% set text = m['content'] %}{% if m['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + text + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.tool_calls %}{{ '<|im_start|>assistant' }}{% if text %}{{ '\n' + text }}{% endif %}"
    '{% for call in m.tool_calls %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ " + TURN + " }}{% endif %}{% endfor %}" + PROMPT
)
UNCALLED = "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
CALLED = TOOLS.replace("{{ '\n<tool_response>", UNCALLED + "{{ '\n<tool_response>")
AT_THE_QUESTION = "{% if loop.index0 == ns.last %}{{ '[TOOLS]' }}{% endif %}"
MOVED = LAST_QUESTION + CALLED.partition("<|im_end|>\n{% endif %}")[2].replace(
    "{{ " + TURN, AT_THE_QUESTION + "{{ " + TURN
)
"""Writes its tools before the last question, so that earlier text changes, and answers of tools behind calls alone."""
CUT_OFF = 104
"""A token that ends no response."""
ASSISTANT = "<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"ä": {}}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes with a few merges, so that a text can be cut in several ways."""
    path, letters = tmp_path_factory.mktemp("merging"), bytes_to_unicode()
    names = [letters[byte] for byte in range(256)] + ["".join(pair) for pair in MERGES]
    tokenizer = FastTokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names_of_tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": PLAIN}
    (path / "tokenizer_config.json").write_text(json.dumps(config | names_of_tokens))
    return path


class Chats:
    """A tokenizer, and what transformers makes of a chat with one of its own."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer, self._reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
        self.ids = {text: self.encode(text)[0] for text in SPECIAL}
        self.end = self.ids["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.batch_decode([ids], skip_special_tokens=False)[0]

    def prompts(self, template: str | None = None, ends: Sequence[str] = ("<|im_end|>", "<|endoftext|>")) -> Any:
        return ChatPrompts(self.tokenizer, [self.ids[end] for end in ends], template)

    def rendered(self, template: str, messages: Sequence[Message], **given: Any) -> list[int]:
        ids: list[int] = self._reference.apply_chat_template(
            list(messages), chat_template=template, add_generation_prompt=True, return_dict=False, **given
        )
        return ids


@pytest.fixture(scope="module")
def chats(folder: Path) -> Chats:
    return Chats(folder)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **others: Any) -> Message:
    return {"role": "assistant", "content": text, **others}


def drawn(prompt: Sequence[int], tokens: Sequence[int], text: str = "", **others: Any) -> Message:
    ids = {"prompt_token_ids": list(prompt), "generation_token_ids": list(tokens)}
    return said(text, **ids, generation_log_probs=[-0.5] * len(tokens), **others)


def without_ids(messages: Sequence[Message]) -> list[Message]:
    return [{key: value for key, value in each.items() if "token_ids" not in key} for each in messages]


def chatml(messages: Sequence[Message], *, keeps_thinking: bool = True) -> str:
    """By hand."""
    question = max((place for place, each in enumerate(messages) if each["role"] == "user"), default=-1)
    parts = []
    for place, each in enumerate(messages):
        text = each["content"]
        if not keeps_thinking and each["role"] == "assistant" and place < question:
            text = text.split("</think>")[-1].lstrip("\n")
        parts.append(f"<|im_start|>{each['role']}\n{text}<|im_end|>\n")
    return "".join(parts)


TEXTS = st.sampled_from(["THE-TURN-0", "<think>\nhm\n</think>\n\nhello"]) | st.text("hello</ \n\té€{}", max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """One to four turns of the model, and what stands before, between and behind them."""
    turns = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        turns += [user(draw(TEXTS)), said(draw(TEXTS))]
    return turns if draw(st.booleans()) else [*turns, user(draw(TEXTS))]


@pytest.mark.parametrize("template", [PLAIN, STRIPPED, WITHOUT_THINKING, TOOLS, OTHER_PROMPT])
@settings(max_examples=30, deadline=None)
@given(messages=conversations())
def test_without_drawn_tokens_a_chat_is_as_transformers_encodes_it(
    chats: Chats, template: str, messages: list[Message]
) -> None:
    assert chats.prompts(template)(messages) == chats.rendered(template, messages)


def test_without_a_template_the_tokenizers_own_counts(chats: Chats) -> None:
    messages = [user("hello"), said("hi"), user("there")]
    assert chats.prompts()(messages) == chats.encode(chatml(messages) + ASSISTANT)


@pytest.mark.parametrize("keeps_thinking", [True, False])
@settings(max_examples=80, deadline=None)
@given(messages=conversations(), data=st.data())
def test_the_last_drawn_turn_and_all_before_it_stay_as_they_were_drawn(
    chats: Chats, keeps_thinking: bool, messages: list[Message], data: st.DataObject
) -> None:
    """Whatever was drawn, also where it decodes to another text than the message has."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = data.draw(st.sets(st.sampled_from(turns), min_size=1), label="drawn")
    tokens = st.lists(st.integers(0, chats.ids["<|endoftext|>"] - 1), max_size=5)
    chat = list(messages)
    for place in chosen:
        text = messages[place]["content"]
        ids = data.draw(st.sampled_from([chats.encode(text), list(text.encode())]) | tokens, label="tokens")
        end = data.draw(st.sampled_from([[chats.end], [chats.ids["<|endoftext|>"]], [CUT_OFF]]), label="end")
        chat[place] = drawn([place, *data.draw(tokens, label="prompt")], ids + end, text)
    last = max(chosen)
    ids = chat[last]["prompt_token_ids"] + chat[last]["generation_token_ids"]
    closing = "<|im_end|>\n" if ids[-1] == CUT_OFF else "\n"
    behind = closing + chatml(messages[last + 1 :], keeps_thinking=keeps_thinking) + ASSISTANT
    template = PLAIN if keeps_thinking else WITHOUT_THINKING
    assert chats.prompts(template)(chat) == ids + chats.encode(behind)


def test_what_an_agent_says_behind_a_turn_with_its_ids_is_no_turn(chats: Chats) -> None:
    """NeMo-Gym's converter writes the ids of the turn before to it."""
    turn = drawn([1, 2], [*chats.encode("hi"), chats.end], "hi")
    messages = [
        {"role": "user", "content": "FIRST"},
        turn,
        {"role": "user", "content": "SECOND"},
        turn | {"content": "INJECTED"},
        {"role": "user", "content": "THIRD"},
    ]
    plain = [{key: message[key] for key in ("role", "content")} for message in messages]
    ids = turn["prompt_token_ids"] + turn["generation_token_ids"]
    assert chats.prompts(PLAIN)(messages) == ids + chats.encode("\n" + chatml(plain[2:]) + ASSISTANT)


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=4))
def test_an_episode_reads_as_the_rendering_and_each_prompt_continues_the_one_before(
    chats: Chats, turns: list[tuple[str, str, bool]]
) -> None:
    """Tokens are cut as the tokenizer does, or into bytes."""
    prompts, messages = chats.prompts(PLAIN), list[Message]()
    seen: list[int] = []
    for question, answer, is_in_bytes in turns:
        messages.append(user(question))
        ids = prompts(messages)
        assert ids[: len(seen)] == seen
        assert chats.decode(ids) == chats.decode(chats.rendered(PLAIN, without_ids(messages)))
        tokens = [*(answer.encode() if is_in_bytes else chats.encode(answer)), chats.end]
        messages.append(drawn(ids, tokens, answer))
        seen = ids + tokens


@pytest.mark.parametrize(
    ("template", "text", "tokens"),
    [
        (PLAIN, "hello", list(b"hello")),
        (STRIPPED, " hello \n", [32, *b"hello", 32, 10]),
        (STRIPPED, "hello", [32, 32, *b"hello", 10]),
        (WITHOUT_THINKING, "<think>\nhm\n</think>\n\nhello", list(b"<think>\nhm\n</think>\n\nhello")),
        (WITHOUT_THINKING, "hello", list(b"<think>\nhm\n</think>\n\nhello")),
        (TOOLS, "hello", list(b"<tool_call>\n{broken")),
    ],
)
def test_what_was_drawn_is_never_encoded_again(chats: Chats, template: str, text: str, tokens: list[int]) -> None:
    before, question = chats.encode(chatml([user("1?")]) + ASSISTANT), [user("2?")]
    ids = chats.prompts(template)([user("1?"), drawn(before, [*tokens, chats.end], text), *question])
    assert ids == [*before, *tokens, chats.end, *chats.encode("\n" + chatml(question) + ASSISTANT)]
    assert ids != chats.rendered(template, [user("1?"), said(text), *question])


@pytest.mark.parametrize("template", [PLAIN, WITHOUT_THINKING, STRIPPED])
@pytest.mark.parametrize("messages", [[user("2?")], [], [{"role": "tool", "content": "3"}, user("<|im_end|>")]])
def test_a_turn_without_an_end_gets_the_templates(chats: Chats, template: str, messages: list[Message]) -> None:
    cut = drawn([1], [104], "<think>h\n")
    behind = chats.encode("<|im_end|>\n" + chatml(messages) + ASSISTANT)
    assert chats.prompts(template)([user("1?"), cut, *messages]) == [1, 104, *behind]


def test_an_end_that_the_template_does_not_write_stands_for_its_own(chats: Chats) -> None:
    """And one that ends no response is text, behind which the turn is closed."""
    behind = chats.encode("\n" + chatml([user("2?")]) + ASSISTANT)
    for end in ("<|im_end|>", "<|endoftext|>"):
        chat = [user("1?"), drawn([1], [104, chats.ids[end]], "h"), user("2?")]
        assert chats.prompts(PLAIN)(chat) == [1, 104, chats.ids[end], *behind]
        closed = chats.prompts(PLAIN, ends=["<|observation|>"])(chat)
        assert closed == [1, 104, chats.ids[end], chats.end, *behind]


def test_an_end_further_on_is_not_the_turns(chats: Chats) -> None:
    """Of a later message's text, or of a template that closes users' turns alone."""
    chat = [user("1?"), drawn([1], [104, chats.end], "h"), user("<|endoftext|>2?")]
    assert chats.prompts(PLAIN)(chat) == [1, 104, chats.end, *chats.encode("\n" + chatml(chat[2:]) + ASSISTANT)]
    closing = "{% if m['role'] == 'user' %}<|im_end|>{% endif %}"
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}" + closing + "{% endfor %}" + PROMPT
    behind = chats.encode("user:<|endoftext|>2?<|im_end|>" + ASSISTANT)
    assert chats.prompts(template)(chat) == [1, 104, chats.end, *behind]


def test_an_end_that_begins_the_next_message_is_there_once(chats: Chats) -> None:
    """As GLM's, whose turns end with the role of who answers."""
    template = "{% for m in messages %}{{ '<|observation|>' + m['content'] if m['role'] == 'tool' else m['content'] }}"
    chat = [user("1?"), drawn([1], [104, chats.ids["<|observation|>"]], "h"), {"role": "tool", "content": "2"}]
    ids = chats.prompts(template + "{% endfor %}", ends=["<|endoftext|>", "<|observation|>"])(chat)
    assert ids == [1, 104, chats.ids["<|observation|>"], *chats.encode("2")]


def test_of_several_drawn_turns_the_last_one_counts(chats: Chats) -> None:
    chat = [user("1?"), drawn([1], [2], "one"), user("2?"), drawn([3], [4, chats.end], "two"), user("3?")]
    behind = chats.encode("\n" + chatml([user("3?")]) + ASSISTANT)
    for template in (PLAIN, WITHOUT_THINKING):
        assert chats.prompts(template)(chat) == [3, 4, chats.end, *behind]
        chat[1] |= {"generation_token_ids": [9, 9], "prompt_token_ids": []}
        assert chats.prompts(template)(chat) == [3, 4, chats.end, *behind]
        ended = [*chat[:3], said("two"), user("3?")]
        first = chats.encode("<|im_end|>\n" + chatml(ended[2:]) + ASSISTANT)
        assert chats.prompts(template)(ended) == [9, 9, *first]


def call(name: str, arguments: object) -> Message:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": [1, 2], "b": "ä"}', {"a": [1, 2], "b": "ä"}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": 1', '{"a": 1'),
        ("add two", "add two"),
    ],
)
def test_arguments_of_tools_are_values_to_the_template_where_they_are_json(
    chats: Chats, arguments: object, value: object
) -> None:
    def chat(of_call: object, content: object) -> list[Message]:
        calls = [call("add", of_call), call("add", of_call)]
        answers = [{"role": "tool", "content": text, "tool_call_id": "call_1"} for text in ("3", "4")]
        return [user("1 + 2?"), {"role": "assistant", "content": content, "tool_calls": calls}, *answers]

    given_messages = chat(arguments, None)
    ids = chats.prompts(TOOLS)(given_messages, [TOOL])
    assert ids == chats.rendered(TOOLS, chat(value, ""), tools=[TOOL])
    assert json.dumps(value, ensure_ascii=False) in chats.decode(ids)
    assert given_messages == chat(arguments, None), "the caller's messages stay"


@pytest.mark.parametrize("template", [TOOLS, CALLED])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_drawn_call_of_a_tool_stays_and_its_answer_follows(chats: Chats, template: str, is_cut: bool) -> None:
    prompts, question = chats.prompts(template), user("1 + 2?")
    before = prompts([question], [TOOL])
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tokens = [*text.encode(), *([] if is_cut else [chats.end])]
    calls, answer = [call("add", '{"a": 1}')], {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    ids = prompts([question, drawn(before, tokens, tool_calls=calls), answer], [TOOL])
    assert ids[: len(before + tokens)] == before + tokens
    rendered = chats.rendered(template, [question, said("", tool_calls=[call("add", {"a": 1})]), answer], tools=[TOOL])
    assert chats.decode(ids) == chats.decode(rendered)


def test_a_drawn_call_stays_where_a_later_question_changes_what_is_before_it(chats: Chats) -> None:
    prompts, question = chats.prompts(MOVED), user("1 + 2?")
    before = prompts([question], [TOOL])
    assert chats.decode(before).startswith("[TOOLS]")
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tokens = [*text.encode(), chats.end]
    turn = drawn(before, tokens, tool_calls=[call("add", '{"a": 1}')])
    ids = prompts([question, turn, {"role": "tool", "content": "3", "tool_call_id": "call_1"}, user("and?")], [TOOL])
    assert ids[: len(before + tokens)] == before + tokens
    behind = chats.decode(ids[len(before + tokens) :])
    told = "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    assert behind == f"\n{told}[TOOLS]<|im_start|>user\nand?<|im_end|>\n{ASSISTANT}"


def test_arguments_that_are_nested_without_end_stay_text(chats: Chats) -> None:
    """A model writes them: they may not end the server's thread."""
    deep = "[" * 100_000
    lengths = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | length }}{% endfor %}"
    ids = chats.prompts("{% for m in messages %}" + lengths + "{% endfor %}")(
        [user("1?"), said("", tool_calls=[call("add", deep)])]
    )
    assert chats.decode(ids) == "100000"


def test_no_calls_are_as_none(chats: Chats) -> None:
    template = PLAIN.replace("{{ ", "{% if m.tool_calls is defined %}calls{% endif %}{{ ", 1)
    nothing: tuple[object, ...] = ([], None)
    for calls in nothing:
        ids = chats.prompts(template)([user("1?"), said("h", tool_calls=calls), user("2?")])
        assert "calls" not in chats.decode(ids)
    assert "calls" in chats.decode(chats.prompts(template)([said("h", tool_calls=[call("add", "{}")])]))


def test_parts_of_text_are_lines(chats: Chats) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    ids = chats.prompts()([{"role": "user", "content": parts}, {"role": "assistant", "content": None}, user("")])
    assert ids == chats.rendered(PLAIN, [user("hello\nthere"), said(""), user("")])
    assert chats.prompts()([{"role": "user", "content": []}]) == chats.rendered(PLAIN, [user("")])


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": {"url": "data:"}}], ["a text"], [3], {"text": "h"}, 3]
)
@pytest.mark.parametrize("beside", [[], [{"type": "text", "text": "hello"}]])
def test_what_is_no_text_is_refused(chats: Chats, content: Any, beside: list[Message]) -> None:
    content = [*beside, *content] if isinstance(content, list) else content
    with pytest.raises(BadChatError, match="neither text nor parts of text"):
        chats.prompts()([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("template", "said_why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "refuses the messages: .*str"),
        ("{{ messages[7]['content'] }}", "refuses the messages: .*no element 7"),
        ("{% if x %}", "refuses the messages: .*end of template"),
        ("{% for n in range(99999) %}{% for m in range(99999) %}{% endfor %}{% endfor %}", "refuses the messages"),
    ],
)
def test_a_template_that_raises_refuses_the_chat(chats: Chats, template: str, said_why: str) -> None:
    with pytest.raises(BadChatError, match=said_why):
        chats.prompts(template)([user("h")])


def test_a_template_that_leaves_a_drawn_turn_out_refuses_the_chat(chats: Chats) -> None:
    last = PLAIN.replace("m in messages", "m in messages[-1:]")
    with pytest.raises(BadChatError, match="leaves out a turn of the model"):
        chats.prompts(last)([user("1?"), drawn([1], [2], "h"), user("2?")])


def test_a_role_that_the_template_leaves_out_is_told_once(chats: Chats) -> None:
    developer = {"role": "developer", "content": "Be brief."}
    prompts = chats.prompts(WITHOUT_DEVELOPER)
    assert prompts([user("1?")]) == prompts([{**developer, "content": ""}, user("1?")])
    assert prompts.notices == []
    for _ in range(2):
        assert prompts([developer, user("1?"), developer]) == prompts([user("1?")])
    (told,) = prompts.notices
    assert told.startswith("the chat template leaves out messages of the role developer, which the model never sees")


def test_a_template_that_prints_every_role_is_not_told_of(chats: Chats) -> None:
    messages = [{"role": role, "content": "h"} for role in ("system", "developer", "user", "assistant", "tool", "user")]
    for template in (PLAIN, WITHOUT_THINKING, TOOLS):
        prompts = chats.prompts(template)
        prompts(messages)
        assert prompts.notices == []


def test_variables_of_a_call_count_before_those_of_all(chats: Chats) -> None:
    prompts = ChatPrompts(chats.tokenizer, [chats.end], "{{ a }} {{ b }} {{ eos_token }}", {"a": 1, "b": 2})
    assert chats.decode(prompts([user("h")])) == "1 2 <|im_end|>"
    assert chats.decode(prompts([user("h")], variables={"b": 3, "eos_token": "x"})) == "1 3 x"


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|observation|>", "<|im_start|>"])
@pytest.mark.parametrize(("role", "mark"), [("user", "<|im_start|>"), ("tool", "<|observation|>")])
def test_an_end_stands_for_the_next_message_only_where_it_is_its_role(
    chats: Chats, end: str, role: str, mark: str
) -> None:
    """As GLM's template, which closes no turn."""
    marks = "{{ ('<|observation|>' if m['role'] == 'tool' else '<|im_start|>') + m['content'] }}"
    prompts = chats.prompts("{% for m in messages %}" + marks + "{% endfor %}", ends=[*SPECIAL])
    ids = prompts([user("1?"), drawn([1], [104, chats.ids[end]], "h"), {"role": role, "content": "2"}])
    assert ids == [1, 104, chats.ids[end], *chats.encode("2" if end == mark else mark + "2")]
