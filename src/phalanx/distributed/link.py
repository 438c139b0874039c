"""Messages between the roles of one torchrun world: orders and weights from the actor, samples between ranks.

Each role has a separate default process group, in which FSDP2, checkpoints and vLLM see only the ranks of that role.
The groups here hold ranks of several roles. They have no time limit: a rank that waits for another role's phase is no
hang, and the watch hears of ranks that are lost.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT, Roles
from phalanx.distributed.watchdog import Watch
from phalanx.types import JobError

NO_LIMIT = timedelta(days=365)
BUCKET_BYTES = 64 * 2**20  # of weights that travel at once
SAMPLES, VALIDATION = 0, 1  # tags
WORD = 8  # bytes; each tensor begins at a whole one
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
Bucket = dict[str, slice]  # of a message's bytes


@dataclass(frozen=True)
class Order:
    """The actor's order with each set of weights, trained for `version` steps: samples of the training steps from
    `first` up to `last`, a validation, or, without weights, the `end`, by the signal `stop` if there is one.
    """

    version: int = 0
    first: int = 0
    last: int = 0
    validate: bool = False
    end: bool = False
    stop: int = 0

    @property
    def steps(self) -> range:
        """The training steps to sample."""
        return range(self.first, self.last)


class Link:
    """This rank's ends of the groups across roles. All ranks of the world make one at the same point."""

    def __init__(self, roles: Roles, rank: int, store: dist.Store, device: torch.device) -> None:
        self.roles, self.rank, self.role = roles, rank, roles.of(rank)
        everyone = range(roles.world_size)
        actors = roles.ranks[ACTOR]
        self.lead = actors[0]
        self._control = self._group("control", everyone, store)
        self._samples = self._group("samples", everyone, store)
        self._gate = self._group(f"gate of {self.role}", roles.ranks[self.role], store)
        receivers = [*roles.ranks[ROLLOUT], *roles.ranks.get(INFERENCE, ())]
        self._weights: dist.ProcessGroup | None = None
        if rank in (self.lead, *receivers):
            self._weights = self._group("weights", [self.lead, *receivers], store, device.type)
        self._device = device
        self._sent: list[list[tuple[dist.Work, Tensor]]] = [[]]  # since each of the last orders

    def _group(self, name: str, ranks: Sequence[int], store: dist.Store, device: str = "cpu") -> Any:
        prefixed, number = dist.PrefixStore(f"across/{name}", store), list(ranks).index(self.rank)
        if device == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = NO_LIMIT
            return dist.ProcessGroupNCCL(prefixed, number, len(ranks), options)
        return dist.ProcessGroupGloo(prefixed, number, len(ranks), NO_LIMIT)

    # -- orders -----------------------------------------------------------------------------------

    def meet(self) -> None:
        """Wait for all ranks of the world."""
        self._control.barrier().wait()

    def part(self, watch: Watch) -> None:
        """At the end: wait for all ranks of the world, none of which is a failure of the job as it leaves from then
        on, with the store perhaps.
        """
        watch.close()
        self.meet()

    def meet_role(self) -> None:
        """Wait for all ranks of this role, before they wait for one another within a time limit."""
        self._gate.barrier().wait()

    def order(self, order: Order | None = None) -> Order:
        """The actor's order, which its first rank gives; on all ranks of the world."""
        box = torch.tensor(astuple(order or Order()), dtype=torch.int64)
        _broadcast(self._control, box, self.lead).wait()
        version, first, last, validate, end, stop = box.tolist()
        received = Order(version, first, last, bool(validate), bool(end), stop)
        if received.steps:
            self._settle()
        return received

    # -- weights ----------------------------------------------------------------------------------

    def compare(self, shapes: Shapes) -> None:
        """Raise JobError where the ranks that receive weights have others than the actor sends."""
        if self._weights is None:
            return
        listing = sorted((name, tuple(shape), str(dtype)) for name, (shape, dtype) in shapes.items())
        digest = hashlib.sha256(repr(listing).encode()).digest()
        local = torch.tensor(list(digest), dtype=torch.uint8, device=self._device)
        sent = local.clone()
        _broadcast(self._weights, sent, 0).wait()
        if not torch.equal(local, sent):
            raise JobError(
                f"placement: the actor trains other tensors than the {self.role} has; is model.path the same?"
            )

    def send_weights(self, weights: Iterable[tuple[str, Tensor]], shapes: Shapes) -> None:
        """On all ranks of the actor: send whole tensors, in the order of `shapes`, as they come."""
        each, sums, work = iter(weights), [], deque[dist.Work]()
        for bucket, flat in self._messages(shapes):
            if len(work) == 2:  # whose memory this is
                work.popleft().wait()
            for name, place in bucket.items():
                given, tensor = next(each)
                assert given == name, f"{given} where {name} is due"
                if self._weights is not None:
                    flat[place].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
            if self._weights is not None:
                sums.append(_sum(flat))
                work.append(_broadcast(self._weights, flat, 0))
        assert next(each, None) is None, "more weights than shapes"
        for one in work:
            one.wait()
        if self._weights is not None and sums:
            _broadcast(self._weights, torch.stack(sums), 0).wait()

    def receive_weights(self, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        """On a rank that samples or scores: the tensors that the actor sends, whole; each is there until the next one
        is drawn. Raises JobError at the end where they are not what was sent.
        """
        sums = []
        coming = ((bucket, flat, _broadcast(self._weights, flat, 0)) for bucket, flat in self._messages(shapes))
        upcoming = next(coming, None)
        while upcoming is not None:
            bucket, flat, work = upcoming
            work.wait()
            upcoming = next(coming, None)  # on its way while this one is read
            sums.append(_sum(flat))
            for name, place in bucket.items():
                shape, dtype = shapes[name]
                yield name, flat[place].view(dtype).view(shape)
        if not sums:
            return
        local = torch.stack(sums)
        sent = torch.empty_like(local)
        _broadcast(self._weights, sent, 0).wait()
        if not torch.equal(local, sent):
            raise JobError(f"placement: the weights that this rank ({self.role}) received are not those that were sent")

    def _messages(self, shapes: Shapes) -> Iterator[tuple[Bucket, Tensor]]:
        """Where tensors lie in each message, and its bytes; those of a message are there until the next but one."""
        buckets = list(_buckets(shapes))
        usual = max((size for _, size in buckets if size <= BUCKET_BYTES), default=0)
        kept = [torch.empty(usual, dtype=torch.uint8, device=self._device) for _ in range(2)]
        for number, (bucket, size) in enumerate(buckets):
            large = size > BUCKET_BYTES
            yield (
                bucket,
                torch.empty(size, dtype=torch.uint8, device=self._device) if large else kept[number % 2][:size],
            )

    # -- samples ----------------------------------------------------------------------------------

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Once, with the same (source, receiver) on all ranks, in one order: their connections. Gloo makes them at the
        first message of two ranks, for which both must be there: `send` would wait for that.
        """
        for source, to in pairs:
            box = torch.zeros(1, dtype=torch.uint8)
            if self.rank == source:
                self._samples.send([box], to, SAMPLES).wait()
            elif self.rank == to:
                self._samples.recv([box], source, SAMPLES).wait()

    def send(self, data: Tensor, to: int, tag: int = SAMPLES) -> None:
        """Send bytes [K] uint8 to a rank of the world, without waiting: gloo's send ends when the other side asks."""
        for part in (torch.tensor([len(data)]), data):
            self._sent[-1].append((self._samples.send([part], to, tag), part))

    def receive(self, source: int, tag: int = SAMPLES) -> Tensor:
        """The bytes [K] uint8 that a rank of the world sends."""
        size = torch.zeros(1, dtype=torch.int64)
        self._samples.recv([size], source, tag).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._samples.recv([data], source, tag).wait()
        return data

    def _settle(self) -> None:
        """With each order of samples: wait for what was sent before the last one. What was sent since may be asked for
        only after the actor has sent the weights that come with this order.
        """
        self._sent.append([])
        while len(self._sent) > 2:
            for work, _ in self._sent.pop(0):
                work.wait()


def _broadcast(group: Any, tensor: Tensor, root: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    work: dist.Work = group.broadcast([tensor], options)
    return work


def _buckets(shapes: Shapes) -> Iterator[tuple[Bucket, int]]:
    """The tensors, in order, in messages of up to BUCKET_BYTES, and the size of each; a larger tensor is
    sent separately.
    """
    bucket: Bucket = {}
    held = 0
    for name, (shape, dtype) in shapes.items():
        size = shape.numel() * dtype.itemsize
        if bucket and held + size > BUCKET_BYTES:
            yield bucket, held
            bucket, held = {}, 0
        bucket[name] = slice(held, held + size)
        held += size + -size % WORD
    if bucket:
        yield bucket, held


def _sum(flat: Tensor) -> Tensor:
    return flat.view(torch.int64).sum()
