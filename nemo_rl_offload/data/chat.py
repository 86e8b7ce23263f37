"""Conversations and preference pairs: what a record may look like, and its tokens with those that are learned.

Which tokens a model learns is found in the rendered text: an assistant turn reaches from the prompt before it to the
end of the conversation up to it, and each of the two must be the beginning of the whole. That needs no marks in the
chat template; templates that rewrite earlier turns (such as removing their reasoning) are refused for such
conversations. The alternative, encoding turn by turn, can cut tokens differently from the text that a user sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from nemo_rl_offload.data.tokenizer import Tokenizer, encode_prompt
from nemo_rl_offload.errors import DataError


class Message(TypedDict):
    """One turn; further keys, which a chat template may read, are kept."""

    role: str
    content: str


ROLES = ("system", "user", "assistant", "tool")


class BadRecordError(DataError):
    """A record that cannot be used; the message goes on after its place."""


@dataclass(frozen=True)
class Row:
    """Token ids, and for each whether it is learned."""

    token_ids: list[int]
    is_learned: list[bool]


def parse_conversation(content: Mapping[str, object]) -> list[Message]:
    """Return the messages of ``{"messages": [...]}`` or of ``{"prompt": ..., "completion": ...}``.

    Prompt and completion are text or lists of messages.

    Raises:
        BadRecordError: neither is there, or no assistant turn.
    """
    if "messages" in content:
        messages = _messages(content["messages"], "messages", role=None)
    elif "prompt" in content and "completion" in content:
        messages = _messages(content["prompt"], "prompt", "user")
        messages += _messages(content["completion"], "completion", "assistant")
    else:
        raise BadRecordError(f"has neither messages nor prompt and completion; it has {_names(content)}")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecordError("has no assistant turn to learn")
    if messages[0]["role"] == "assistant":
        raise BadRecordError("begins with an assistant turn, which answers nothing")
    return messages


def parse_preference(content: Mapping[str, object]) -> tuple[list[Message], list[Message], list[Message]]:
    """Return prompt, chosen and rejected messages.

    Forms: ``prompt`` with ``chosen`` and ``rejected`` (text or messages); ``chosen`` and ``rejected`` alone, as whole
    conversations with the same beginning; ``context`` with ``completions`` of the ``rank`` 0 and 1 (NeMo-RL's).

    Raises:
        BadRecordError: none of these.
    """
    if "completions" in content and "context" in content:
        prompt = _messages(content["context"], "context", role=None)
        chosen, rejected = _ranked(content["completions"])
    elif "chosen" in content and "rejected" in content:
        with_prompt = "prompt" in content
        role = "assistant" if with_prompt else None
        chosen, rejected = (_messages(content[key], key, role) for key in ("chosen", "rejected"))
        prompt = _messages(content["prompt"], "prompt", "user") if with_prompt else _common(chosen, rejected)
        if not with_prompt:
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        raise BadRecordError(f"has neither chosen and rejected nor context and completions; it has {_names(content)}")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in messages):
            raise BadRecordError(f"{name} adds no assistant turn to the prompt")
    if not prompt:
        raise BadRecordError("has no prompt: chosen and rejected do not begin alike")
    return prompt, chosen, rejected


def _messages(value: object, key: str, role: str | None) -> list[Message]:
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"{key} is not a list of messages" + (" or text" if role else ""))
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise BadRecordError(f"{key} has a message without text in 'content'")
        if message.get("role") not in ROLES:
            raise BadRecordError(f"{key} has the role {message.get('role')!r}; roles are {', '.join(ROLES)}")
    return list(value)


def _ranked(completions: object) -> list[list[Message]]:
    items = completions if isinstance(completions, list) else []
    ranked = [(item.get("rank"), item.get("completion")) for item in items if isinstance(item, dict)]
    ranks = [rank for rank, _ in ranked if type(rank) is int]
    if len(items) != 2 or sorted(ranks) != [0, 1]:
        raise BadRecordError("completions are not two with the rank 0 (chosen) and 1 (rejected)")
    by_rank = dict(ranked)
    return [_messages(by_rank[rank], f"completion of rank {rank}", "assistant") for rank in (0, 1)]


def _common(first: Sequence[Message], second: Sequence[Message]) -> list[Message]:
    shared = []
    for message, other in zip(first, second, strict=False):
        if message != other:
            break
        shared.append(message)
    return shared


def _names(content: Mapping[str, object]) -> str:
    return ", ".join(content) or "no key"


class ChatEncoder:
    """Tokens of conversations, with a template around a single question or with the tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        if template is None and tokenizer.chat_template is None:
            raise DataError(
                "data.prompt_template: null takes the tokenizer's chat template, and it has none. "
                "Give a template, such as '{question}\\n'."
            )
        if template is None and not tokenizer.is_fast:
            raise DataError("policy.tokenizer.name: a tokenizer without tokenizer.json does not tell places in a text")
        self._tokenizer = tokenizer
        self._template = template

    def __call__(self, messages: Sequence[Message], num_given: int = 0) -> Row:
        """Encode a conversation; the assistant turns after its first ``num_given`` messages are learned.

        Raises:
            BadRecordError: the template does not fit the conversation.
        """
        if self._template is not None:
            return self._by_template(messages, self._template)
        text = self._render(messages)
        spans = [
            (self._prefix(text, messages[:turn], prompt=True), self._prefix(text, messages[: turn + 1], prompt=False))
            for turn, message in enumerate(messages)
            if message["role"] == "assistant" and turn >= num_given
        ]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_learned = [any(begin <= start < end for begin, end in spans) for start, _ in encoded["offset_mapping"]]
        return Row(list(encoded["input_ids"]), is_learned)

    def _by_template(self, messages: Sequence[Message], template: str) -> Row:
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise BadRecordError(
                "is not one question and one answer, which data.prompt_template takes; null takes the chat template"
            )
        prompt = encode_prompt(self._tokenizer, template, messages[0]["content"])
        answer = self._tokenizer.encode(messages[1]["content"], add_special_tokens=False)
        answer.append(self._tokenizer.eos_token_id)
        return Row(prompt + answer, [False] * len(prompt) + [True] * len(answer))

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:
            raise BadRecordError(f"is refused by the chat template: {error}") from error
        return str(text)

    def _prefix(self, text: str, messages: Sequence[Message], prompt: bool) -> int:
        """Length of the beginning of the text that these messages make."""
        beginning = self._render(messages, prompt)
        if not text.startswith(beginning):
            raise BadRecordError(
                "has several assistant turns, of which the chat template rewrites earlier ones; "
                "end the conversation after the turn to learn"
            )
        return len(beginning)
