"""Whether a tokenizer can write a stop string at all."""

from collections.abc import Callable

KEY = "policy.generation.stop_strings"


def never_written(
    text: str, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], special: dict[str, int]
) -> str | None:
    """Why no response can hold a text, as a message for the user; None where one can.

    `decode` leaves special tokens out. They are `special`: texts and ids. What a tokenizer makes of the text, alone and
    among others, is looked at.
    """
    if not text or "\ufffd" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        what = "is empty" if not text else "has a character that stands for what is no text"
        return f"{KEY}: {text!a} {what}. Remove it."
    written = [decode(encode(before + text + after)) for before, after in (("", ""), ("x", ""), ("x", "x"))]
    if any(text in each for each in written):
        return None
    if text in special:
        return (
            f"{KEY}: {text!r} is a special token, which is left out of a response's text. "
            f"Name its id instead: policy.generation.stop_token_ids=[{special[text]}]"
        )
    return (
        f"{KEY}: {text!r} never stands in a response: the tokenizer writes {written[0]!r} for it, without special "
        "tokens. Give text as it writes it; special tokens are named in policy.generation.stop_token_ids."
    )
