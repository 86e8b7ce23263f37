"""A changed configuration is accepted or explained, whatever was changed."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import megatron_changes, mutate, refused, set_at

Tiny = Callable[..., dict[str, Any]]
MANY = pytest.mark.slow


def check_mutated(tiny: Tiny, data: st.DataObject) -> None:
    raw = tiny()
    mutate(data, raw)
    refused(raw)


def check_changed(tiny: Tiny, changes: dict[tuple[str, ...], Any]) -> None:
    raw = tiny()
    for path, value in changes.items():
        set_at(raw, ("policy", "megatron_cfg", *path), value)
    refused(raw)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_a_mutated_configuration_never_ends_in_another_error(tiny: Tiny, data: st.DataObject) -> None:
    check_mutated(tiny, data)


@pytest.mark.slow
@given(changes=megatron_changes())
@settings(max_examples=250, deadline=None)
def test_contradictory_keys_never_end_in_another_error(tiny: Tiny, changes: dict[tuple[str, ...], Any]) -> None:
    check_changed(tiny, changes)


@pytest.mark.sampled
@MANY
@given(data=st.data())
@settings(max_examples=1500, deadline=None)
def test_many_mutated_configurations(tiny: Tiny, data: st.DataObject) -> None:
    check_mutated(tiny, data)


@pytest.mark.sampled
@MANY
@given(changes=megatron_changes())
@settings(max_examples=1500, deadline=None)
def test_many_contradictory_keys(tiny: Tiny, changes: dict[tuple[str, ...], Any]) -> None:
    check_changed(tiny, changes)
