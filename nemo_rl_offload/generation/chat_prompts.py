"""The tokens of a chat that a response continues: its template's, or exactly those that were drawn before.

A chat is rendered by the template, as vLLM's own server does it. Where the messages hold a turn of the model with its
token ids, these stand for all up to its end: decoded, parsed and rendered again, a turn may become other tokens, and a
model would learn from responses to what it never said. Only what the template writes behind that turn is encoded. It is
the difference of the renderings with and without what follows; where the template rewrites the turn once more follows
(thinking that is left out), a mark stands in the turn's place, and what is behind the mark is taken.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nemo_rl_offload.data.tokenizer import Tokenizer, added_tokens
from nemo_rl_offload.data.turns import unused_text
from nemo_rl_offload.errors import NemoRLOffloadError
from nemo_rl_offload.specs.bounded_template import RunawayTemplateError
from nemo_rl_offload.specs.chat_template import RENDERING_ERRORS, plain_call, render_chat

Chat = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form; a turn of the model may have `prompt_token_ids` and `generation_token_ids`."""
_OF_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class BadChatError(NemoRLOffloadError):
    """A chat that cannot be answered; the message says why."""


class ChatPrompts:
    """Encodes chats. `notices` are what to warn of, once each."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_ids: Collection[int],
        template: str | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> None:
        """`template` is in place of the tokenizer's, `variables` are given to it."""
        self._tokenizer, self._template = tokenizer, template
        self._variables = {**tokenizer.special_tokens_map, **(variables or {})}
        self._ends = {token: text for text, token in added_tokens(tokenizer).items() if token in frozenset(end_ids)}
        self._rendered_roles: set[str] = set()
        self.notices: list[str] = []

    def __call__(
        self,
        messages: Chat,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the token ids that a response to the messages continues.

        Raises:
            BadChatError: the template refuses them.
        """
        plain = [_plain(message) for message in messages]
        template = self._template or self._tokenizer.get_chat_template(tools=tools)
        given = {**self._variables, **(variables or {})}

        def render(part: Chat, *, prompt: bool) -> str:
            try:
                return render_chat(template, part, given, prompt=prompt, tools=tools)
            except (*RENDERING_ERRORS, RunawayTemplateError) as error:
                raise BadChatError(f"the chat template refuses the messages: {error}") from error

        whole = render(plain, prompt=True)
        self._watch_roles(plain, whole, render)
        drawn = _drawn_places(messages)
        if not drawn:
            return self._tokenizer.encode(whole, add_special_tokens=False)
        last = messages[drawn[-1]]
        ids = [*last["prompt_token_ids"], *last["generation_token_ids"]]
        closing = _closing(plain, drawn[-1], render)
        return ids + self._encode_behind(_behind(plain, drawn[-1], whole, closing, render), closing, ids[-1])

    def _encode_behind(self, text: str, closing: str, last_id: int) -> list[int]:
        """The ids of what the template writes behind a turn's text, of which the turn's own end is there already.

        Where the template closes no turn, what follows begins with the next message's role, which stands for the end
        only where it is what was drawn.
        """
        end = self._ends.get(last_id)
        found = [(text.find(each), each) for each in self._ends.values() if each in text]
        if end is None or not found:
            return self._tokenizer.encode(text, add_special_tokens=False)
        place, first = min(found)
        is_own = first == end or any(each in closing for each in self._ends.values())
        if text[:place].strip() or not is_own:  # an end further on is another turn's
            return self._tokenizer.encode(text, add_special_tokens=False)
        rest = text[place + len(first) :]
        ids = self._tokenizer.encode(end + rest, add_special_tokens=False)  # as what stands behind another token
        return ids[1:] if ids[:1] == [last_id] else self._tokenizer.encode(rest, add_special_tokens=False)

    def _watch_roles(self, messages: Chat, whole: str, render: Callable[..., str]) -> None:
        """Warn of a role whose messages the template leaves out."""
        for place, message in enumerate(messages):
            role = str(message.get("role"))
            if role in self._rendered_roles or role == "assistant" or not message.get("content"):
                continue
            self._rendered_roles.add(role)
            marked = [*messages[:place], {**message, "content": unused_text(whole)}, *messages[place + 1 :]]
            try:
                is_left_out = render(marked, prompt=True) == whole
            except BadChatError:
                continue
            if is_left_out:
                self.notices.append(
                    f"the chat template leaves out messages of the role {role}, which the model never sees. Give "
                    "another template, or records with other roles."
                )


def _drawn_places(messages: Chat) -> list[int]:
    """Places of the turns that the model drew.

    NeMo-Gym writes a turn's ids to whatever an assistant says behind it as well: the first message that has them is it.
    """
    found: dict[tuple[tuple[int, ...], ...], int] = {}
    for place, message in enumerate(messages):
        if message.get("generation_token_ids"):
            found.setdefault(tuple(tuple(message[key]) for key in _OF_TOKENS[:2]), place)
    return list(found.values())


def _behind(messages: Chat, turn: int, whole: str, closing: str, render: Callable[..., str]) -> str:
    """What the template writes behind the text of an assistant's turn, up to where the next response begins.

    Raises:
        BadChatError: the template leaves the turn out.
    """
    until = render(messages[: turn + 1], prompt=False)
    if whole.startswith(until):
        return closing + whole[len(until) :]
    mark = unused_text(whole)
    marked = [*messages[:turn], {**messages[turn], "content": mark}]
    before, found, behind = render([*marked, *messages[turn + 1 :]], prompt=True).rpartition(mark)
    if not found or not before:
        raise BadChatError("the chat template leaves out a turn of the model, which later ones answer")
    calls = render(marked, prompt=False).rpartition(mark)[2].removesuffix(closing)
    return behind.removeprefix(calls)


def _closing(messages: Chat, turn: int, render: Callable[..., str]) -> str:
    """What the template closes a last turn with."""
    mark = unused_text(render(messages[: turn + 1], prompt=False))
    marked = [*messages[:turn], {"role": "assistant", "content": mark}]
    _, found, closing = render(marked, prompt=False).rpartition(mark)
    return closing if found else ""


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it: without token ids, its text as one, arguments of tools as values."""
    plain = {key: value for key, value in message.items() if key not in _OF_TOKENS}
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        if not isinstance(content, list) or any(
            not isinstance(part, Mapping) or "text" not in part for part in content
        ):
            raise BadChatError("a message's content is neither text nor parts of text, which is all that models read")
        plain["content"] = "\n".join(str(part["text"]) for part in content)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [plain_call(call) for call in plain["tool_calls"]]
    else:
        plain.pop("tool_calls", None)
    return plain
