"""Placement of the reward model: arithmetic of ranks and nodes."""

import pytest

from phalanx.config import ConfigError
from phalanx.config.lm import LMRLConfig
from phalanx.config.reward import RewardModelConfig
from phalanx.distributed.placement import Domain, judged_beside, place


def section(tp: int, placement: str = "colocate") -> RewardModelConfig:
    return RewardModelConfig(tensor_parallel_size=tp, placement=placement)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", ["colocate", "ranks 0-7"])
def test_256_ranks_8_a_node(tp: int, placement: str) -> None:
    domains = place(section(tp, placement), world_size=256, local_world_size=8)
    assert [rank for domain in domains for rank in domain.ranks] == list(range(256))
    holders = [replica for domain in domains for replica in domain.replicas]
    assert len(holders) == 256 // tp
    for replica in holders:
        assert list(replica) == list(range(replica[0], replica[0] + tp))
    for domain in domains:
        assert len({rank // 8 for rank in domain.ranks}) == 1, "a domain lies within one node"
        assert {rank for replica in domain.replicas for rank in replica} <= set(domain.ranks)


def test_colocated_groups_score_their_own_images() -> None:
    assert place(section(2), 4, 4) == (Domain((0, 1), ((0, 1),)), Domain((2, 3), ((2, 3),)))


def test_on_some_ranks_of_each_node() -> None:
    assert place(section(1, "ranks 3-3"), 8, 4) == (Domain((0, 1, 2, 3), ((3,),)), Domain((4, 5, 6, 7), ((7,),)))
    domains = place(section(2, "ranks 4-7"), 256, 8)
    assert len(domains) == 32
    assert domains[-1] == Domain(tuple(range(248, 256)), ((252, 253), (254, 255)))


@pytest.mark.parametrize(
    ("tp", "placement", "message"),
    [
        (
            3,
            "colocate",
            "reward.model.tensor_parallel_size: 3 does not divide the 8 ranks of a node; nearest that does: 2 or 4",
        ),
        (
            16,
            "colocate",
            "reward.model.tensor_parallel_size: 16 does not divide the 8 ranks of a node; nearest that does: 8",
        ),
        (
            2,
            "ranks 5-7",
            "reward.model.tensor_parallel_size: 2 does not divide the 3 ranks of reward.model.placement 'ranks 5-7'; "
            "nearest that does: 1 or 3",
        ),
        (1, "ranks 6-8", "reward.model.placement: 'ranks 6-8': a node has ranks 0 to 7 here"),
        (1, "ranks 3-2", "reward.model.placement: 'ranks 3-2': a node has ranks 0 to 7 here"),
        (1, "rank 7", "reward.model.placement: 'rank 7'; expected colocate, or ranks of each node such as ranks 6-7"),
    ],
)
def test_what_does_not_divide_is_refused(tp: int, placement: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        place(section(tp, placement), world_size=256, local_world_size=8)
    assert str(error.value) == message


def test_eight_ranks_of_two_nodes_are_not_one_node() -> None:
    with pytest.raises(ConfigError, match="8 does not divide the 4 ranks of a node; nearest that does: 4"):
        place(section(8), world_size=8, local_world_size=4)


@pytest.mark.parametrize(("engine", "beside"), [("policy", True), ("vllm", False)])
def test_a_judge_answers_beside_the_sampling_but_not_beside_vllm(engine: str, beside: bool) -> None:
    """vLLM's state is process-wide."""
    cfg = LMRLConfig()
    cfg.reward.model, cfg.rollout.engine = section(1, "ranks 1-1"), engine
    assert judged_beside(cfg, shard_size=1) is beside
