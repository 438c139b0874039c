"""Images of planned prompts, and the passes of a vision tower over them, on shapes only.

Each prompt shows one image with as many tokens as the processor makes of one image at most, and as a prompt may have.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from phalanx.config.lm import LMDataConfig, LMRunConfig
from phalanx.config.messages import ConfigError
from phalanx.data.prompts import load_prompts
from phalanx.engines.loading import loading
from phalanx.models.lm.vision import Features, Look, Vision, _flatten_features
from phalanx.models.lm.vision_families import FAMILIES, Family
from phalanx.tools.plan.ledger import META

SIDE = 1024  # pixels of a square image, for processors that resize all images to their own sizes


class PlannedVision(Vision):
    """A vision tower whose passes are counted. Images have sizes but no pixels. look: the image of each prompt."""

    look: Look

    def begin(self, path: str, data: LMDataConfig) -> None:
        """Find the image that prompts show. Raises ValueError, in one line, if prompts have no room for an image."""
        inputs = dict(_processor_tensors(path, data, self.family))
        with torch.no_grad():
            count = len(
                _flatten_features(
                    self.model.get_image_features(**self._join_inputs([inputs]), return_dict=True).pooler_output
                )
            )
        length = data.max_prompt_length
        if count > length:
            raise ConfigError(
                f"data.max_prompt_length: {length} tokens have no room for an image, of which {path!r} makes {count}"
            )
        at = torch.arange(length).expand(3, -1)
        self.look = Look(inputs, at if self.family.rotary else at[:1], length, count, [], ())

    def looks(self, count: int) -> list[Look]:
        """The images of `count` prompts."""
        return [replace(self.look, seen={}) for _ in range(count)]

    def keep(self, looks: Sequence[Look]) -> None:
        """Have a frozen tower read the images of prompts, in one pass; their features stay until the step ends."""
        if not self.frozen:
            return
        first, *others = looks
        [features] = self.features([first])
        for look in others:
            pooled, deep = torch.empty_like(features.pooled), tuple(map(torch.empty_like, features.deep))
            look.seen[self.owner] = Features(features.kind, features.listed, pooled, deep)

    def inputs(self, ids: Tensor, looks: Sequence[Any]) -> dict[str, Any]:
        """Embeddings of tokens; the first ones are replaced by the images, since placeholders are unknown here."""
        embedded = self.model.get_input_embeddings()(ids)
        distinct = list(dict.fromkeys(looks))
        known = dict(zip(distinct, self.features(distinct), strict=True))
        each = [(known[look].pooled, *known[look].deep) for look in looks]
        layers = [torch.cat(layer) for layer in zip(*each, strict=True)]
        rows = torch.arange(len(layers[0]), device=META)
        features = layers[0]
        for layer in layers[1:]:
            features = features + layer
        shown = embedded.flatten(0, 1).index_put((rows,), features.to(embedded.dtype)).view(embedded.shape)
        types = {"token_type_ids": torch.zeros_like(ids)} if self.family.types else {}
        # the class receives them, so they exist until its forward ends
        return {"inputs_embeds": shown, "mm_encoder_outputs": {"layers": layers}, **types}

    def _join_inputs(self, inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """As Vision._join_inputs. Only pixels move to the device, and not those of tiles: classes drop empty tiles."""
        joined = {}
        for name in inputs[0]:
            whole = torch.cat([each[name] for each in inputs], self.family.tiles)
            joined[name] = whole.to(META) if whole.is_floating_point() and not self.family.tiles else whole
        return joined


def shows_images(cfg: LMRunConfig, settings: Any) -> bool:
    """Whether prompts are planned with images: the model reads images, and the data has keys of images, or readable
    files with images.
    """
    data = cfg.data
    if (settings.architectures or [""])[0] not in FAMILIES or cfg.model.block_size is not None:
        return False
    if any(key is not None for key in (data.image_key, data.min_pixels, data.max_pixels)):
        return True
    here = [file for file in data.train_files if Path(file).expanduser().exists()]
    rows = load_prompts(here, "data.train_files", prompt=data.prompt_key, quoted=False) if here else []
    return any(row.images for row in rows)


def _processor_tensors(path: str, data: LMDataConfig, family: Family) -> dict[str, Tensor]:
    """The tensors that the image processor of a folder makes of the largest image. Raises ValueError, in one line, for
    a folder without a processor.
    """
    with loading(f"model.path: {path!r}: its image processor does not load"):
        processor: Any = transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
    height = width = SIDE
    if family.sizes:
        edge = processor.patch_size * processor.merge_size
        size = processor.size
        most = data.max_pixels or size["longest_edge"]
        for name, pixels in (("shortest_edge", data.min_pixels), ("longest_edge", most)):
            size[name] = pixels or size[name]
        tokens = max(min(most // edge**2, data.max_prompt_length), 1)
        height = isqrt(tokens)
        height, width = height * edge, tokens // height * edge
    with loading(f"model.path: {path!r}: its image processor fails"):
        made = processor(images=[[Image.new("RGB", (width, height))]], return_tensors="pt")
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}
