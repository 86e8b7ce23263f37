"""What a chat template writes around the text of a turn, without transformers, which imports torch.

A template is Jinja with a few additions of transformers (`raise_exception`, `strftime_now`, `tojson` that keeps
characters, `{% generation %}`, `{% break %}`); the environment here has the same, and a test compares what both make
of many templates. Training and generation render with the tokenizer itself; this is for what can be said before.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.bounded_template import MAX_TEMPLATE, BoundedEnvironment, allowance_for
from nemo_rl_offload.specs.documents import parse_json

Conversation = Sequence[Mapping[str, object]]
Render = Callable[[Conversation, bool], str]
"""From messages, and whether the prompt of the next assistant turn follows, to the text."""
RENDERING_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a template raises, by itself or by its `raise_exception`, where it does not fit a conversation."""
PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The texts alone; NeMo-RL's template where none is wanted."""


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what an assistant says, has no effect on the text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@cache
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.bound_filters()
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def variables_of(template: str) -> frozenset[str]:
    """The names that a template is given from outside, such as `messages`, `tools` or `enable_thinking`.

    Raises:
        ConfigError: it is no Jinja.
    """
    if len(template) > MAX_TEMPLATE:
        raise ConfigError(f"has {len(template)} characters, and a chat template at most {MAX_TEMPLATE}. Shorten it.")
    try:
        _compiled(template)
        return frozenset(find_undeclared_variables(_environment().parse(template)) - _environment().globals.keys())
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise ConfigError("is nested too deeply for a Jinja template. Mend it.") from error
    except jinja2.TemplateError as error:
        line = f" in its line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(f"is no Jinja template: {(error.message or '').rstrip('.')}{line}. Mend it.") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def render_chat(
    template: str,
    messages: Conversation,
    variables: Mapping[str, object],
    *,
    prompt: bool,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """Render a conversation; `variables` are special tokens and further arguments, `prompt` whether one follows.

    Raises one of `RENDERING_ERRORS`, or RunawayTemplateError.
    """
    listed = list(messages)
    given = {"messages": listed, "tools": tools, "documents": None, "add_generation_prompt": prompt}
    with allowance_for([listed, tools]):
        return str(_compiled(template).render({**variables, **given}))


def plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call of OpenAI's form, with its arguments as values and not as text, as templates get them from vLLM."""
    function = dict(call.get("function") or {})
    if isinstance(arguments := function.get("arguments") or "{}", str):
        with suppress(ValueError):  # what the model wrote is no JSON, and stays its text
            function["arguments"] = parse_json(arguments)
    return {**call, "function": function}


def textual_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """The same with its arguments as JSON's text, for templates that join them to text. Raises TypeError and ValueError
    for what JSON does not have."""
    arguments = call["function"].get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return with_arguments(call, text)


def with_arguments(call: Mapping[str, Any], arguments: object) -> dict[str, Any]:
    """A tool call of OpenAI's form with other arguments."""
    return {**call, "function": {**call["function"], "arguments": arguments}}


def renderer(template: str, variables: Mapping[str, object]) -> Render:
    """A function that renders conversations; `variables` are special tokens and further arguments.

    They raise as `render_chat`.
    """
    return lambda messages, prompt: render_chat(template, messages, variables, prompt=prompt)


ALWAYS_PROMPTS = (
    "the template begins an assistant's turn behind every conversation, which would be learned behind an answer's end. "
    "Give one that does so where add_generation_prompt is true."
)


@dataclass(frozen=True)
class TurnTexts:
    """What a template writes around an assistant's text."""

    prompt: str
    """The generation prompt, behind a user's message."""
    opening: str
    """Before the text, where a user's message and its end stand before it."""
    closing: str
    """Behind the text of a last turn."""

    @property
    def prompt_opens_the_turn(self) -> bool:
        """Whether what follows the generation prompt is what the template renders behind it."""
        return self.opening.startswith(self.prompt) and (bool(self.prompt) or not self.opening.strip())


USER: dict[str, object] = {"role": "user", "content": "THE-QUESTION"}
TEXT = "THE-ANSWER"


def turn_texts(render: Render) -> TurnTexts | None:
    """Ask a template for a short conversation; None where it refuses it, or leaves the texts out."""
    turns: list[Mapping[str, object]] = [USER, {"role": "assistant", "content": TEXT}]
    try:
        question, prompted, answered = render([USER], False), render([USER], True), render(turns, False)
    except RENDERING_ERRORS:
        return None
    if answered.count(TEXT) != 1 or not (prompted.startswith(question) and answered.startswith(question)):
        return None
    opening, closing = answered.removeprefix(question).split(TEXT)
    return TurnTexts(prompted.removeprefix(question), opening, closing)


def always_prompts(render: Render, texts: TurnTexts) -> bool:
    """Whether a template begins an assistant's turn behind every conversation, asked to or not (Llama-3's first one).

    Behind an assistant's last text it then writes what it does not write where a user's message follows.
    """
    if texts.prompt or texts.opening.strip():
        return False
    try:
        followed = render([USER, {"role": "assistant", "content": TEXT}, USER], False)
    except RENDERING_ERRORS:
        return False
    return not followed.partition(TEXT)[2].startswith(texts.closing)


def keeps_thinking(render: Render) -> bool:
    """Whether what an assistant thought stays in its turn when a user's message follows; true where none is taken."""
    thinking = "THE-THINKING"
    turn = {"role": "assistant", "content": f"<think>\n{thinking}\n</think>\n\n{TEXT}"}
    try:
        return thinking in render([USER, turn, USER], False)
    except RENDERING_ERRORS:
        return True
