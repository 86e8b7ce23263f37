"""How many turns a response may have, by environment."""

import pytest

from nemo_rl_offload.config.environments import ENVIRONMENTS, num_turns_of


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_the_key_counts_where_turns_are_possible(name: str) -> None:
    assert num_turns_of(name, 3) == (3 if name == "function" else 1)
    assert num_turns_of(name, 1) == 1
