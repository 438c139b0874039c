"""Assignment of roles to ranks, configured by `placement`.

    {}                                                              every rank runs every phase
    {"actor,rollout": "all"}                                        the same
    {"rollout": "0-19", "inference": "20-23", "actor": "24-31"}     each rank has one role

Ranks are given as `all`; as numbers and inclusive ranges, such as `0-3,8-11`; as the same ranks of each node, `0-5 of
each node`; or, for elastic jobs, as a number or a fraction of the ranks, `4 ranks` or `1/4`, and for one role `rest`.
Such ranks are laid out in the order in which the roles are given.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from phalanx.config.messages import ConfigError, nearest
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLES, ROLLOUT

_FORMS = "all, 0-3,8-11, 0-5 of each node, or for an elastic job 4 ranks, 1/4, rest"


@dataclass(frozen=True)
class Roles:
    """`ranks` of each role, ascending. Either each rank has one role, or all ranks are actor and rollout."""

    ranks: dict[str, tuple[int, ...]]

    @property
    def collocated(self) -> bool:
        """Whether every rank runs every phase."""
        return self.ranks[ACTOR] == self.ranks[ROLLOUT]

    @property
    def world_size(self) -> int:
        """Number of ranks of all roles."""
        return max(max(ranks) for ranks in self.ranks.values()) + 1

    def of(self, rank: int) -> str:
        """The role of a rank; `actor` if every rank runs every phase."""
        return next(role for role in ROLES if rank in self.ranks.get(role, ()))

    def launch(self, role: str, launch: Launch) -> Launch:
        """The launch of a world that consists only of the ranks of one role: rank, world size and ranks per node.

        The rank is this one if it has the role, otherwise the role's first rank.
        """
        if self.collocated:
            return launch
        ranks, node = self.ranks[role], launch.local_world_size
        rank = launch.rank if launch.rank in ranks else ranks[0]
        # each block of this size, counted from the role's first rank, lies within a node
        neighbours = math.gcd(*(sum(r // node == n for r in ranks) for n in {r // node for r in ranks}))
        return replace(launch, rank=ranks.index(rank), world_size=len(ranks), local_world_size=neighbours)


def roles_of(placement: Mapping[str, Any], launch: Launch) -> Roles:
    """The roles of this launch's ranks. Raises ConfigError if they do not cover the world exactly once."""
    if not placement:
        everyone = tuple(range(launch.world_size))
        return Roles({ACTOR: everyone, ROLLOUT: everyone})
    given: dict[str, str] = {}
    for names, value in placement.items():
        for name in str(names).split(","):
            role = name.strip()
            if role not in ROLES:
                raise ConfigError(f"placement: no role {role!r}{_role_hint(role)}")
            if role in given:
                raise ConfigError(f"placement: {role} is placed twice")
            given[role] = " ".join(str(value).split())
    for role in (ACTOR, ROLLOUT):
        if role not in given:
            raise ConfigError(f"placement: no ranks for {role}; expected actor and rollout, and optionally inference")
    counted = {role: text for role, text in given.items() if _is_count(text)}
    if counted and len(counted) < len(given):
        ranges = ", ".join(role for role in given if role not in counted)
        raise ConfigError(f"placement: counts ({', '.join(counted)}) and ranges ({ranges}) cannot be combined")
    if counted:
        return Roles(_laid_out(counted, launch.world_size))
    ranks_of_role = {role: _parse_ranks(role, text, launch) for role, text in given.items()}
    _check_cover(ranks_of_role, launch.world_size)
    return Roles(ranks_of_role)


def span(ranks: Collection[int], separator: str = ",") -> str:
    """Ranks as ranges: `0-3,8` for (0, 1, 2, 3, 8)."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _role_hint(role: str) -> str:
    if role == "reward":
        return "; rewards run where the rollout does, and reward.model.placement places a reward model there"
    return nearest(role, ROLES) or f"; expected one of {', '.join(ROLES)}"


def _is_count(text: str) -> bool:
    return re.fullmatch(r"\d+ ranks?|\d+/\d+|rest", text) is not None


def _parse_ranks(role: str, text: str, launch: Launch) -> tuple[int, ...]:
    """Parse the ranks that a text names."""
    key, size, node = f"placement.{role}: {text!r}", launch.world_size, launch.local_world_size
    if text == "all":
        return tuple(range(size))
    each = re.fullmatch(r"(.+) of each node", text)
    if launch.nodes and each is None:
        raise ConfigError(
            f"{key} names ranks, which change as nodes join and leave (NNODES={launch.nodes}); expected a form such as "
            "4 ranks, 1/4, rest, or 0-5 of each node"
        )
    body, last = (each[1], node - 1) if each else (text, size - 1)
    ranks: list[int] = []
    for part in body.split(","):
        bounds = re.fullmatch(r" ?(\d+)(?: ?- ?(\d+))? ?", part)
        if bounds is None:
            raise ConfigError(f"{key}; expected {_FORMS}")
        a, b = int(bounds[1]), int(bounds[2] or bounds[1])
        if a > b:
            raise ConfigError(f"{key}: {a}-{b} is descending; expected {b}-{a}")
        if b > last:
            raise ConfigError(f"{key}: {'a node' if each else 'this world'} has ranks 0 to {last}")
        twice = set(ranks).intersection(range(a, b + 1))
        if twice:
            raise ConfigError(f"{key} names ranks {span(twice)} twice")
        ranks += range(a, b + 1)
    if each:
        ranks = [first + rank for first in range(0, size, node) for rank in ranks]
    return tuple(sorted(ranks))


def _laid_out(counted: dict[str, str], world_size: int) -> dict[str, tuple[int, ...]]:
    """The ranks of roles that are given by numbers or fractions, one role after the other."""
    counts: dict[str, int] = {}
    for role, text in counted.items():
        if text == "rest":
            continue
        share = text.split("/")
        if len(share) == 2:
            above, below = int(share[0]), int(share[1])
            if below == 0 or above * world_size % below:
                raise ConfigError(f"placement.{role}: {text!r} of {world_size} ranks is not a whole number")
            counts[role] = above * world_size // below
        else:
            counts[role] = int(text.split()[0])
        if counts[role] == 0:
            raise ConfigError(f"placement.{role}: {text!r} means no ranks; leave the role out")
    rest = [role for role in counted if role not in counts]
    if len(rest) > 1:
        raise ConfigError(f"placement: {' and '.join(rest)} are both rest; only one role can be")
    total = sum(counts.values())
    words = " + ".join(f"{role} {count}" for role, count in counts.items())
    if rest and total >= world_size:
        raise ConfigError(f"placement: {words} of {world_size} ranks leave none for {rest[0]}")
    if not rest and total != world_size:
        raise ConfigError(f"placement: {words} = {total} of {world_size} ranks; make one of them rest")
    ranks_of_role, first = {}, 0
    for role in counted:
        count = counts.get(role, world_size - total)
        ranks_of_role[role] = tuple(range(first, first + count))
        first += count
    return ranks_of_role


def _check_cover(ranks_of_role: dict[str, tuple[int, ...]], world_size: int) -> None:
    """Raise ConfigError for roles that share ranks or leave some idle."""
    together = ranks_of_role[ACTOR] == ranks_of_role[ROLLOUT]
    if together and INFERENCE in ranks_of_role:
        raise ConfigError("placement: inference needs separate ranks for actor and rollout; leave it out")
    for (role, ranks), (other, others) in combinations([] if together else sorted(ranks_of_role.items()), 2):
        both = set(ranks).intersection(others)
        if both:
            raise ConfigError(
                f"placement: ranks {span(both)} are both {role}'s ({span(ranks)}) and {other}'s ({span(others)})"
            )
    idle = set(range(world_size)).difference(*ranks_of_role.values())
    if idle:
        words = ", ".join(f"{role} {span(ranks)}" for role, ranks in ranks_of_role.items())
        raise ConfigError(f"placement: ranks {span(idle)} of {world_size} have no role ({words})")
