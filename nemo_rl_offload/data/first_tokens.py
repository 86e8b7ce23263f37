"""The first tokens of a text, of which no more are wanted, without making those of megabytes behind them.

A sample is cut to a length, and a prompt over a length is left out, but both were encoded whole before: a text of 8 MB
took 1.7 GB. How much text makes how many tokens is not known beforehand: tokenizers drop blanks, make one token of a
word of any length that they do not know, and compose characters. So a beginning is encoded, and a longer one where it
makes too few tokens.

A beginning's tokens are those of the whole where nothing behind it matters. Words are cut by what stands next to them,
which a beginning has, but for its end; but nothing forbids a tokenizer to look further. Some group the digits of a
number from its end, and Unigram's best pieces of a run depend on its length. So longer beginnings, by a few characters
and twice as long, must begin with the same tokens; else more is encoded, at last the whole. The limit: what shows in
none of these lengths goes unseen.
"""

from nemo_rl_offload.data.tokenizer import Encoded, Tokenizer

WHOLE_CHARACTERS, CHARACTERS_PER_TOKEN = 1 << 16, 16
"""Texts up to twice these are encoded whole, the second for each token that is wanted."""
_MORE = (1, 2, 3, 5)


def first_tokens(tokenizer: Tokenizer, text: str, num_tokens: int) -> tuple[list[int], int]:
    """Return so many first tokens of a text, or all of them; and of how many characters, where all are there all."""
    found, length = _first(tokenizer, text, num_tokens, with_places=False)
    return found["input_ids"], length


def first_tokens_and_places(tokenizer: Tokenizer, text: str, num_tokens: int) -> tuple[Encoded, int]:
    """The same, with where each begins and ends in the text; the characters are those that the tokens stand for."""
    return _first(tokenizer, text, num_tokens, with_places=True)


def _first(tokenizer: Tokenizer, text: str, num_tokens: int, *, with_places: bool) -> tuple[Encoded, int]:
    length = max(WHOLE_CHARACTERS, CHARACTERS_PER_TOKEN * num_tokens)
    while 2 * length < len(text):
        first = _encode(tokenizer, text[:length], with_places=with_places)
        if len(first["input_ids"]) > num_tokens:
            kept = _cut(first, num_tokens)
            ends = (*(length + more for more in _MORE), 2 * length)
            longer = (_encode(tokenizer, text[:end], with_places=with_places) for end in ends)
            if all(_cut(other, num_tokens) == kept for other in longer):
                return kept, max(end for _, end in kept["offset_mapping"]) if with_places else length
        length *= 2
    return _encode(tokenizer, text, with_places=with_places), len(text)


def _encode(tokenizer: Tokenizer, text: str, *, with_places: bool) -> Encoded:
    if with_places:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return {"input_ids": list(found["input_ids"]), "offset_mapping": found["offset_mapping"]}
    return {"input_ids": tokenizer.encode(text, add_special_tokens=False), "offset_mapping": []}


def _cut(encoded: Encoded, num_tokens: int) -> Encoded:
    return {
        "input_ids": encoded["input_ids"][:num_tokens],
        "offset_mapping": encoded["offset_mapping"][:num_tokens],
    }
