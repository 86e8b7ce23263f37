"""What stands beside the weights of a Hugging Face folder: the model's configuration, and the run's tokenizer.

The start model's files are copied, for other programs read keys that this project does not know. Then what the run did
otherwise is written over them: its tokenizer's files in place of the model's, the chat template that it rendered with,
the tokens that ended a response, the type of the weights. Files are copied and not saved anew by transformers: those of
its fifth version name classes that the fourth, and what is built on it, does not have.

What came out is read as a user would read it, and compared with what the run had: beside a model's config.json,
transformers may take another class for the same tokenizer files.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from nemo_rl_offload.data.inputs import TOKENIZER_FILES
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.documents import MODEL_BYTES, DocumentError, read_json_object
from nemo_rl_offload.specs.end_tokens import GENERATION_CONFIG
from nemo_rl_offload.specs.model_keys import Content, with_overrides
from nemo_rl_offload.specs.multimodal import SECTION, changed_text

MODEL_CONFIG, TOKENIZER_CONFIG, CHAT_TEMPLATE = "config.json", "tokenizer_config.json", "chat_template.jinja"
PROBES = (
    "Hello, 1 + 2 = 3",
    " two  blanks\tand\n\nlines ",
    "I'll've 12345.678 x² ½",
    "e\u0301 ﬁ Å",  # what normal forms of Unicode change
    "数学 привет 🙂",
)
"""Texts on which tokenizers of different classes differ."""


def readable(folder: Path) -> None:
    """Give weights the rights that new files have here: safetensors gives them to their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def copy_model_files(source: Path, folder: Path) -> None:
    """Copy a model's files but for its weights. Raises OSError where that fails."""
    for file in source.iterdir():
        if file.suffix in (".json", ".txt", ".jinja", ".model", ".tiktoken") and "index" not in file.name:
            shutil.copyfile(file, folder / file.name)  # not its mode: caches are often read-only


def write_overrides(folder: Path, overrides: Content) -> None:
    """Say in config.json what the run said of positions. Raises OSError, DocumentError."""
    if overrides:
        path = folder / MODEL_CONFIG
        config = read_json_object(path, MODEL_BYTES)
        write_json(path, changed_text(config, lambda text: with_overrides(text, overrides)))


def write_dtype(folder: Path, dtype: str) -> None:
    """Say in config.json of which type the weights are, and that they are not quantized.

    Raises OSError, DocumentError.
    """
    path = folder / MODEL_CONFIG
    config = read_json_object(path, MODEL_BYTES)
    before = deepcopy(config)
    config.pop("quantization_config", None)
    for section in (config, config.get(SECTION)):
        if isinstance(section, dict):
            # transformers wrote `torch_dtype` before its version 4.56, and reads both.
            keys = [key for key in ("dtype", "torch_dtype") if key in section]
            section |= dict.fromkeys(keys or (["dtype"] if section is config else []), dtype)
    if config != before:
        write_json(path, config)


def write_generation_config(folder: Path, end_ids: Sequence[int], pad_id: int) -> None:
    """Say in generation_config.json which tokens end a response, and which one pads. Raises OSError, ConfigError."""
    path = folder / GENERATION_CONFIG
    config: dict[str, Any] = {}
    if path.exists():
        try:
            config = read_json_object(path, MODEL_BYTES)
        except DocumentError as error:
            raise ConfigError(
                f"policy.model_name: {GENERATION_CONFIG} cannot be read: {error.reason}. Mend it."
            ) from error
    config.pop("_from_model_config", None)  # with it, transformers may take config.json's end token again
    config |= {"eos_token_id": list(end_ids) if len(end_ids) > 1 else end_ids[0], "pad_token_id": pad_id}
    write_json(path, config)


def replace_tokenizer(folder: Path, tokenizer_path: Path) -> None:
    """Put a tokenizer's files in place of those that are there. Raises OSError where that fails."""
    for pattern in TOKENIZER_FILES:
        for file in folder.glob(pattern):
            file.unlink()
        for file in tokenizer_path.glob(pattern):
            target = folder / file.relative_to(tokenizer_path)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def write_chat_template(folder: Path, template: str) -> None:
    """Make it the one chat template, for readers of either place. Raises OSError where that fails."""
    (folder / "chat_template.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    config = read_json_object(folder / TOKENIZER_CONFIG, MODEL_BYTES)
    write_json(folder / TOKENIZER_CONFIG, config | {"chat_template": template})


def difference(exported: Tokenizer, trained: Tokenizer) -> str:
    """In what a tokenizer as it is read from an export differs from the run's; empty where in nothing."""
    if exported.get_vocab() != trained.get_vocab():
        return f"it has {len(exported)} tokens instead of {len(trained)}, or other ones"
    if exported.eos_token_id != trained.eos_token_id:
        return f"its end token is {exported.eos_token} instead of {trained.eos_token}"
    for text in PROBES:
        if exported.encode(text) != trained.encode(text):
            return (
                f"as {type(exported).__name__}, it encodes {text!r} otherwise than as {type(trained).__name__}, by "
                "which the run encoded"
            )
    return ""


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a file of settings. Raises OSError where that fails."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
