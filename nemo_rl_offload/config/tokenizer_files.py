"""What the files of a Hugging Face tokenizer say, read without transformers, which imports torch.

Only what they say plainly: what the code of a tokenizer's class adds, such as an end token that no file names, is
known when the tokenizer is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_rl_offload.config.loader import resolve_data_path
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.chat_template import PASSTHROUGH, TurnTexts
from nemo_rl_offload.specs.documents import TEMPLATE_BYTES, TOKENIZER_BYTES, DocumentError, read_json_object, read_text
from nemo_rl_offload.specs.end_tokens import EndTokens, closing_token, end_tokens, read_generation_ids

OWN = "default"
"""The tokenizer's own chat template."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer as its files describe it."""

    special: dict[str, str]
    """Names of special tokens (`eos_token`, ...) and their texts."""
    ids: dict[str, int]
    """Tokens of their own, which no text is cut into, and their ids."""
    vocabulary: dict[str, int]
    """All tokens and their ids; empty where no file lists them."""
    templates: dict[str, str]
    """Chat templates by name; the one that counts unless another is asked for is `default`."""

    @property
    def highest_id(self) -> int | None:
        """Of all tokens; None where no file lists them."""
        return max(self.vocabulary.values(), default=None)

    @property
    def eos_id(self) -> int | None:
        """The end token's id; None where the files do not tell."""
        return self.ids.get(self.special.get("eos_token", ""))


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a tokenizer's folder.

    Raises:
        ConfigError: a file is no JSON, or not what such a file is.
    """
    path = folder / "tokenizer.json"
    stamp = path.stat().st_mtime_ns if path.is_file() else None
    try:
        return _read(folder, stamp, (folder / "tokenizer_config.json").stat().st_mtime_ns)
    except DocumentError as error:
        raise ConfigError(f"the tokenizer's files in '{folder}' cannot be read: {error}. Mend them.") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"the tokenizer's files in '{folder}' cannot be read: {error!r}. Mend them.") from error


@cache
def _read(folder: Path, tokens_stamp: int | None, _config_stamp: int) -> TokenizerFiles:
    config = _json(folder / "tokenizer_config.json")
    others = _json(folder / "special_tokens_map.json")
    values = {name: _text(value) for name, value in {**others, **config}.items() if name.endswith("_token")}
    special = {name: text for name, text in values.items() if text is not None}
    listed = config.get("added_tokens_decoder", {})
    ids = {text: int(number) for number, token in listed.items() if (text := _text(token))}
    all_ids = dict[str, int]()
    if tokens_stamp is not None:
        content = _json(folder / "tokenizer.json")
        ids |= {token["content"]: token["id"] for token in content.get("added_tokens", [])}
        vocabulary = model.get("vocab") if isinstance(model := content.get("model"), dict) else None
        if not isinstance(vocabulary, dict | list):
            raise DocumentError("has no model with a vocab", folder / "tokenizer.json")
        pieces = vocabulary if isinstance(vocabulary, dict) else {each[0]: at for at, each in enumerate(vocabulary)}
        all_ids = {**pieces, **ids}
        if strange := next((token for token, number in all_ids.items() if type(number) is not int), None):
            raise DocumentError(f"has {all_ids[strange]!r} as the id of {strange!r}", folder / "tokenizer.json")
    return TokenizerFiles(
        special, {text: number for text, number in ids.items() if text}, all_ids, _own(folder, config)
    )


def differing_token(some: TokenizerFiles, other: TokenizerFiles) -> str | None:
    """A token that has another id in the other tokenizer, or none; None where the files show no difference.

    Special tokens are left out that a tokenizer may add itself when it is loaded.
    """
    if not (some.vocabulary and other.vocabulary):
        return None
    added = {*some.special.values(), *other.special.values()}
    different = some.vocabulary.items() ^ other.vocabulary.items()
    found = min(((number, token) for token, number in different if token not in added), default=None)
    return None if found is None else found[1]


def _own(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    value = config.get("chat_template")
    templates = {each["name"]: each["template"] for each in value} if isinstance(value, list) else {}
    if isinstance(value, str):
        templates[OWN] = value
    if (single := folder / "chat_template.jinja").is_file():
        templates[OWN] = read_text(single, TEMPLATE_BYTES)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path, TEMPLATE_BYTES)
    return templates


def _json(path: Path) -> dict[str, Any]:
    return read_json_object(path, TOKENIZER_BYTES) if path.exists() else {}


def _text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def chosen_template(setting: str | None, own: Mapping[str, str]) -> str | None:
    """The Jinja text that `policy.tokenizer.chat_template` asks for, as in NeMo-RL; None where the tokenizer has none.

    `default` is the tokenizer's own, null the texts alone; else it is Jinja text, the name of one of the tokenizer's
    templates, or the path of a file.

    Raises:
        ConfigError: none of these; the message goes on after the key.
    """
    if setting is None:
        return PASSTHROUGH
    if setting.lower() == OWN:
        return own.get(OWN)
    if setting in own:
        return own[setting]
    if "{{" in setting or "{%" in setting:
        return setting
    try:
        path = resolve_data_path(setting)
        return read_text(path, TEMPLATE_BYTES)
    except (ConfigError, OSError, ValueError) as error:
        names = [OWN, *(name for name in own if name != OWN)]
        raise ConfigError(
            f"'{setting}' is no Jinja text, none of the tokenizer's templates ({', '.join(names)}) and no file that "
            f"can be read.{nearest(setting, names)} Give one of them."
        ) from error


def ends_of_turns(eos_id: int, special: Mapping[str, int], model: Path, texts: TurnTexts | None) -> EndTokens:
    """Which tokens end a turn of the model in this folder.

    `special` are the texts and ids of the tokens of their own, `texts` what the chat template writes around a turn;
    None where it is not used. Raises ConfigError as `read_generation_ids` does.
    """
    names = {token: text for text, token in special.items()}
    closing_id = None if texts is None else closing_token(texts.closing, special)
    return end_tokens(
        eos_id,
        read_generation_ids(model),
        closing_id,
        lambda token: f"{names[token]} ({token})" if token in names else str(token),
    )
