"""Tokens of conversations and what is learned of them, against what chat templates in public styles render."""

import copy
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_styles import CONVERSATIONS, SPECIAL, STYLES, Style, Turn, talk
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from nemo_rl_offload.config.tokenizer_files import read_tokenizer_files
from nemo_rl_offload.data.forms import BadRecordError
from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer
from nemo_rl_offload.data.tokenizer import added_tokens
from nemo_rl_offload.data.turns import ChatEncoder, Row, encode_observation
from nemo_rl_offload.errors import DataError
from nemo_rl_offload.specs.chat_template import renderer

CORPUS = [turn["content"] for turns in CONVERSATIONS.values() for turn in turns]
WORDS = ["Assistant: It is ASSISTANT: User: Falcon: ### Response:\n\n### Instruction:\n", *CORPUS]
Make = Callable[..., tuple[Any, tuple[int, ...]]]


def train_tokens(folder: Path, kind: str) -> None:
    """A byte-level tokenizer with merges, as most models have, or one that marks words (SentencePiece's, Llama-2's).

    Tokens of their own swallow blanks behind them in one that `swallows` (as Phi-3's do).
    """
    is_bytes = kind != "words"
    tokenizer = FastTokenizer(models.BPE(unk_token=None if is_bytes else "<unk>"))
    tokenizer.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if is_bytes
        else pre_tokenizers.Metaspace(prepend_scheme="first")
    )
    tokenizer.decoder = decoders.ByteLevel() if is_bytes else decoders.Metaspace(prepend_scheme="first")
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet() if is_bytes else sorted({*"".join(WORDS), *map(chr, range(32, 127)), "\n"})
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False, special_tokens=[] if is_bytes else ["<unk>"]
    )
    tokenizer.train_from_iterator(WORDS * 20, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=kind == "swallows") for text in SPECIAL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("bytes", "words", "swallows")}
    for kind, folder in folders.items():
        train_tokens(folder, kind)
        config = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 8, "num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 1}))

    def load(style: Style, kind: str) -> tuple[Any, tuple[int, ...]]:
        folder = folders[kind]
        ids = {
            token["content"]: token["id"]
            for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        }
        names = {"eos_token": style.eos, "bos_token": "<|bos|>", "chat_template": style.template}
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names})
        )
        generation = {"eos_token_id": [ids[text] for text in style.generation]} if style.generation else {}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        section = {"name": str(folder), "chat_template": "default", "chat_template_kwargs": style.kwargs}
        return load_policy_tokenizer({"model_name": str(folder), "tokenizer": section}, None)

    loaded: dict[tuple[str, str], tuple[Any, tuple[int, ...]]] = {}

    def load_once(style: Style, kind: str = "bytes", *, again: bool = False) -> tuple[Any, tuple[int, ...]]:
        key = (repr(style), kind)
        if again or key not in loaded:
            loaded[key] = load(style, kind)
        return loaded[key]

    return load_once


def learned(tokenizer: Any, row: Row) -> str:
    pairs = zip(row.token_ids, row.is_learned, strict=True)
    return str(tokenizer.decode([token for token, is_learned in pairs if is_learned]))


def contents(turns: list[Turn]) -> list[str]:
    return [turn["content"] for turn in turns if turn["role"] == "assistant"]


def cases() -> list[Any]:
    return [pytest.param(name, talk, id=f"{name}-{talk}") for name in STYLES for talk in CONVERSATIONS]


@pytest.mark.parametrize(("name", "talk_name"), cases())
def test_a_sample_is_the_templates_rendering_and_its_assistants_turns_are_learned(
    make: Make, name: str, talk_name: str
) -> None:
    style, turns = STYLES[name], CONVERSATIONS[talk_name]
    tokenizer, end_ids = make(style)
    encoder = ChatEncoder(tokenizer, None, end_ids)
    if talk_name in style.refuses:
        with pytest.raises(BadRecordError, match=r"generation prompt, which ends with|is refused by the chat template"):
            encoder(turns)
        return
    row = encoder(turns)
    assert row.token_ids == tokenizer.apply_chat_template(turns, return_dict=False)
    assert learned(tokenizer, row) == style.learned(contents(turns))
    ends = [style.last if style.middle is None else style.middle] * (len(contents(turns)) - 1) + [style.last]
    assert encoder.counts.num_turns == len(ends)
    assert encoder.counts.num_open == sum(added_tokens(tokenizer).get(end.strip()) not in end_ids for end in ends)


@pytest.mark.parametrize("kind", ["words", "swallows"])
@pytest.mark.parametrize("name", ["llama-2", "mistral-1", "vicuna", "zephyr", "gemma", "deepseek-2", "falcon", "phi-3"])
@pytest.mark.parametrize("talk_name", ["several", "alike", "blanks"])
def test_other_kinds_of_tokenizers_learn_the_same(make: Make, kind: str, name: str, talk_name: str) -> None:
    style, turns = STYLES[name], CONVERSATIONS[talk_name]
    tokenizer, end_ids = make(style, kind)
    row = ChatEncoder(tokenizer, None, end_ids)(turns)
    assert row.token_ids == tokenizer.apply_chat_template(turns, return_dict=False)
    assert "".join(learned(tokenizer, row).split()) == "".join(style.learned(contents(turns)).split())


FRAGMENTS = [
    "yes",
    " ",
    "\n",
    "<|im_end|>",
    "</s>",
    "<think>",
    "</think>",
    "THE-TURN-0",
    "é",
    "😀",
    "[/INST]",
    "ASSISTANT:",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4).map("".join).filter(str.strip)


@given(
    texts=st.lists(TEXTS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0),
    name=st.sampled_from([*STYLES]),
)
@settings(max_examples=40, deadline=None)
def test_any_text_is_learned_as_it_is_rendered_or_refused(make: Make, texts: list[str], name: str) -> None:
    turns, style = talk(*texts), STYLES[name]
    tokenizer, end_ids = make(style)
    try:
        row = ChatEncoder(tokenizer, None, end_ids)(turns)
    except BadRecordError:
        assume(not any("think>" in text for text in texts))
        raise
    assert row.token_ids == tokenizer.apply_chat_template(turns, return_dict=False)
    if not any("think>" in text for text in texts):
        assert learned(tokenizer, row) == style.learned(contents(turns))


def played(tokenizer: Any, turns: list[Turn], sampled: Callable[[str], list[int]]) -> list[int]:
    """The prompt of a rollout's last turn, where each response is what `sampled` makes of a content."""
    ids = list(tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False))
    for place in range(1, len(turns) - 1, 2):
        response = sampled(turns[place]["content"])
        ids += response + encode_observation(tokenizer, None, turns[: place + 2], response[-1])
    return ids


ROLLOUTS = {
    **{name: turns[:-1] for name, turns in CONVERSATIONS.items() if name not in ("single", "system", "thinking")},
    "observation": talk("a", "b", "THE-TURN-0 THE-TURN-1 </s> THE-ANSWER <|im_end|> -", "c", "</think> - THE-RESPONSE"),
}
AS_SAMPLED = ("deepseek-r1", "qwen3-without-thinking", "harmony", "falcon")
"""Styles whose rendering of an earlier turn is not what can be sampled."""


@pytest.mark.parametrize("name", [name for name in STYLES if name not in AS_SAMPLED])
@pytest.mark.parametrize("talk_name", ROLLOUTS)
def test_a_rollouts_next_prompt_is_the_templates(make: Make, name: str, talk_name: str) -> None:
    style, turns = STYLES[name], ROLLOUTS[talk_name]
    follows(make(style), style, turns)


@pytest.mark.parametrize("kind", ["words", "swallows"])
@pytest.mark.parametrize("name", ["llama-2", "mistral-1", "zephyr", "gemma", "phi-3", "command-r"])
@pytest.mark.parametrize("talk_name", ["several", "observation"])
def test_a_rollout_with_other_kinds_of_tokenizers(make: Make, kind: str, name: str, talk_name: str) -> None:
    follows(make(STYLES[name], kind), STYLES[name], ROLLOUTS[talk_name])


def follows(loaded: tuple[Any, tuple[int, ...]], style: Style, turns: list[Turn]) -> None:
    """Play a conversation, each response as the template renders it, and compare the prompt of the next turn."""
    tokenizer, end_ids = loaded
    middle = style.last if style.middle is None else style.middle
    end = middle.strip()
    before = middle.partition(end)[0]

    def sampled(content: str) -> list[int]:
        text = style.lead + style.shows(content, False) + before
        behind = tokenizer.encode(end + text, add_special_tokens=False)  # as text is cut behind a token of its own
        return [*behind[1:], added_tokens(tokenizer)[end]]

    assert added_tokens(tokenizer)[end] in end_ids
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert played(tokenizer, turns, sampled) == expected


@pytest.mark.parametrize(
    ("name", "response", "expected"),
    [
        ("llama-2", "yo</s>", "<|bos|>[INST] q [/INST]yo</s><|bos|>[INST] next [/INST]"),
        (
            "deepseek-r1",
            "hm</think>yo{}",
            "<|bos|><|Asker|>q<|Helper|><think>\nhm</think>yo{}<|Asker|>next<|Helper|><think>\n",
        ),
        (
            "qwen3",
            "<think>\nhm\n</think>\n\nyo<|im_end|>",
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nyo<|im_end|>\n"
            "<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3-without-thinking",
            "yo<|im_end|>",
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nyo<|im_end|>\n"
            "<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (
            "harmony",
            "<|channel|>final<|message|>yo<|return|>",
            "<|start|>user<|message|>q<|end|><|start|>assistant<|channel|>final<|message|>yo<|return|>"
            "<|start|>user<|message|>next<|end|><|start|>assistant",
        ),
        ("falcon", " yo<|endoftext|>", "User: q\nFalcon: yo<|endoftext|>\nUser: next\nFalcon:"),
        (
            "qwen2-base",  # sampled another token that ends a turn
            "yo<|endoftext|>",
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nyo"
            "<|endoftext|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "glm-4",
            "\nyo<|endoftext|>",
            "[gMASK]<sop><|user|>\nq<|assistant|>\n\nyo<|endoftext|><|user|>\nnext<|assistant|>\n",
        ),
    ],
)
def test_a_response_stays_as_it_was_sampled_with_one_end(make: Make, name: str, response: str, expected: str) -> None:
    tokenizer, _ = make(STYLES[name])
    response, expected = (text.replace("{}", STYLES[name].eos) for text in (response, expected))
    ids = played(tokenizer, talk("q", "yo", "next"), lambda _: tokenizer.encode(response, add_special_tokens=False))
    assert tokenizer.decode(ids) == expected


def test_a_template_that_refuses_an_observation_says_why(make: Make) -> None:
    one_question = (
        "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}{{ messages[0].content }}"
    )
    tokenizer, _ = make(Style(one_question, "</s>", ""))
    with pytest.raises(DataError, match="several turns is refused by the chat template: one question"):
        encode_observation(tokenizer, None, talk("q", "yo", "next"), 1)
    tokenizer, _ = make(Style("{{ messages[-1].content }}", "</s>", ""))
    with pytest.raises(
        DataError, match=r"chat_template: the template leaves a response out of a conversation of several"
    ):
        encode_observation(tokenizer, None, talk("q", "yo", "next"), 1)


def test_a_prompt_template_takes_the_observation_alone(make: Make) -> None:
    tokenizer, _ = make(STYLES["chatml"])
    assert tokenizer.decode(encode_observation(tokenizer, "{question}", talk("q", "yo", " next"), 1)) == " next"


def counted(make: Make, style: Style, turns: list[Turn], **options: Any) -> tuple[Any, str]:
    tokenizer, end_ids = make(style)
    encoder = ChatEncoder(tokenizer, None, end_ids, **options)
    row = encoder(turns)
    return encoder.counts, learned(tokenizer, row)


WITH_CALLS = (
    "{% for m in messages %}{{ m.content }}{% for t in m.tool_calls or [] %}"
    "<call>{{ t.function.name }} ARGUMENTS</call>{% endfor %}</s>{% endfor %}"
)


@pytest.mark.parametrize("way", ["| tojson", "", "+ ''", "| string"])
@pytest.mark.parametrize("given", ['{"a": 1, "b": "x"}', "no JSON"])
def test_arguments_of_calls_are_learned_as_json_whatever_the_template_takes(way: str, given: str, make: Make) -> None:
    """OpenAI's are text. Templates write values as JSON, or join text."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    turns: Any = [*talk("q"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    style = Style(WITH_CALLS.replace("ARGUMENTS", f"{{{{ t.function.arguments {way} }}}}"), "</s>", "")
    _, text = counted(make, style, turns)
    assert text == f"<call>f {json.dumps(given) if given == 'no JSON' and way == '| tojson' else given}</call></s>"
    assert call["function"] == {"name": "f", "arguments": given}, "the record's own"


@pytest.mark.parametrize("way", ["| tojson", "", "+ ''", "| string"])
@pytest.mark.parametrize("given", [{"a": 1, "b": "é", "c": [None, {"d": True}]}, {}])
def test_arguments_that_are_values_are_learned_as_json_too(way: str, given: dict[str, object], make: Make) -> None:
    """A template that does not write JSON wrote Python's form of them."""
    turns: Any = [*talk("q"), {"role": "assistant", "content": "", "tool_calls": [called(given)]}]
    style = Style(WITH_CALLS.replace("ARGUMENTS", f"{{{{ t.function.arguments {way} }}}}"), "</s>", "")
    _, text = counted(make, style, turns)
    assert text == f"<call>f {json.dumps(given, ensure_ascii=False)}</call></s>"
    assert turns[-1]["tool_calls"] == [called(given)], "the record's own"


@pytest.mark.parametrize("way", ["| tojson", "", "+ ''", "| string"])
@pytest.mark.parametrize("given", ["", None])
def test_no_arguments_are_an_empty_object(way: str, given: object, make: Make) -> None:
    turns: Any = [*talk("q"), {"role": "assistant", "content": "", "tool_calls": [called(given)]}]
    style = Style(WITH_CALLS.replace("ARGUMENTS", f"{{{{ t.function.arguments {way} }}}}"), "</s>", "")
    assert counted(make, style, turns)[1] == "<call>f {}</call></s>"


@pytest.mark.parametrize("way", ["| tojson", "", "| string"])
@pytest.mark.parametrize("given", [["a", "b"], True, '["a", "b"]', "true", "5", {"it's": 1}, {"a": {"b": "c"}}])
def test_arguments_of_other_kinds_are_json_too(way: str, given: object, make: Make) -> None:
    turns: Any = [*talk("q"), {"role": "assistant", "content": "", "tool_calls": [called(given)]}]
    style = Style(WITH_CALLS.replace("ARGUMENTS", f"{{{{ t.function.arguments {way} }}}}"), "</s>", "")
    assert (
        counted(make, style, turns)[1] == f"<call>f {given if isinstance(given, str) else json.dumps(given)}</call></s>"
    )


@pytest.mark.parametrize(
    ("way", "written"),
    [
        ("{{ t.function.arguments | tojson }}", '{"city": "Paris"}'),
        ("{% for key, value in t.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}", "city=Paris;"),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_pythons_form_elsewhere_in_a_conversation_is_no_sign(way: str, written: str, as_text: bool, make: Make) -> None:
    """It was looked for in the whole text: what an assistant thought of a call changed how the call was learned."""
    given: Any = {"city": "Paris"}
    call = called(json.dumps(given) if as_text else given)
    spoken = {"role": "assistant", "content": "", "reasoning_content": f"f({given}).", "tool_calls": [call]}
    template = WITH_CALLS.replace("ARGUMENTS", way)
    thinking = template.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    turns: Any = [*talk("q"), spoken]
    assert counted(make, Style(thinking, "</s>", ""), turns)[1] == f"<call>f {written}</call></s>"
    several = [called({"code": f"f({given})"}), call]
    turns = [*talk("q"), {"role": "assistant", "content": "", "tool_calls": several}]
    _, text = counted(make, Style(template, "</s>", ""), turns)
    assert text.endswith(f"<call>f {written}</call></s>")


def test_arguments_that_json_does_not_have_are_refused_where_they_are_needed(make: Make) -> None:
    turns: Any = [
        *talk("q"),
        {"role": "assistant", "content": "", "tool_calls": [called({"day": datetime.date(2026, 1, 2)})]},
    ]
    items = "{% for key, value in t.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
    assert counted(make, Style(WITH_CALLS.replace("ARGUMENTS", items), "</s>", ""), turns)[1].startswith(
        "<call>f day=2026"
    )
    with pytest.raises(BadRecordError, match="has arguments of a tool call that are not JSON"):
        counted(make, Style(WITH_CALLS.replace("ARGUMENTS", "{{ t.function.arguments }}"), "</s>", ""), turns)


def called(arguments: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def test_arguments_are_values_whatever_else_is_said(make: Make) -> None:
    given = ['{"a": "x"}', "no JSON", "5", "[1, 2]", "{}"]
    calls = [{"type": "function", "function": {"name": "f", "arguments": text}} for text in given]
    turns: Any = [*talk("{'a': 'x'} is Python's"), {"role": "assistant", "content": "", "tool_calls": calls}]
    _, text = counted(
        make, Style(WITH_CALLS.replace("ARGUMENTS", "{{ t.function.arguments | tojson }}"), "</s>", ""), turns
    )
    written = [json.dumps(each) if each == "no JSON" else each for each in given]
    assert text == "".join(f"<call>f {each}</call>" for each in written) + "</s>"


def test_what_a_template_leaves_out_of_others_and_of_calls_is_counted(make: Make) -> None:
    texts_alone = Style("{% for m in messages %}{{ m.content }}</s>{% endfor %}{# m.tool_calls #}", "</s>", "")
    users_alone = Style("{% for m in messages if m.role != 'system' %}{{ m.content }}</s>{% endfor %}", "</s>", "")
    system: Any = {"role": "system", "content": "In French."}
    turns: Any = [system, *talk("q", "a", "q2"), {"role": "assistant", "content": "b"}]
    assert counted(make, texts_alone, turns)[0].num_unheard == 0
    counts, _ = counted(make, users_alone, turns)
    assert (counts.num_unheard, counts.num_others) == (1, 3)
    turns[-1] = {**turns[-1], "tool_calls": [{"function": {"name": "look_up", "arguments": {}}}]}
    assert counted(make, texts_alone, turns)[0].num_shortened == 1


def test_what_a_template_makes_otherwise_is_counted(make: Make) -> None:
    thinking, several = CONVERSATIONS["thinking"], CONVERSATIONS["several"]
    assert counted(make, STYLES["chatml"], thinking)[0].num_shortened == 0
    assert counted(make, STYLES["qwen3"], thinking)[0].num_shortened == 1
    assert counted(make, STYLES["deepseek-r1"], thinking)[0].num_shortened == 2
    assert counted(make, STYLES["deepseek-r1"], several)[0].num_shortened == 0
    reasoned = [{**turn, "reasoning_content": "hm"} if turn["role"] == "assistant" else turn for turn in several]
    assert counted(make, STYLES["qwen3"], reasoned)[0].num_shortened == 2, "the last one's stays"
    for name, style in STYLES.items():
        num_elsewhere = counted(make, style, several)[0].num_elsewhere
        assert bool(num_elsewhere) == style.elsewhere, name


NO_PROMPT = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}{% endfor %}"
NO_END = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_without_a_generation_prompt_learns_no_header(make: Make) -> None:
    counts, text = counted(make, Style(NO_PROMPT, "</s>", "</s>"), CONVERSATIONS["several"])
    assert text == "Hi.</s>Fine, thanks.</s>Bye.</s>"
    assert (counts.num_elsewhere, counts.num_open) == (3, 0)
    bare = NO_PROMPT.replace(" + eos_token", "")
    counts, text = counted(make, Style(bare, "</s>", ""), CONVERSATIONS["several"])
    assert text == "Hi.Fine, thanks.Bye."
    assert counts.num_open == 3


def test_a_template_that_always_prompts_is_refused_for_what_it_would_teach(make: Make) -> None:
    tokenizer, end_ids = make(Style(NO_PROMPT + "{{ '<|assistant|>\\n' }}", "</s>", "</s>"))
    with pytest.raises(DataError, match=r"chat_template: the template begins an assistant's turn behind every"):
        ChatEncoder(tokenizer, None, end_ids)
    ChatEncoder(tokenizer, "{question}", end_ids)


def test_turns_without_an_end_are_counted_and_the_last_can_be_ended(make: Make) -> None:
    style = Style(NO_END, "</s>", "")
    counts, text = counted(make, style, CONVERSATIONS["several"])
    assert (text, counts.num_open, counts.num_turns) == ("Hi.Fine, thanks.Bye.", 3, 3)
    counts, text = counted(make, style, CONVERSATIONS["several"], adds_end=True)
    assert (text, counts.num_open) == ("Hi.Fine, thanks.Bye.</s>", 2)
    counts, text = counted(make, STYLES["chatml"], CONVERSATIONS["several"], adds_end=True)
    assert text == STYLES["chatml"].learned(["Hi.", "Fine, thanks.", "Bye."])


TOOLS: list[dict[str, object]] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}


def test_tools_and_calls_are_rendered_or_refused_by_name(make: Make) -> None:
    turns: Any = [*talk("q"), CALL, {"role": "tool", "content": "2"}, *talk("", "Two.")[1:]]
    tokenizer, end_ids = make(STYLES["qwen3"])
    row = ChatEncoder(tokenizer, None, end_ids)(turns, tools=TOOLS)
    assert row.token_ids == tokenizer.apply_chat_template(turns, tools=TOOLS, return_dict=False)
    assert '"name": "add", "parameters"' in tokenizer.decode(row.token_ids)
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    assert learned(tokenizer, row) == call + "<think>\n\n</think>\n\nTwo.<|im_end|>\n"
    plain, end_ids = make(STYLES["chatml"])
    for content, tools, words in (
        (talk("q", "a"), TOOLS, "has tools, which the chat template does not read"),
        (turns, None, "has tool_calls in a message, which"),
        ([*talk("q"), {**talk("", "a")[1], "reasoning_content": "hm"}], None, "has reasoning_content in a message"),
    ):
        with pytest.raises(BadRecordError, match=words):
            ChatEncoder(plain, None, end_ids)(content, tools=tools)
    with pytest.raises(
        BadRecordError, match=r"tools or thinking of its own, for which data\.prompt_template has no place"
    ):
        ChatEncoder(plain, "{question}", end_ids)(talk("q", "a"), tools=TOOLS)


def test_a_record_whose_turn_the_template_drops_or_doubles_is_refused_with_the_reason(make: Make) -> None:
    for template, times in (
        ("{{ messages[0].content }}", 0),
        ("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", 2),
    ):
        tokenizer, end_ids = make(Style(template, "</s>", ""))
        with pytest.raises(BadRecordError, match=f"whose text the chat template writes {times} times"):
            ChatEncoder(tokenizer, None, end_ids)(talk("q", "a"))


@pytest.mark.parametrize("name", STYLES)
def test_the_check_renders_as_transformers_does(make: Make, name: str) -> None:
    style = STYLES[name]
    tokenizer, _ = make(style, again=True)
    files = read_tokenizer_files(Path(tokenizer.name_or_path))
    assert (files.ids, files.eos_id) == (added_tokens(tokenizer), tokenizer.eos_token_id)
    assert files.highest_id == max(tokenizer.get_vocab().values())
    assert files.templates == {"default": style.template}
    render = renderer(style.template, {**files.special, **style.kwargs})
    for talk_name in CONVERSATIONS.keys() - style.refuses:
        turns = CONVERSATIONS[talk_name]
        for prompt in (False, True):
            expected = type(tokenizer).apply_chat_template(
                tokenizer, turns, tokenize=False, add_generation_prompt=prompt, **style.kwargs
            )
            assert render(turns, prompt) == expected
            assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt) == expected


def test_a_template_that_writes_thinking_itself_learns_it_where_it_stands(make: Make) -> None:
    forgetful = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}[thought]{% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    _, text = counted(make, Style(forgetful, "</s>", "</s>"), talk("a", "b", "c", "d"))
    assert text == "b</s>[thought]d</s>"


def test_turns_that_are_given_are_not_learned(make: Make) -> None:
    tokenizer, end_ids = make(STYLES["chatml"])
    row = ChatEncoder(tokenizer, None, end_ids)(CONVERSATIONS["several"], 4)
    assert learned(tokenizer, row) == "Bye.<|im_end|>\n"


def test_prompt_template(make: Make) -> None:
    tokenizer, end_ids = make(STYLES["chatml"])
    encoder = ChatEncoder(tokenizer, "Q: {question}\nA:", end_ids)
    row = encoder(talk(" one? ", " 1"))
    assert tokenizer.decode(row.token_ids) == "Q: one?\nA: 1<|im_end|>"
    assert learned(tokenizer, row) == " 1<|im_end|>"
    assert learned(tokenizer, encoder(talk("one?", "1<|im_end|>"))) == "1<|im_end|>"
    with pytest.raises(BadRecordError, match="not one question and one answer"):
        encoder(talk("a", "b", "c"))
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"data\.prompt_template: null takes the tokenizer's chat template"):
        ChatEncoder(tokenizer, None, end_ids)


def test_a_word_that_is_cut_across_the_prompts_end_is_learned_whole(make: Make) -> None:
    template = STYLES["vicuna"].template.replace("ASSISTANT:{%", "{{ 'ASSISTANT: ' }}{%")
    tokenizer, end_ids = make(Style(template, "</s>", "</s>"))
    row = ChatEncoder(tokenizer, None, end_ids)(CONVERSATIONS["single"])
    assert learned(tokenizer, row) == " It is two.</s>"
    assert row.token_ids == tokenizer.apply_chat_template(CONVERSATIONS["single"], return_dict=False)
