"""Judges of pairs over real ranks: win rates do not depend on the placement of samples and model."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.reward import RewardModelConfig
from phalanx.distributed.seed import fold_in
from phalanx.rewards.judge_pairs import pairings
from tests.helpers.judged import config, settings, step_and_terms
from tests.helpers.judged_pairs import COUNT, GROUPS, Broken, Reading, compared, failed, plainly
from tests.helpers.ranks import run_ranks

ONE, TWO = [COUNT], [8, 4]  # the second group is on both of two ranks


def section(model: Path, **settings: Any) -> RewardModelConfig:
    wanted = {"max_model_len": 512, "max_tokens": 4, "dtype": "float32", **settings}
    return RewardModelConfig(path=str(model), engine="transformers", **wanted)


def orders(opponents: int | None, shuffled: bool, both: bool) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """The orders in which a judge sees the pairs of GROUPS."""
    result = {}
    for group, pictures in enumerate(GROUPS):
        for i, j in pairings(len(pictures), opponents):
            swapped = shuffled and fold_in("order of a pair", group, i, j) % 2 == 1
            result[group, i, j] = [(i, j), (j, i)] if both else [(j, i) if swapped else (i, j)]
    return result


def joined(ranks: Sequence[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    return [rate for rank in ranks for rate in rank]


@pytest.mark.full
@pytest.mark.seldom("as sampled", "both")
@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle_order": False}, {"both_orders": True}, {"opponents": 2}],
    ids=["seeded", "as sampled", "both", "two opponents"],
)
def test_win_rates_are_those_of_single_questions(judge_model: Path, options: dict[str, Any]) -> None:
    cfg = section(judge_model)
    shown = orders(options.get("opponents"), options.get("shuffle_order", True), options.get("both_orders", False))
    (wanted,) = run_ranks(plainly, 1, cfg, shown)
    assert len({rate for rate, _ in wanted}) > 2 and any(lost for _, lost in wanted)
    alone = run_ranks(compared, 1, cfg, ONE, Reading(**options))[0]
    assert alone == [pytest.approx(rate) for rate in wanted]
    assert joined(run_ranks(compared, 2, cfg, TWO, Reading(**options))) == alone


@pytest.mark.full
def test_win_rates_are_the_same_on_any_ranks(judge_model: Path) -> None:
    """Also if a rank has no samples, if the model is on other ranks or answers on a thread, and if two ranks share the
    scoring of each sample.
    """
    alone = run_ranks(compared, 1, section(judge_model), ONE, Reading())[0]
    apart = section(judge_model, placement="ranks 1-2")
    assert joined(run_ranks(compared, 4, apart, [3, 0, 1, 8], Reading())) == alone
    both = section(judge_model, tensor_parallel_size=2)
    assert joined(run_ranks(compared, 4, both, [3, 3, 3, 3], Reading())) == alone
    last = section(judge_model, placement="ranks 1-1")
    assert joined(run_ranks(partial(compared, beside=True), 2, last, TWO, Reading())) == alone
    even, odd = run_ranks(partial(compared, context_size=2), 2, section(judge_model), TWO, Reading())
    assert [rate for both in zip(even, odd, strict=True) for rate in both] == alone


def test_a_failure_on_one_rank_is_told_on_all(judge_model: Path) -> None:
    """No rank waits for a rank with unusable answers or a question that is too long."""
    told = run_ranks(failed, 2, section(judge_model), [6, 6], Broken())
    assert (
        told
        == [
            "reward 'pairs': parse returned 7.0; expected 1 for the first sample, 0 for the second, 1/2 for neither, or None"
        ]
        * 2
    )
    long = run_ranks(failed, 2, section(judge_model, max_model_len=5), [12, 0], Reading())
    assert long[0] == long[1] and long[0].startswith("reward.model.max_model_len: a question with its image has ")


@pytest.mark.full
def test_a_group_on_two_ranks_in_a_job(sd3_folder: Path, judge_model: Path, tmp_path: Path) -> None:
    """A step with one prompt: its images get the same win rates, with mean 1/2, on one rank and on two."""
    judge = "{path: 'tests.helpers.judged_pairs:Reading'}"
    keys = ("data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "actor.ppo_micro_batch_size_per_gpu=1")
    single = (*keys, "reward.model.engine=transformers")
    rates = []
    for world in (1, 2):
        cfg = config(sd3_folder, tmp_path / str(world), *settings(judge_model, judge), *single)
        ranks = run_ranks(step_and_terms, world, cfg)
        rates.append(torch.cat([rank["terms"]["Reading"] for rank in ranks]))
    assert torch.equal(*rates) and rates[0].mean() == 0.5 and len(set(rates[0].tolist())) > 1
