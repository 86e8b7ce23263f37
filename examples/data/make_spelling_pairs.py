"""Make the preference pairs of dpo_tiny.yaml: `uv run python examples/data/make_spelling_pairs.py`.

Chosen is the right answer, rejected a wrong one that the shipped model gave itself: made-up mistakes are told apart at
once, and learning to avoid them spoils generation. The same files on the same machine and thread count.
"""

import argparse
import json
from pathlib import Path

from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.loader import load_config, resolve_model_path
from nemo_rl_offload.config.validation import check_config
from nemo_rl_offload.data.prompt_tokens import encode_prompt
from nemo_rl_offload.data.prompts import problems_of
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.policy.driver import Policy

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "grpo_tiny.yaml"
SUPERVISED = {"seed": 0, "size": 4000}  # what the shipped model was trained on
SETS = {"validation": (20_000_000, 200), "train": (2_000_000, 2000)}
NUM_CANDIDATES_PER_PAIR = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE)
    output: Path = parser.parse_args().output
    config = check_config(load_config(CONFIG), str(CONFIG)).config
    task, template = config["env"]["reasoning_gym"], config["data"]["prompt_template"]
    model = resolve_model_path(config["policy"]["model_name"])
    tokenizer, sampling = load_tokenizer(model), Sampling.of(config["policy"])
    seen = {problem.question for problem in problems_of(task, **SUPERVISED)}
    with VirtualCluster(num_nodes=1, gpus_per_node="auto") as cluster:
        policy = Policy(
            cluster, config["policy"], model, (tokenizer.eos_token_id,), seed=0, num_steps=None, keep_reference=False
        )
        for name, (seed, size) in SETS.items():
            found = {p.question: p for p in problems_of(task, seed, NUM_CANDIDATES_PER_PAIR * size)}
            problems = [problem for question, problem in found.items() if question not in seen]
            responses = policy.generate(
                [encode_prompt(tokenizer, template, p.question) for p in problems], seed, sampling
            )
            answers = [tokenizer.decode(response.tokens, skip_special_tokens=True) for response in responses]
            pairs = [
                {"prompt": problem.question, "chosen": problem.answer, "rejected": answer}
                for problem, response, answer in zip(problems, responses, answers, strict=True)
                if response.finished and answer != problem.answer
            ][:size]
            assert len(pairs) == size, f"only {len(pairs)} of {size} pairs"
            seen |= {pair["prompt"] for pair in pairs}
            lines = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
            (output / f"spelling_pairs_{name}.jsonl").write_text(lines, encoding="utf-8")
        policy.shutdown()


if __name__ == "__main__":
    main()
