"""Prompt embeddings: encoded once per prompt and node, cached in memory and, if a folder is given, on disk."""

import hashlib
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save
from torch import Tensor, nn
from torch.nn.functional import pad

from phalanx.distributed.collectives import exchange
from phalanx.distributed.mesh import Node
from phalanx.kept import kept
from phalanx.models.flow.family import Embeds
from phalanx.types import Prompt

log = logging.getLogger(__name__)

MEMORY_LIMIT = 4 << 30  # bytes of embeddings that stay in memory
# Maximum number of training steps whose prompts are encoded at once; fewer if the cache would evict the first of them
# before they are sampled. Qwen-Image's embeddings of a text of 200 tokens, 3584 wide in bfloat16, take 1.4 MB.
# Qwen-Image-Edit adds about 212 tokens for image and template, and the image's latents, 0.5 MB at 1024 x 1024 pixels:
# 3.5 MB, and at most as much for the negative prompt. With 48 prompts on 8 ranks that is 42 MB per step and rank, and
# 32 steps fit into half of the cache's 4 GiB; on one rank it is 336 MB, and 6 steps fit. The first Qwen-Image-Edit has
# 1369 tokens per image, 24 MB per prompt: 15 steps fit on 8 ranks, and 1 on one rank.
ENCODE_AHEAD = 32


class EmbedsCache:
    """A cache for `encode(texts)`; `identity` names the model and its settings.

    Texts may be any hashable objects whose str() identifies their contents.
    """

    def __init__(self, encode: Callable[[list[Any]], list[Embeds]], identity: str, folder: str | None) -> None:
        self._encode, self._identity = encode, identity
        self._folder = Path(folder) if folder is not None else None
        # least recently used first
        self._memory: OrderedDict[Hashable, Embeds] = kept(("embeddings", identity), OrderedDict)
        self._bytes = sum(map(_embeds_bytes, self._memory.values()))

    def __call__(self, texts: Sequence[Hashable]) -> list[Embeds]:
        """Embeddings of each text, on the CPU."""
        # The result is collected here, because memory may evict a text of this very call. All missing texts are encoded
        # in one call, because moving the encoders to the device takes long.
        result: dict[Hashable, Embeds] = {}
        missing = []
        for text in dict.fromkeys(texts):
            embeds = self._look_up(text)
            if embeds is None:
                missing.append(text)
            else:
                result[text] = embeds
        encoded = self._encode(missing) if missing else []
        for text, embeds in zip(missing, encoded, strict=True):
            result[text] = embeds
            self._remember_embeds(text, embeds)
            self._write_embeds(text, embeds)
        return [result[text] for text in texts]

    def share(
        self,
        texts_of_ranks: Sequence[Sequence[Hashable]],
        node: Node,
        agreed: Callable[[Callable[[], list[Embeds]]], list[Embeds]],
    ) -> None:
        """Make the embeddings of this rank's texts available; `texts_of_ranks` are those of each rank of the node.

        A rank that has an embedding sends it to the ranks that lack it; an embedding that no rank has is computed by
        one of them. The result does not depend on which, because texts are encoded one by one. `agreed` calls a
        function that may raise ValueError on one rank, so that all ranks raise.
        """
        if len(node.ranks) == 1:
            agreed(lambda: self(texts_of_ranks[0]))
            return
        texts = list(dict.fromkeys(chain.from_iterable(texts_of_ranks)))
        local_texts = set(texts_of_ranks[node.place])
        # kept here, because memory may evict them; only this rank's texts are read from disk
        held: dict[Hashable, Embeds] = {}
        for text in texts:
            embeds = self._look_up(text) if text in local_texts else self._memory.get(text)
            if embeds is not None:
                held[text] = embeds
        new_here = local_texts - held.keys()
        # [ranks, texts] bool
        has = node.all_gather(torch.tensor([text in held for text in texts], dtype=torch.uint8)).bool()
        needs = torch.tensor([[text in each for text in texts] for each in map(set, texts_of_ranks)])
        lacks = needs & ~has
        # the first rank that has it; texts that no rank has are dealt out to the ranks
        source = has.int().argmax(0)
        new = (~has.any(0)).nonzero().flatten()
        source[new] = torch.arange(len(new)) % len(node.ranks)
        to_encode = [texts[i] for i in new.tolist() if source[i] == node.place]
        encoded = agreed(lambda: self._encode(to_encode) if to_encode else [])
        for text, embeds in zip(to_encode, encoded, strict=True):
            held[text] = embeds
            self._write_embeds(text, embeds)
        lacks &= source != torch.arange(len(node.ranks))[:, None]  # a rank now has what it has encoded
        parcels = {}
        for place, rank in enumerate(node.ranks):
            if sent := (lacks[place] & (source == node.place)).nonzero().flatten().tolist():
                packed = bytearray(_pack_embeds({i: held[texts[i]] for i in sent}))
                parcels[rank] = torch.frombuffer(packed, dtype=torch.uint8)
        senders = node.ranks.start + source[lacks[node.place]].unique()
        for parcel in exchange(parcels, senders.tolist()).values():
            for i, embeds in _unpack_embeds(parcel.numpy().tobytes()).items():
                held[texts[i]] = embeds
        for text in texts:
            if text in new_here:
                self._remember_embeds(text, held[text])

    def room(self) -> int:
        """Number of entries, of the mean size of those in memory, that fill half of the limit."""
        # the other half is left to validation, whose prompts would otherwise evict those of training
        return MEMORY_LIMIT // 2 * len(self._memory) // max(self._bytes, 1)

    def _look_up(self, text: Hashable) -> Embeds | None:
        if text in self._memory:
            self._memory.move_to_end(text)
            return self._memory[text]
        file = self._cache_file(text)
        if file is None or not file.is_file():
            return None
        embeds = load_file(file)
        self._remember_embeds(text, embeds)
        return embeds

    def _remember_embeds(self, text: Hashable, embeds: Embeds) -> None:
        self._memory[text] = embeds
        self._bytes += _embeds_bytes(embeds)
        while self._bytes > MEMORY_LIMIT and len(self._memory) > 1:
            _, forgotten = self._memory.popitem(last=False)
            self._bytes -= _embeds_bytes(forgotten)

    def _write_embeds(self, text: Hashable, embeds: Embeds) -> None:
        file = self._cache_file(text)
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        # ranks may write the same prompt at the same time, so each writes its own file and renames it
        part = file.with_suffix(f".{uuid.uuid4().hex}.part")
        # not by save_file, whose files only their owner can read
        part.write_bytes(save({name: t.contiguous() for name, t in embeds.items()}))
        part.replace(file)

    def _cache_file(self, text: Hashable) -> Path | None:
        if self._folder is None:
            return None
        # a prompt may be too long for a file name, and may contain any character
        digest = hashlib.sha256(f"{self._identity}\n{text}".encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest}.safetensors"


@contextmanager
def moved(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Within the block, frozen modules are on `device`; then they have their tensors back, and not copies of them.

    What was a view of a mapped file still is one, whose memory the ranks of a node share: copies would take 16.6 GB of
    each rank for Qwen-Image's text encoder.
    """
    weights, buffers = [], []
    for part in [part for module in modules for part in module.modules()]:
        weights += [(part, name, p, p.data) for name, p in part.named_parameters(recurse=False)]
        buffers += [(part, name, buffer) for name, buffer in part.named_buffers(recurse=False)]
    for module in modules:
        module.to(device)
    try:
        yield
    finally:
        for part, name, p, data in weights:
            p.data, part._parameters[name] = data, p
        for part, name, buffer in buffers:
            part._buffers[name] = buffer
        for module in modules:
            module.to("cpu")  # what the block has added


def _pack_embeds(embeds: dict[int, Embeds]) -> bytes:
    # texts about the same image share a tensor: it is sent once, and shared again by the receiver
    places: dict[tuple[str, int], list[str]] = {}
    tensors: dict[tuple[str, int], Tensor] = {}
    for i, of_text in embeds.items():
        for name, t in of_text.items():
            places.setdefault((name, id(t)), []).append(str(i))
            tensors[name, id(t)] = t.contiguous()
    return save({f"{','.join(places[key])} {key[0]}": t for key, t in tensors.items()})


def _unpack_embeds(parcel: bytes) -> dict[int, Embeds]:
    embeds: dict[int, Embeds] = {}
    for key, tensor in load(parcel).items():
        texts, _, name = key.partition(" ")
        for i in texts.split(","):
            embeds.setdefault(int(i), {})[name] = tensor
    return embeds


def _embeds_bytes(embeds: Embeds) -> int:
    return sum(t.numel() * t.element_size() for t in embeds.values())


def chat_tokens(tokenizer: Any, texts: list[str], **form: Any) -> list[list[int]]:
    """Tokens of each text as a turn of the user in the chat template, which gets `form`."""
    turns = [[{"role": "user", "content": text}] for text in texts]
    chats = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **form)
    return tokenizer(chats)["input_ids"]


def pooled_embeds(embeds: Tensor, pooled: Tensor) -> list[Embeds]:
    """Split a pipeline's embeddings [N, L, D] and CLIP's pooled embeddings [N, P] by text."""
    result = []
    for text, vector in zip(embeds.cpu(), pooled.cpu(), strict=True):
        # cloned: a view would keep the whole batch in memory
        result.append({"prompt_embeds": text.clone(), "pooled": vector.clone()})
    return result


def padded_texts(embeds: list[Embeds], length: int) -> Tensor:
    """Stack `prompt_embeds` to [N, length, D], padded with zeros."""
    texts = [e["prompt_embeds"] for e in embeds]
    return torch.stack([pad(t, (0, 0, 0, length - len(t))) for t in texts])


def masked_texts(embeds: list[Embeds], length: int, padded: bool, mask: str = "attention_mask") -> Embeds:
    """`prompt_embeds` [N, length, D], padded with zeros, and if `padded` a mask [N, length], False for the padding."""
    batch = {"prompt_embeds": padded_texts(embeds, length)}
    if padded:
        batch[mask] = torch.arange(length) < torch.tensor([[len(e["prompt_embeds"])] for e in embeds])
    return batch


class EncodeAhead:
    """Encodes the prompts of several training steps at once, up to step `until`, for the rollout and for teachers with
    separate encoders, because moving text encoders to the device is slow.

    `encoders`: PolicyRollout.encode of each of them.
    """

    def __init__(self, encode: Callable[[list[list[Prompt]]], int]) -> None:
        self.encoders = [encode]
        self.until: int | None = None
        self._room: int | None = None  # number of steps whose embeddings fit into the cache

    def reach(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """Encode the prompts of `step` and of as many steps after it, up to `end`, as fit into the cache.

        `batches(k)` are the prompts of step k.
        """
        if self.until is not None and step < self.until:
            return
        if self._room is None:  # the size of embeddings is known once the first prompts are encoded
            prompts = batches(step)
            log.info("encoding %d prompts", len(prompts))
            self._room = self._encode_steps([prompts])
        # decided by the step, not by the contents of a rank's cache: all ranks must encode at the same steps
        self.until = min(step + self._room, end)
        self._room = self._encode_steps([batches(k) for k in range(step, self.until)])

    def _encode_steps(self, prompts: list[list[Prompt]]) -> int:
        """Encode, and return the number of steps, at most ENCODE_AHEAD, that fit into the caches."""
        room = [encode(prompts) for encode in self.encoders]
        return max(1, min(ENCODE_AHEAD, *room))
