"""Some of what the model said, kept for people: which responses, and how they are shown."""

from collections.abc import Sequence
from pathlib import Path

from nemo_rl_offload.algorithms.rollout import Rollout
from nemo_rl_offload.config.schema import LoggerConfig
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.observability.sample_text import sample_lines
from nemo_rl_offload.runs.run_files import SampleRecord
from nemo_rl_offload.runs.samples import SampleLog


class Samples:
    """Takes responses of steps and validations, as the section ``logger`` says, until they are written and shown."""

    def __init__(self, run_dir: Path, section: LoggerConfig, tokenizer: Tokenizer) -> None:
        self._log = SampleLog(run_dir)
        self._section = section
        self._tokenizer = tokenizer
        self._kept: list[SampleRecord] = []
        self._lines: list[str] = []
        self._warnings: list[str] = []

    def take_training(self, played: Rollout, step: int) -> None:
        """Of a step of training, if its turn has come."""
        period = self._section["sample_period"]
        if period and step % period == 0:
            self._take(played, step, "train")

    def take_validation(self, played: Rollout, step: int) -> None:
        """Of a validation; some of them are to be shown."""
        self._take(played, step, "validation")
        rewards = [score.reward for score in played.scores]
        by_reward = sorted(range(len(rewards)), key=rewards.__getitem__)
        shown = [by_reward[place] for place in spread(len(rewards), self._section["num_val_samples_to_print"])]
        self._lines += sample_lines(self._records(played, shown, step, "validation"), len(rewards))

    def _take(self, played: Rollout, step: int, prefix: str) -> None:
        rows = spread(len(played.responses), self._section["num_samples_to_keep"])
        self._kept += self._records(played, rows, step, prefix)

    def _records(self, played: Rollout, rows: Sequence[int], step: int, prefix: str) -> list[SampleRecord]:
        return records_of(played, rows, step, prefix, self._tokenizer)

    def forget_after(self, step: int | None) -> None:
        """Forget what was written of later steps; of all without one."""
        self._warnings += self._log.forget_after(step)

    def keep(self) -> list[str]:
        """Write what was taken; returns what to warn of."""
        told, self._warnings = [*self._warnings, *self._log.append(self._kept)], []
        self._kept = []
        return told

    def lines_to_show(self) -> list[str]:
        """What the validations since the last call have to show."""
        lines, self._lines = self._lines, []
        return lines


def records_of(
    played: Rollout, rows: Sequence[int], step: int, prefix: str, tokenizer: Tokenizer
) -> list[SampleRecord]:
    """What is written down of these responses."""
    if not rows:  # of which transformers makes one text
        return []
    asked, said = (
        tokenizer.batch_decode(sequences, skip_special_tokens=False)
        for sequences in (
            [played.prompts[row].token_ids for row in rows],
            [played.responses[row].tokens for row in rows],
        )
    )
    return [
        {
            "step": step,
            "prefix": prefix,
            "prompt": prompt,
            "response": response,
            "reward": played.scores[row].reward,
            "truncated": not played.responses[row].finished,
            "num_tokens": played.responses[row].num_generated,
            "num_turns": played.responses[row].num_turns,
        }
        for row, prompt, response in zip(rows, asked, said, strict=True)
    ]


def spread(size: int, count: int) -> list[int]:
    """At most ``count`` of the numbers below ``size``, evenly from the first to the last; the middle one if one."""
    if count >= size:
        return list(range(size))
    if count == 1:
        return [size // 2]
    return [round(number * (size - 1) / (count - 1)) for number in range(count)]
