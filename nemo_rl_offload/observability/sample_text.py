"""Text of a model's, which may be anything, in a terminal and on a page: what is no letter stands as its escape.

A response can hold what a terminal obeys (its escape sequences, a carriage return that hides a line) and what turns
the order of letters around. Of what is not printable, blanks of other scripts alone stay.
"""

import unicodedata
from collections.abc import Iterator, Sequence

from nemo_rl_offload.runs.run_files import SampleRecord
from nemo_rl_offload.runs.samples import shortened

PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 200, 400
"""That are shown in a terminal."""


def visible(text: str, *, keeps: str = "") -> str:
    """A text with escapes, such as ``\\n``, in place of all that does not print, but for the letters of ``keeps``."""
    return "".join(
        each if each.isprintable() or each in keeps or unicodedata.category(each) == "Zs" else _escape(each)
        for each in text
    )


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def outcome(sample: SampleRecord) -> str:
    """What became of a response, in a few words."""
    turns = f", {sample['num_turns']} turns" if sample["num_turns"] > 1 else ""
    end = ", cut off" if sample["truncated"] else ""
    tokens = "1 token" if sample["num_tokens"] == 1 else f"{sample['num_tokens']} tokens"
    return f"reward {sample['reward']:.4g}, {tokens}{turns}{end}"


def sample_lines(samples: Sequence[SampleRecord], num_all: int) -> Iterator[str]:
    """Lines for a terminal with some of a validation's ``num_all`` samples."""
    if samples:
        yield f"{len(samples)} of {num_all} responses:"
    for sample in samples:
        yield f"  {outcome(sample)}"
        yield f"    prompt    {visible(shortened(sample['prompt'], PROMPT_CHARACTERS))}"
        yield f"    response  {visible(shortened(sample['response'], RESPONSE_CHARACTERS))}"
