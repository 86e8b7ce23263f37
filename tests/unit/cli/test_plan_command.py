"""`nemo-rl-offload plan` as a user meets it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from patience import PATIENCE_S

from nemo_rl_offload.cli.command_line import EXIT_USER_ERROR, main
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import check_config
from nemo_rl_offload.runs.run_directory import check_not_of_run

EXAMPLES = PROJECT_ROOT / "examples" / "configs"
SMALL = str(EXAMPLES / "grpo_math_1B_megatron.yaml")
TINY = str(EXAMPLES / "grpo_tiny.yaml")
CFG = "policy.megatron_cfg"
LOGITS = f"{CFG}.use_fused_linear_logprobs=false"
"""What takes more memory than an H100 has."""
COLOCATED = "policy.generation.colocated"


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    captured = capsys.readouterr()
    told = re.sub(r"^note: .*\n", "", captured.err)
    return told if code and told else captured.out


@pytest.mark.parametrize("layouts", [[], ["--layouts", "1"]])
def test_how_many_gpus_auto_stands_for_is_said(capsys: pytest.CaptureFixture[str], layouts: list[str]) -> None:
    for words, said in ([], 1), (["--gpus-per-node", "4"], 0), (["cluster.gpus_per_node=4"], 0):
        assert main(["plan", SMALL, "--gpu", "gb200-186gb", *layouts, *words]) == 0
        captured = capsys.readouterr()
        assert captured.err.count("a node is taken to have 4, as those of gb200-186gb have") == said
        assert "gb200-186gb, 4 devices" in captured.out


def test_what_is_not_counted_of_cuda_graphs_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    graphs = ["cuda_graph_impl=transformer_engine", "transformer_impl=transformer_engine"]
    off = ["fine_grained_activation_offloading=false", "recompute_granularity=null", "recompute_modules=null"]
    off += ["distributed_data_parallel_config.overlap_param_gather=false"]
    for keys, said in (graphs, 1), (graphs[1:], 0):
        words = [f"{CFG}.{key}" for key in (*keys, *off)]
        assert main(["plan", SMALL, "--gpu", "h100-80gb", "policy.sequence_packing.enabled=false", *words]) == 0
        assert capsys.readouterr().err.count("not that it stays in other phases") == said
        written = [*words, "policy.sequence_packing.enabled=false", "--gpu", "h100-80gb", "--write", "planned.yaml"]
        assert main(["plan", SMALL, *written]) == (2 if said else 0)
        assert capsys.readouterr().err.count(f"Plan with {CFG}.cuda_graph_impl=none, or leave out --write.") == said


def test_an_exemplar_is_planned_from_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, SMALL, "--gpu", "h100-80gb", "policy.train_micro_batch_size=4")
    assert "fits without offloading" in text
    assert "stage 0: layers 0-27" in text


@pytest.mark.parametrize("apart", [False, True])
def test_an_engine_on_the_same_gpus_has_its_share_while_it_generates(
    capsys: pytest.CaptureFixture[str], apart: bool
) -> None:
    engine = ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.gpu_memory_utilization=0.45"]
    colocated = "policy.generation.colocated"
    slots = [f"{colocated}.enabled=false", f"{colocated}.resources.gpus_per_node=1", "cluster.gpus_per_node=2"]
    words = ("--gpu", "h100-80gb", "--format", "json", *engine, *(slots if apart else []))
    phases = {each["phase"]: each for each in json.loads(plan(capsys, SMALL, *words))["phases"]}
    assert ("generation" in phases) is not apart
    if not apart:
        assert phases["generation"]["parts"]["vLLM's engine"] == pytest.approx(0.45 * 79.1 * 2**30)


def test_an_engine_that_leaves_training_no_room_is_told_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    words = (SMALL, "--gpu", "h100-80gb", "policy.generation.backend=vllm")
    share = "policy.generation.vllm_cfg.gpu_memory_utilization"
    text = plan(capsys, *words, f"{share}=0.99", code=EXIT_USER_ERROR)
    (said,) = re.findall(rf"not enough: generation on stage 0: .* more than there is\. {share} may be ([\d.]+)\.", text)
    assert "\nthe training step alone fits with" in text
    assert "\nfits" not in text
    text = plan(capsys, *words, f"{share}={said}")
    assert "not enough" not in text
    assert re.search(r"generation +[\d.]+ GiB +[\d.]+ s", text), "what leaves for it crosses the link"
    plan(capsys, *words, f"{share}={float(said) + 0.02}", code=EXIT_USER_ERROR)


@pytest.mark.parametrize("section", ["sequence_packing", "dynamic_batching"])
def test_log_probabilities_without_room_name_their_key(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    both = {name: str(name == section).lower() for name in ("sequence_packing", "dynamic_batching")}
    words = [f"policy.{name}.enabled={value}" for name, value in both.items()]
    long = ("policy.train_micro_batch_size=1", f"policy.{section}.logprob_mb_tokens=4000000", "--memory", "72GiB")
    text = plan(capsys, SMALL, "--gpu", "h100-80gb", *words, *long, code=EXIT_USER_ERROR)
    assert f"Lower policy.{section}.logprob_mb_tokens." in text


def test_a_local_folder_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(plan(capsys, TINY, "--gpu", "a100", "--gpus-per-node", "1", "--format", "json"))
    assert data["world"] == 1
    assert data["device"] == "a100-80gb"
    shape = json.loads((PROJECT_ROOT / "examples/models/tiny_speller/config.json").read_text())
    assert data["stages"][0]["layers"] == [[0, shape["num_hidden_layers"]]]


def test_whole_modules_that_are_better_than_a_choice_by_layers_are_the_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = json.loads(plan(capsys, SMALL, "--gpu", "h100-80gb", "--memory", "50GiB", "--format", "json", LOGITS))
    chosen = data["outcomes"]["chosen"]
    assert chosen == data["outcomes"]["written"]
    assert {key: chosen[key] for key in ("peak_bytes", "step_ms")} in data["frontier"]


def test_the_choice_is_a_row_where_offloading_takes_as_long(capsys: pytest.CaptureFixture[str]) -> None:
    """All of it fits: nothing is offloaded, though it could be in the same time."""
    text = plan(capsys, SMALL, "--gpu", "h100-80gb", "--memory", "72GiB")
    (peak,) = re.findall(r"chosen for the budget: peak (.+?), step", text)
    (row,) = re.findall(rf"^ *{peak} .* chosen +(.*)", text, re.MULTILINE)
    assert "fits without offloading" in text
    assert row.startswith("nothing offloaded")


@pytest.mark.parametrize(
    ("memory", "keys"),
    [
        ("71GiB", {"offload_modules": list}),
        ("60GiB", {"offload_modules": list, "recompute_num_layers": int}),
        ("48GiB", {"recompute_method": str}),
    ],
)
def test_what_it_writes_passes_the_check(
    memory: str, keys: dict[str, type], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overlay, page = tmp_path / "planned.yaml", tmp_path / "plan.html"
    words = (SMALL, "--gpu", "h100", "--memory", memory, LOGITS)
    text = plan(capsys, *words, "--write", str(overlay), "--html", str(page))
    section = yaml.safe_load(overlay.read_text())["policy"]["megatron_cfg"]
    for key, kind in keys.items():
        assert isinstance(section[key], kind)
        said = section[key] if kind is not list else f"[{', '.join(section[key])}]"
        assert f"{key}: {said}" in text
    checked = check_config(load_config(overlay), run_here=False)
    assert {key: checked.config["policy"]["megatron_cfg"][key] for key in section} == section
    assert not [warning for warning in checked.warnings if "recompute" in warning or "saves nothing" in warning]
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "overrides",
    [
        [
            f"{CFG}.activation_offload.engine=megatron",
            f"{CFG}.transformer_impl=transformer_engine",
            f"{CFG}.offload_modules=[core_attn,attn_proj]",
        ],
        [f"{CFG}.activation_checkpointing=false"],
    ],
)
def test_what_it_writes_passes_the_check_and_is_in_force(
    overrides: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Megatron-Core's own engine moves and recomputes no parts of dense MLPs; a switch that is off is left."""
    own, overlay = tmp_path / "own.yaml", tmp_path / "planned.yaml"
    nothing = [f"{CFG}.recompute_granularity=null", f"{CFG}.recompute_modules=null"]
    own.write_text(yaml.safe_dump(load_config(SMALL, [*nothing, LOGITS, *overrides])))
    main(["plan", str(own), "--gpu", "h100", "--memory", "60GiB", "--write", str(overlay)])
    capsys.readouterr()
    section = yaml.safe_load(overlay.read_text())["policy"]["megatron_cfg"]
    assert section["recompute_granularity"]
    checked = check_config(load_config(overlay), run_here=False)
    assert not [warning for warning in checked.warnings if "activation_checkpointing" in warning]


@pytest.mark.slow
def test_changes_that_cannot_be_tried_are_no_error_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks are taken."""
    words = (f"{CFG}.context_parallel_size=4", "policy.max_total_sequence_length=4024", "policy.logprob_chunk_size=256")
    words += ("policy.train_micro_batch_size=1", "--gpus-per-node", "4", "--memory", "6GiB")
    words += ("policy.sequence_packing.enabled=false",)
    text = plan(capsys, SMALL, "--gpu", "h100", *words, code=EXIT_USER_ERROR)
    assert "changes that would do" not in text
    assert re.search(r"no layout that was tried has room.* on 4 devices; on (8|16): ", text)
    assert "to paste: cluster.num_nodes=" in text


def test_pairs_of_dpo_are_two_rows(capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(EXAMPLES / "dpo.yaml"), "--gpu", "h100", "--format", "json")
    pairs, rows = (
        json.loads(plan(capsys, *words, f"algorithm={name}"))["outcomes"]["nothing_offloaded"]
        for name in ("dpo", "sft")
    )
    assert pairs["step_ms"] == pytest.approx(2 * rows["step_ms"], rel=0.05)


@pytest.mark.parametrize(
    ("name", "overrides", "is_kept"),
    [
        ("sft.yaml", [], False),
        ("dpo.yaml", ["loss_fn.reference_policy_kl_penalty=0"], True),
        ("distillation_math.yaml", [], False),
        ("grpo_math_1B.yaml", ["loss_fn.reference_policy_kl_penalty=0"], False),
        ("grpo_math_1B.yaml", ["loss_fn.reference_policy_kl_penalty=0.1"], True),
    ],
)
def test_the_start_model_waits_on_the_host_where_its_loss_needs_it(
    name: str, overrides: list[str], is_kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--gpu", "h200", "--gpus-per-node", "4", "--format", "json", *overrides)
    data = json.loads(plan(capsys, str(EXAMPLES / name), *words))
    assert (data["host"]["of_it_start_model_bytes"] > 0) == is_kept


def test_the_teacher_is_on_the_device_while_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(EXAMPLES / "distillation_math.yaml"), "--gpu", "h200", "--gpus-per-node", "4", "--format", "json")
    data = json.loads(plan(capsys, *words))
    teacher = pytest.approx(7.616e9 * 2, rel=1e-3)
    assert {each["phase"]: each["parts"].get("teacher") for each in data["phases"]} == {
        "generation": None,
        "teacher's logits": teacher,
        "training": None,
        "optimizer step": None,
    }
    assert data["host"]["beside"]["teacher"] == teacher
    (move,) = next(each["moves"] for each in data["phases"] if each["phase"] == "teacher's logits")
    assert move["ms"] == pytest.approx(7.616e9 * 2 / 55e6, rel=1e-3)


def test_an_override_may_give_what_a_file_leaves_open(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own, overlay = tmp_path / "own.yaml", tmp_path / "planned.yaml"
    own.write_text(f"defaults: {EXAMPLES / 'sft.yaml'}\npolicy:\n  model_name: ???\n")
    words = ("--gpu", "h100", "--write", str(overlay))
    assert "policy.model_name: missing value" in plan(capsys, str(own), *words, code=EXIT_USER_ERROR)
    plan(capsys, str(own), *words, "policy.model_name=Qwen/Qwen2.5-1.5B")
    assert load_config(overlay)["policy"]["model_name"] == "Qwen/Qwen2.5-1.5B"


def test_a_machine_has_the_workers_that_are_configured(capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(EXAMPLES / "grpo_math_1B.yaml"), "--gpu", "h100", "--format", "json", "cluster.num_nodes=4")
    for count in (["cluster.gpus_per_node=2"], ["--gpus-per-node", "2"]):
        data = json.loads(plan(capsys, *words, *count))
        assert data["world"] == 8
        assert data["host"]["memory_per_node_bytes"] == 2 * 240 * 2**30


def test_workers_that_generate_do_not_train(capsys: pytest.CaptureFixture[str]) -> None:
    apart = (f"{COLOCATED}.enabled=false", f"{COLOCATED}.resources.gpus_per_node=4")
    for name, world in (("grpo_math_1B.yaml", 4), ("sft.yaml", 8)):  # where nothing is generated, none do
        assert (
            json.loads(plan(capsys, str(EXAMPLES / name), "--gpu", "h100", "--format", "json", *apart))["world"]
            == world
        )


def test_changes_are_none_that_check_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """A shorter length would be another task. Packs may be split over ranks."""
    data = json.loads(
        plan(capsys, SMALL, "--gpu", "h100", "--memory", "40GiB", "--format", "json", LOGITS, code=EXIT_USER_ERROR)
    )
    assert data["changes"]
    for change in data["changes"]:
        assert "max_total_sequence_length" not in change


def test_layers_of_either_implementation_get_modules_of_both(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overlay = tmp_path / "planned.yaml"
    words = (SMALL, "--gpu", "h100", "--memory", "52GiB", "--write", str(overlay), f"{CFG}.transformer_impl=auto")
    text = plan(capsys, *words, f"{CFG}.offload_modules=[core_attn]")
    assert "transformer_impl: auto is planned as torch" in text
    checked = check_config(load_config(overlay), run_here=False)
    assert not [warning for warning in checked.warnings if "may not be offloadable" in warning]


def test_what_it_writes_has_the_overrides_that_were_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    overlay = tmp_path / "planned.yaml"
    words = ("policy.train_micro_batch_size=2", f"{CFG}.optimizer.lr=3.0e-6", "cluster.num_nodes=2")
    plan(capsys, SMALL, "--gpu", "h100", "--write", str(overlay), *words)
    written = load_config(overlay)
    assert written["policy"]["train_micro_batch_size"] == 2
    assert written["policy"]["megatron_cfg"]["optimizer"]["lr"] == 3e-6
    assert written["cluster"]["num_nodes"] == 2
    assert written["policy"]["megatron_cfg"]["offload_modules"] == []


def test_what_it_writes_has_overrides_that_formulas_of_others_gave_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """There `train_mb_tokens` is 8 times the length, and the value given is what that was before."""
    overlay, sft = tmp_path / "planned.yaml", str(EXAMPLES / "sft.yaml")
    tokens = load_config(sft)["policy"]["sequence_packing"]["train_mb_tokens"]
    words = (f"policy.sequence_packing.train_mb_tokens={tokens}", "policy.max_total_sequence_length=4096")
    first = plan(capsys, sft, "--gpu", "h100", "--write", str(overlay), *words)
    assert f"microbatches of {tokens} tokens" in first
    assert f"# planned with: --gpu h100 {' '.join(words)}" in overlay.read_text()
    assert plan(capsys, str(overlay), "--gpu", "h100").splitlines()[0] == first.splitlines()[0]
    assert load_config(overlay)["policy"]["sequence_packing"]["train_mb_tokens"] == tokens


def test_a_key_that_an_override_removes_is_not_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = plan(
        *(capsys, SMALL, "--gpu", "h100", "--write", str(tmp_path / "planned.yaml"), "~env.reasoning_gym"),
        code=EXIT_USER_ERROR,
    )
    assert "--write: ~env.reasoning_gym removes a key" in text


def test_a_shipped_file_is_planned_and_inherited_from_anywhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = "examples/configs/grpo_math_1B_megatron.yaml"
    plan(capsys, shipped, "--gpu", "h100", "--write", "planned.yaml")
    assert f"defaults: {shipped}\n" in Path("planned.yaml").read_text()
    assert load_config("planned.yaml")["policy"]["model_name"] == load_config(shipped)["policy"]["model_name"]


@pytest.mark.parametrize(("option", "name"), [("--write", "config.yaml"), ("--html", "checkpoints/step_1/state")])
def test_it_does_not_write_over_what_a_run_has_written(
    option: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    for each in (path, tmp_path / "run/config.yaml", tmp_path / "run/.lock"):
        each.write_text("kept")
    text = plan(capsys, SMALL, "--gpu", "h100", option, str(path), code=EXIT_USER_ERROR)
    assert text == f"error: {path}: belongs to the run in {tmp_path / 'run'}, and would be lost. Give another name.\n"
    assert path.read_text() == "kept"
    (tmp_path / "run/.lock").unlink()
    check_not_of_run(path)  # of a folder that only looks like a run's
    check_not_of_run(tmp_path / ("a" * 300) / "plan.yaml")


@pytest.mark.parametrize("option", ["--write", "--html"])
@pytest.mark.parametrize("name", ["own.yaml", "base.yaml"])
def test_it_does_not_write_over_what_it_reads(
    option: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text(f"defaults: {SMALL}\n")
    (tmp_path / "own.yaml").write_text("defaults: base.yaml\n")
    path = tmp_path / name
    before = path.read_text()
    text = plan(capsys, str(tmp_path / "own.yaml"), "--gpu", "h100", option, str(path), code=EXIT_USER_ERROR)
    assert text == f"error: {path}: the configuration is read from it, and would be lost. Give another name.\n"
    assert path.read_text() == before


def test_a_misspelt_module_is_not_planned_without(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, SMALL, "--gpu", "h100", f"{CFG}.offload_modules=[core_atn]", code=EXIT_USER_ERROR)
    assert "offload_modules: 'core_atn': unknown module. Did you mean 'core_attn'? Allowed: attn_norm" in text


@pytest.mark.parametrize("skew", ["0.5", "nan", "inf"])
def test_a_skew_that_is_none(skew: str, capsys: pytest.CaptureFixture[str]) -> None:
    moe = str(EXAMPLES / "grpo_moe_megatron.yaml")
    text = plan(capsys, moe, "--gpu", "h100", "--routing-skew", skew, code=EXIT_USER_ERROR)
    assert text.startswith(f"error: --routing-skew {skew}: ")


def test_a_choice_that_whole_modules_cannot_say_is_written_as_auto(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As when the link is slow: what all layers of a module would hold on its way is more than what some do."""
    device, overlay = tmp_path / "slow.yaml", tmp_path / "planned.yaml"
    device.write_text("like: h100\nlink_out_gb_per_s: 1\nlink_in_gb_per_s: 1\n")
    words = (SMALL, "--gpu", str(device), "--memory", "48.5GiB", LOGITS)
    text = plan(capsys, *words, "--write", str(overlay))
    section = yaml.safe_load(overlay.read_text())["policy"]["megatron_cfg"]
    budget = section["activation_offload"]["gpu_memory_budget"]
    assert section["offload_modules"] == "auto"
    assert f"fits with offload_modules: auto; gpu_memory_budget: {budget}; recompute" in text
    assert f"# fits with offload_modules: auto; gpu_memory_budget: {budget}" in overlay.read_text()
    assert [line for line in text.splitlines() if line.startswith("whole modules ([")]
    assert check_config(load_config(overlay), run_here=False).config["policy"]["megatron_cfg"]["recompute_granularity"]
    again = json.loads(plan(capsys, str(overlay), "--gpu", str(device), "--format", "json"))
    assert again["budget_bytes"] == pytest.approx(48.5 * 2**30, abs=2**20)


def test_the_configured_budget_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what torch's allocator may hand out, beside which the allowances stand."""
    budget = 'policy.megatron_cfg.activation_offload.gpu_memory_budget="75GiB"'
    data = json.loads(plan(capsys, SMALL, "--gpu", "h100", "--format", "json", budget))
    static = data["stages"][0]["static_bytes"]
    assert data["budget_bytes"] == 75 * 2**30 + static["runtime"] + static["fragmentation"]
    all_of_it = 'policy.megatron_cfg.activation_offload.gpu_memory_budget="79GiB"'
    data = json.loads(plan(capsys, SMALL, "--gpu", "h100", "--format", "json", all_of_it))
    assert data["budget_bytes"] == int(79.1 * 2**30)


def test_what_does_not_fit_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, SMALL, "--gpu", "h100", "--memory", "15GiB", code=EXIT_USER_ERROR)
    assert "does not fit: stage 0 needs" in text
    changes = text.partition("changes that would do: ")[2].splitlines()[0].split("; or ")
    assert all(re.fullmatch(r"policy\.[\w.]+=\S+( policy\.[\w.]+=\S+)?", each) for each in changes), "can be pasted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "changes", "own"),
    [
        (["Qwen/Qwen2.5-7B", "policy.max_total_sequence_length=2048"], ["0.75"], []),
        (["Qwen/Qwen3-8B", "cluster.gpus_per_node=4"], [], ["0.25"]),
    ],
)
def test_one_share_of_the_optimizer_does_for_the_layout(
    words: list[str], changes: list[str], own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What training and the optimizer's step ask for is not always the same; a layout beside may ask for another."""
    given = ("cluster.gpus_per_node=2", *(f"policy.model_name={words[0]}", *words[1:]))
    text = plan(capsys, str(EXAMPLES / "grpo_math_1B_megatron.yaml"), "--gpu", "h100", *given, code=EXIT_USER_ERROR)
    named = {line.split(":")[0]: re.findall(r"offload_fraction=([\d.]+)", line) for line in text.splitlines()}
    assert named["not enough"] == own
    assert named.get("changes that would do", []) == changes
    assert "\ninstead, a layout with room: " in text


def test_a_small_plan_says_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, TINY, "--gpu", "h100-80gb", "--gpus-per-node", "1")
    assert "h100-80gb, 1 device, 2 microbatches of" in text
    assert not re.search(r"\b0\.0+ (GiB|s)\b", text)
    assert re.search(r"^ module +microbatch +at peak +goes *$", text, re.MULTILINE), (
        "no link, no recomputation, no copies"
    )


REFUSED = [
    ((), "--gpu: missing value. Known: a100-40gb, a100-80gb, "),
    (("--gpu", "h1000"), "--gpu h1000: unknown device. Did you mean 'h100'?"),
    (
        ("--gpu", "h100", "policy.model_name=nowhere"),
        "policy.model_name: 'nowhere' is neither a local folder with a config.json nor",
    ),
    (("--gpu", "h100", "--memory", "80GB"), "'80GB' is not a size"),
    (("--gpu", "h100", "--memory", "81GiB"), "--memory, gpu_memory_budget: h100-80gb has 79.1 GiB. Give at most that."),
    (("--gpu", "h100", "--gpus-per-node", "0"), "--gpus-per-node 0: give a number from 1 on."),
    (
        ("--gpu", "h100", "policy.megatron_cfg.tensor_model_parallel_size=5"),
        "5 does not divide the model's 12 attention heads",
    ),
    (("--gpu", "h100", "policy.megatron_cfg.tensor_model_parallel_size=two"), '"two" is not allowed'),
    (
        ("--gpu", "h100", "policy.train_global_batch_size=100", "policy.sequence_packing.enabled=false"),
        "100 is not a multiple of train_micro_batch_size",
    ),
    (("--gpu", "h100", "--html", "/nowhere/plan.html"), "/nowhere/plan.html: cannot be written: No such file"),
    (
        (
            *("--gpu", "a100", f"{CFG}.fp8_cfg.enabled=true", "policy.generation.backend=vllm"),
            *(f"{CFG}.transformer_impl=transformer_engine", f"{CFG}.recompute_granularity=null"),
            f"{CFG}.offload_modules=[core_attn]",
        ),
        "a100-80gb has no 8-bit formats",
    ),
    (("--gpu", "h100", "--memory", ""), "--memory: '' is not a size"),
    (
        ("--gpu", "h100", "policy.max_total_sequence_length=abc"),
        'policy.max_total_sequence_length: "abc" is not allowed',
    ),
    (("--gpu", "h100", "--write", "one.yaml", "--html", "one.yaml"), "--write one.yaml: --html would write over it"),
    (("--gpu", "h100", f"{CFG}.recompute_modules=[mlp_atc]"), "'mlp_atc': unknown module. Did you mean 'mlp_act'?"),
    (("--gpu", "h100", "policy.dynamic_batching.enabled=true"), "excluded by dynamic_batching.enabled"),
    (("--gpu", "h100", "policy.sequence_packing.train_mb_tokens=10"), "train_mb_tokens: 10 is less than the longest"),
    (("--gpu", "h100", "algorithm=dpoo"), 'algorithm: "dpoo" is not allowed'),
    (
        ("--gpu", "h100", f"{COLOCATED}.enabled=false", f"{COLOCATED}.resources.gpus_per_node=8"),
        "8 workers of 8 leave none to train",
    ),
    (("--gpu", "h100", f"{COLOCATED}.enabled=false"), "missing value: how many of cluster.gpus_per_node generate"),
]


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--gpu", "h1000", "--memory", "72", "--routing-skew", "0.5", "policy.train_micro_batch_size=x"]
    text = plan(capsys, SMALL, *wrong, "--gpus-per-node", "8", code=EXIT_USER_ERROR)
    words = ["--gpu h1000:", "--routing-skew 0.5:", "--memory: '72'", SMALL, 'policy.train_micro_batch_size: "x"']
    lines = text.removeprefix("error: ").splitlines()
    assert [line[: len(word)] for line, word in zip(lines, words, strict=True)] == words


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_bad_input_gets_one_message_with_the_fix(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan(capsys, SMALL, *words, code=EXIT_USER_ERROR)
    assert text.startswith("error: ")
    assert message in text
    assert "Traceback" not in text


def test_where_nothing_can_be_written_is_said_before_planning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nemo_rl_offload.cli.plan.make_plan", lambda *_: pytest.fail("it plans"))
    text = plan(capsys, SMALL, "--gpu", "h100", "--write", "/nowhere/one.yaml", code=EXIT_USER_ERROR)
    assert (
        text == "error: --write /nowhere/one.yaml: cannot be written: No such file or directory. Name another file.\n"
    )


def test_it_imports_neither_torch_nor_ray() -> None:
    script = (
        "import sys; from nemo_rl_offload.cli.command_line import main; "
        f"code = main(['plan', {TINY!r}, '--gpu', 'h100', '--gpus-per-node', '1']); "
        "sys.exit(code or 1 * bool({'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S).returncode == 0


def test_routing_is_of_models_with_experts(capsys: pytest.CaptureFixture[str]) -> None:
    dense = str(EXAMPLES / "grpo_math_1B_megatron.yaml")
    text = plan(capsys, dense, "--gpu", "h100", "--routing-skew", "1.3", code=EXIT_USER_ERROR)
    assert text.startswith("error: --routing-skew: ")
    assert "has no experts" in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80])
def test_tables_of_a_plan_fit_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["plan", "examples/configs/grpo_moe_megatron.yaml", "--gpu", "h100-80gb"]) in (0, 2)
    text = capsys.readouterr().out
    assert any("GiB" in row for row in text.splitlines() if row.startswith(" "))
    long = [line for line in text.splitlines() if len(line) > width and " " in line]
    assert [line.split(":")[0] for line in long] == ["to paste"], "which is one line of a shell"
    monkeypatch.delenv("COLUMNS")
    assert main(["plan", "examples/configs/grpo_moe_megatron.yaml", "--gpu", "h100-80gb"]) in (0, 2)
    in_a_file = capsys.readouterr().out.partition("device memory by phase")[0]
    assert text.partition("device memory by phase")[0].split() == in_a_file.split()
    assert re.search(r"^host memory per node: .{80}", in_a_file, re.MULTILINE), "a line of a file stays whole"
    size = ["policy.max_total_sequence_length=8192", "policy.train_global_batch_size=64", "cluster.gpus_per_node=8"]
    words = ["policy.model_name=Qwen/Qwen2.5-7B", "policy.train_micro_batch_size=1", *size]
    assert main(["plan", "examples/configs/sft.yaml", "--gpu", "h100-80gb", "--memory", "72GiB", *words]) == 0
    assert "…" not in capsys.readouterr().out, "no figure is cut"
