"""Serialize samples for the transfer between ranks, as bytes without pickle.

A parcel contains some samples of one rank; the receiver concatenates the parcels of all ranks that have a part of its
share. A parcel is a safetensors file; everything besides tensors is JSON inside of it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, get_type_hints

import safetensors.torch
import torch
from torch import Tensor

from phalanx.distributed.collectives import exchange
from phalanx.distributed.link import Link
from phalanx.distributed.mesh import World
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT
from phalanx.functional.aggregation import Mean
from phalanx.telemetry.records import Record, Thumbnail
from phalanx.training.collect import Collected
from phalanx.types import Prompt, Samples

_TENSORS = ("log_prob", "mask", "index", "weight", "lengths", "positions", "version", "action_reward")  # see Samples


@dataclass(frozen=True)
class Share:
    """The samples of one rank of a role: numbers `first` to `last` (exclusive), counted over all ranks."""

    rank: int
    first: int
    last: int


def shares(ranks: Sequence[int], samples: int) -> list[Share]:
    """Divide `samples` equally among the ranks of a role."""
    each = samples // len(ranks)
    return [Share(rank, i * each, (i + 1) * each) for i, rank in enumerate(ranks)]


def overlaps(share: Share, others: Sequence[Share]) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, first, last) for each rank of another role that has samples of this share: `first` to `last`."""
    for other in others:
        first, last = max(share.first, other.first), min(share.last, other.last)
        if first < last:
            yield other.rank, first, last


def stages(ranks: Mapping[str, Sequence[int]], samples: int) -> dict[str, list[Share]]:
    """The shares of each role's ranks, in the order in which samples pass through the roles."""
    return {role: shares(ranks[role], samples) for role in (ROLLOUT, INFERENCE, ACTOR) if role in ranks}


def routes(ranks: Mapping[str, Sequence[int]], samples: int) -> list[tuple[int, int]]:
    """All pairs (source, receiver) of ranks that exchange samples or validations between these roles."""
    links = []
    for sources, receivers in pairwise(stages(ranks, samples).values()):
        for source in sources:
            links += [(source.rank, receiver) for receiver, _, _ in overlaps(source, receivers)]
    validation = (ranks[ROLLOUT][0], ranks[ACTOR][0])
    return links if validation in links else [*links, validation]


def link_of(world: World) -> Link:
    """The link between roles, for a world that has roles."""
    assert world.link is not None, "only jobs with roles call this"
    return world.link


class Mail:
    """The parcels that this rank receives from the role before its own, and those that it sends to the next one."""

    def __init__(self, world: World, kind: type, samples: int) -> None:
        """kind: the class of traces. samples: number of samples in one part of a step, over all ranks."""
        self.link, self._kind, self._device = link_of(world), kind, world.device
        of_roles = stages(self.link.roles.ranks, samples)
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
    return _file({}, {"stop": signal})


def serialize(collected: Collected, rows: slice | Tensor, stop: int = 0) -> Tensor:
    """Bytes [K] uint8 of this rank's samples `rows`, with the rewards of all ranks' samples and the metrics. stop: the
    signal that a rank received during sampling, 0 if none.
    """
    samples = collected.samples
    at = torch.arange(len(samples.index))[rows]
    device = samples.log_prob.device
    tensors: dict[str, Tensor] = {"reward": collected.reward}
    for name in _TENSORS:
        value = vars(samples)[name]
        if value is not None:
            tensors[name] = value[at.to(value.device)]
    trace = samples.trace.select(at.to(device))
    plain: dict[str, Any] = {}
    for field in fields(trace):
        value = vars(trace)[field.name]
        if isinstance(value, Tensor):
            tensors[f"trace/{field.name}"] = value
        elif isinstance(value, dict):
            tensors |= {f"trace/{field.name}/{name}": tensor for name, tensor in value.items()}
        else:
            plain[field.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    of_rows = [samples.prompts[i] for i in at.tolist()]
    prompts = {p.group_id: asdict(replace(p, meta={})) for p in of_rows}
    plain_values = {
        "trace": plain,
        "prompts": list(prompts.values()),
        "groups": [p.group_id for p in of_rows],
        "stop": stop,
        "exact": samples.exact,
        "on_policy": samples.on_policy,
        "row": collected.row,
        "counts": {name: value.count for name, value in collected.row.items() if isinstance(value, Mean)},
    }
    return _file(tensors, plain_values)


def deserialize(data: Tensor, kind: type, device: torch.device) -> tuple[Collected | None, int]:
    """The samples of a parcel, with a trace of class `kind` (None if it has no samples), and the signal to stop."""
    tensors, plain_values = _read(data)
    if "trace" not in plain_values:
        return None, plain_values["stop"]
    values: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for field in fields(kind):
        name = field.name
        if name in plain_values["trace"]:
            plain = plain_values["trace"][name]
            values[name] = hints[name](**plain) if isinstance(plain, dict) else plain
        elif f"trace/{name}" in tensors:
            values[name] = tensors.pop(f"trace/{name}").to(device)
        else:
            inner = [key for key in tensors if key.startswith(f"trace/{name}/")]
            values[name] = {key.removeprefix(f"trace/{name}/"): tensors.pop(key).to(device) for key in inner}
    known = {prompt["group_id"]: Prompt(**prompt) for prompt in plain_values["prompts"]}
    reward = tensors.pop("reward")
    for name in ("log_prob", "mask", "weight", "action_reward"):
        if name in tensors:
            tensors[name] = tensors[name].to(device)
    samples = Samples(
        prompts=[known[group] for group in plain_values["groups"]],
        outputs=[],
        trace=kind(**values),
        exact=plain_values["exact"],
        on_policy=plain_values["on_policy"],
        **tensors,
    )
    row = plain_values["row"]
    for name, count in plain_values["counts"].items():
        row[name] = Mean(row[name], count)
    return Collected(samples, reward, row), plain_values["stop"]


def concatenate(parts: Sequence[Collected]) -> Collected:
    """Concatenate the samples of several parcels."""
    if len(parts) == 1:
        return parts[0]
    samples = [part.samples for part in parts]
    values: dict[str, Any] = {"trace": type(samples[0].trace).joined([some.trace for some in samples]), "prompts": []}
    for name in _TENSORS:
        if vars(samples[0])[name] is not None:
            values[name] = torch.cat([vars(some)[name] for some in samples])
    for some in samples:
        values["prompts"] += some.prompts
    return replace(parts[0], samples=replace(samples[0], **values))


def exchanged(samples: Samples, ranks: Tensor, world: World) -> Samples:
    """Exchange samples between ranks, and return those of this rank.

    samples: this rank's samples before the exchange; each rank has consecutive ones. ranks: [N], the data-parallel rank
    that gets each sample of all ranks, -1 for samples that no rank needs.
    """
    this, kind, parcels = world.rank, type(samples.trace), dict[int, Tensor]()
    size = world.context_size
    place = (
        this % size
    )  # context-parallel ranks have the same samples: those at the same place exchange with each other
    goes = ranks[samples.index]
    for rank in goes[goes >= 0].unique().tolist():
        rows = (goes == rank).nonzero().flatten()
        parcels[rank * size + place] = serialize(Collected(samples, torch.empty(0), {}), rows)
    holders = ((ranks == world.data_rank).nonzero().flatten() // len(samples.index)).unique()
    sources = (holders * size + place).tolist()
    kept = {this: parcels.pop(this)} if this in parcels else {}
    arrived = kept | exchange(parcels, [rank for rank in sources if rank != this])
    parts = []
    for rank in sources:
        part, _ = deserialize(arrived[rank], kind, world.device)
        assert part is not None, "each parcel has samples"
        parts.append(part)
    return concatenate(parts).samples


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
    return _file(tensors, plain_values)


def deserialize_records(data: Tensor) -> tuple[dict[str, float], dict[str, list[Record]], int]:
    """The inverse of `serialize_records`, and the signal to stop; with a signal there is nothing else."""
    tensors, plain_values = _read(data)
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


def _file(tensors: dict[str, Tensor], plain_values: dict[str, Any]) -> Tensor:
    words = torch.tensor(list(json.dumps(plain_values).encode()), dtype=torch.uint8)
    # cloned, since a view would be written with its whole storage
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return torch.frombuffer(bytearray(safetensors.torch.save(whole | {"json": words})), dtype=torch.uint8)


def _read(data: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = safetensors.torch.load(data.numpy().tobytes())
    plain_values: dict[str, Any] = json.loads(tensors.pop("json").numpy().tobytes())
    return tensors, plain_values
