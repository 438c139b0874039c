"""Seconds per update, and token imbalance, of very different response lengths with and without trainer.balance_batch.

    python benchmarks/balance.py                     # 2 and 4 ranks, 4 steps of each kind
    python benchmarks/balance.py --ranks 2 --steps 2 --no-docs

Ranks are forked processes over gloo that run a job of a tiny language model: its optimizer steps and the exchange of
samples are the job's own. Lengths are drawn from lognormal distributions, correlated within a group, with a tail of up
to 32 times the median. Texts are random, and each pass sleeps until the time of its tokens is over. For larger worlds,
the job's rule for the assignment is simulated. The tables go to docs/performance.md.
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

from learning import insert, metrics  # noqa: E402

from phalanx.config.lm import LMRLConfig  # noqa: E402
from phalanx.training.minibatches import Units  # noqa: E402
from tests.helpers.lm import tiny_lm, tiny_lm_config  # noqa: E402
from tests.helpers.ranks import run_ranks  # noqa: E402

N = 8  # responses per prompt; each rank draws those of two prompts
MEDIAN, LONGEST = 40, 1280  # tokens of a response
SECONDS = 2e-3  # per token of the update
KINDS = {"as drawn": "false", "balanced": "true"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="worlds of real ranks (2 4)")
    parser.add_argument("--steps", type=int, default=4, help="training steps of each kind (4)")
    parser.add_argument("--no-docs", action="store_true", help="print the tables, write nothing below docs/")
    args = parser.parse_args()
    run = ["| ranks | samples | s per update | most tokens of a rank / mean |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        model = tiny_lm(Path(name) / "model")
        settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 2 * LONGEST}
        (model / "config.json").write_text(json.dumps(settings))
        for ranks in args.ranks:
            for kind, on in KINDS.items():  # both have the same lengths, which differ between steps
                folder = Path(name) / f"{ranks}_{on}"
                keys = [f"trainer.balance_batch={on}", f"trainer.total_training_steps={args.steps + 1}"]
                keys += [f"{key}={2 * ranks}" for key in ("data.train_batch_size", "actor.ppo_mini_batch_size")]
                run_ranks(trained, ranks, config(model, folder, *keys), timeout=900)
                rows = [row for row in metrics(folder / "out") if row["step"] > 1]  # the first one warms up
                seconds = statistics.mean(row["time/update"] for row in rows)
                most = statistics.mean(row["perf/token_imbalance"] for row in rows)
                run.append(f"| {ranks} | {kind} | {seconds:.2f} | {most:.2f} |")
                print(run[-1], flush=True)
    head = "| ranks | tokens, as drawn | tokens, balanced | operations, as drawn | operations, balanced |"
    simulated = [head, "|---|---|---|---|---|"]
    for ranks in (8, 32, 64, 256):
        cells = [f"{value:.2f}" for value in simulate(ranks)]
        simulated.append(f"| {ranks} | {' | '.join(cells)} |")
    print("\n".join([*run, "", *simulated]))
    if not args.no_docs:
        insert(ROOT / "docs" / "performance.md", "balance", run)
        insert(ROOT / "docs" / "performance.md", "balance-simulated", simulated)


def config(model: Path, folder: Path, *keys: str) -> LMRLConfig:
    """A job with one optimizer step per training step, on packed samples."""
    return tiny_lm_config(
        model,
        folder,
        "model.use_remove_padding=true",
        "actor.use_dynamic_bsz=true",
        "actor.ppo_max_token_len_per_gpu=2048",
        f"data.max_response_length={LONGEST}",
        f"rollout.n={N}",
        "rollout.micro_batch_size_per_gpu=16",
        "parallel.fsdp_size=1",
        *keys,
    )


def trained(cfg: LMRLConfig) -> None:
    """Train on responses of drawn lengths, with passes that take the emulated time of their tokens."""
    from phalanx.rollout.lm.in_policy import Drawn, LMRollout
    from phalanx.run.lm_rl import build
    from phalanx.training.minibatches import Minibatches
    from phalanx.training.update import StepLog

    select, micro_batch = Minibatches.select, StepLog.micro_batch
    started = [0.0]

    def decode(self: LMRollout, prompts: Any, names: Any, decoding: Any) -> list[Drawn]:
        drawn = []
        for prompt, (seed, step, group, i) in zip(prompts, names, strict=True):
            length = lengths(random.Random(f"{seed} {step} {group}"), N, MEDIAN, LONGEST)[i]
            tokens = torch.randint(10, 100, (length,)).tolist()
            drawn.append(Drawn(self.policy.encode(prompt), tokens, self.policy.decode(tokens), False))
        return drawn

    def begin_pass(self: Minibatches, *args: Any) -> Any:
        started[0] = time.perf_counter()
        return select(self, *args)

    def end_pass(self: StepLog, samples: Any, rows: Any, loss: Any) -> None:
        micro_batch(self, samples, rows, loss)
        end = started[0] + SECONDS * int(samples.tokens[rows].sum())
        time.sleep(max(end - time.perf_counter(), 0))

    LMRollout.decode, Minibatches.select, StepLog.micro_batch = decode, begin_pass, end_pass  # type: ignore[method-assign]
    build(cfg).fit()


def lengths(rng: random.Random, n: int, median: float, longest: int) -> list[int]:
    """Lengths of the responses to a prompt; each prompt has a random scale."""
    scale = median * rng.lognormvariate(0, 0.7)
    return [min(int(scale * rng.lognormvariate(0, 0.5)) + 1, longest) for _ in range(n)]


def simulate(ranks: int, seeds: int = 20) -> list[float]:
    """Maximum over mean of the ranks' tokens, as drawn and balanced, then of operations; two prompts per rank."""
    most: list[list[float]] = [[], [], [], []]
    for seed in range(seeds):
        rng, drawn = random.Random(seed), list[int]()
        for _ in range(2 * ranks):
            drawn += [length + 300 for length in lengths(rng, N, 3640, 32768)]
        tokens = torch.tensor(drawn, dtype=torch.float64)
        costs = tokens + tokens**2 / 24576  # as for a 7B model: at 24 k tokens, attention costs as much as the rest
        number, share = torch.arange(len(tokens)), 2 * N
        every = torch.ones(len(tokens), dtype=torch.bool)
        units = Units(every, number // share, number[:share], number[:share, None], every[:share])
        balanced = units.balanced(costs, 1, ranks)
        for i, (values, where) in enumerate(
            [(tokens, units.ranks), (tokens, balanced), (costs, units.ranks), (costs, balanced)]
        ):
            totals = torch.zeros(ranks, dtype=torch.float64).index_add(0, where, values)
            most[i].append(float(totals.max() / totals.mean()))
    return [statistics.mean(values) for values in most]


if __name__ == "__main__":
    main()
