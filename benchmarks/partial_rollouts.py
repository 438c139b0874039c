"""Seconds per step, and staleness, of long-tailed response lengths with and without rollout.partial_rollout.

    python benchmarks/partial_rollouts.py                     # 2 ranks, 12 steps of each kind
    python benchmarks/partial_rollouts.py --steps 6 --no-docs

Ranks are forked processes over gloo that run a job of a tiny language model: rounds, waiting groups, log-probs and
optimizer steps are the job's own. Lengths are drawn from lognormal distributions, correlated within a group, with a
tail of up to 32 times the median. Texts are random; each decoding call sleeps for the time that its prefill and its
longest response would take. The table goes to docs/performance.md.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from balance import LONGEST, MEDIAN, lengths  # noqa: E402
from learning import insert, metrics  # noqa: E402

from phalanx.config.lm import LMRLConfig  # noqa: E402
from tests.helpers.lm import tiny_lm, tiny_lm_config  # noqa: E402
from tests.helpers.ranks import run_ranks  # noqa: E402

N, PROMPTS = 8, 8  # responses per prompt, and prompts per training step
DECODED, READ = 4e-3, 4e-5  # seconds per decoding step, and per prefilled token
PARTIAL = ["rollout.partial_rollout=true", "rollout.partial_rollout_tokens=64", "rollout.max_staleness=4"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks (2)")
    parser.add_argument("--steps", type=int, default=12, help="training steps of each kind (12)")
    parser.add_argument("--no-docs", action="store_true", help="print the table, write nothing below docs/")
    args = parser.parse_args()
    head = "| prompts drawn at once | s per rollout | s per step | rounds | staleness of tokens, mean / max |"
    table = [head, "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        model = tiny_lm(Path(name) / "model")
        settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 2 * LONGEST}
        (model / "config.json").write_text(json.dumps(settings))
        for drawn in (None, PROMPTS * 5 // 4, PROMPTS * 3 // 2, PROMPTS * 2):
            folder = Path(name) / f"{drawn}"
            keys = [f"trainer.total_training_steps={args.steps + 4}"]
            if drawn is not None:
                keys += [*PARTIAL, f"rollout.over_sampling_batch_size={drawn}"]
            run_ranks(trained, args.ranks, config(model, folder, *keys), timeout=900)
            # without the first steps, before which no group has waited, and the last ones, after which none may wait
            rows = [row for row in metrics(folder / "out") if 2 < row["step"] <= args.steps + 2]
            cells = ["8, off" if drawn is None else str(drawn)]
            cells += [f"{mean(rows, key):.2f}" for key in ("time/rollout", "perf/step_s")]
            if drawn is None:
                cells += ["", ""]
            else:
                stalest = max(row["rollout/staleness_max"] for row in rows)
                cells += [
                    f"{mean(rows, 'rollout/rounds'):.1f}",
                    f"{mean(rows, 'rollout/staleness_mean'):.2f} / {stalest:.0f}",
                ]
            table.append(f"| {' | '.join(cells)} |")
            print(table[-1], flush=True)
    if not args.no_docs:
        insert(ROOT / "docs" / "performance.md", "partial-rollouts", table)


def mean(rows: list[dict[str, float]], key: str) -> float:
    return statistics.mean(row[key] for row in rows)


def config(model: Path, folder: Path, *keys: str) -> LMRLConfig:
    """A job with one optimizer step per training step, on packed samples."""
    return tiny_lm_config(
        model,
        folder,
        "model.use_remove_padding=true",
        "actor.use_dynamic_bsz=true",
        "actor.ppo_max_token_len_per_gpu=2048",
        f"data.max_response_length={LONGEST}",
        f"data.train_batch_size={PROMPTS}",
        f"actor.ppo_mini_batch_size={PROMPTS}",
        f"rollout.n={N}",
        "rollout.micro_batch_size_per_gpu=null",  # all at once
        *keys,
    )


def trained(cfg: LMRLConfig) -> None:
    """Train on responses of drawn lengths, with decoding that takes the emulated time."""
    from phalanx.rollout.lm.in_policy import Drawn, LMRollout
    from phalanx.run.lm_rl import build

    def response(rollout: LMRollout, name: tuple[int, ...]) -> list[int]:
        """All tokens of a response; they are a function of its name."""
        seed, step, group, i = name
        length = lengths(random.Random(f"{seed} {step} {group}"), N, MEDIAN, LONGEST)[i]
        generator = torch.Generator().manual_seed(hash(name) % 2**31)
        tokens = torch.randint(10, 100, (length,), generator=generator).tolist()
        return tokens if length == LONGEST else [*tokens[:-1], rollout.how.ends[0]]

    def decode(self: LMRollout, prompts: Any, names: Any, decoding: Any) -> list[Drawn]:
        drawn = []
        for prompt, name in zip(prompts, names, strict=True):
            tokens = response(self, name)
            drawn.append(Drawn(self.policy.encode(prompt), tokens, self.policy.decode(tokens), False))
        longest = max(len(some.response) for some in drawn)
        time.sleep(DECODED * longest + READ * sum(len(some.prompt) for some in drawn))
        return drawn

    def continued(
        self: LMRollout, rows: Any, starts: Any, names: Any, count: int
    ) -> list[tuple[list[int], list[float]]]:
        new: list[tuple[list[int], list[float]]] = []
        for row, start, name in zip(rows, starts, names, strict=True):
            tokens = response(self, name)[len(row) - start :][:count]
            new.append((tokens, [-4.0] * len(tokens)))
        longest = max((len(tokens) for tokens, _ in new), default=0)
        time.sleep(DECODED * longest + READ * sum(map(len, rows)))
        return new

    LMRollout.decode, LMRollout.continued = decode, continued  # type: ignore[method-assign]
    build(cfg).fit()


if __name__ == "__main__":
    main()
