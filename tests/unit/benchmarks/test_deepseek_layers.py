"""E1's three ways differ in copies and engine alone."""

from typing import Any, cast

from deepseek_layers import Stage
from megatron.core.transformer.moe import token_dispatcher


def test_the_routers_answers_pass_bare_copies_as_they_pass_an_engines() -> None:
    original = token_dispatcher.maybe_move_tensor_to_cpu
    stage = object.__new__(Stage)
    stage.use(None, cast(Any, "copies"))
    assert token_dispatcher.maybe_move_tensor_to_cpu is not original
    stage.use(None)
    assert token_dispatcher.maybe_move_tensor_to_cpu is original
    assert stage.bare_copies is None
