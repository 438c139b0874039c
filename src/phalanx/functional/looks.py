"""The images of a prompt, as the trained modules read them, and their way between ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Features:
    """The tower's output for the images of a prompt with n placeholders.

    kind: class of the output. listed: its pooler_output is a tuple, with a tensor for each image. pooled: [n, H].
    deep: inputs of deeper layers (DeepStack), [n, H] each.
    """

    kind: type
    listed: bool
    pooled: Tensor
    deep: tuple[Tensor, ...]


@dataclass(eq=False)
class Look:
    """The images of a prompt; all samples of the prompt share one object.

    inputs: the processor's outputs except those per token, on the CPU.
    positions: [3 or 1, P], of the prompt's tokens. following: position of the first token after them.
    count: number of placeholders among the tokens. short: the tokens with only one placeholder per image.
    pictures: the images (phalanx.media.pictures.Picture), for engines with a copy of the model.
    seen: features that frozen towers computed, by the towers' names.
    """

    inputs: dict[str, Tensor]
    positions: Tensor
    following: int
    count: int
    short: list[int]
    pictures: tuple[Any, ...] = ()
    seen: dict[str, Features] = field(default_factory=dict)

    def alone(self) -> "Look":
        """A copy with only what a replay needs, for other ranks."""
        return replace(self, pictures=(), seen={})


def sent(looks: Sequence[Look | None]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and plain values, from which `received` makes the looks of samples; each look is in it once."""
    distinct = list(dict.fromkeys(look for look in looks if look is not None))
    tensors: dict[str, Tensor] = {}
    each = []
    for i, look in enumerate(distinct):
        tensors[f"{i}/positions"] = look.positions
        tensors |= {f"{i}/inputs/{name}": value for name, value in look.inputs.items()}
        each.append({"following": look.following, "count": look.count, "short": look.short})
    return tensors, {"each": each, "of": [None if look is None else distinct.index(look) for look in looks]}


def received(tensors: Mapping[str, Tensor], plain: dict[str, Any]) -> tuple[Look | None, ...]:
    """The inverse of `sent`, without the pictures."""
    distinct = []
    for i, values in enumerate(plain["each"]):
        begin, inputs = f"{i}/inputs/", {}
        for name, tensor in tensors.items():
            if name.startswith(begin):
                inputs[name.removeprefix(begin)] = tensor
        distinct.append(Look(inputs=inputs, positions=tensors[f"{i}/positions"], **values))
    return tuple(None if i is None else distinct[i] for i in plain["of"])
