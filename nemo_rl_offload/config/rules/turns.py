"""Rules about the tokenizer and its chat template: that the model has its tokens, and that turns begin and end as said.

They read the tokenizer's files where these are here. What only its loaded code knows, a run finds.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nemo_rl_offload.config.loader import resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.config.rules.rule import (
    Get,
    ReportedError,
    Rule,
    algorithm_has,
    algorithm_spec,
    read_shape,
    vocabulary_key,
)
from nemo_rl_offload.config.tokenizer_files import (
    TokenizerFiles,
    chosen_template,
    differing_token,
    ends_of_turns,
    read_tokenizer_files,
)
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.bounded_template import RunawayTemplateError
from nemo_rl_offload.specs.chat_template import (
    ALWAYS_PROMPTS,
    TurnTexts,
    always_prompts,
    keeps_thinking,
    renderer,
    turn_texts,
    variables_of,
)
from nemo_rl_offload.specs.documents import DocumentError
from nemo_rl_offload.specs.end_tokens import closing_token, outside, read_generation_ids

TEMPLATE, KWARGS, NAME = (f"policy.tokenizer.{key}" for key in ("chat_template", "chat_template_kwargs", "name"))
GIVEN = (
    *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("chat_template", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    "return_assistant_tokens_mask",
)
"""What is said to a template, or to what renders it, by this project."""


def _files(get: Get) -> TokenizerFiles:
    """The tokenizer's files; ends the rule where they are not here, or where another rule reports them."""
    try:
        return read_tokenizer_files(resolve_tokenizer_path(get(NAME)))
    except ConfigError as error:
        raise ReportedError from error


def _model(get: Get) -> Path:
    try:
        return resolve_model_path(get("policy.model_name"))
    except ConfigError as error:
        raise ReportedError from error


def tokenizer_can_be_read(get: Get) -> Iterator[str]:
    """A rule: where the tokenizer's folder is here, its files can be read, and the model has all of its tokens."""
    try:
        folder = resolve_tokenizer_path(get(NAME))
    except ConfigError:  # a rule about this machine says so
        return
    try:
        files = read_tokenizer_files(folder)
    except ConfigError as error:
        yield f"{NAME}: {error}"
        return
    teacher = get("teacher.model_name") if algorithm_spec(get).needs_teacher else None
    for key, model in (("policy.model_name", get("policy.model_name")), ("teacher.model_name", teacher)):
        if model is None:
            continue
        try:
            vocab_size = read_shape(model).vocab_size
        except ConfigError:  # a rule about the model says so
            continue
        if vocab_size and files.highest_id is not None and files.highest_id >= vocab_size:
            yield (
                f"{NAME}: the tokenizer in {folder} has ids up to {files.highest_id}, and the model {model} of {key} "
                f"has {vocab_size} tokens ({vocabulary_key(model)} of its config.json). Take the model's own "
                "tokenizer, or remove the added tokens that the model does not have from tokenizer.json."
            )


def _teacher_has_the_vocabulary(get: Get) -> Iterator[str]:
    """Where the teacher's tokenizer is here, it has the student's tokens: the teacher's logits go by their ids."""
    name = get("teacher.model_name") if algorithm_spec(get).needs_teacher else None
    if name is None:
        return
    try:
        folder = resolve_model_path(name)
    except ConfigError:  # a rule about this machine says so
        return
    if not (folder / "tokenizer_config.json").is_file():
        return
    student = _files(get)
    try:
        teacher = read_tokenizer_files(folder)
    except ConfigError as error:
        yield f"teacher.model_name: {error}"
        return
    if (token := differing_token(teacher, student)) is not None:
        its, mine = (
            f"has the id {files.vocabulary[token]} in" if token in files.vocabulary else "is no token of"
            for files in (teacher, student)
        )
        yield (
            f"teacher.model_name: the tokenizer in {folder} has another vocabulary than the student's: {token!r} "
            f"{its} it, and {mine} that of {NAME}. Choose a teacher of the same family."
        )


def generation_config_can_be_read(get: Get) -> Iterator[str]:
    """A rule: where the model's folder is here, its generation_config.json names tokens that the model has."""
    model = _model(get)
    try:
        ids = read_generation_ids(model) or []
    except ConfigError as error:
        yield f"policy.model_name: {error}"
        return
    try:
        vocab_size = read_shape(get("policy.model_name")).vocab_size
    except ConfigError:
        return
    if vocab_size and (beyond := outside(ids, vocab_size)):
        yield (
            f"policy.model_name: eos_token_id of {model / 'generation_config.json'} names {beyond[0]}, and the model "
            f"has {vocab_size} tokens. Correct the file."
        )


def template_can_be_used(get: Get) -> Iterator[str]:
    """A rule: the chat template is Jinja."""
    try:
        template = _chosen(get)
    except ConfigError as error:  # of one that is not here, `template_is_here` says so
        if isinstance(error.__cause__, DocumentError):
            yield f"{TEMPLATE}: {error.__cause__}"
        return
    try:
        variables_of(template or "")
    except ConfigError as error:
        yield f"{TEMPLATE}: {error}"
        return
    try:
        _turns(get)
    except ReportedError as error:
        if isinstance(error.__cause__, RunawayTemplateError):
            yield str(error.__cause__)


def given_arguments(get: Get) -> Iterator[str]:
    """A rule: no argument of the template's that this project gives."""
    for name in get(KWARGS) or {}:
        if name in GIVEN:
            yield f"{KWARGS}.{name}: is given by this project wherever it renders the template. Remove it."


def template_is_here(get: Get) -> Iterator[str]:
    """A rule: the chat template is one of the tokenizer's, or a text, or a file that is here."""
    try:
        template = _chosen(get)
    except ConfigError as error:
        yield f"{TEMPLATE}: {error}"
        return
    if template is None and get("data.prompt_template") is None:
        yield (
            "data.prompt_template: null takes the tokenizer's chat template, and it has none. Give a template, such as "
            f"'{{question}}\\n', or {TEMPLATE}."
        )


def _chosen(get: Get) -> str | None:
    return chosen_template(get(TEMPLATE), _files(get).templates)


def _unread_arguments(get: Get) -> Iterator[str]:
    if get("data.prompt_template") is not None:
        return
    try:
        allowed = sorted(variables_of(_chosen(get) or "") - {*GIVEN} - _files(get).special.keys())
    except ConfigError:
        return
    for name in get(KWARGS) or {}:
        if name not in allowed and name not in GIVEN:
            takes = f"It reads: {', '.join(allowed)}." if allowed else "It reads none."
            yield f"{KWARGS}.{name}: has no effect: the chat template does not read it.{nearest(name, allowed)} {takes}"


@dataclass(frozen=True)
class _Turns:
    files: TokenizerFiles
    texts: TurnTexts | None
    """None where the chat template is not used, or does not take a short conversation."""
    keeps_thinking: bool
    always_prompts: bool = False


def _turns(get: Get) -> _Turns:
    files = _files(get)
    if get("data.prompt_template") is not None:
        return _Turns(files, None, keeps_thinking=True)
    try:
        template = _chosen(get)
        if template is None:
            raise ReportedError
        variables_of(template)
    except ConfigError as error:
        raise ReportedError from error
    found = _asked(template, json.dumps({**files.special, **(get(KWARGS) or {})}, default=str))
    if isinstance(found, RunawayTemplateError):
        raise ReportedError from found
    return _Turns(files, *found)


@lru_cache(maxsize=16)
def _asked(template: str, variables: str) -> tuple[TurnTexts | None, bool, bool] | RunawayTemplateError:
    """What a template says of turns, or that it does not end; asked once for all rules. `variables` are JSON."""
    render = renderer(template, json.loads(variables))
    try:
        texts = turn_texts(render)
        return texts, keeps_thinking(render), texts is not None and always_prompts(render, texts)
    except RunawayTemplateError as error:
        return error


def answers_end_before_a_prompt(get: Get) -> Iterator[str]:
    """A rule: where given answers are learned, the chat template begins the next one only where it is asked to."""
    if not algorithm_spec(get).generates and _turns(get).always_prompts:
        yield f"{TEMPLATE}: {ALWAYS_PROMPTS}"


def _turns_end(get: Get) -> Iterator[str]:
    turns, model = _turns(get), _model(get)
    if turns.files.eos_id is None:
        return
    try:
        ends = ends_of_turns(turns.files.eos_id, turns.files.ids, model, turns.texts)
    except ConfigError:  # `generation_config_can_be_read` says so
        return
    if ends.disagreement is not None:
        yield f"{NAME}: {ends.disagreement}."
    if turns.texts is None or closing_token(turns.texts.closing, turns.files.ids) is not None:
        return
    if closing := turns.texts.closing.strip():
        yield (
            f"{TEMPLATE}: the chat template closes a turn with {closing!r}, which is no token of the tokenizer's, so "
            "no response ends there. Add it to the tokenizer, or give a template that closes turns with eos_token."
        )
    elif not algorithm_spec(get).generates and not get("data.add_eos"):
        yield (
            f"{TEMPLATE}: the chat template writes no token behind an assistant's last turn, so its end is not "
            "learned. Give one that closes it, or set data.add_eos=true."
        )


def _turns_begin(get: Get) -> Iterator[str]:
    texts = _turns(get).texts
    if texts is None or texts.prompt_opens_the_turn:
        return
    if not texts.prompt:
        yield (
            f"{TEMPLATE}: the chat template has no generation prompt: it opens an assistant's turn with "
            f"{texts.opening!r}, and a prompt ends before that. Give one that reads add_generation_prompt."
        )
    elif not algorithm_spec(get).generates:
        yield (
            f"{TEMPLATE}: the chat template's generation prompt is {texts.prompt!r}, and it renders answers behind "
            f"{texts.opening!r}: they are learned behind that."
        )


def _thinking_stays(get: Get) -> Iterator[str]:
    key = f"{get('algorithm')}.max_rollout_turns"
    if algorithm_has("max_rollout_turns", get) and get(key) > 1 and not _turns(get).keeps_thinking:
        yield (
            f"{key}: the chat template leaves the thinking of earlier turns out, and a rollout of several turns keeps "
            "what was sampled. Give another policy.tokenizer.chat_template to have both alike."
        )


TURN_RULES: tuple[Rule, ...] = (
    tokenizer_can_be_read,
    _teacher_has_the_vocabulary,
    generation_config_can_be_read,
    template_can_be_used,
    given_arguments,
    answers_end_before_a_prompt,
)
TURN_WARNINGS: tuple[Rule, ...] = (_unread_arguments, _turns_end, _turns_begin, _thinking_stays)
