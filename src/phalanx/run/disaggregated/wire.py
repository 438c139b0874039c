"""Samples and validations between ranks of different roles: whose samples go where, and the parcels of each rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLLOUT, World
from phalanx.run.link import link_of
from phalanx.telemetry.records import Record, Thumbnail
from phalanx.training.exchange import concatenate, deserialize, from_bytes, serialize, to_bytes
from phalanx.types import Collected


@dataclass(frozen=True)
class Share:
    """The samples of one rank of a role: numbers `first` to `last` (exclusive), counted over all ranks."""

    rank: int
    first: int
    last: int


def shares(ranks: Sequence[int], samples: int, together: int = 1) -> list[Share]:
    """Divide `samples` equally among the ranks of a role, of which `together` neighbours have the same ones."""
    each = samples * together // len(ranks)
    return [Share(rank, i // together * each, (i // together + 1) * each) for i, rank in enumerate(ranks)]


def overlaps(share: Share, others: Sequence[Share]) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, first, last) for each rank of another role that has samples of this share: `first` to `last`."""
    for other in others:
        first, last = max(share.first, other.first), min(share.last, other.last)
        if first < last:
            yield other.rank, first, last


def stages(ranks: Mapping[str, Sequence[int]], samples: int, together: int = 1) -> dict[str, list[Share]]:
    """The shares of each role's ranks, in the order in which samples pass through the roles. together: ranks of the
    actor that train the same samples.
    """
    result = {role: shares(ranks[role], samples) for role in (ROLLOUT, INFERENCE) if role in ranks}
    return result | {ACTOR: shares(ranks[ACTOR], samples, together)}


def routes(ranks: Mapping[str, Sequence[int]], samples: int, together: int = 1) -> list[tuple[int, int]]:
    """All pairs (source, receiver) of ranks that exchange samples or validations between these roles."""
    links = []
    for sources, receivers in pairwise(stages(ranks, samples, together).values()):
        for source in sources:
            links += [(source.rank, receiver) for receiver, _, _ in overlaps(source, receivers)]
    validation = (ranks[ROLLOUT][0], ranks[ACTOR][0])
    return links if validation in links else [*links, validation]


class Mail:
    """The parcels that this rank receives from the role before its own, and those that it sends to the next one."""

    def __init__(self, world: World, kind: type, samples: int, together: int) -> None:
        """kind: the class of traces. samples: number of samples in one part of a step, over all ranks. together: see
        `stages`.
        """
        self.link, self._kind, self._device = link_of(world), kind, world.device
        self.routes = routes(self.link.roles.ranks, samples, together)
        of_roles = stages(self.link.roles.ranks, samples, together)
        self.own = of_roles[world.role][world.rank]
        order, at = list(of_roles.values()), list(of_roles).index(world.role)
        self._senders = order[at - 1] if at > 0 else []
        self._receivers = order[at + 1] if at + 1 < len(order) else []

    def receive(self) -> tuple[Collected | None, int]:
        """This rank's samples of the next part (None if a sender was told to stop), and the signal to stop or 0."""
        parts, stop = [], 0
        for rank, _, _ in overlaps(self.own, self._senders):
            received, signal = deserialize(self.link.receive(rank), self._kind, self._device)
            parts.append(received)
            stop = max(stop, signal)
        self.link.meet_role()
        whole = [part for part in parts if part is not None]
        return concatenate(whole) if len(whole) == len(parts) else None, stop

    def send(self, collected: Collected | None, stop: int = 0) -> None:
        """Send this rank's samples (None if it was told to stop) and the signal to stop to the ranks they belong to."""
        for rank, first, last in overlaps(self.own, self._receivers):
            rows = slice(first - self.own.first, last - self.own.first)
            self.link.send(stopped(stop) if collected is None else serialize(collected, rows, stop), rank)


def stopped(signal: int) -> Tensor:
    """Bytes [K] uint8 that replace samples if a rank was told to stop by `signal`."""
    return to_bytes({}, {"stop": signal})


def serialize_records(row: dict[str, float], kept: dict[str, list[Record]]) -> Tensor:
    """Bytes [K] uint8 of a validation: its metrics, and the samples to keep of each set."""
    tensors: dict[str, Tensor] = {}
    plain_values: dict[str, Any] = {"row": row, "kept": {}, "stop": 0}
    for name, records in kept.items():
        plain = []
        for i, record in enumerate(records):
            words = dict(vars(record))
            if not isinstance(record.output, str):
                tensors[f"{name}/{i}"] = torch.from_numpy(record.output)
                words["output"] = None
            words["images"] = []
            for j, shown in enumerate(record.images):
                tensors[f"{name}/{i}/{j}"] = torch.from_numpy(shown.pixels.copy())
                words["images"].append([shown.place, shown.height, shown.width])
            plain.append(words)
        plain_values["kept"][name] = plain
    return to_bytes(tensors, plain_values)


def deserialize_records(data: Tensor) -> tuple[dict[str, float], dict[str, list[Record]], int]:
    """The inverse of `serialize_records`, and the signal to stop; with a signal there is nothing else."""
    tensors, plain_values = from_bytes(data)
    if "kept" not in plain_values:
        return {}, {}, plain_values["stop"]
    kept: dict[str, list[Record]] = {}
    for name, records in plain_values["kept"].items():
        kept[name] = []
        for i, words in enumerate(records):
            if words["output"] is None:
                words["output"] = tensors[f"{name}/{i}"].numpy()
            images = []
            for j, (place, height, width) in enumerate(words.pop("images")):
                images.append(Thumbnail(place, height, width, tensors[f"{name}/{i}/{j}"].numpy()))
            kept[name].append(Record(**words, images=tuple(images)))
    return plain_values["row"], kept, plain_values["stop"]
