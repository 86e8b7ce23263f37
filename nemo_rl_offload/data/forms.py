"""What records of given answers may look like: the forms of public data sets, as conversations and preference pairs.

Data sets differ in whether an answer repeats its prompt. A list of messages that begins with an assistant turn is an
answer. Any other holds the prompt too: it has to be that of the record, and stands once in what is learned from. A
record whose parts do not fit together is refused. Rejected: to let an answer follow the prompt whatever it begins
with. That asks every question twice where answers repeat it.

Text has no turns. Whether an answer that begins with the words of its prompt repeats it, or just speaks so, is told
from the whole data set (`repeats_prompt`); where most do, they are refused, not mended. The limit: a data set of whose
text answers less than half repeat the prompt is taken as it is.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from nemo_rl_offload.errors import DataError
from nemo_rl_offload.specs.documents import DocumentError, parse_json


class Message(TypedDict):
    """One turn; further keys, which a chat template may read, are kept."""

    role: str
    content: str


ROLES = ("system", "user", "assistant", "tool")
REPEATS_PROMPT = (
    "begins its answers with the text of the prompt, as most records here do, so that it would stand twice; leave it "
    "out of the answers, or give messages, which are taken as they are"
)
_SYSTEM_COLUMNS = ("system", "system_prompt")
_BESIDE_TEXT = ("image", "images", "video", "videos", "audio", "audios")
_UNREAD_COLUMNS = ("functions", "chat_template_kwargs", *_BESIDE_TEXT)
BESIDE_TURNS = (*_SYSTEM_COLUMNS, "tools", *_UNREAD_COLUMNS, "label", "weight")
"""Columns that say something of a conversation beside its turns: they are read, or refused."""
_EMPTY: tuple[object, ...] = (None, [], {}, "", "[]", "{}")
_QUESTION_COLUMNS = ("question", "problem", "input", "instruction")
"""Of pairs of plain text: where the prompt is besides `prompt`, where a record has one of them."""
_COMPARED_COLUMNS = (
    ("context", "response1", "response2", "overall_preference"),
    ("prompt", "response_1", "response_2", "preference_strength"),
)
"""Of HelpSteer3 and HelpSteer2: prompt, answers, and a number that is below 0 where the first is better."""
_CHOSEN_COLUMNS = ("prompt", "response_0", "response_1", "better_response_id")
"""Of PKU-SafeRLHF: prompt, answers, and which of them is better."""
_TEXT_COLUMNS = (
    ("prompt", "completion"),
    *((name, "chosen", "rejected") for name in ("prompt", *_QUESTION_COLUMNS)),
    *(columns[:3] for columns in (*_COMPARED_COLUMNS, _CHOSEN_COLUMNS)),
)
_WORD = re.compile(r"\S+")
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_SPEAKER_ROLES = {"Human": "user", "User": "user", "Assistant": "assistant"}
_HELPSTEER2_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
_HELPSTEER2_MARK = re.compile(r"<extra_id_\d+>")
"""What stands between the turns of a prompt."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}

type Answers = dict[str, list[Message]]
"""By the name that messages call them by."""


class BadRecordError(DataError):
    """A record that cannot be used; the message goes on after its place."""


class UndecidedPairError(DataError):
    """A pair that is in order and teaches nothing: neither of its answers is the better one."""

    def __init__(self, why: Literal["tie", "identical"]) -> None:
        super().__init__(why)
        self.why = why


def parse_conversation(content: Mapping[str, object]) -> list[Message]:
    """Return the messages of ``{"messages": [...]}`` or of ``{"prompt": ..., "completion": ...}``.

    ShareGPT's ``conversations`` are messages too.
    Prompt and completion are text or lists of messages; a completion may be the whole conversation. Of either form,
    a text ``system`` beside them is the system prompt.

    Raises:
        BadRecordError: neither is there, no assistant turn, or something that would not be honoured.
    """
    _refuse_unread(content)
    if name := next((name for name in ("messages", "conversations") if name in content), None):
        messages = _messages(content[name], name, role=None)
    elif "prompt" in content and "completion" in content:
        prompt, answers = _fit(*_read("prompt", content["prompt"], {"completion": content["completion"]}))
        messages = [*prompt, *answers["completion"]]
    else:
        raise BadRecordError(
            f"has neither messages nor prompt and completion; it has {_names(content)}. Columns of other names are "
            "given by data.train.input_key and output_key"
        )
    messages = _below(_system_column(content), messages)
    turns = [message for message in messages if message["role"] == "assistant"]
    if not turns:
        raise BadRecordError("has no assistant turn to learn")
    weight = next((weight for turn in turns if (weight := turn.get("weight")) not in (None, 1)), None)
    if weight == 0:
        raise BadRecordError(
            "has an assistant turn of weight 0, which would be learned; end the conversation before it"
        )
    if weight is not None:
        raise BadRecordError(f"has an assistant turn of weight {weight!r}, which would be learned as any other")
    if any(turn.get("train") is False for turn in turns):
        raise BadRecordError("has an assistant turn with train false, which would be learned as any other")
    if messages[0]["role"] == "assistant":
        raise BadRecordError("begins with an assistant turn, which answers nothing")
    return messages


def parse_preference(content: Mapping[str, object]) -> tuple[list[Message], list[Message], list[Message]]:
    """Return prompt, chosen and rejected messages; docs/algorithms.md lists the forms.

    Raises:
        BadRecordError: none of the forms, or parts that do not fit together.
        UndecidedPairError: the answers are the same, or rated the same.
    """
    _refuse_unread(content)
    prompt, answers = _pair(content)
    prompt, answers = _split(answers) if prompt is None else _fit(prompt, answers)
    chosen, rejected = answers.values()
    if chosen == rejected:
        raise UndecidedPairError("identical")
    names = " and ".join(answers)
    for name, messages in answers.items():
        if not any(message["role"] == "assistant" for message in messages):
            raise BadRecordError(f"{name} adds no assistant turn to the prompt")
    if not prompt:
        raise BadRecordError(f"has no prompt: {names} do not begin alike")
    for name, messages in answers.items():
        if messages[0]["role"] != "assistant":
            raise BadRecordError(
                f"{names} do not answer the same prompt: {name} goes on with a {messages[0]['role']} turn"
            )
    if prompt[-1]["role"] == "assistant":
        raise BadRecordError("has a prompt that ends with an assistant turn, so that nothing is asked")
    return _below(_system_column(content), prompt), chosen, rejected


def parse_tools(content: Mapping[str, object]) -> list[dict[str, object]] | None:
    """Return ``tools``, what the assistant may call, a list or its JSON text; None where there are none.

    They stand in the record, or in the ``input`` of OpenAI's preferences.

    Raises:
        BadRecordError: they are neither.
    """
    given = content.get("input")
    tools = content.get("tools") or (given.get("tools") if isinstance(given, dict) else None)
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except DocumentError as error:
            raise BadRecordError(f"has tools that are text, which {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecordError("has tools that are not a list of descriptions")
    return tools


def repeats_prompt(content: Mapping[str, object]) -> bool | None:
    """Whether each answer begins with the prompt, up to white space; None where they are not all text."""
    for columns in _TEXT_COLUMNS:
        texts = [text for column in columns if isinstance(text := content.get(column), str)]
        if len(texts) == len(columns):
            question, *answers = texts
            is_asked = bool(question.strip()) and not _is_dialogue(question)
            return is_asked and all(_begins_with(answer, question) for answer in answers)
    return None


def _begins_with(text: str, beginning: str) -> bool:
    """The same up to blanks, without cutting into words what may be megabytes."""
    words, begun = (_WORD.finditer(each) for each in (text, beginning))
    asked = next(begun, None)
    while asked is not None:
        said, following = next(words, None), next(begun, None)
        if said is None or not said[0].startswith(asked[0]) or (following is not None and said[0] != asked[0]):
            return False
        asked = following
    return True


def _pair(content: Mapping[str, object]) -> tuple[list[Message] | None, Answers]:
    """The prompt, if there is one, and the answers, the better first; they may hold the prompt."""
    has = content.keys()
    of_helpsteer3, of_helpsteer2 = _COMPARED_COLUMNS
    if has >= set(of_helpsteer3):
        return _read("context", content["context"], _columns(content, *_compared(content, *of_helpsteer3[1:])))
    if has >= {"chosen", "rejected"}:
        if (score := content.get("score_chosen")) is not None and score == content.get("score_rejected"):
            raise UndecidedPairError("tie")
        if "conversations" in has and "prompt" not in has:
            raise BadRecordError(
                "is a pair in ShareGPT's form; write each record r anew as "
                '{"prompt": r["conversations"], "chosen": [r["chosen"]], "rejected": [r["rejected"]]}'
            )
        answers = _columns(content, "chosen", "rejected")
        if (name := _question_column(content, answers)) is not None:
            return _read(name, content[name], answers)
        try:
            return None, {name: _whole(answer, name) for name, answer in answers.items()}
        except BadRecordError as error:
            raise BadRecordError(f"{error}{_meant_columns(content)}") from None
    if has >= set(of_helpsteer2):
        answers = _columns(content, *_compared(content, *of_helpsteer2[1:]))
        return _read("prompt", _helpsteer2_turns(content["prompt"]), answers)
    if has >= set(_CHOSEN_COLUMNS):
        return _read("prompt", content["prompt"], _columns(content, *_better(content, *_CHOSEN_COLUMNS[1:])))
    if has >= {"context", "completions"}:
        return _read("context", content["context"], _ranked(content["completions"]))
    if has >= {"instruction", "completions"}:
        return _read("instruction", content["instruction"], _scored(content["completions"]))
    if has >= {"input", "preferred_output", "non_preferred_output"}:
        given = content["input"] if isinstance(content["input"], dict) else {}
        _refuse_unread(given)
        answers = _columns(content, "preferred_output", "non_preferred_output")
        return _read("input.messages", given.get("messages"), answers)
    raise BadRecordError(
        f"has neither chosen and rejected nor another form of a pair (see docs/algorithms.md); it has {_names(content)}"
        f"{_meant_columns(content)}"
    )


def _meant_columns(content: Mapping[str, object]) -> str:
    """What columns of other names may be meant as."""
    pair = ("prompt", "chosen", "rejected")
    others = [name for name in content if name not in pair]
    near = {name: get_close_matches(name, others, n=1) for name in pair if name not in content}
    return "".join(f"; did you mean '{name}' by {found[0]}?" for name, found in near.items() if found)


def _question_column(content: Mapping[str, object], answers: Mapping[str, object]) -> str | None:
    """`prompt`, or what plain text answers; whole conversations hold their prompt."""
    if content.get("prompt") is not None:
        return "prompt"
    if not all(isinstance(answer, str) and not _is_dialogue(answer) for answer in answers.values()):
        return None
    found = [name for name in _QUESTION_COLUMNS if isinstance(content.get(name), str)]
    return found[0] if len(found) == 1 else None


def _columns(content: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: content[name] for name in names}


def _helpsteer2_turns(prompt: object) -> object:
    """Its turns, where a text has several."""
    if not isinstance(prompt, str) or not _HELPSTEER2_MARK.search(prompt):
        return prompt
    first, *parts = _HELPSTEER2_TURN.split(prompt)
    turns = [("User", first)] if first else []
    turns += zip(parts[::2], parts[1::2], strict=True)
    if marks := [mark for _, said in turns for mark in _HELPSTEER2_MARK.findall(said)]:
        raise BadRecordError(f"prompt has {marks[0]} where no turn of a user or an assistant begins")
    if any(speaker != ("User", "Assistant")[number % 2] for number, (speaker, _) in enumerate(turns)):
        raise BadRecordError("prompt has turns that are not the user's and the assistant's in turn")
    return [{"role": _SPEAKER_ROLES[speaker], "content": said} for speaker, said in turns]


def _compared(content: Mapping[str, object], first: str, second: str, name: str) -> tuple[str, str]:
    preference = content[name]
    if isinstance(preference, bool) or not isinstance(preference, int | float) or preference != preference:
        raise BadRecordError(f"{name} is {preference!r}, not a number: below 0 for {first}, above for {second}")
    if preference == 0:
        raise UndecidedPairError("tie")
    return (first, second) if preference < 0 else (second, first)


def _better(content: Mapping[str, object], first: str, second: str, name: str) -> tuple[str, str]:
    better = content[name]
    if isinstance(better, bool) or better not in (0, 1):
        raise BadRecordError(f"{name} is {better!r}, not 0 for {first} or 1 for {second}")
    return (second, first) if better else (first, second)


def _ranked(completions: object) -> dict[str, object]:
    ranked = _rated(completions, "rank", "completion", (int,))
    if len(ranked) != 2:
        raise BadRecordError("completions are not two with a whole number as rank, of which the lower is chosen")
    (low, chosen), (high, rejected) = sorted(ranked, key=lambda pair: pair[0])
    if low == high:
        raise UndecidedPairError("tie")
    return {f"completion of rank {low:g}": chosen, f"completion of rank {high:g}": rejected}


def _scored(completions: object) -> dict[str, object]:
    """The responses of the highest and the lowest score; the first of equals."""
    scored = _rated(completions, "overall_score", "response", (int, float))
    if len(scored) < 2:
        raise BadRecordError("completions are not several with a response and a number as overall_score")
    scores = [score for score, _ in scored]
    high, low = max(scores), min(scores)
    if high == low:
        raise UndecidedPairError("tie")
    best, worst = (scored[scores.index(score)][1] for score in (high, low))
    return {"response of the highest score": best, "response of the lowest score": worst}


def _rated(items: object, rating: str, answer: str, kinds: tuple[type, ...]) -> list[tuple[float, object]]:
    """Each item's rating and answer; nothing where one has no such rating."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return []
    rated = [(item.get(rating), item.get(answer)) for item in items]
    return rated if all(type(value) in kinds and value == value for value, _ in rated) else []


def _read(name: str, prompt: object, answers: Mapping[str, object]) -> tuple[list[Message], Answers]:
    """Prompt and answers as messages. After a dialogue as text come answers without the space that parts them."""
    asked = _messages(prompt, name, "user")
    if isinstance(prompt, str) and _is_dialogue(prompt):
        is_open = asked[-1] == {"role": "assistant", "content": ""}
        asked = asked[:-1] if is_open else asked
        texts = {name: text for name, text in answers.items() if isinstance(text, str) and not _is_dialogue(text)}
        answers = {**answers, **{name: text.strip() for name, text in texts.items()}}
    return asked, {name: _messages(answer, name, "assistant") for name, answer in answers.items()}


def _whole(value: object, name: str) -> list[Message]:
    """A whole conversation."""
    if isinstance(value, str) and not _is_dialogue(value):
        raise BadRecordError(
            f"{name} is text without a prompt, whose end is not told; give a prompt, or name its column with "
            "data.train.input_key, or give messages"
        )
    return _messages(value, name, "assistant")


def _messages(value: object, name: str, role: str | None) -> list[Message]:
    """Messages of a list, of a dialogue as text, or one of ``role`` that is text, where there is one."""
    if isinstance(value, str) and role is not None:
        return _dialogue(value) if _is_dialogue(value) else [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"{name} is not a list of messages" + (" or text" if role else ""))
    messages = [_with_text(message) for message in value]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise BadRecordError(f"{name} has a message without text in 'content'{_in_place_of_text(message)}")
        if message.get("role") not in ROLES:
            raise BadRecordError(f"{name} has the role {message.get('role')!r}; roles are {', '.join(ROLES)}")
        if seen := next((key for key in _BESIDE_TEXT if message.get(key) not in _EMPTY), None):
            raise BadRecordError(f"{name} has a message with {seen}; text alone is read")
    return messages


def _with_text(message: Any) -> Any:
    """In the usual keys, where it has ShareGPT's; a message that only calls tools has the empty text."""
    if not isinstance(message, dict):
        return message
    if message.keys() >= {"from", "value"} and not message.keys() & {"role", "content"}:
        speaker, said = message["from"], message["value"]
        kept = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": _SHAREGPT_ROLES.get(str(speaker), speaker), "content": said, **kept}
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        return {**message, "content": "".join(part["text"] for part in content)}
    return message


def _is_text_part(part: Any) -> bool:
    """Of OpenAI's parts of a message's content, such as images, one of text."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _in_place_of_text(message: Any) -> str:
    """What a message without text has, for a sentence."""
    if not isinstance(message, dict):
        return ""
    if isinstance(message.get("content"), list):
        others = [part for part in message["content"] if not _is_text_part(part)]
        kinds = sorted({str(part.get("type")) if isinstance(part, dict) else "none" for part in others})
        return f"; of parts, those of text alone are read, and it has {', '.join(kinds) or 'none'}"
    return f"; it has {_names(message)}"


def _is_dialogue(text: str) -> bool:
    r"""Whether it is of the form ``\n\nHuman: ...\n\nAssistant: ...`` (Anthropic's HH), or a part of that."""
    begins = text.startswith(("\n\nHuman:", "\n\nAssistant:"))
    return begins or (text.lstrip().startswith("Human:") and "\n\nAssistant:" in text)


def _dialogue(text: str) -> list[Message]:
    _, *parts = _SPEAKER.split(text.strip())
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _SPEAKER_ROLES[speaker], "content": said.strip()} for speaker, said in turns]


def _split(answers: Answers) -> tuple[list[Message], Answers]:
    """What they begin with, and how each goes on."""
    shared = _shared(answers)
    return shared, {name: messages[len(shared) :] for name, messages in answers.items()}


def _fit(prompt: list[Message], answers: Answers) -> tuple[list[Message], Answers]:
    """Prompt and answers without what answers repeat of it.

    Where all answers hold the prompt, so do the turns that they share: it may be one of several.
    """
    whole = [messages for messages in answers.values() if messages[0]["role"] != "assistant"]
    system, asked = _parted(prompt)
    shared, rests = _split(answers)
    holds_prompt = _is_within(asked, _parted(shared)[1])
    if holds_prompt and len(whole) == len(answers):
        return _below(system, shared), rests
    if holds_prompt and asked:
        raise BadRecordError(
            f"{' and '.join(answers)} have the prompt after an assistant turn, so that it would stand twice"
        )
    systems = [_parted(messages)[0] or system for messages in whole]
    if any(not _alike(system, systems[0]) for system in systems):
        raise BadRecordError(f"{' and '.join(answers)} have different system prompts")
    rests = {name: _without_prompt(prompt, messages, name) for name, messages in answers.items()}
    return _below(systems[0], prompt) if systems else prompt, rests


def _without_prompt(prompt: list[Message], answer: list[Message], name: str) -> list[Message]:
    """The answer without the prompt, or as much of its end, that it may begin with."""
    if answer[0]["role"] == "assistant":
        return answer
    asked, said = _parted(prompt)[1], _parted(answer)[1]
    for start in range(len(asked)):
        repeated = len(asked) - start
        if _alike(asked[start:], said[:repeated]):
            return said[repeated:]
    if answer[0]["role"] == "user" and prompt[-1]["role"] == "assistant":
        return answer
    raise BadRecordError(f"{name} holds a conversation that does not begin with the prompt")


def _below(system: list[Message], messages: list[Message]) -> list[Message]:
    """The messages after a system prompt, which they may begin with themselves."""
    own, rest = _parted(messages)
    if system and own and not _alike(system, own):
        raise BadRecordError("has two different system prompts")
    return [*(own or system), *rest]


def _system_column(content: Mapping[str, object]) -> list[Message]:
    for column in _SYSTEM_COLUMNS:
        text = content.get(column)
        if text is not None and not isinstance(text, str):
            raise BadRecordError(f"{column} is not text")
        if text and text.strip():
            return [{"role": "system", "content": text}]
    return []


def _refuse_unread(content: Mapping[str, object]) -> None:
    for column in _UNREAD_COLUMNS:
        if content.get(column) not in _EMPTY:
            raise BadRecordError(f"has {column}, which the chat template is not given here; leave them out if unneeded")
    if content.get("label") is False:
        raise BadRecordError("has the label false: it is one to avoid, which is not learned here")
    weight = content.get("weight")
    if isinstance(weight, int | float) and weight != 1:
        raise BadRecordError(f"has the weight {weight!r}, and would be learned as any other")


def _parted(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system prompt at the beginning, and the rest."""
    end = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return messages[:end], messages[end:]


def _shared(answers: Answers) -> list[Message]:
    """What all of them begin with, as the first has it. Of answers, white space counts too."""
    shared: list[Message] = []
    for first, *others in zip(*answers.values(), strict=False):
        is_answer = first["role"] == "assistant"
        if not all(
            _is_same(first, other) and (not is_answer or first["content"] == other["content"]) for other in others
        ):
            break
        shared.append(first)
    return shared


def _is_within(part: list[Message], whole: list[Message]) -> bool:
    starts = range(len(whole) - len(part) + 1)
    return any(_alike(part, whole[start : start + len(part)]) for start in starts)


def _alike(some: Sequence[Message], others: Sequence[Message]) -> bool:
    return len(some) == len(others) and all(map(_is_same, some, others))


def _is_same(message: Message, other: Message) -> bool:
    """Whether two messages say the same, up to white space and keys that only one of them has."""
    texts = message["content"], other["content"]
    same_text = texts[0] == texts[1] or texts[0].split() == texts[1].split()
    kept = {key: value for key, value in other.items() if value is not None}
    items = [(key, value) for key, value in message.items() if key != "content" and value is not None]
    return same_text and all(kept.get(key, value) == value for key, value in items)


def _names(content: Mapping[str, object]) -> str:
    return ", ".join(content) or "no key"
