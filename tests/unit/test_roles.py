"""Assignment of roles to ranks: every form of a placement, and every mistake with its line."""

from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLLOUT
from phalanx.run.roles import roles_of, span
from tests.helpers.checks import refused


def launch(world: int, node: int | None = None, rank: int = 0, nodes: str = "") -> Launch:
    node = node or world
    return Launch(rank, world, rank % node, node, nodes=nodes)


GOOD: list[tuple[dict[str, Any], int, int | None, dict[str, str]]] = [
    ({}, 4, None, {ACTOR: "0-3", ROLLOUT: "0-3"}),
    ({"actor,rollout": "all"}, 4, None, {ACTOR: "0-3", ROLLOUT: "0-3"}),
    ({"actor, rollout": "0-3"}, 4, None, {ACTOR: "0-3", ROLLOUT: "0-3"}),
    (
        {"rollout": "0-19", "inference": "20-23", "actor": "24-31"},
        32,
        8,
        {ROLLOUT: "0-19", INFERENCE: "20-23", ACTOR: "24-31"},
    ),
    ({"rollout": "0-1,4-5", "actor": "2 - 3, 6-7"}, 8, 4, {ROLLOUT: "0-1,4-5", ACTOR: "2-3,6-7"}),
    ({"rollout": "0-5 of each node", "actor": "6-7 of each node"}, 16, 8, {ROLLOUT: "0-5,8-13", ACTOR: "6-7,14-15"}),
    (
        {"rollout": "rest", "inference": "1 rank", "actor": "2 ranks"},
        6,
        None,
        {ROLLOUT: "0-2", INFERENCE: "3", ACTOR: "4-5"},
    ),
    ({"actor": "1/4", "rollout": "3/4"}, 8, None, {ACTOR: "0-1", ROLLOUT: "2-7"}),
    ({"rollout": 0, "actor": 1}, 2, None, {ROLLOUT: "0", ACTOR: "1"}),
]


@pytest.mark.parametrize(("placement", "world", "node", "expected"), GOOD)
def test_forms(placement: dict[str, Any], world: int, node: int | None, expected: dict[str, str]) -> None:
    roles = roles_of(placement, launch(world, node))
    assert {role: span(ranks) for role, ranks in roles.ranks.items()} == expected
    assert roles.world_size == world
    assert roles.collocated == (expected[ACTOR] == expected[ROLLOUT])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"actr": "all"}, "placement: no role 'actr'; did you mean actor?"),
    (
        {"actor,rollout,reward": "all"},
        "placement: no role 'reward'; rewards run where the rollout does, and reward.model.placement places a reward model there",
    ),
    ({"actor": "all"}, "placement: no ranks for rollout; expected actor and rollout, and optionally inference"),
    (
        {"actor,rollout,inference": "all"},
        "placement: inference needs separate ranks for actor and rollout; leave it out",
    ),
    ({"actor": "0-3", "actor ,rollout": "4-7"}, "placement: actor is placed twice"),
    ({"rollout": "0-3", "actor": "3-7"}, "placement: ranks 3 are both actor's (3-7) and rollout's (0-3)"),
    ({"rollout": "0-3", "actor": "5-6"}, "placement: ranks 4,7 of 8 have no role (rollout 0-3, actor 5-6)"),
    ({"rollout": "3-0", "actor": "4-7"}, "placement.rollout: '3-0': 3-0 is descending; expected 0-3"),
    ({"rollout": "0-3", "actor": "4-9"}, "placement.actor: '4-9': this world has ranks 0 to 7"),
    ({"rollout": "0-3", "actor": "4-5 of each node"}, "placement.actor: '4-5 of each node': a node has ranks 0 to 3"),
    (
        {"rollout": "0..3", "actor": "4-7"},
        "placement.rollout: '0..3'; expected all, 0-3,8-11, 0-5 of each node, or for an elastic job 4 ranks, 1/4, rest",
    ),
    ({"rollout": "0-3,2-4", "actor": "5-7"}, "placement.rollout: '0-3,2-4' names ranks 2-3 twice"),
    ({"actor,rollout": "0-3"}, "placement: ranks 4-7 of 8 have no role (actor 0-3, rollout 0-3)"),
    ({"rollout": "2 ranks", "actor": "4-7"}, "placement: counts (rollout) and ranges (actor) cannot be combined"),
    (
        {"rollout": "2 ranks", "actor": "2 ranks"},
        "placement: rollout 2 + actor 2 = 4 of 8 ranks; make one of them rest",
    ),
    ({"rollout": "rest", "actor": "rest"}, "placement: rollout and actor are both rest; only one role can be"),
    ({"rollout": "8 ranks", "actor": "rest"}, "placement: rollout 8 of 8 ranks leave none for actor"),
    ({"rollout": "1/3", "actor": "rest"}, "placement.rollout: '1/3' of 8 ranks is not a whole number"),
    ({"rollout": "0 ranks", "actor": "rest"}, "placement.rollout: '0 ranks' means no ranks; leave the role out"),
]


@pytest.mark.parametrize(("placement", "message"), BAD)
def test_mistakes(placement: dict[str, Any], message: str) -> None:
    with refused(message, ConfigError):
        roles_of(placement, launch(8, 4))


def test_ranks_of_an_elastic_job_change() -> None:
    placement = {"rollout": "0-3", "actor": "4-7"}
    message = (
        "placement.rollout: '0-3' names ranks, which change as nodes join and leave (NNODES=1:2); expected a form such "
        "as 4 ranks, 1/4, rest, or 0-5 of each node"
    )
    with refused(message, ConfigError):
        roles_of(placement, launch(8, 4, nodes="1:2"))
    for world in (4, 8):  # the same message for both
        roles = roles_of({"rollout": "rest", "actor": "1/4"}, launch(world, 4, nodes="1:2"))
        assert len(roles.ranks[ACTOR]) == world // 4


def test_a_role_is_a_launch_of_its_own() -> None:
    """Rank and size within the role, the device on the node, and the number of neighbours that always share a node."""
    roles = roles_of({"rollout": "0-19", "inference": "20-23", "actor": "24-31"}, launch(32, 8))
    own = roles.launch(ROLLOUT, launch(32, 8, rank=17))
    assert (own.rank, own.world_size, own.local_rank, own.local_world_size) == (17, 20, 1, 4)
    own = roles.launch(INFERENCE, launch(32, 8, rank=21))
    assert (own.rank, own.world_size, own.local_rank, own.local_world_size) == (1, 4, 5, 4)
    own = roles.launch(ACTOR, launch(32, 8, rank=0))  # of the actor's first rank
    assert (own.rank, own.world_size, own.local_world_size) == (0, 8, 8)
