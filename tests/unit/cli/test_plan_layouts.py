"""`nemo-rl-offload plan --layouts`, and the layouts that `plan` advises, as a user meets them."""

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_offload.cli.command_line import EXIT_USER_ERROR, main
from nemo_rl_offload.cli.parser import build_parser
from nemo_rl_offload.cli.planned_job import read_options
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.validation import examine
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.planner.search.layout_search import beside_ms
from nemo_rl_offload.runs.comparison import leaves
from nemo_rl_offload.specs.catalogue import load_model_shape

SFT = str(PROJECT_ROOT / "examples/configs/sft.yaml")
CFG = "policy.megatron_cfg"
LLAMA = "meta-llama/Llama-3.1-70B"
TASK = ("policy.max_total_sequence_length", "policy.train_global_batch_size", "policy.model_name")


def cluster(name: str, sequence: int, nodes: int, *more: str) -> tuple[str, ...]:
    sizes = ("cluster.gpus_per_node=8", f"cluster.num_nodes={nodes}")
    return (f"policy.model_name={name}", f"policy.max_total_sequence_length={sequence}", *sizes, *more)


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", SFT, "--gpu", "h100-80gb", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code and captured.err else captured.out


def as_data(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(planned(capsys, *words, "--format", "json", code=code))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "world"),
    [
        pytest.param(
            cluster("deepseek-ai/DeepSeek-V3", 4096, 32, "policy.train_global_batch_size=1024"),
            256,
            marks=pytest.mark.slow,
        ),
        pytest.param(cluster(LLAMA, 8192, 2), 16, marks=pytest.mark.slow),
        pytest.param(cluster("openai/gpt-oss-120b", 4096, 1), 16, marks=pytest.mark.slow),
        pytest.param(cluster("openai/gpt-oss-120b", 4096, 4), 32, marks=pytest.mark.slow),
        pytest.param(cluster("Qwen/Qwen3-30B-A3B", 32768, 1), 8, marks=pytest.mark.slow),
        (cluster("Qwen/Qwen3-8B", 16384, 1), 8),
    ],
)
def test_layouts_have_room_and_are_planned_alike(
    given: tuple[str, ...], world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and float32 gradients of gpt-oss-120b are more than eight devices have, which is told."""
    is_given = f"cluster.num_nodes={world // 8}" in given
    found = as_data(capsys, *given, "--layouts", code=0 if is_given else EXIT_USER_ERROR)
    assert found["fits"] is is_given
    layouts = found["layouts"]
    assert len(layouts) == 5
    totals = [each["step_ms"] + each["messages_ms"] + each["optimizer_ms"] for each in layouts]
    assert totals == sorted(totals)
    shape = load_model_shape(given[0].partition("=")[2], None)
    for each in layouts:
        sizes = each["layout"]
        tensor, pipeline, context, data = (
            sizes[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context", "data")
        )
        assert tensor * pipeline * context * data == world
        assert tensor <= 8
        assert pipeline <= shape.num_layers
        assert each["peak_bytes"] <= found["budget_bytes"]
        assert not set(TASK) & set(each["keys"])
    assert len({tuple(each["layout"].values()) for each in layouts}) == 5
    for each in (layouts[0], layouts[-1]):
        pasted = shlex.split(each["overrides"])
        loaded = read_recipe(SFT, [*given, *pasted])
        assert {path: leaves(loaded.values)[path] for path in each["keys"]} == each["keys"], "values, not words"
        assert not [one for one in examine(loaded, run_here=False).problems if one.path]
        again = as_data(capsys, *given, *pasted)
        outcomes = again["outcomes"]
        came = outcomes.get("as_configured", outcomes["nothing_offloaded"])
        assert (came["peak_bytes"], came["step_ms"]) == (each["peak_bytes"], each["step_ms"])
        assert again["fits"]
        assert again["host"]["memory_per_node_bytes"] >= each["host_per_node_bytes"]


BEST = (
    *("policy.sequence_packing.train_mb_tokens=4096", f"{CFG}.recompute_granularity=null"),
    *(f"{CFG}.recompute_modules=null", f"{CFG}.offload_modules=[core_attn,attn_proj,mlp_norm,mlp_fc1]"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "place", "says"),
    [
        ((), 2, "as configured, does not fit: DP8, "),
        (BEST, 1, "as configured: DP8, "),
        ((f"{CFG}.tensor_model_parallel_size=3",), None, ""),
    ],
)
def test_the_configured_layout_stands_among_those_found(
    words: tuple[str, ...], place: int | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (*cluster("Qwen/Qwen3-8B", 4096, 1), *words)
    found = as_data(capsys, *given, "--layouts", "2")
    lines = planned(capsys, *given, "--layouts", "2").splitlines()
    shown = [line for line in lines if re.match(r"\d\. |as configured", line)]
    if place is None:
        assert (found["configured"], len(shown)) == (None, 2)
        return
    (line,) = [each for each in shown if each.startswith("as configured")]
    assert line.startswith(says)
    assert shown.index(line) == place
    configured, totals = found["configured"], []
    for each in (configured, *found["layouts"]):
        totals.append(each["step_ms"] + each["messages_ms"] + each["optimizer_ms"])
    assert configured["fits"] is ("does not" not in says)
    assert not configured["fits"] or place == sum(total <= totals[0] for total in totals[1:])
    alone = as_data(capsys, *given)["outcomes"]["as_configured"]
    assert (alone["peak_bytes"], alone["step_ms"]) == (configured["peak_bytes"], configured["step_ms"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(cluster(LLAMA, 8192, 4), marks=pytest.mark.slow),
        (*cluster("Qwen/Qwen3-8B", 4096, 1), "--memory", "24GiB"),
    ],
)
def test_advice_where_a_layout_has_no_room_is_a_layout_that_was_tried(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = planned(capsys, *given, code=EXIT_USER_ERROR)
    assert "none that was tried" not in text
    assert "more ranks" not in text
    (pasted,) = re.findall(r"^to paste: (.+)$", text, re.MULTILINE)
    assert not any(key in pasted for key in TASK)
    assert "not enough" not in planned(capsys, *given, *shlex.split(pasted))


@pytest.mark.slow
def test_more_machines_are_told_where_these_are_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    given = (*cluster("Qwen/Qwen3-8B", 4096, 1), "--memory", "10GiB")
    text = planned(capsys, *given, code=EXIT_USER_ERROR)
    assert "no layout that was tried has room on 8 devices; on 16: " in text
    (pasted,) = re.findall(r"^to paste: (.+)$", text, re.MULTILINE)
    assert pasted.startswith("cluster.num_nodes=2 ")
    planned(capsys, *given, *shlex.split(pasted))


@pytest.mark.slow
def test_what_no_layout_changes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    grpo = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.gpu_memory_utilization=0.99")
    words = ["plan", str(PROJECT_ROOT / "examples/configs/grpo_math_1B_megatron.yaml"), "--gpu", "h100", "--layouts"]
    assert main([*words, *grpo, "cluster.gpus_per_node=1"]) == EXIT_USER_ERROR
    text = capsys.readouterr().out
    assert "no layout that was tried has room for more than training (generation on stage 0: " in text
    assert "gpu_memory_utilization may be" in text


@pytest.mark.slow
def test_the_best_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    overlay = tmp_path / "laid_out.yaml"
    given = cluster("Qwen/Qwen3-8B", 8192, 1)
    text = planned(capsys, *given, "--memory", "40GiB", "--layouts", "2", "--write", str(overlay))
    assert [line[:2] for line in text.splitlines() if re.match(r"\d\. ", line)] == ["1.", "2."]
    pasted = shlex.split(text.splitlines()[-1])
    assert read_recipe(overlay).values == read_recipe(SFT, [*given, *pasted]).values
    assert yaml.safe_load(overlay.read_text())["cluster"] == {"num_nodes": 1, "gpus_per_node": 8}
    assert overlay.read_text().splitlines()[1].startswith("# ")


@pytest.mark.slow
def test_a_layout_that_cannot_be_planned_is_no_hindrance(capsys: pytest.CaptureFixture[str]) -> None:
    given = cluster("Qwen/Qwen3-8B", 4096, 1)
    wrong = (f"{CFG}.tensor_model_parallel_size=3", f"{CFG}.pipeline_model_parallel_size=7")
    assert "does not divide" in planned(capsys, *given, *wrong, code=EXIT_USER_ERROR)
    found = as_data(capsys, *given, *wrong, "--layouts", "1")
    assert found["layouts"] == as_data(capsys, *given, *wrong, "--layouts=1")["layouts"]
    planned(capsys, *given, *wrong, *shlex.split(found["layouts"][0]["overrides"]))


@pytest.mark.slow
def test_what_check_refuses_is_no_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Transformer Engine has no kernel for packs of models with sinks that context-parallel ranks share."""
    words = cluster("openai/gpt-oss-120b", 16384, 4)
    impl = (f"{CFG}.transformer_impl=transformer_engine", f"{CFG}.offload_modules=[core_attn]")
    found = as_data(capsys, *words, *impl, "--layouts", "3")
    assert {each["layout"]["context_parallel_size"] for each in found["layouts"]} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layouts", "--html", "a.html"), "--html: not with --layouts."),
        (("--layouts", "policy.no_such_key=1"), "no_such_key"),
    ],
)
def test_wrong_words(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in planned(capsys, *words, code=EXIT_USER_ERROR)


@pytest.mark.parametrize("virtual", ["null", "2"])
def test_values_that_a_message_names_can_be_pasted(virtual: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = (*cluster("deepseek-ai/DeepSeek-V3", 4096, 32), f"{CFG}.pipeline_model_parallel_size=8")
    given += (f"{CFG}.virtual_pipeline_model_parallel_size={virtual}", f"{CFG}.expert_model_parallel_size=32")
    text = planned(capsys, *given, code=EXIT_USER_ERROR)
    assert "61 layers cannot be divided among 8 ranks" in text
    named = re.findall(rf"{CFG}\.num_layers_in_first_pipeline_stage=5|'{CFG}\.[^']+'", text)
    assert len(named) == (2 if virtual == "null" else 1)
    for each in named:
        read_options(_options(), read_recipe(SFT, [*given, *shlex.split(each)]))


def test_stages_of_another_number_are_told_what_belongs_together(capsys: pytest.CaptureFixture[str]) -> None:
    given = (*cluster("deepseek-ai/DeepSeek-V3", 4096, 32), f"{CFG}.mtp_num_layers=0")
    given += (f"{CFG}.pipeline_model_parallel_size=16", f"{CFG}.expert_model_parallel_size=16")
    wrong = f'{CFG}.pipeline_model_parallel_layout="Et|{"tt|" * 29}ttL"'
    text = planned(capsys, *given, wrong, code=EXIT_USER_ERROR)
    assert "has 31 stages, and pipeline_model_parallel_size is 16. There must be 16 stages, or a multiple" in text
    (virtual, stages) = re.findall(rf"({CFG}\.virtual_pipeline_model_parallel_size=2) '({CFG}\.[^']+)'", text)[0]
    read_options(_options(), read_recipe(SFT, [*given, virtual, stages]))


def _options(*words: str) -> Any:
    return build_parser().parse_args(["plan", SFT, "--gpu", "h100-80gb", *words])


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["24GiB", "79GiB"])
def test_the_best_is_as_good_as_that_of_all(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Full plans of every layout of a small grid, with none, half and all of the optimizer on the host."""
    given = cluster("Qwen/Qwen3-8B", 16384, 1, "policy.train_global_batch_size=64")
    given += ("policy.sequence_packing.train_mb_tokens=16384", f"{CFG}.recompute_granularity=null")
    given += (f"{CFG}.recompute_modules=null", f"{CFG}.fine_grained_activation_offloading=false")
    (best,) = as_data(capsys, *given, "--memory", memory, "--layouts", "1")["layouts"]
    times = []
    for tensor, pipeline, share in itertools.product((1, 2, 4), (1, 2), (0, 0.5, 1)):
        sizes = [
            f"{CFG}.tensor_model_parallel_size={tensor}",
            f"{CFG}.pipeline_model_parallel_size={pipeline}",
            f"{CFG}.sequence_parallel={str(tensor > 1).lower()}",
            f"{CFG}.optimizer.optimizer_cpu_offload={str(share > 0).lower()}",
            f"{CFG}.optimizer.optimizer_offload_fraction={share}",
        ]
        try:
            job = read_options(_options("--memory", memory), read_recipe(SFT, [*given, *sizes]))
        except ConfigError:
            continue
        plan = make_plan(job, with_suggestions=False)
        if not plan.shortfall_bytes and not plan.lacking:
            times.append(plan.chosen.step_ms + beside_ms(job))
    assert len(times) > 3
    assert best["step_ms"] + best["messages_ms"] + best["optimizer_ms"] < 1.02 * min(times)
