"""Which tokens end a turn, and where the three places that say so disagree."""

from pathlib import Path

import pytest

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.end_tokens import closing_token, end_tokens, outside, read_generation_ids


@pytest.mark.parametrize(
    ("eos", "generation", "closing", "ids", "said"),
    [
        (2, None, None, (2,), None),
        (2, [2], 2, (2,), None),
        (2, [2, 7], 7, (2, 7), None),
        (2, None, 7, (2, 7), "eos_token is <2>, the chat template closes a turn with <7>; each of [<2>, <7>] ends"),
        (2, [2], 7, (2, 7), "eos_token is <2>, generation_config.json has [<2>], the chat template closes a turn with"),
        (
            2,
            [7],
            None,
            (2, 7),
            "eos_token is <2>, generation_config.json has [<7>]; each of [<2>, <7>] ends a response",
        ),
        (2, [9, 7], 7, (2, 7, 9), "generation_config.json has [<9>, <7>]"),
    ],
)
def test_any_of_the_three_places_ends_a_turn(
    eos: int, generation: list[int] | None, closing: int | None, ids: tuple[int, ...], said: str | None
) -> None:
    found = end_tokens(eos, generation, closing, "<{}>".format)
    assert found.ids == ids
    assert found.disagreement is None if said is None else said in str(found.disagreement)
    assert "\n" not in str(found.disagreement)


@pytest.mark.parametrize(
    ("closing", "token"),
    [
        ("<|end|>\n", 1),
        (" </s>", 2),
        ("<|end|>x<", 1),
        ("", None),
        ("\n\n", None),
        ("\n### Q", None),
        ("<|endless|>", 3),
    ],
)
def test_the_token_behind_an_assistants_text(closing: str, token: int | None) -> None:
    assert closing_token(closing, {"": 0, "<|end|>": 1, "</s>": 2, "<|endless|>": 3, "<|end": 4}) == token


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('{"eos_token_id": 3}', [3]),
        ('{"eos_token_id": [3, 4]}', [3, 4]),
        ("{}", None),
        ('{"eos_token_id": null}', None),
    ],
)
def test_generation_config(tmp_path: Path, text: str, ids: list[int] | None) -> None:
    assert read_generation_ids(tmp_path) is None
    (tmp_path / "generation_config.json").write_text(text)
    assert read_generation_ids(tmp_path) == ids


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}', '{"eos_token_id": -1}']
)
def test_a_generation_config_that_says_nothing_usable_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json.*Mend it"):
        read_generation_ids(tmp_path)


def test_ids_that_a_model_does_not_have() -> None:
    assert outside([5, 0, 4, 7], 5) == [5, 7]
