"""Prompt embeddings: encoded once per prompt and node, kept in memory and, if a folder is given, on disk."""

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save, save_file

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
        found: dict[Hashable, Embeds] = {}
        missing = []
        for text in dict.fromkeys(texts):
            embeds = self._look_up(text)
            if embeds is None:
                missing.append(text)
            else:
                found[text] = embeds
        encoded = self._encode(missing) if missing else []
        for text, embeds in zip(missing, encoded, strict=True):
            found[text] = embeds
            self._remember(text, embeds)
            self._write(text, embeds)
        return [found[text] for text in texts]

    def share(
        self,
        wanted: Sequence[Sequence[Hashable]],
        node: Node,
        agreed: Callable[[Callable[[], list[Embeds]]], list[Embeds]],
    ) -> None:
        """Have the embeddings of what this rank wants: `wanted` are the texts of every rank of the node.

        What a rank has, it sends to those who lack it; what none has, one of them encodes. Which one does not show:
        texts are encoded one by one. `agreed` runs what may raise ValueError on one rank, so that all ranks raise.
        """
        every = list(dict.fromkeys(text for texts in wanted for text in texts))
        mine = set(wanted[node.place])
        # held here, since memory may forget; only what is wanted here is read from disk
        looked = {text: self._look_up(text) if text in mine else self._memory.get(text) for text in every}
        found = {text: embeds for text, embeds in looked.items() if embeds is not None}
        has = node.all_gather(torch.tensor([text in found for text in every], dtype=torch.uint8)).bool()
        wants = torch.tensor([[text in texts for text in every] for texts in map(set, wanted)])
        lacks = wants & ~has
        # the first rank that has it, or in turns one that encodes it
        source = has.int().argmax(0)
        new = (~has.any(0)).nonzero().flatten()
        source[new] = torch.arange(len(new)) % len(node.ranks)
        to_encode = [every[i] for i in new.tolist() if source[i] == node.place]
        encoded = agreed(lambda: self._encode(to_encode) if to_encode else [])
        for text, embeds in zip(to_encode, encoded, strict=True):
            found[text] = embeds
            self._write(text, embeds)
        parcels = []
        for place in range(len(node.ranks)):
            sent = (lacks[place] & (source == node.place)).nonzero().flatten().tolist() if place != node.place else []
            parcels.append(_pack({i: found[every[i]] for i in sent}))
        for parcel in node.exchange(parcels):
            found |= {every[i]: embeds for i, embeds in _unpack(parcel).items()}
        for text in every:
            if text in mine and looked[text] is None:
                self._remember(text, found[text])

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
    return save({f"{i} {name}": t.contiguous() for i, tensors in embeds.items() for name, t in tensors.items()})


def _unpack(parcel: bytes) -> dict[int, Embeds]:
    found: dict[int, Embeds] = {}
    for key, tensor in load(parcel).items():
        i, _, name = key.partition(" ")
        found.setdefault(int(i), {})[name] = tensor
    return found


def _size(embeds: Embeds) -> int:
    return sum(t.numel() * t.element_size() for t in embeds.values())
