"""A custom reward: a function `(outputs, prompts, metadata) -> scores` with one score per sample.

    sh train.sh tasks/train_grpo.py configs/grpo/quickstart.yaml \
      'reward.functions=[{path: "examples/my_reward.py:short_answer", kwargs: {most_words: 10}}]'

The name of the first parameter decides what is scored: `images` [B, 3, H, W] in 0..1, `videos` [B, F, 3, H, W], or
`completions`, B texts. `metadata` has, for each sample, the other columns of its row of the data.
"""

from typing import Any


def short_answer(
    completions: list[str], prompts: list[str], metadata: list[dict[str, Any]], most_words: int = 30
) -> list[float]:
    """1 for a response of at most `most_words` words, and less for longer ones."""
    scores = []
    for text in completions:
        words = len(text.split())
        scores.append(min(1.0, most_words / max(words, 1)))
    return scores
