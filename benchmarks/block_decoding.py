"""Accuracy of a block-diffusion model against the number of tokens that a forward pass unmasks.

    python benchmarks/block_decoding.py FOLDER [FOLDER ...] [--data assets/words/test.jsonl] [--block-size 4]

Decoding is greedy, on the word problems of the quickstart, with several thresholds and numbers of denoising steps per
block. Every denoising step of a block is a forward pass; passes that only store keys and values are not counted. The
last line is JSON.
"""

import argparse
import json
import os

from alone import RANK

from phalanx.config.lm import LMDataConfig, LMRolloutConfig, LMValRolloutConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.data.prompts import validation_sets
from phalanx.models.lm.blocks import build_block_policy
from phalanx.rollout.lm.in_blocks import BlockDiffusionRollout
from phalanx.run.world import start_world
from phalanx.zoo.rewards.text.gsm8k import Gsm8k

THRESHOLDS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--data", default="assets/words/test.jsonl")
    parser.add_argument("--block-size", type=int, default=4)
    options = parser.parse_args()
    os.environ |= RANK
    world = start_world(ParallelConfig())
    (prompts,) = validation_sets([options.data], prompt="question", quoted=False).values()
    size, data = options.block_size, LMDataConfig(max_prompt_length=64, max_response_length=40)
    settings = [(size, threshold) for threshold in THRESHOLDS] + [(k, 1.0) for k in (1, 2, 4) if k < size]
    results = []
    for folder in options.folders:
        config = LMModelConfig(path=folder, dtype="float32", block_size=size)
        policy = build_block_policy(config, ParallelConfig(), data, world, chunk=1024, temperature=1.0, seed=0)
        for steps, threshold in settings:
            val = LMValRolloutConfig(denoising_steps_per_block=steps, threshold=threshold)
            rollout = BlockDiffusionRollout(policy, LMRolloutConfig(val=val), world, 100, None)
            with rollout.awake():
                drawn = rollout.draw_validation(prompts, each=lambda outputs, about: None)
            scores = Gsm8k()([one.text for one in drawn], [p.text for p in prompts], [p.meta for p in prompts])
            tokens, forwards = sum(len(one.steps) for one in drawn), sum(rollout.forwards(one) for one in drawn)
            row = {"model": folder, "steps": steps, "threshold": threshold, "right": sum(scores) / len(scores)}
            results.append(row | {"tokens_per_forward": round(tokens / forwards, 2)})
            print(results[-1], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
