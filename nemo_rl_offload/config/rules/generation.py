"""Rules about what ends a response: tokens that the model has, and texts that its tokenizer can write."""

from collections.abc import Callable, Iterator
from pathlib import Path

from nemo_rl_offload.config.loader import resolve_tokenizer_path
from nemo_rl_offload.config.rules.rule import Get, Rule, algorithm_spec, model_shape, vocabulary_key
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.end_tokens import outside
from nemo_rl_offload.specs.stop_strings import KEY, never_written

_STOP_IDS = "policy.generation.stop_token_ids"


def _model_has_stop_tokens(get: Get) -> Iterator[str]:
    ids = get(_STOP_IDS)
    if not ids or not algorithm_spec(get).generates:
        return
    vocab_size = model_shape(get).vocab_size
    if vocab_size and (beyond := outside(ids, vocab_size)):
        key = vocabulary_key(get("policy.model_name"))
        yield (
            f"{_STOP_IDS}: {beyond[0]} is no token of the model, which has {vocab_size} ({key} of its config.json). "
            f"Give ids from 0 to {vocab_size - 1}."
        )


def _tokenizer_writes_stop_strings(get: Get) -> Iterator[str]:
    texts = get(KEY)
    if not texts or not algorithm_spec(get).generates:
        return
    try:
        path = resolve_tokenizer_path(get("policy.tokenizer.name")) / "tokenizer.json"
    except ConfigError:  # another rule says so
        return
    if not path.is_file() or (read := _tokenizer(path)) is None:
        return  # a run asks the tokenizer itself
    for text in texts:
        if problem := never_written(text, *read):
            yield problem


_Read = tuple[Callable[[str], list[int]], Callable[[list[int]], str], dict[str, int]]


def _tokenizer(path: Path) -> _Read | None:
    """How a tokenizer cuts and writes text, and its special tokens; None where the file does not load."""
    from tokenizers import Tokenizer  # type: ignore[import-untyped]

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - its own, which has no name; another rule, or the run, says what is wrong
        return None
    special = {each.content: token for token, each in tokenizer.get_added_tokens_decoder().items() if each.special}
    return (
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        special,
    )


GENERATION_RULES: tuple[Rule, ...] = (_model_has_stop_tokens, _tokenizer_writes_stop_strings)
