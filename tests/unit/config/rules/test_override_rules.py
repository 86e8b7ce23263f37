"""What `check` says about `policy.hf_config_overrides`."""

from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import examine
from nemo_rl_offload.specs.model_keys import positions_of, with_overrides

OVERRIDES = "policy.hf_config_overrides"


def said(*overrides: str) -> tuple[dict[str, str], dict[str, str]]:
    found = examine(load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides), run_here=False)
    problems = {each.path: each.message for each in found.problems}
    return problems, {each.path: each.message for each in found.warnings}


@pytest.mark.parametrize(
    ("override", "path", "text"),
    [
        ("{num_hidden_layers: 3}", f"{OVERRIDES}.num_hidden_layers", "another config.json, not supported here"),
        ("{rope_scalin: {}}", f"{OVERRIDES}.rope_scalin", "Did you mean 'rope_scaling'?"),
        ("{rope_scaling: 3}", f"{OVERRIDES}.rope_scaling", "Allowed: a section of keys, or null"),
        ("{rope_theta: 0}", f"{OVERRIDES}.rope_theta", "Allowed: a number above 0"),
        ("{max_position_embeddings: x}", f"{OVERRIDES}.max_position_embeddings", "Allowed: a number above 0"),
        ("{rope_scaling: {}, rope_parameters: {}}", f"{OVERRIDES}.rope_parameters", "Remove one"),
        ("{rope_scaling: {rope_type: yarm, factor: 2}}", OVERRIDES, "and not 'yarm'"),
        ("{rope_scaling: {rope_type: yarn}}", OVERRIDES, "a factor above 0"),
        ("{rope_scaling: {rope_type: yarn, factor: {x: 1}}}", f"{OVERRIDES}.rope_scaling.factor", "a number"),
        ("{rope_scaling: {rope_type: 3}}", f"{OVERRIDES}.rope_scaling.rope_type", "Allowed: text"),
        ("{rope_scaling: {rope_tipe: yarn}}", f"{OVERRIDES}.rope_scaling.rope_tipe", "Did you mean 'rope_type'?"),
        ("{rope_scaling: {truncate: 1}}", f"{OVERRIDES}.rope_scaling.truncate", "Allowed: true or false"),
        ("{rope_scaling: {factor: true}}", f"{OVERRIDES}.rope_scaling.factor", "Allowed: a number"),
        ("{rope_scaling: {factor: 4}}", f"{OVERRIDES}.rope_scaling.factor", "rope_type default, which is meant where"),
        ("{rope_parameters: {factor: 4}}", f"{OVERRIDES}.rope_parameters.factor", "(linear, dynamic, yarn, llama3,"),
        ("{rope_scaling: {rope_type: default, factor: 4}}", f"{OVERRIDES}.rope_scaling.factor", "not read with"),
        ("{rope_scaling: {rope_type: linear, factor: 2, beta_fast: 3}}", f"{OVERRIDES}.rope_scaling.beta_fast", "yarn"),
        (
            "{rope_scaling: {type: dynamic, factor: 2, original_max_position_embeddings: 8}}",
            f"{OVERRIDES}.rope_scaling.original_max_position_embeddings",
            "not read with rope_type dynamic",
        ),
        ("{rope_theta: 3, rope_scaling: {rope_theta: 4}}", f"{OVERRIDES}.rope_theta", "rope_scaling.rope_theta is 4"),
        ("{rope_scaling: {rope_theta: null}}", f"{OVERRIDES}.rope_scaling.rope_theta", "Allowed: a number"),
        ("{rope_scaling: {rope_type: linear, type: yarn, factor: 2}}", f"{OVERRIDES}.rope_scaling.type", "Remove one"),
        (
            "{rope_scaling: {rope_type: yarn, factor: 2, mscale: 1}}",
            f"{OVERRIDES}.rope_scaling.mscale",
            "together with",
        ),
        (
            "{rope_scaling: {rope_type: yarn, factor: 2, mscale: 1, mscale_all_dim: 2, attention_factor: 1}}",
            f"{OVERRIDES}.rope_scaling.mscale_all_dim",
            "is not read beside attention_factor",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_once(override: str, path: str, text: str) -> None:
    problems, _ = said(f"{OVERRIDES}={override}")
    assert text in problems[path]
    assert OVERRIDES not in problems or problems.keys() == {OVERRIDES}


@pytest.mark.parametrize(
    "override", ["{rope_theta: 3, rope_scaling: {rope_theta: 3}}", "{rope_scaling: {}}", "{rope_scaling: null}"]
)
def test_what_says_the_same_twice_or_nothing_is_taken(override: str) -> None:
    assert said(f"{OVERRIDES}={override}")[0] == {}


def test_stretched_positions_are_as_many_as_they_say() -> None:
    long = "policy.max_total_sequence_length=1024"
    yarn = f"{OVERRIDES}={{rope_scaling: {{rope_type: yarn, factor: 4, original_max_position_embeddings: 256}}}}"
    assert "is more than the 256 positions" in said(long)[1]["policy.max_total_sequence_length"]
    for enough in (yarn, f"{OVERRIDES}={{max_position_embeddings: 1024}}"):
        problems, warnings = said(long, enough)
        assert "policy.max_total_sequence_length" not in warnings
        assert problems == {}


OLD = {"rope_theta": 5.0, "rope_scaling": None, "vocab_size": 7}
NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5}, "vocab_size": 7}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("content", "overrides", "wanted"),
    [
        (OLD, {}, OLD),
        (OLD, {"max_position_embeddings": 9}, OLD | {"max_position_embeddings": 9}),
        (OLD, {"rope_scaling": LINEAR}, OLD | {"rope_scaling": LINEAR}),
        (OLD, {"rope_parameters": {**LINEAR, "rope_theta": 3.0}}, {"rope_theta": 3.0, "rope_scaling": LINEAR}),
        (OLD, {"rope_theta": 3.0}, {"rope_theta": 3.0, "rope_scaling": None}),
        (OLD | {"rope_scaling": LINEAR}, {"rope_theta": 3.0}, {"rope_theta": 3.0, "rope_scaling": LINEAR}),
        (OLD | {"rope_scaling": LINEAR}, {"rope_scaling": None}, OLD),
        (NEW, {"rope_scaling": LINEAR}, {"rope_parameters": NEW["rope_parameters"] | LINEAR}),
        (NEW, {"rope_theta": 3.0}, {"rope_parameters": NEW["rope_parameters"] | {"rope_theta": 3.0}}),
        ({}, {"rope_scaling": LINEAR}, {"rope_scaling": LINEAR}),
    ],
)
def test_a_file_that_says_the_same(content: Any, overrides: Any, wanted: Any) -> None:
    before = repr(content)
    assert with_overrides(content, overrides) == ({"vocab_size": 7} if content else {}) | wanted
    assert repr(content) == before


def test_positions_of_a_stretched_rotation() -> None:
    assert positions_of({"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 8}}) == 32
    assert positions_of({"rope_parameters": {"factor": 4.0}}) == positions_of({}) == 0
