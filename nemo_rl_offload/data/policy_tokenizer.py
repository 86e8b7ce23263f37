"""The tokenizer of a run, as the section `policy.tokenizer` sets it up, and which of its tokens end a turn."""

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_rl_offload.config.loader import resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.config.tokenizer_files import OWN, chosen_template, ends_of_turns, read_tokenizer_files
from nemo_rl_offload.data.tokenizer import Tokenizer, added_tokens, load_tokenizer, special_ids
from nemo_rl_offload.errors import ConfigError, DataError
from nemo_rl_offload.specs.catalogue import key_in_file, read_config_file
from nemo_rl_offload.specs.chat_template import turn_texts
from nemo_rl_offload.specs.model_shape import parse_model_shape
from nemo_rl_offload.specs.stop_strings import never_written


def load_policy_tokenizer(policy: PolicyConfig, prompt_template: str | None) -> tuple[Tokenizer, tuple[int, ...]]:
    """Load the tokenizer with its chat template, and find which tokens end a turn, the tokenizer's own first.

    Where the tokenizer, generation_config.json and the chat template disagree about these, that is warned of, unless
    the check of the configuration could tell it from the tokenizer's files. ``prompt_template`` is
    `data.prompt_template`; with one the chat template does not count.

    Raises:
        DataError: as `load_tokenizer`, or the model lacks tokens of the tokenizer.
        ConfigError: `policy.tokenizer.chat_template` names nothing, or generation_config.json cannot be read.
    """
    section = policy["tokenizer"]
    folder, model = resolve_tokenizer_path(section["name"]), resolve_model_path(policy["model_name"])
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, folder, model)
    own = tokenizer.chat_template
    names = own if isinstance(own, dict) else {} if own is None else {OWN: own}
    if section["chat_template"] is None or section["chat_template"].lower() != OWN:
        try:
            tokenizer.chat_template = chosen_template(section["chat_template"], names)
        except ConfigError as error:
            raise ConfigError(f"policy.tokenizer.chat_template: {error}") from error
    if section["chat_template_kwargs"]:
        given = partial(tokenizer.apply_chat_template, **section["chat_template_kwargs"])
        tokenizer.apply_chat_template = given  # type: ignore[assignment,method-assign]
    texts = None
    if prompt_template is None and tokenizer.chat_template is not None:
        texts = turn_texts(
            lambda messages, prompt: str(
                tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
            )
        )
    ends = ends_of_turns(tokenizer.eos_token_id, added_tokens(tokenizer), model, texts)
    if ends.disagreement is not None and read_tokenizer_files(folder).eos_id != tokenizer.eos_token_id:
        warnings.warn(f"policy.tokenizer.name: {ends.disagreement}.", stacklevel=2)
    return tokenizer, ends.ids


@dataclass(frozen=True)
class ResponseEnds:
    """What ends a response."""

    ids: tuple[int, ...]
    """Any of these tokens; the first is the tokenizer's end token."""
    without_text: frozenset[int]
    """Those of them that are no part of what a response says."""


def response_ends(policy: PolicyConfig, tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> ResponseEnds:
    """What ends a response: ``end_ids``, which end a turn of the model, and what `policy.generation` names besides.

    Of `stop_token_ids`, special tokens only end; others are text, as a stop string is. Raises ConfigError where a stop
    string can never be written.
    """
    section, special = policy["generation"], special_ids(tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def decode(ids: list[int]) -> str:
        return tokenizer.batch_decode([ids], skip_special_tokens=True)[0]

    names = {text: token for text, token in added_tokens(tokenizer).items() if token in special}
    for text in section["stop_strings"] or ():
        if problem := never_written(text, encode, decode, names):
            raise ConfigError(problem)
    stop_ids = section["stop_token_ids"] or ()
    return ResponseEnds(
        tuple(dict.fromkeys([*end_ids, *stop_ids])), frozenset(end_ids) | (special.intersection(stop_ids))
    )


def check_vocabulary(tokenizer: Tokenizer, folder: Path, model: Path) -> None:
    """Raise DataError where the model in its folder lacks tokens of the tokenizer in another one."""
    highest = max(tokenizer.get_vocab().values())
    file = model / "config.json"
    vocab_size = parse_model_shape(read_config_file(file)).shape.vocab_size
    if vocab_size and highest >= vocab_size:
        raise DataError(
            f"policy.tokenizer.name: the tokenizer in {folder} has ids up to {highest}, and the model in {model} has "
            f"{vocab_size} tokens ({key_in_file(file, 'vocab_size')} of its config.json). Take the model's own "
            "tokenizer, or remove the added tokens that the model does not have."
        )
