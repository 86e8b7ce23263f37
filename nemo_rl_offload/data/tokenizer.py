"""Tokenizers from local folders, and the byte-level one of the tiny shipped models."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypedDict, overload

from nemo_rl_offload.errors import DataError
from nemo_rl_offload.specs.chat_template import render_chat

PROBE = "Hello, 1 + 2"
EOS, PAD, BOS, START = "<|im_end|>", "<|endoftext|>", "<|bos|>", "<|im_start|>"  # Qwen2's names
RESERVED = tuple(f"<|reserved_{number}|>" for number in range(4))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Encoded(TypedDict):
    """A text's tokens, and where each begins and ends in it."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]


class AddedToken(Protocol):
    """A token of its own, which no text is cut into."""

    content: str
    special: bool
    """Whether it is left out of a text."""


class Tokenizer(Protocol):
    """What is called of a Hugging Face tokenizer."""

    chat_template: str | dict[str, str] | None
    is_fast: bool
    eos_token: str
    eos_token_id: int
    pad_token_id: int
    bos_token_id: int | None

    added_tokens_decoder: Mapping[int, AddedToken]
    special_tokens_map: Mapping[str, object]

    def __len__(self) -> int: ...
    def __call__(
        self, text: str, *, add_special_tokens: Literal[False], return_offsets_mapping: Literal[True]
    ) -> Encoded: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str: ...
    @overload
    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], *, return_dict: Literal[False], add_generation_prompt: bool
    ) -> list[int]: ...
    def get_chat_template(self, *, tools: Sequence[Mapping[str, object]] | None = None) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the Hugging Face tokenizer of a local folder; a missing padding token becomes the end token.

    Raises:
        DataError: nothing loads from ``path``, the tokenizer has no end token, or it does not encode (where
            the tokenizer class does not fit the files, transformers gives an empty vocabulary and no error).
    """
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise DataError(f"policy.tokenizer.name: no folder '{path}'. Give a local folder with tokenizer.json.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason: object = error
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own (auto_map), which is never run. Take one of a class of transformers"
        raise DataError(f"policy.tokenizer.name: no tokenizer loads from '{path}': {reason}") from error
    if not tokenizer.encode(PROBE, add_special_tokens=False):
        raise DataError(
            f"policy.tokenizer.name: the tokenizer in '{path}' ({type(tokenizer).__name__}) encodes "
            f"{PROBE!r} to nothing: its class does not fit its files. Add a tokenizer.json."
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"policy.tokenizer.name: the tokenizer in '{path}' has no end token, so no response could end. "
            "Set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    checked: Tokenizer = tokenizer
    checked.apply_chat_template = partial(_apply_chat_template, checked)  # type: ignore[assignment,method-assign]
    return checked


def _apply_chat_template(
    tokenizer: Tokenizer,
    conversation: Sequence[Mapping[str, object]],
    *,
    tokenize: bool = True,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, object]] | None = None,
    return_dict: bool = False,
    **variables: object,
) -> str | list[int]:
    """What transformers makes of a conversation, with an allowance for what the template does."""
    assert not return_dict, "nothing here asks for it"
    template = tokenizer.get_chat_template(tools=tools)
    given = {**tokenizer.special_tokens_map, **variables}
    text = render_chat(template, conversation, given, prompt=add_generation_prompt, tools=tools)
    return tokenizer.encode(text, add_special_tokens=False) if tokenize else text


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Texts and ids of the tokens of their own, such as `<|im_end|>`."""
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that are left out of a text."""
    return frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)


def make_byte_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of a byte-level BPE without merges.

    264 tokens, so that 2, 4 and 8 ranks divide them: id ``b`` is the byte ``b``, then the end of a turn and of a
    response (256, also unknown), padding (257), beginning (258), the start of a turn (259), and four in reserve.
    The chat template is ChatML. Byte for byte the same files every time. Beside a Qwen2 ``config.json``, transformers
    insists on its Qwen2 class, which brings text into Unicode's composed form (NFC) first; elsewhere every text
    round-trips that does not spell a special token.
    """
    from tokenizers import (  # type: ignore[import-untyped]
        AddedToken,
        decoders,
        models,
        pre_tokenizers,
    )
    from tokenizers import Tokenizer as ByteLevelTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()
    tokenizer = ByteLevelTokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (EOS, PAD, BOS, START, *RESERVED)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": EOS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
