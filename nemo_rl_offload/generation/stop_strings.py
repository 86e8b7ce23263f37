"""Finds the token that completes a stop string.

A text may be cut into tokens in any way, and a character over several of them. So after each token the end of the
response is decoded anew: as many tokens as the longest stop string has bytes, since a token of the text has at least
one, and some before them. Decoding that begins within a character, or with a token that is written otherwise at the
beginning of a text, differs from the whole there only. Special tokens are not in the text, and do not count.

Rejected: comparing token ids, which misses every other way to cut the same text; and decoding each token for itself,
which is wrong for characters of several tokens and for tokenizers that write spaces before words.
"""

from collections.abc import Sequence

from nemo_rl_offload.data.tokenizer import Tokenizer, special_ids

MARGIN = 8
"""Tokens before those that can hold a stop string: a character has at most four bytes."""


class StopStrings:
    """Texts of which each ends a response, and the responses of a batch so far."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], num_rows: int) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._without_text = special_ids(tokenizer)
        self._window = MARGIN + max(len(text.encode()) for text in strings)
        self._tails: list[list[int]] = [[] for _ in range(num_rows)]

    def completed(self, tokens: Sequence[int], writes: Sequence[bool]) -> list[bool]:
        """Take each row's next token, where it `writes` one; whether a stop string is there that was not before."""
        rows = [row for row, writing in enumerate(writes) if writing and self._is_text(tokens[row])]
        for row in rows:
            self._tails[row] = [*self._tails[row], tokens[row]][-self._window :]
        found = [False] * len(tokens)
        if not rows:  # of which transformers makes one text
            return found
        texts = self._tokenizer.batch_decode([self._tails[row] for row in rows], skip_special_tokens=True)
        for row, text in zip(rows, texts, strict=True):
            found[row] = any(stop in text for stop in self._strings)
        return found

    def _is_text(self, token: int) -> bool:
        """Whether it is no special one, and none that the model has beyond the tokenizer's."""
        return token not in self._without_text and token < len(self._tokenizer)
