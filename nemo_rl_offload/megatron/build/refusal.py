"""Megatron-Core's refusal of a configuration, as a message about the user's key."""

import re
import traceback

from nemo_rl_offload.config.types import keys_of
from nemo_rl_offload.errors import ConfigError


def refused(section: str, keys: type, error: Exception) -> ConfigError:
    """Megatron's own words, or its code where it says none, with the path of the first key that they name.

    `section` is the path below `policy.megatron_cfg`, and `keys` its schema.
    """
    words = " ".join(str(error).split()) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    named = [name for name in re.findall(r"\w+", words.replace("-", "_")) if name in keys_of(keys)]
    path = ".".join(["policy.megatron_cfg", *([section] if section else []), *named[:1]])
    return ConfigError(f"{path}: Megatron-Core refuses this configuration: {words}")
