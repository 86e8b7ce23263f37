"""A job read from a configuration whose microbatches are numbers of tokens."""

from dataclasses import replace
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.job import Job, read_job
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.planner.search.suggestions import smaller_microbatches
from nemo_rl_offload.planner.simulate.simulated_step import highest_peak
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.devices import find_device


def job(*overrides: str, model: str = "Qwen/Qwen2.5-1.5B") -> Job:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_math_1B.yaml", list(overrides))
    return read_job(config["policy"], load_model_shape(model, None), find_device("h100-80gb"), 4)


_NARROW = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=false"
_AWARE = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true"
_ENGINE = "policy.megatron_cfg.transformer_impl=transformer_engine"


@pytest.mark.parametrize(
    ("overrides", "gradient", "copied", "could_read"),
    [
        ((), 4, 0, False),
        ((_NARROW,), 2, 4, False),
        ((_NARROW, _ENGINE), 2, 4, True),
        ((_NARROW, _ENGINE, "policy.megatron_cfg.optimizer.use_distributed_optimizer=false"), 2, 4, False),
        ((_NARROW, _ENGINE, "policy.megatron_cfg.optimizer.optimizer=sgd"), 2, 4, False),
        ((_NARROW, _ENGINE, _AWARE), 2, 0, False),
        ((_NARROW, "policy.precision=float32"), 4, 0, False),
        ((_ENGINE, _AWARE), 4, 0, False),
        ((_NARROW, _ENGINE, "policy.quant_cfg=NVFP4_DEFAULT_CFG"), 2, 4, False),
    ],
)
def test_gradients_that_are_not_float32_are_copied_for_the_update(
    overrides: tuple[str, ...], gradient: int, copied: int, could_read: bool
) -> None:
    optimizer = job(*overrides).optimizer
    found = (optimizer.gradient_bytes, optimizer.gradient_copy_bytes, optimizer.could_read_gradients)
    assert found == (gradient, copied, could_read)


@pytest.mark.parametrize("section", ["dynamic_batching", "sequence_packing"])
def test_a_number_of_tokens_is_as_many_of_the_longest_samples(section: str) -> None:
    on = f"policy.{section}.enabled=true"
    assert replace(job(on), micro_batch_tokens=None, is_packed=False) == job()
    assert job(on).context == job().context
    larger = job(on, f"policy.{section}.train_mb_tokens={6 * 1024}", "policy.train_global_batch_size=500")
    assert (larger.micro_batch, larger.num_microbatches) == (6, 21)  # 500 samples on 4 ranks, the last not full


def test_the_rows_of_a_pack_are_one_for_the_pieces_of_its_logits() -> None:
    """`logprob_chunk_size` counts tokens of a row."""
    tokens, chunk = 16 * 1024, ("policy.logprob_chunk_size=1024", "policy.megatron_cfg.use_fused_linear_logprobs=false")
    logits = {}
    for section in ("dynamic_batching", "sequence_packing"):
        given = job(f"policy.{section}.enabled=true", f"policy.{section}.train_mb_tokens={tokens}", *chunk)
        logits[section] = make_plan(given).baseline.stages[0].static_bytes["logits"]
    assert logits["sequence_packing"] < 0.5 * logits["dynamic_batching"]


@pytest.mark.parametrize(("context", "padded"), [(1, 1025), (2, 1028), (4, 1032)])
def test_a_length_is_padded_as_in_a_run(context: int, padded: int) -> None:
    given = job(f"policy.megatron_cfg.context_parallel_size={context}", "policy.max_total_sequence_length=1025")
    assert given.sequence == given.context.tokens.sequence == padded


def test_a_pack_may_hold_more_than_whole_samples_of_the_longest() -> None:
    on = "policy.sequence_packing.enabled=true"
    some, more = (job(on, f"policy.sequence_packing.train_mb_tokens={tokens}") for tokens in (1024, 2047))
    assert (some.context.tokens.count, more.context.tokens.count) == (1024, 2047)
    assert some.num_microbatches * 1024 == pytest.approx(more.num_microbatches * 2047, rel=0.02)
    assert highest_peak(make_plan(more).baseline) > 1.1 * highest_peak(make_plan(some).baseline)


def test_smaller_microbatches_divide_the_batch_or_hold_the_longest_sample() -> None:
    size = "policy.train_micro_batch_size=15"
    texts = [text for text, _ in smaller_microbatches(job(size, "policy.train_global_batch_size=60"))]
    assert texts == [f"policy.train_micro_batch_size={number}" for number in (5, 1)]  # not 7, which `check` refuses
    packed = job("policy.sequence_packing.enabled=true", f"policy.sequence_packing.train_mb_tokens={9 * 1024}")
    found = dict(smaller_microbatches(packed))
    assert list(found) == [f"policy.sequence_packing.train_mb_tokens={number}" for number in (4608, 2304, 1152)]
    for smaller in found.values():
        assert smaller.num_microbatches * smaller.context.tokens.count >= packed.num_microbatches * 9 * 1024


def test_changes_of_packs_name_what_has_an_effect() -> None:
    """A shorter length would be another task."""
    packs = ("policy.sequence_packing.enabled=true", f"policy.sequence_packing.train_mb_tokens={32 * 1024}")
    packed = job(*packs, "policy.megatron_cfg.use_fused_linear_logprobs=false")
    changes = make_plan(replace(packed, memory_bytes=40 << 30)).suggestions
    assert "policy.sequence_packing.train_mb_tokens=8192" in changes
    assert not any("max_total_sequence_length" in each for each in changes)


def test_the_engine_that_moves_modules_is_read() -> None:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_math_1B.yaml", [])
    policy = config["policy"]
    shape, device = load_model_shape("Qwen/Qwen2.5-1.5B", None), find_device("h100-80gb")
    assert read_job(policy, shape, device, 4).native_engine
    policy["megatron_cfg"]["activation_offload"]["engine"] = "megatron"
    assert not read_job(policy, shape, device, 4).native_engine


@pytest.mark.parametrize(
    ("switch", "given"),
    [
        ("true", []),
        ("true", ["recompute_granularity=selective", "recompute_modules=[mlp]"]),
        ("false", ["recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"]),
    ],
)
def test_the_switch_for_recomputation_counts_as_it_does_in_training(switch: str, given: list[str]) -> None:
    """With true, what is left open is filled in; with false, nothing is recomputed."""
    given = [f"policy.megatron_cfg.{text}" for text in given]
    spelled = given if switch == "true" else []
    if not given:
        keys = {"granularity": "full", "method": "uniform", "num_layers": 1}
        spelled = [f"policy.megatron_cfg.recompute_{key}={value}" for key, value in keys.items()]
    switched = job(f"policy.megatron_cfg.activation_checkpointing={switch}", *given)
    assert switched.recompute == job(*spelled).recompute
    assert (switched.recompute == job().recompute) == (switch == "false")


@pytest.mark.parametrize("tokens", [None, 4 * 1024])
def test_a_sample_of_two_rows_takes_twice_as_much(tokens: int | None) -> None:
    """As in DPO: `train_micro_batch_size` counts pairs, a number of tokens does not."""
    config: Any = load_config(PROJECT_ROOT / "examples/configs/dpo.yaml", [])
    policy = config["policy"]
    if tokens is not None:
        policy["sequence_packing"] |= {"enabled": True, "train_mb_tokens": tokens}
    shape, device = load_model_shape("Qwen/Qwen2.5-1.5B", None), find_device("h100-80gb")
    single, pairs = read_job(policy, shape, device, 1), read_job(policy, shape, device, 1, rows_per_sample=2)
    if tokens is None:
        assert (pairs.micro_batch, pairs.num_microbatches) == (2 * single.micro_batch, single.num_microbatches)
    else:
        assert (pairs.micro_batch, pairs.num_microbatches) == (single.micro_batch, 2 * single.num_microbatches)


@pytest.mark.parametrize(
    ("model", "left"),
    [
        ("Qwen/Qwen2.5-1.5B", {"mlp_act"}),
        ("Qwen/Qwen3-30B-A3B", {"moe_act"}),
        ("deepseek-ai/DeepSeek-V3", {"mlp_act", "moe_act"}),
    ],
)
def test_of_a_list_for_any_model_what_its_layers_have_is_recomputed(model: str, left: set[str]) -> None:
    both = ("recompute_granularity=selective", "recompute_modules=[mlp_act,moe_act]")
    assert job(*(f"policy.megatron_cfg.{each}" for each in both), model=model).recompute.modules == left


def test_a_repeated_layer_for_further_tokens_is_not_planned() -> None:
    model, repeated = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B", "policy.megatron_cfg.mtp_use_repeated_layer=true"
    with pytest.raises(ConfigError, match=r"mtp_use_repeated_layer: .* Plan with mtp_num_layers 1 or 0"):
        job(repeated, "policy.megatron_cfg.mtp_num_layers=3", model=model)
    assert job(repeated, model=model).shape.num_mtp_layers == 1
    assert job(repeated, "policy.megatron_cfg.mtp_num_layers=3").shape.num_mtp_layers == 0
