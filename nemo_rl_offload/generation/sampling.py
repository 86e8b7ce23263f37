"""How responses are drawn: the same keys in training and in validation, each with values of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nemo_rl_offload.config.loader import resolve_tokenizer_path
from nemo_rl_offload.config.schema import PolicyConfig


@dataclass(frozen=True)
class Sampling:
    """What a call for responses asks for beside the prompts. The tokens that end one are the generator's own."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int | None = None
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of them, in the text without special tokens."""
    tokenizer: Path | None = None
    """The folder whose tokenizer makes that text; needed where there are stop strings."""

    @classmethod
    def of(cls, policy: PolicyConfig, *, validation: bool = False) -> Self:
        """As the section `policy.generation` says, in validation by its keys `val_*`."""
        section, stops = policy["generation"], tuple(policy["generation"]["stop_strings"] or ())
        temperature, top_p, top_k = section["temperature"], section["top_p"], section["top_k"]
        if validation:
            temperature, top_p, top_k = section["val_temperature"], section["val_top_p"], section["val_top_k"]
        folder = resolve_tokenizer_path(policy["tokenizer"]["name"]).resolve() if stops else None
        return cls(section["max_new_tokens"], temperature, top_p, top_k, stops, folder)
