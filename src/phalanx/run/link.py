"""Messages between the roles of one torchrun world: orders and weights from the actor, samples between ranks.

Each role has a separate default process group, so that FSDP2, checkpoints and vLLM see only the ranks of that role. The
groups here contain ranks of several roles. They have no time limit, because a rank may wait long for another role's
phase; the watch detects lost ranks.
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

from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLLOUT, Watch, World
from phalanx.run.roles import Roles
from phalanx.run.severed import unlisted
from phalanx.types import JobError

NO_LIMIT = timedelta(days=365)
BUCKET_BYTES = 64 * 2**20  # of weights per message
SAMPLES, VALIDATION = 0, 1  # tags
WORD = 8  # bytes; alignment of each tensor in a message
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
Bucket = dict[str, slice]  # the bytes of each tensor in a message


@dataclass(frozen=True)
class Order:
    """The actor's order to the other roles, sent with weights that were trained for `version` steps.

    It asks for samples of the training steps from `first` up to, but without, `last`, or for a validation; or, without
    weights, it announces the `end` of the job, caused by the signal `stop` if that is not 0.
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
    """This rank's membership in the groups across roles. All ranks of the world create one at the same point."""

    def __init__(
        self, roles: Roles, rank: int, store: dist.Store, device: torch.device, limit: timedelta = NO_LIMIT
    ) -> None:
        """limit: to connect to the other ranks."""
        self._connects = limit
        self.roles, self.rank, self.role = roles, rank, roles.of(rank)
        self.world_size = roles.world_size
        everyone = range(roles.world_size)
        actors = roles.ranks[ACTOR]
        self.lead = actors[0]
        self._control = self._make_group("control", everyone, store)
        self._samples = self._make_group("samples", everyone, store)
        self._gate = self._make_group(f"gate of {self.role}", roles.ranks[self.role], store)
        receivers = [*roles.ranks[ROLLOUT], *roles.ranks.get(INFERENCE, ())]
        self._weights: dist.ProcessGroup | None = None
        if rank in (self.lead, *receivers):
            self._weights = self._make_group("weights", [self.lead, *receivers], store, device.type)
        self._device = device
        self._sent: list[list[tuple[dist.Work, Tensor]]] = [[]]  # one list for each of the last orders

    def _make_group(self, name: str, ranks: Sequence[int], store: dist.Store, device: str = "cpu") -> Any:
        prefixed, number = dist.PrefixStore(f"across/{name}", store), list(ranks).index(self.rank)
        if device == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = NO_LIMIT
            group: Any = dist.ProcessGroupNCCL(prefixed, number, len(ranks), options)
        else:
            group = dist.ProcessGroupGloo(prefixed, number, len(ranks), self._connects)
            group._set_default_timeout(NO_LIMIT)
        unlisted.append(group)
        return group

    # -- orders -----------------------------------------------------------------------------------

    def meet(self) -> None:
        """Barrier of all ranks of the world."""
        self._control.barrier().wait()

    def part(self, watch: Watch) -> None:
        """At the end: wait for all ranks of the world, and close these groups. Ranks that leave from then on, and the
        store that may go with them, do not count as failures.
        """
        watch.close()
        self.meet()
        for group in (self._weights, self._gate, self._samples, self._control):
            if group is not None:
                group.shutdown()
        unlisted.clear()

    def meet_role(self) -> None:
        """Barrier of all ranks of this role without a time limit, before their collectives that have one."""
        self._gate.barrier().wait()

    def order(self, order: Order | None = None) -> Order:
        """Broadcast the order given by the actor's first rank to all ranks of the world."""
        box = torch.tensor(astuple(order or Order()), dtype=torch.int64)
        _broadcast_tensor(self._control, box, self.lead).wait()
        version, first, last, validate, end, stop = box.tolist()
        received = Order(version, first, last, bool(validate), bool(end), stop)
        if received.steps:
            self._wait_sent()
        return received

    def announce(self, step: int = 0, data: Tensor | None = None) -> tuple[int, list[Tensor]]:
        """Broadcast from the actor's first rank, before the first order: the training step at which the job begins, and
        what a checkpoint has of samples that the rollout keeps, bytes [K] uint8. Returns both on all ranks.
        """
        data = torch.empty(0, dtype=torch.uint8) if data is None else data
        box = torch.tensor([step, len(data)])
        _broadcast_tensor(self._control, box, self.lead).wait()
        step, size = box.tolist()
        if size == 0:
            return step, []
        data = data if self.rank == self.lead else torch.empty(size, dtype=torch.uint8)
        _broadcast_tensor(self._control, data, self.lead).wait()
        return step, [data]

    # -- weights ----------------------------------------------------------------------------------

    def compare(self, shapes: Shapes) -> None:
        """Raise JobError on a rank whose weights differ in names, shapes or dtypes from those that the actor sends."""
        if self._weights is None:
            return
        listing = sorted((name, tuple(shape), str(dtype)) for name, (shape, dtype) in shapes.items())
        digest = hashlib.sha256(repr(listing).encode()).digest()
        local = torch.tensor(list(digest), dtype=torch.uint8, device=self._device)
        sent = local.clone()
        _broadcast_tensor(self._weights, sent, 0).wait()
        if not torch.equal(local, sent):
            raise JobError(
                f"placement: the actor and the {self.role} have different tensors; is model.path the same on all ranks?"
            )

    def send_weights(self, weights: Iterable[tuple[str, Tensor]], shapes: Shapes) -> None:
        """On all ranks of the actor: send unsharded tensors, in the order of `shapes`, as `weights` yields them."""
        each, sums, work = iter(weights), [], deque[dist.Work]()
        for bucket, flat in self._weight_messages(shapes):
            if len(work) == 2:  # the older of these messages uses the same memory
                work.popleft().wait()
            for name, place in bucket.items():
                given, tensor = next(each)
                assert given == name, f"got {given}, expected {name}"
                if self._weights is not None:
                    flat[place].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
            if self._weights is not None:
                sums.append(_integer_sum(flat))
                if self._device.type == "cuda":
                    # The bucket was gathered in another group. NCCL does not order the kernels of two groups, so that
                    # ranks which have begun both may wait for one another.
                    torch.cuda.current_stream(self._device).synchronize()
                work.append(_broadcast_tensor(self._weights, flat, 0))
        assert next(each, None) is None, "more weights than shapes"
        for one in work:
            one.wait()
        if self._weights is not None and sums:
            _broadcast_tensor(self._weights, torch.stack(sums), 0).wait()

    def receive_weights(self, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        """On a rank that samples or scores: iterate over the unsharded tensors from the actor. Each is valid until the
        next one is requested. Raises JobError at the end if checksums differ from those of the sent tensors.
        """
        sums = []
        coming = (
            (bucket, flat, _broadcast_tensor(self._weights, flat, 0)) for bucket, flat in self._weight_messages(shapes)
        )
        upcoming = next(coming, None)
        while upcoming is not None:
            bucket, flat, work = upcoming
            work.wait()
            upcoming = next(coming, None)  # it is received while this one is read
            sums.append(_integer_sum(flat))
            for name, place in bucket.items():
                shape, dtype = shapes[name]
                yield name, flat[place].view(dtype).view(shape)
        if not sums:
            return
        local = torch.stack(sums)
        sent = torch.empty_like(local)
        _broadcast_tensor(self._weights, sent, 0).wait()
        if not torch.equal(local, sent):
            raise JobError(f"placement: the weights that this rank ({self.role}) received are not those that were sent")

    def _weight_messages(self, shapes: Shapes) -> Iterator[tuple[Bucket, Tensor]]:
        """Iterate over messages: the places of the tensors in each, and its buffer, which the next but one reuses."""
        buckets = list(_group_tensors(shapes))
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
        """Connect pairs (source, receiver) of ranks. Call it once, with the same pairs in the same order on all ranks.

        Gloo connects two ranks at their first message, which needs both of them, so that `send` would have to wait.
        """
        for source, to in pairs:
            box = torch.zeros(1, dtype=torch.uint8)
            if self.rank == source:
                self._samples.send([box], to, SAMPLES).wait()
            elif self.rank == to:
                self._samples.recv([box], source, SAMPLES).wait()

    def send(self, data: Tensor, to: int, tag: int = SAMPLES) -> None:
        """Send bytes [K] uint8 to a rank of the world without waiting; gloo's send ends only when the receiver asks."""
        for part in (torch.tensor([len(data)]), data):
            self._sent[-1].append((self._samples.send([part], to, tag), part))

    def receive(self, source: int, tag: int = SAMPLES) -> Tensor:
        """Receive bytes [K] uint8 from a rank of the world."""
        size = torch.zeros(1, dtype=torch.int64)
        self._samples.recv([size], source, tag).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._samples.recv([data], source, tag).wait()
        return data

    def _wait_sent(self) -> None:
        """With each order of samples, wait until everything sent before the previous order has been received. Later
        messages may be received only after the actor has sent the weights of this order.
        """
        self._sent.append([])
        while len(self._sent) > 2:
            for work, _ in self._sent.pop(0):
                work.wait()


def link_of(world: World) -> Link:
    """The link between roles, for a world that has roles."""
    assert isinstance(world.link, Link), "only jobs with roles call this"
    return world.link


def _broadcast_tensor(group: Any, tensor: Tensor, root: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    work: dist.Work = group.broadcast([tensor], options)
    return work


def _group_tensors(shapes: Shapes) -> Iterator[tuple[Bucket, int]]:
    """Group the tensors, in order, into messages of up to BUCKET_BYTES, and yield each with its size in bytes. A larger
    tensor gets a separate message.
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


def _integer_sum(flat: Tensor) -> Tensor:
    return flat.view(torch.int64).sum()
