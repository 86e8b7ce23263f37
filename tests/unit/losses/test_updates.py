"""Metrics of several updates against those of one that has all their sequences."""

from typing import Any

import pytest
import torch

from nemo_rl_offload.losses.clipped_pg import ClippedPolicyGradient
from nemo_rl_offload.losses.reduction import normalizers, valid_tokens
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.losses.updates import OF_LOSS, OF_TOKENS, mean_of_updates

OWN = {"lr": 1.0, "grad_norm": 2.0, "skipped_updates": 0.0, "moe/load_balancing_loss": 4.0, "paged_stash/reruns": 1.0}


def loss_of(config: Any) -> ClippedPolicyGradient:
    loss = build_loss("clipped_pg", config)
    assert isinstance(loss, ClippedPolicyGradient)
    return loss


@pytest.mark.parametrize("token_level_loss", [True, False])
@pytest.mark.parametrize("counts", [(4, 8), (1, 11), (6, 6)])
def test_updates_say_together_what_one_of_all_would(token_level_loss: bool, counts: tuple[int, int]) -> None:
    from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config

    overrides = [f"loss_fn.token_level_loss={str(token_level_loss).lower()}", "loss_fn.entropy_coeff=0.1"]
    overrides += ["loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.use_importance_sampling_correction=true"]
    overrides += ["loss_fn.truncated_importance_sampling_type=icepop"]
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)["loss_fn"]
    loss, draw = loss_of(config), torch.Generator().manual_seed(sum(counts) + counts[0])
    size = sum(counts), 9
    names = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "entropy", "logprobs")
    batch = {name: torch.rand(size, generator=draw, dtype=torch.float64) for name in names}
    lengths = torch.randint(2, 10, (size[0],), generator=draw)
    batch["token_mask"] = (torch.arange(size[1]) < lengths[:, None]).long()
    batch["sample_mask"] = (torch.rand(size[0], generator=draw) < 0.8).float()
    batch["advantages"] = torch.randn(size[0], 1, generator=draw, dtype=torch.float64).expand(size)

    def metrics(part: slice) -> dict[str, float]:
        own = {name: value[part] for name, value in batch.items()}
        return {name: float(value) for name, value in loss(own["logprobs"], own, normalizers(own))[1].items()}

    parts = [slice(0, counts[0]), slice(counts[0], None)]
    num_tokens = [int(valid_tokens({name: value[part] for name, value in batch.items()}).sum()) for part in parts]
    num_sequences = [int(batch["sample_mask"][part].sum()) for part in parts]
    whole = metrics(slice(None))
    assert {*whole} <= {*OF_TOKENS, *OF_LOSS}
    found = mean_of_updates(
        [metrics(part) for part in parts], num_tokens, num_sequences, token_level_loss=token_level_loss
    )
    assert found == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("token_level_loss", [True, False])
def test_what_is_an_updates_own_counts_alike_and_an_empty_update_not_at_all(token_level_loss: bool) -> None:
    updates = [{"loss": 2.0, "probs_ratio": 2.0, **OWN}, {"loss": 0.0, "probs_ratio": 0.0, **dict.fromkeys(OWN, 0.0)}]
    halves = {name: value / 2 for name, value in OWN.items()}
    found = mean_of_updates(updates, [7, 0], [3, 0], token_level_loss=token_level_loss)
    assert found == {"loss": 2.0, "probs_ratio": 2.0, **halves}
    assert mean_of_updates(updates[1:], [0], [0], token_level_loss=token_level_loss)["loss"] == 0
