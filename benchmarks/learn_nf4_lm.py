"""Does a LoRA learn on a 4-bit base model? Measured on the language-model quickstart's task, over several seeds.

    python benchmarks/learn_nf4_lm.py
    python benchmarks/learn_nf4_lm.py "lora, nf4" --seeds 0 --no-docs

As learn_nf4.py, with the recipes of learn_nf4_lm.yaml.
"""

from dataclasses import replace
from functools import partial

from learn_nf4 import SUBJECT as FLOW
from learn_nf4 import after
from learning import main

VALIDATION = "val/test/reward/gsm8k"
SUBJECT = replace(
    FLOW,
    name="learn_nf4_lm",
    task="train_grpo",
    config="configs/grpo/quickstart.yaml",
    fixed=["model.lora_rank=16", "optim.lr=3e-3"],
    mark="nf4 text",
    validation=VALIDATION,
    scale="right answers to test.jsonl",
    noun="samples",
    samples=128,
    steps=40,
    test_freq=40,
    after=partial(after, validation=VALIDATION),
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
