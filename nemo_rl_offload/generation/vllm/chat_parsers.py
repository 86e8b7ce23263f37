"""A response as a message of a chat: its thinking and its calls of tools, by vLLM's own parsers.

vLLM is imported where a parser is named, in the process that answers chats. It needs no engine for them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from nemo_rl_offload.config.schema import VllmConfig
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.generation.chat_prompts import BadChatError

_CFG = "policy.generation.vllm_cfg"
_CHAT = f"{_CFG}.http_server_serving_chat_kwargs"


@dataclass(frozen=True)
class Said:
    """What a response says."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's form."""

    def message(self) -> dict[str, Any]:
        """As a message of a chat."""
        said: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            said |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.tool_calls:
            said["tool_calls"] = [dict(call) for call in self.tool_calls]
        return said


class ChatParsers:
    """Reads responses, as vLLM's server would with the same arguments."""

    def __init__(self, cfg: VllmConfig, tokenizer: Tokenizer, model_name: str) -> None:
        """Load the parsers.

        Raises:
            ConfigError: vLLM has none of that name, or a plugin cannot be loaded.
        """
        chat = cfg["http_server_serving_chat_kwargs"]
        self._tokenizer, self._calls_tools = tokenizer, chat["enable_auto_tools"]
        self._tool_parser = chat["tool_parser"] if self._calls_tools else None
        self._parser: Any = None
        if self._tool_parser is None and chat["reasoning_parser"] is None:
            return
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        for key, load in (
            ("tool_parser_plugin", ToolParserManager.import_tool_parser),
            ("reasoning_parser_plugin", ReasoningParserManager.import_reasoning_parser),
        ):
            if (path := cfg[key]) is not None:  # type: ignore[literal-required]
                try:
                    load(path)
                except Exception as error:
                    raise ConfigError(f"{_CFG}.{key}: {path} cannot be loaded: {error}") from error
        for key, name, manager in (
            ("tool_parser", self._tool_parser, ToolParserManager),
            ("reasoning_parser", chat["reasoning_parser"], ReasoningParserManager),
        ):
            names = sorted(manager.list_registered())
            if name is not None and name not in names:
                raise ConfigError(
                    f"{_CHAT}.{key}: vLLM has no '{name}'. Allowed: {', '.join(names)}; others by {_CFG}.{key}_plugin."
                    f"{nearest(name, names)}"
                )
        for name in ("vllm.tool_parsers", "vllm.reasoning"):  # a malformed call is the model's, and counted
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            self._parser = ParserManager.get_parser(
                tool_parser_name=self._tool_parser,
                reasoning_parser_name=chat["reasoning_parser"],
                enable_auto_tools=self._calls_tools,
                model_name=model_name,
            )
            self._parser(tokenizer, None)
        except Exception as error:
            named = {"tool_parser": self._tool_parser, "reasoning_parser": chat["reasoning_parser"]}
            given = " and ".join(f"{key} {name}" for key, name in named.items() if name is not None)
            said = str(error).rstrip(".! ")
            raise ConfigError(
                f"{_CHAT}: not with this model and what is installed: {given}: {said}. Name those of the model's "
                "family, or null."
            ) from error

    def check(self, asked: Mapping[str, Any]) -> None:
        """Raise BadChatError where a request asks for what needs constrained sampling."""
        if (choice := asked.get("tool_choice")) not in (None, "auto", "none"):
            raise BadChatError(f"tool_choice {choice!r} needs constrained sampling, which is not here. Set it to auto")
        if asked.get("response_format", {"type": "text"}) not in (None, {"type": "text"}):
            raise BadChatError("response_format needs constrained sampling, which is not here. Leave it out")

    def __call__(self, token_ids: Sequence[int], asked: Mapping[str, Any], variables: Mapping[str, Any]) -> Said:
        """Read a response's tokens, without the one that ended it; `asked` is the request's content.

        `variables` are the template's.

        Raises:
            BadChatError: vLLM refuses the request's form.
        """
        tools, choice = asked.get("tools") or None, asked.get("tool_choice")
        if self._parser is None:
            return Said(self._decode(token_ids, skips_special=True))
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        try:
            request = ChatCompletionRequest(
                messages=asked["messages"], **({"tools": tools, "tool_choice": choice or "auto"} if tools else {})
            )
        except ValueError as error:
            raise BadChatError(f"vLLM refuses the request: {error}") from error
        try:
            parser = self._parser(self._tokenizer, request.tools, chat_template_kwargs=dict(variables))
            for part in (parser.reasoning_parser, parser.tool_parser):
                request = request if part is None else part.adjust_request(request)
            text = self._decode(token_ids, skips_special=request.skip_special_tokens)
            reasoning, content, calls = parser.parse(
                text, request, enable_auto_tools=self._calls_tools, model_output_token_ids=list(token_ids)
            )
        except Exception as error:
            raise BadChatError(f"vLLM's parser fails: {type(error).__name__}: {error}") from error
        if not tools or choice == "none" or not self._calls_tools:
            calls = None
        made = tuple(
            {
                "id": _name_of(call.id or "", text, token_ids, number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls or ())
        )
        return Said(content, reasoning, made)

    def _decode(self, token_ids: Sequence[int], *, skips_special: bool) -> str:
        return self._tokenizer.batch_decode([token_ids], skip_special_tokens=skips_special)[0]


def _name_of(given: str, text: str, token_ids: Sequence[int], number: int) -> str:
    """The name of a call, a function of the response, since templates may write it.

    vLLM draws names that a response does not give. Those of nine letters and digits are Mistral's, which has no others.
    """
    if given and given in text:
        return given
    drawn = blake2b(f"{list(token_ids)}:{number}".encode(), digest_size=8).hexdigest()
    return drawn[:9] if len(given) == 9 and given.isalnum() else f"call_{drawn}"
