"""Conversations as tokens: which of them are learned, and what stands between the turns of a rollout.

The tokens are those of the chat template's own rendering of the whole conversation. Which of them a model learns is
found in that text, without marks in the template:

- A turn begins behind the generation prompt of the messages before it, which is what the model continues, where the
  text begins with that. Templates whose prompt opens thinking that they leave out of turns (DeepSeek-R1's), or that
  have no generation prompt, are asked once more with a mark in place of the turn's text: it begins where the mark does.
- A turn ends where the rendering up to it ends. Where the text goes on otherwise, because the template rewrites earlier
  turns (Qwen3 leaves out their thinking), the mark tells how long it is, and what it writes both behind the mark in a
  last turn and here closes it. A token that ends a turn and opens the next one (GLM's `<|user|>`) counts to both.

Rejected: encoding turn by turn, which can cut tokens differently from the text that a user sees; and finding a turn's
text by its words, which may occur elsewhere. Limit: what a template changes in a turn is learned as it renders it.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, cast

from nemo_rl_offload.data.first_tokens import first_tokens, first_tokens_and_places
from nemo_rl_offload.data.forms import BadRecordError, Message
from nemo_rl_offload.data.prompt_tokens import encode_prompt
from nemo_rl_offload.data.tokenizer import Tokenizer, added_tokens
from nemo_rl_offload.errors import DataError
from nemo_rl_offload.specs.bounded_template import RunawayTemplateError
from nemo_rl_offload.specs.chat_template import (
    ALWAYS_PROMPTS,
    always_prompts,
    plain_call,
    textual_call,
    turn_texts,
    variables_of,
    with_arguments,
)
from nemo_rl_offload.specs.end_tokens import closing_token

Tools = list[dict[str, object]]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
READ_BY_NAME = ("tool_calls", *THOUGHTS, "function_call", "refusal")
"""Keys of a message that say what an assistant does beside its text."""
_TAIL = 1000
"""Characters, of which the last token is looked at."""
OTHER_TEMPLATE = "leave that out, or give another policy.tokenizer.chat_template"
NO_TEMPLATE = (
    "data.prompt_template: null takes the tokenizer's chat template, and it has none. "
    "Give a template, such as '{question}\\n', or policy.tokenizer.chat_template."
)


@dataclass(frozen=True)
class Row:
    """Token ids, and for each whether it is learned."""

    token_ids: list[int]
    is_learned: list[bool]
    rest: str = ""
    """Text behind the tokens that were wanted, which has no tokens here."""
    rest_is_learned: bool = False
    """Whether some of it would be learned."""


@dataclass
class TurnCounts:
    """What was found in the turns that are learned."""

    num_turns: int = 0
    num_open: int = 0
    """Without a token that ends them."""
    num_shortened: int = 0
    """Of which the template leaves a part of the text, or a call, out."""
    num_elsewhere: int = 0
    """Rendered otherwise than the generation prompt begins them."""
    num_others: int = 0
    """Turns of systems, users and tools beside them."""
    num_unheard: int = 0
    """Of those, without their text."""


class ChatEncoder:
    """Tokens of conversations, with a template around a single question or with the tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        end_ids: Collection[int],
        *,
        adds_end: bool = False,
        adds_beginning: bool = False,
        num_tokens: int = 1 << 60,
    ) -> None:
        """Of a row, at least the first ``num_tokens`` tokens are made, and not all others of a very long text."""
        if template is None and tokenizer.chat_template is None:
            raise DataError(NO_TEMPLATE)
        if template is None and not tokenizer.is_fast:
            raise DataError("policy.tokenizer.name: a tokenizer without tokenizer.json does not tell places in a text")
        self._tokenizer = tokenizer
        self._template = template
        self._end_ids = frozenset(end_ids)
        self._adds_end = adds_end
        self._beginning = tokenizer.bos_token_id if adds_beginning else None
        self._num_tokens = num_tokens
        special = added_tokens(tokenizer)
        self._special_ids = frozenset(special.values())
        self._ends = [text for text, token in special.items() if token in self._end_ids]
        self.counts = TurnCounts()
        texts = None if template is not None else turn_texts(partial(render, tokenizer))
        if texts is not None and always_prompts(partial(render, tokenizer), texts):
            raise DataError(f"policy.tokenizer.chat_template: {ALWAYS_PROMPTS}")
        self.always_elsewhere = texts is not None and not texts.prompt_opens_the_turn
        """Whether any turn begins otherwise than the generation prompt, which the check of the configuration says."""

    def __call__(
        self, messages: Sequence[Message], num_given: int = 0, tools: Tools | None = None, *, counts_given: bool = True
    ) -> Row:
        """Encode a conversation; the assistant turns after its first ``num_given`` messages are learned.

        ``tools`` are what the assistant may call, as the chat template takes them. ``counts_given`` is false where the
        given messages were counted before, with another answer.

        Raises:
            BadRecordError: the template does not fit the conversation.
        """
        if self._template is not None:
            return self._by_template(messages, self._template, tools)
        chat = _Chat(self._tokenizer, messages, tools)
        encoded, num_read = first_tokens_and_places(self._tokenizer, chat.text, self._num_tokens)
        token_ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        is_learned = [False] * len(token_ids)
        rest_is_learned = False
        before = 0
        self._count_others(messages if counts_given else messages[num_given:], chat.text)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or turn < num_given:
                continue
            if num_read < len(chat.text) and num_read <= before:
                rest_is_learned = True
                break
            begin, is_elsewhere = chat.begin(turn)
            end = self._through_end(chat.text, chat.end(turn, begin))
            places = [
                place
                for place, (first, last) in enumerate(offsets)
                if first < end and begin < last
                # text that is cut across a turn's edge belongs to it, a token of its own stands on one side
                if (begin <= first and last <= end) or token_ids[place] not in self._special_ids
            ]
            for place in places:
                is_learned[place] = True
            written = [token_ids[place] for place in places if chat.text[slice(*offsets[place])].strip()]
            if num_read < end:
                rest_is_learned = True
                tail = chat.text[max(begin, end - _TAIL) : end].rstrip()
                written = self._tokenizer.encode(tail, add_special_tokens=False)
            is_open = not written or written[-1] not in self._end_ids
            if is_open and self._adds_end and turn == len(messages) - 1:
                is_open = False
                if num_read == len(chat.text):
                    token_ids.append(self._tokenizer.eos_token_id)
                    is_learned.append(True)
            self.counts.num_turns += 1
            self.counts.num_open += is_open
            self.counts.num_elsewhere += is_elsewhere
            said = [str(message.get(key) or "") for key in ("content", *THOUGHTS)] + _called_names(message)
            self.counts.num_shortened += any(not _holds(chat.text[before:end], text) for text in said)
            before = end
        if self._beginning is not None and token_ids[:1] != [self._beginning]:
            token_ids, is_learned = [self._beginning, *token_ids], [False, *is_learned]
        return Row(token_ids, is_learned, chat.text[num_read:], rest_is_learned)

    def _count_others(self, messages: Sequence[Message], text: str) -> None:
        for message in messages:
            if message["role"] != "assistant":
                self.counts.num_others += 1
                self.counts.num_unheard += not _is_heard(text, message["content"])

    def _by_template(self, messages: Sequence[Message], template: str, tools: Tools | None) -> Row:
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise BadRecordError(
                "is not one question and one answer, which data.prompt_template takes; null takes the chat template"
            )
        if tools or any(message.get(key) for message in messages for key in READ_BY_NAME):
            raise BadRecordError("has tools or thinking of its own, for which data.prompt_template has no place")
        prompt = encode_prompt(self._tokenizer, template, messages[0]["content"], self._num_tokens)
        text = messages[1]["content"]
        answer, num_read = first_tokens(self._tokenizer, text, self._num_tokens)
        if num_read == len(text) and answer[-1:] != [self._tokenizer.eos_token_id]:
            answer.append(self._tokenizer.eos_token_id)
        self.counts.num_turns += 1
        is_learned = [False] * len(prompt) + [True] * len(answer)
        is_cut = num_read < len(text)
        return Row(prompt + answer, is_learned, text if is_cut else "", is_cut)

    def _through_end(self, text: str, end: int) -> int:
        """Take in the token that ends a turn by opening the next one."""
        if any(text[:end].rstrip().endswith(token) for token in self._ends):
            return end
        return end + max((len(token) for token in self._ends if text.startswith(token, end)), default=0)


class _Chat:
    """One conversation, and the chat template's renderings of its parts."""

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        template = tokenizer.get_chat_template(tools=tools)
        if tools and "tools" not in variables_of(template):
            raise BadRecordError("has tools, which the chat template does not read; " + OTHER_TEMPLATE)
        for key in READ_BY_NAME:
            is_read = re.search(rf"[.'\"]{key}\b", template)
            if not is_read and any(message.get(key) for message in messages):
                raise BadRecordError(f"has {key} in a message, which the chat template does not read; {OTHER_TEMPLATE}")
        self._messages, self.text = self._called(messages)
        self._mark = unused_text(self.text)

    def _called(self, messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
        """The messages as the template reads their tool calls, and its text.

        Arguments that are text, as OpenAI writes them, become values, as vLLM hands them over. A template that joins
        them to text refuses values, or writes Python's form of them: it gets JSON's text.
        """
        if not any(message.get("tool_calls") for message in messages):
            return messages, self._render(messages)
        plain = [_in_form(message, plain_call) for message in messages]
        try:
            text = self._render(plain)
            if not self._writes_python(plain, text):
                return plain, text
        except BadRecordError:
            pass
        try:
            texts = [_in_form(message, textual_call) for message in messages]
        except (TypeError, ValueError) as error:
            raise BadRecordError(f"has arguments of a tool call that are not JSON: {error}") from error
        return texts, self._render(texts)

    def _writes_python(self, messages: Sequence[Message], text: str) -> bool:
        """Whether the template, which makes `text` of the messages, writes arguments in Python's form."""
        word = unused_text(text)
        arguments = {word: word}
        form = partial(with_arguments, arguments=arguments)
        try:
            asked = self._render([_in_form(message, form) for message in messages])
        except BadRecordError:
            return False
        return str(arguments) in asked

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        return render(self._tokenizer, messages, prompt, self._tools)

    def begin(self, turn: int) -> tuple[int, bool]:
        """Where an assistant's turn begins, and whether generation begins otherwise."""
        before = self._messages[:turn]
        prompted, unprompted = self._render(before, prompt=True), self._render(before)
        if prompted != unprompted and self.text.startswith(prompted):
            return len(prompted), False
        opened = self._marked(turn, self._messages)[0]
        if not self.text.startswith(opened):
            raise BadRecordError(
                f"has an assistant turn that the chat template does not render behind its generation prompt, which "
                f"ends with {prompted.removeprefix(unprompted)[-40:]!r}; {OTHER_TEMPLATE}"
            )
        generation_prompt = prompted.removeprefix(unprompted)
        if generation_prompt:
            return len(opened), not opened.endswith(generation_prompt)
        header = self._marked(turn, self._messages[: turn + 1])[0].removeprefix(prompted)
        return (len(opened), True) if header.strip() else (len(opened) - len(header), False)

    def end(self, turn: int, begin: int) -> int:
        """Where an assistant's turn ends that begins there."""
        until = self._messages[: turn + 1]
        rendered = self._render(until)
        if self.text.startswith(rendered):
            return len(rendered)
        after = self._marked(turn, self._messages)[1]
        end = len(self.text) - len(after)
        if not self.text.endswith(after) or end < begin:
            raise BadRecordError(
                "has several assistant turns, of which the chat template rewrites earlier ones, beyond what their text "
                "tells; end the conversation after the turn to learn"
            )
        closing = self._marked(turn, until)[1]
        return end + next(
            (place for place in range(len(after)) if after[place] != closing[place : place + 1]), len(after)
        )

    def _marked(self, turn: int, messages: Sequence[Message]) -> tuple[str, str]:
        """What the template writes before and behind the text of a turn."""
        marked = [message.copy() for message in messages]
        marked[turn]["content"] = self._mark
        parts = self._render(marked).split(self._mark)
        if len(parts) != 2:
            raise BadRecordError(
                f"has an assistant turn whose text the chat template writes {len(parts) - 1} times; {OTHER_TEMPLATE}"
            )
        return parts[0], parts[1]


def _called_names(message: Message) -> list[str]:
    calls: Any = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [str(function["name"]) for function in functions if isinstance(function, dict) and function.get("name")]


def _in_form(message: Message, form: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Message:
    """With its tool calls in another form, where they are OpenAI's."""
    calls: Any = message.get("tool_calls")
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        return message
    return cast("Message", {**message, "tool_calls": [form(call) for call in calls]})


def render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]], prompt: bool, tools: Tools | None = None
) -> str:
    """The chat template's text of a conversation. Raises BadRecordError with the template's reason."""
    given = {} if tools is None else {"tools": tools}
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt, **given)
    except RunawayTemplateError:
        raise
    except Exception as error:
        raise BadRecordError(f"is refused by the chat template: {error}") from error
    return str(text)


def encode_observation(
    tokenizer: Tokenizer, template: str | None, messages: Sequence[Mapping[str, str]], end_id: int | None
) -> list[int]:
    """Return the token ids between a response and the next one; ``end_id`` is the token that ended it, None where its
    text did.

    ``messages`` are the whole conversation: the last is the observation, before it stands the response. With a prompt
    ``template`` the ids are the observation's alone. The chat template renders the conversation with the observation as
    a user's turn. What it writes behind the response is taken, but for its own end of a turn, for which the sampled
    ``end_id`` stands: where the template closes a turn with ``end_id``, prompt, response and these ids are its
    rendering. Where it would rewrite the response, such as to leave out thinking, the response stays as it was sampled.

    Raises:
        DataError: the chat template refuses the conversation, or leaves the response out.
    """
    if template is not None:
        return list(tokenizer.encode(messages[-1]["content"], add_special_tokens=False))
    mark = unused_text("".join(message["content"] for message in messages))
    turns: list[Message] = [{"role": each["role"], "content": each["content"]} for each in messages]
    turns[-2]["content"] = mark
    try:
        texts = [render(tokenizer, *part).rpartition(mark) for part in ((turns, True), (turns[:-1], False))]
    except BadRecordError as error:
        raise DataError(f"a conversation of several turns {error}") from error
    if not all(found for _, found, _ in texts):
        raise DataError(
            "policy.tokenizer.chat_template: the template leaves a response out of a conversation of several turns. "
            "Give another one, or set max_rollout_turns to 1."
        )
    (_, _, after), (_, _, closing) = texts
    special = added_tokens(tokenizer)
    first = closing_token(after, special)
    if first is not None and end_id is not None and (first == end_id or closing_token(closing, special) is not None):
        text = next(text for text, token in special.items() if token == first)
        after = after.lstrip()[len(text) :]
    if end_id is None:
        return tokenizer.encode(after, add_special_tokens=False)
    end_text = next((text for text, token in special.items() if token == end_id), "")
    ids = tokenizer.encode(end_text + after, add_special_tokens=False)  # its first token as what stands behind another
    return ids[1:] if ids[:1] == [end_id] else tokenizer.encode(after, add_special_tokens=False)


def unused_text(text: str) -> str:
    """A word that does not occur in a text."""
    return next(word for number in count() if (word := f"THE-TURN-{number}") not in text)


def _is_heard(whole: str, part: str) -> bool:
    """Whether a text holds another one, as it is or as JSON."""
    return _holds(whole, part) or any(json.dumps(part, ensure_ascii=each)[1:-1] in whole for each in (True, False))


def _holds(whole: str, part: str) -> bool:
    """Whether a text holds another one, up to blanks."""
    return part.strip() in whole or _squeezed(part) in _squeezed(whole)


def _squeezed(text: str) -> str:
    return "".join(text.split())
