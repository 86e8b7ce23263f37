"""What ends a response, against a real tokenizer's file, and how validation samples."""

from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_offload.config.validation import CheckedConfig
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
G = "policy.generation"
TINY = "policy.model_name=examples/models/tiny_speller"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stop_strings=['<|im_end|>']",
            r"'<\|im_end\|>' is a special token.* policy.generation.stop_token_ids=\[256\]",
        ),
        ("stop_strings=[a,'b<|im_end|>']", r"'b<\|im_end\|>' never stands in a response: the tokenizer writes 'b'"),
        ("stop_strings=['']", r"'' is empty\. Remove it\."),
        ("stop_strings=['\ufffd']", r"'\\ufffd' has a character that stands for what is no text"),
        ("stop_strings=[5]", r"stop_strings(\.0)?: 5 is not allowed"),
        ("stop_strings=END", r"Allowed: a list of text, or null. Write it as a list: \[END\]"),
        ("stop_token_ids=[264]", r"264 is no token of the model, which has 264 .* Give ids from 0 to 263\."),
        ("stop_token_ids=[3,-1]", r"stop_token_ids(\.1)?: -1 is not allowed"),
        ("stop_token_ids=256", r"Allowed: a list of whole numbers from 0, or null\."),
        ("val_temperature=-0.1", r"val_temperature: -0\.1 is not allowed\. Allowed: a number from 0\."),
        ("val_temperature=null", r"val_temperature: null is not allowed"),
        ("val_top_p=0", r"val_top_p: 0 is not allowed"),
        ("val_top_k=0", r"val_top_k: 0 is not allowed"),
    ],
)
def test_refused(check: Check, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(TINY, f"{G}.{override}")


@pytest.mark.parametrize(
    "override",
    [
        "stop_strings=['</a>',END,' x','größer','日本','\n\n']",
        "stop_strings=[]",
        "stop_token_ids=[0,263]",
        "stop_token_ids=[]",
        "val_temperature=0",
        "val_top_k=null",
    ],
)
def test_taken_without_a_word(check: Check, override: str) -> None:
    assert not [warning for warning in check(TINY, f"{G}.{override}").warnings if G in warning]


def test_validation_samples_as_training_unless_it_is_told_otherwise(check: Check) -> None:
    found: Any = check(TINY, f"{G}.temperature=0.5", f"{G}.top_p=0.9", f"{G}.top_k=7")
    section = found.config["policy"]["generation"]
    assert [section[f"val_{key}"] for key in ("temperature", "top_p", "top_k")] == [0.5, 0.9, 7]
    assert not [warning for warning in found.warnings if "val_" in warning]
    other: Any = check(TINY, f"{G}.top_k=7", f"{G}.val_top_k=null").config
    assert other["policy"]["generation"]["val_top_k"] is None


OFF = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (
            (*OFF, f"{G}.val_temperature=0.5", f"{G}.val_top_k=3"),
            f"{G}.val_temperature: 0.5 has no effect, nor have {G}.val_top_k while validation is off.",
        ),
        ((*OFF, f"{G}.val_top_p=0.5"), f"{G}.val_top_p: 0.5 has no effect while validation is off."),
        (
            (f"{G}.val_temperature=0", f"{G}.val_top_k=3"),
            f"{G}.val_top_k: 3 has no effect while {G}.val_temperature is 0",
        ),
        ((f"{G}.val_temperature=0", f"{G}.val_top_p=0.3"), f"{G}.val_top_p: 0.3 has no effect while"),
    ],
)
def test_what_validation_does_not_read_is_warned_of(check: Check, overrides: tuple[str, ...], warning: str) -> None:
    assert [line for line in check(TINY, *overrides).warnings if G in line and line.startswith(warning)]
