"""Stages in Megatron-Core's notation, against Megatron-Core itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.pipeline_layout import layers_of_stages, layout_problems, stages_of

DEEPSEEK = "E|" + "|".join(["tt"] * 29) + "|ttt|L"
PIECES = st.sampled_from(["E", "t", "tt", "t*3", "|", "(t|)*2", "(tt|t)*3", ",", "m", "L", "(|t)*2", "t*12"])


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_stages_are_megatrons(text: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert stages_of(text) == tuple("".join(letters[each.name] for each in stage) for stage in theirs)


def problems(text: str, pipeline: int = 2, virtual: int | None = None, layers: int = 4, heads: int = 0) -> list[str]:
    sizes = {"num_layers": layers, "num_mtp_layers": heads, "pipeline": pipeline, "virtual": virtual}
    return list(layout_problems(text, **sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["Et|tttL", "Et*2|ttL", "E|t*4,L", "E,(t)*4|L"])
def test_layouts_that_fit(text: str) -> None:
    assert not problems(text)
    assert sum(layers_of_stages(text)) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ettx|ttL", "'x' stands for nothing"),
        ("E(tt|ttL", "'(' stands for nothing"),
        ("", "E, the embedding, stands once"),
        ("tt|ttL", "E, the embedding, stands once"),
        ("Ett|tt", "L, the loss, stands once, and the layout must end with it."),
        ("EEtt|ttL", "E, the embedding, stands once, and the layout must begin with it."),
        ("Ett|ttLt", "L, the loss, stands once"),
        ("EttttL|", "L, the loss, stands once, and the layout must end with it."),
        ("|EttttL", "E, the embedding, stands once, and the layout must begin with it."),
        ("E(t*999)*999|L", "stands for more than 20000 letters"),
        ("Ett|tttL", "has 5 of t (layer), and the model has 4. Write 4."),
        ("Ett|ttmL", "has 1 of m (head that predicts a further token), and the model has 0"),
        ("Ett|t|tL", "has 3 stages, and pipeline_model_parallel_size is 2. There must be 2 stages, or a multiple"),
        ("Ett|t|tL", "virtual_pipeline_model_parallel_size=2 'policy.megatron_cfg.pipeline_model_parallel_layout="),
        ("Ett|t|tL", 'pipeline_model_parallel_layout="Et|(t|)*2tL"'),
        ("Et|t|t|tL", "Set policy.megatron_cfg.virtual_pipeline_model_parallel_size=2."),
        ("Et*99999999999999|L", "repeats 't' 999999999999 times. Write fewer."),
    ],
)
def test_layouts_that_do_not_fit(text: str, message: str) -> None:
    assert any(message in problem for problem in problems(text)), problems(text)


def test_virtual_stages_are_counted_with_the_ranks() -> None:
    assert not problems("Et|t|t|tL", virtual=2)
    (problem,) = problems("Ett|ttL", virtual=2)
    assert "is 2 x virtual_pipeline_model_parallel_size 2. There must be 2 stages" in problem
    assert problem.endswith("Set policy.megatron_cfg.virtual_pipeline_model_parallel_size=null.")


def test_heads_stand_between_the_last_layer_and_the_loss() -> None:
    assert not problems("Ett|ttmL", heads=1)
    assert "without the loss" in problems("Etttt|m|L", pipeline=3, heads=1)[0]
    assert "come before the heads" in problems("Ett|tmtL", heads=1)[0]


def test_61_layers_on_8_ranks_with_4_virtual_stages() -> None:
    assert not problems(DEEPSEEK, pipeline=8, virtual=4, layers=61)


def test_a_bomb_is_refused_before_it_is_written_out() -> None:
    with pytest.raises(ConfigError, match="Write fewer"):
        stages_of("(" * 1 + "t*9999" + ")*9999999999")
