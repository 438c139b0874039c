"""Prompt embeddings: encoded once per prompt, kept in memory and, if a folder is given, on disk."""

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

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


def _size(embeds: Embeds) -> int:
    return sum(t.numel() * t.element_size() for t in embeds.values())
