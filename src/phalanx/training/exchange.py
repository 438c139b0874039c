"""Exchange samples between ranks, as bytes without pickle.

A parcel contains some samples of one rank; the receiver concatenates the parcels of all ranks that have a part of its
share. A parcel is a safetensors file; everything besides tensors is JSON inside of it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, get_type_hints

import safetensors.torch
import torch
from torch import Tensor

from phalanx.distributed.collectives import exchange
from phalanx.distributed.mesh import World
from phalanx.functional import looks
from phalanx.functional.aggregation import Mean
from phalanx.types import Collected, Prompt, Samples

_TENSORS = ("log_prob", "mask", "index", "weight", "lengths", "positions", "version", "action_reward")  # see Samples


def serialize(collected: Collected, rows: slice | Tensor, stop: int = 0) -> Tensor:
    """Bytes [K] uint8 of this rank's samples `rows`, with the rewards of all ranks' samples and the metrics. stop: the
    signal that a rank received during sampling, 0 if none.
    """
    samples = collected.samples
    at = torch.arange(len(samples.index))[rows]
    device = samples.log_prob.device
    tensors: dict[str, Tensor] = {"reward": collected.reward}
    if collected.pending is not None:
        tensors["pending"] = collected.pending
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
        elif field.name == "looks" and value is not None:
            pixels, plain["looks"] = looks.sent(value)
            tensors |= {f"trace/looks/{name}": tensor for name, tensor in pixels.items()}
        else:
            plain[field.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    of_rows = [samples.prompts[i] for i in at.tolist()]
    prompts = {p.group_id: asdict(replace(p, meta={}, images=(), told=())) for p in of_rows}
    plain_values = {
        "trace": plain,
        "prompts": list(prompts.values()),
        "groups": [(p.group_id, p.told) for p in of_rows],
        "stop": stop,
        "exact": samples.exact,
        "on_policy": samples.on_policy,
        "row": collected.row,
        "counts": {name: value.count for name, value in collected.row.items() if isinstance(value, Mean)},
    }
    return to_bytes(tensors, plain_values)


def deserialize(data: Tensor, kind: type, device: torch.device) -> tuple[Collected | None, int]:
    """The samples of a parcel, with a trace of class `kind` (None if it has no samples), and the signal to stop."""
    tensors, plain_values = from_bytes(data)
    if "trace" not in plain_values:
        return None, plain_values["stop"]
    values: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for field in fields(kind):
        name = field.name
        if name == "looks" and plain_values["trace"].get(name) is not None:
            begin = "trace/looks/"
            pixels = {key.removeprefix(begin): tensors.pop(key) for key in list(tensors) if key.startswith(begin)}
            values[name] = looks.received(pixels, plain_values["trace"][name])
        elif name in plain_values["trace"]:
            plain = plain_values["trace"][name]
            values[name] = hints[name](**plain) if isinstance(plain, dict) else plain
        elif f"trace/{name}" in tensors:
            values[name] = tensors.pop(f"trace/{name}").to(device)
        else:
            inner = [key for key in tensors if key.startswith(f"trace/{name}/")]
            values[name] = {key.removeprefix(f"trace/{name}/"): tensors.pop(key).to(device) for key in inner}
    known = {prompt["group_id"]: Prompt(**prompt) for prompt in plain_values["prompts"]}
    reward, pending = tensors.pop("reward"), tensors.pop("pending", None)
    for name in ("log_prob", "mask", "weight", "action_reward"):
        if name in tensors:
            tensors[name] = tensors[name].to(device)
    prompts = []
    for group, told in plain_values["groups"]:
        prompts.append(replace(known[group], told=told if isinstance(told, str) else tuple(told)))
    samples = Samples(
        prompts=prompts,
        outputs=[],
        trace=kind(**values),
        exact=plain_values["exact"],
        on_policy=plain_values["on_policy"],
        **tensors,
    )
    row = plain_values["row"]
    for name, count in plain_values["counts"].items():
        row[name] = Mean(row[name], count)
    return Collected(samples, reward, row, pending), plain_values["stop"]


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
    # context-parallel ranks have the same samples: those at the same place exchange with each other
    size, place = world.context_size, this % world.context_size
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


def to_bytes(tensors: dict[str, Tensor], plain_values: dict[str, Any]) -> Tensor:
    words = torch.tensor(list(json.dumps(plain_values).encode()), dtype=torch.uint8)
    # cloned, since a view would be written with its whole storage
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return torch.frombuffer(bytearray(safetensors.torch.save(whole | {"json": words})), dtype=torch.uint8)


def from_bytes(data: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = safetensors.torch.load(data.numpy().tobytes())
    plain_values: dict[str, Any] = json.loads(tensors.pop("json").numpy().tobytes())
    return tensors, plain_values
