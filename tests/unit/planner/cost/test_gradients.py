"""Gradients on their way, by hand."""

from dataclasses import replace

from jobs import make_job

from nemo_rl_offload.planner.cost.gradients import backward_bytes
from nemo_rl_offload.planner.cost.storages import LayerContext, Tokens
from nemo_rl_offload.planner.job import Recompute
from nemo_rl_offload.planner.simulate.stages import Stage, build_stages
from nemo_rl_offload.specs.model_shape import DENSE_LAYER, MOE_LAYER
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

TOKENS = 4096


def context_of(name: str, **layout: int) -> LayerContext:
    return replace(make_job(name).context, layout=ParallelLayout(**layout))


def test_of_experts_the_gradients_of_the_first_products_weights_are_most() -> None:
    """16 of DeepSeek-V3's experts, 8 a token: hidden 7168, width 2048. By then, activations of both sizes are freed."""
    rows, hidden, width = TOKENS * 8, 7168, 2048
    weights = 16 * 2 * width * hidden
    expected = 2 * (TOKENS * hidden + 2 * rows * width + rows * hidden + weights - rows * width - 2 * rows * width)
    assert backward_bytes(context_of("deepseek-ai/DeepSeek-V3", world=16, expert=16), MOE_LAYER) == expected


def test_of_a_wide_dense_layer_the_activations_gradients_are_most() -> None:
    """Qwen2.5-7B: the gradient of the activation's output and the two of its inputs; its output is freed."""
    context = replace(context_of("Qwen/Qwen2.5-7B", world=1), tokens=Tokens(2 * TOKENS, 2 * TOKENS))
    expected = 2 * 2 * TOKENS * (3584 + 3 * 18944 - 18944)
    assert backward_bytes(context, DENSE_LAYER) == expected


def stages_of(recompute: Recompute, **changes: int) -> list[Stage]:
    job = make_job(
        "Qwen/Qwen2.5-7B", num_layers=8, layout=ParallelLayout(2, pipeline=2), recompute=recompute, num_microbatches=8
    )
    return build_stages(replace(job, shape=replace(job.shape, **changes)), ())


def test_at_the_end_of_the_pipeline_the_logits_are_gone_by_then() -> None:
    first, last = stages_of(Recompute(), vocab_size=512)
    final_norm = 2 * 2 * TOKENS * 3584
    assert first.static_bytes["backward"] - last.static_bytes["backward"] == last.static_bytes["logits"] + final_norm
    _, last = stages_of(Recompute(method="uniform"), vocab_size=152064)
    assert last.static_bytes["backward"] == last.static_bytes["recomputation"] == 0


def test_layers_are_recomputed_a_group_at_a_time_with_its_output_for_its_input() -> None:
    def bytes_of(**how: int | str) -> int:
        return stages_of(Recompute(**how))[0].static_bytes["recomputation"]  # type: ignore[arg-type]

    one = bytes_of(method="uniform")
    assert bytes_of(method="uniform", num_layers=2) == 2 * one
    assert bytes_of(method="block", num_layers=3) == one
    assert one == sum(part.kept_bytes for part in stages_of(Recompute())[0].chunks[0] if part.layer == 0)


def test_a_module_that_is_recomputed_whole_gives_its_output_again() -> None:
    """Beside what it saves, which is all that remains where its output is not computed again."""

    def bytes_of(*modules: str) -> int:
        return stages_of(Recompute(frozenset(modules)))[0].static_bytes["recomputation"]

    saved = (3 * 18944 + 3584) * 2 * TOKENS  # both halves of the first linear, the activation, and the norm's output
    assert bytes_of("mlp") == saved + 3584 * 2 * TOKENS
    assert bytes_of("mlp_act") == 18944 * 2 * TOKENS


def test_what_the_layer_before_the_loss_keeps_makes_room_for_what_others_recompute() -> None:
    """In bfloat16: first linears give 2 x 18944 values a token, their activation 18944."""
    values = 2 * TOKENS * 18944

    def bytes_of(num_layers: int | None) -> list[int]:
        recompute = Recompute(frozenset({"mlp_act", "mlp_fc1"}), num_counted_layers=num_layers)
        return [stage.static_bytes["recomputation"] for stage in stages_of(recompute, vocab_size=512)]

    first_linear = bytes_of(None)[0]
    assert first_linear >= 3 * values
    assert bytes_of(4) == bytes_of(None) == [first_linear, first_linear]
    assert bytes_of(3) == [first_linear, values], "the last layer keeps more than the first linear of another takes"
