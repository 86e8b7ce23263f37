"""Which tokens end a turn: the one answer for generation, for what is learned, and for exports.

Three places say it. A tokenizer has one `eos_token`. `generation_config.json` has `eos_token_id`, one id or a list; it
is what other engines stop at. And the chat template writes something behind an assistant's text, which is what a model
that was trained with it writes. Public models disagree: Qwen2.5's base model ends with `<|endoftext|>`, and its
template closes turns with `<|im_end|>`. A response that goes on behind any of them is text that nobody asked for, so
any of them ends it. Rejected: to believe one place alone, which is wrong for the models of the other two.

Limit: what a template writes counts where it is one token of its own, such as `<|im_end|>`; ordinary text, such as an
empty line, ends nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.documents import MODEL_BYTES, DocumentError, read_json_object

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class EndTokens:
    """What ends a turn."""

    ids: tuple[int, ...]
    """Any of them ends a response. The first is the tokenizer's, which closes an answer without a chat template."""
    disagreement: str | None = None
    """Which place names a token that another lacks; one line, None where none does."""


def end_tokens(
    eos_id: int,
    generation_ids: Sequence[int] | None,
    closing_id: int | None,
    name_of: Callable[[int], str] = str,
) -> EndTokens:
    """Return the tokens that end a turn.

    Args:
        eos_id: the tokenizer's end token.
        generation_ids: `eos_token_id` of generation_config.json, None where it says nothing.
        closing_id: the token that the chat template writes behind an assistant's text, None where there is none or the
            chat template is not used.
        name_of: how a message names a token.
    """
    ids = tuple(dict.fromkeys([eos_id, *([] if closing_id is None else [closing_id]), *(generation_ids or [])]))
    known = [eos_id] if generation_ids is None else generation_ids
    if eos_id in known and (closing_id is None or closing_id in known):
        return EndTokens(ids)
    places = [f"the tokenizer's eos_token is {name_of(eos_id)}"]
    if generation_ids is not None:
        places.append(f"{GENERATION_CONFIG} has {_listed(generation_ids, name_of)}")
    if closing_id is not None:
        places.append(f"the chat template closes a turn with {name_of(closing_id)}")
    text = f"{', '.join(places)}; each of {_listed(ids, name_of)} ends a response"
    return EndTokens(ids, text)


def closing_token(closing: str, special: Mapping[str, int]) -> int | None:
    """The id of the token in `special` (text -> id) that `closing` begins with, behind blanks; None without one."""
    text = closing.lstrip()
    matches = [token for token in special if token and text.startswith(token)]
    return special[max(matches, key=len)] if matches else None


def read_generation_ids(folder: Path) -> list[int] | None:
    """`eos_token_id` of the folder's generation_config.json, as a list; None without the file or the key.

    Raises:
        ConfigError: the file cannot be read, or the value is neither an id nor a list of ids.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return None
    try:
        value = read_json_object(path, MODEL_BYTES).get("eos_token_id")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except DocumentError as error:
        raise ConfigError(f"{error}. Mend it.") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ConfigError(f"{path}: eos_token_id is {repr(value)[:100]}, neither an id nor a list of ids. Mend it.")
    return ids or None


def outside(ids: Collection[int], vocab_size: int) -> list[int]:
    """The ids that a model with so many tokens does not have, in order."""
    return sorted(each for each in ids if not 0 <= each < vocab_size)


def _listed(ids: Sequence[int], name_of: Callable[[int], str]) -> str:
    return f"[{', '.join(map(name_of, ids))}]"
