"""Prompt embeddings: encoded once per prompt and node, kept in memory and, if a folder is given, on disk."""

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor
from torch.nn.functional import pad

from phalanx.distributed.node import Node
from phalanx.models.flow.family import Embeds

MEMORY_LIMIT = 4 << 30  # bytes of embeddings that stay in memory


class EmbedsCache:
    """A cache in front of `encode(texts)`; `identity` names the model and its settings.

    What stands for texts here may be anything that can be a key, and whose str names its contents.
    """

    def __init__(self, encode: Callable[[list[Any]], list[Embeds]], identity: str, folder: str | None) -> None:
        self._encode, self._identity = encode, identity
        self._folder = Path(folder) if folder is not None else None
        # the text that was asked for last comes last, and the first one is forgotten first
        self._memory: OrderedDict[Hashable, Embeds] = OrderedDict()
        self._bytes = 0

    def __call__(self, texts: Sequence[Hashable]) -> list[Embeds]:
        """Embeddings of each text, on the CPU."""
        # The answer is gathered here and not from memory, which may forget a text of this very
        # call. All that are missing are encoded at once: the encoders' way to the device is long.
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
            self._remember(text, embeds)
            self._write(text, embeds)
        return [result[text] for text in texts]

    def share(
        self,
        wanted: Sequence[Sequence[Hashable]],
        node: Node,
        agreed: Callable[[Callable[[], list[Embeds]]], list[Embeds]],
    ) -> None:
        """Make the embeddings of this rank's texts available: `wanted` lists the texts of each rank of the node.

        A rank that has an embedding sends it to the ranks that lack it; one that no rank has is encoded by one of
        them. The result does not depend on which: texts are encoded one by one. `agreed` runs what may raise
        ValueError on one rank, so that all ranks raise.
        """
        texts = list(dict.fromkeys(chain.from_iterable(wanted)))
        local_texts = set(wanted[node.place])
        # held here, since memory may forget; only this rank's texts are read from disk
        held: dict[Hashable, Embeds] = {}
        for text in texts:
            embeds = self._look_up(text) if text in local_texts else self._memory.get(text)
            if embeds is not None:
                held[text] = embeds
        new_here = local_texts - held.keys()
        # [ranks, texts] bool
        has = node.all_gather(torch.tensor([text in held for text in texts], dtype=torch.uint8)).bool()
        wants = torch.tensor([[text in each for text in texts] for each in map(set, wanted)])
        lacks = wants & ~has
        # the first rank that has it; texts that no rank has are encoded by the ranks in turn
        source = has.int().argmax(0)
        new = (~has.any(0)).nonzero().flatten()
        source[new] = torch.arange(len(new)) % len(node.ranks)
        to_encode = [texts[i] for i in new.tolist() if source[i] == node.place]
        encoded = agreed(lambda: self._encode(to_encode) if to_encode else [])
        for text, embeds in zip(to_encode, encoded, strict=True):
            held[text] = embeds
            self._write(text, embeds)
        parcels = []
        for place in range(len(node.ranks)):
            sent = lacks[place] & (source == node.place) & (place != node.place)
            parcels.append(_pack({i: held[texts[i]] for i in sent.nonzero().flatten().tolist()}))
        for parcel in node.exchange(parcels):
            for i, embeds in _unpack(parcel).items():
                held[texts[i]] = embeds
        for text in texts:
            if text in new_here:
                self._remember(text, held[text])

    def room(self) -> int:
        """Number of entries, of the mean size of those in memory, that fill half of it."""
        # the other half is left to validation, which would make training's prompts be forgotten
        return MEMORY_LIMIT // 2 * len(self._memory) // max(self._bytes, 1)

    def _look_up(self, text: Hashable) -> Embeds | None:
        if text in self._memory:
            self._memory.move_to_end(text)
            return self._memory[text]
        file = self._file(text)
        if file is None or not file.is_file():
            return None
        embeds = load_file(file)
        self._remember(text, embeds)
        return embeds

    def _remember(self, text: Hashable, embeds: Embeds) -> None:
        self._memory[text] = embeds
        self._bytes += _size(embeds)
        while self._bytes > MEMORY_LIMIT and len(self._memory) > 1:
            _, forgotten = self._memory.popitem(last=False)
            self._bytes -= _size(forgotten)

    def _write(self, text: Hashable, embeds: Embeds) -> None:
        file = self._file(text)
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        # ranks may write the same prompt at once: each writes its own file and renames it
        part = file.with_suffix(f".{uuid.uuid4().hex}.part")
        save_file({name: t.contiguous() for name, t in embeds.items()}, part)
        part.replace(file)

    def _file(self, text: Hashable) -> Path | None:
        if self._folder is None:
            return None
        # a prompt may be longer than the name of a file, and hold any character
        digest = hashlib.sha256(f"{self._identity}\n{text}".encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest}.safetensors"


def _pack(embeds: dict[int, Embeds]) -> bytes:
    # texts about one image share a tensor, which travels once and is one tensor where it arrives
    places: dict[tuple[str, int], list[str]] = {}
    tensors: dict[tuple[str, int], Tensor] = {}
    for i, of_text in embeds.items():
        for name, t in of_text.items():
            places.setdefault((name, id(t)), []).append(str(i))
            tensors[name, id(t)] = t.contiguous()
    return save({f"{','.join(places[key])} {key[0]}": t for key, t in tensors.items()})


def _unpack(parcel: bytes) -> dict[int, Embeds]:
    embeds: dict[int, Embeds] = {}
    for key, tensor in load(parcel).items():
        texts, _, name = key.partition(" ")
        for i in texts.split(","):
            embeds.setdefault(int(i), {})[name] = tensor
    return embeds


def _size(embeds: Embeds) -> int:
    return sum(t.numel() * t.element_size() for t in embeds.values())


def pooled_embeds(embeds: Tensor, pooled: Tensor) -> list[Embeds]:
    """A pipeline's embeddings [N, L, D] of texts, and those that CLIP pools [N, P], text by text."""
    result = []
    for text, vector in zip(embeds.cpu(), pooled.cpu(), strict=True):
        # cloned: a view would keep the whole batch in memory
        result.append({"prompt_embeds": text.clone(), "pooled": vector.clone()})
    return result


def padded_texts(embeds: list[Embeds], length: int) -> Tensor:
    """`prompt_embeds` of all, [N, length, D], padded with zeros."""
    texts = [e["prompt_embeds"] for e in embeds]
    return torch.stack([pad(t, (0, 0, 0, length - len(t))) for t in texts])
