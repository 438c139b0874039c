"""Prompts with images, for the vision-language models in phalanx.models.lm.vision_families.

transformers does the computation: its processors produce tokens and pixels, and its classes accept the output of their
vision towers (`mm_encoder_outputs`) and position ids. These are passed in every call, because a class would otherwise
keep state between calls. A frozen tower encodes the images of each prompt once, one prompt at a time, so that their
features do not depend on the rest of the batch. A trained tower encodes all prompts of a pass together, each once.
"""

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad

from phalanx.config.lm import LMDataConfig
from phalanx.config.messages import cut
from phalanx.config.trained_model import LMModelConfig
from phalanx.engines.loading import loading
from phalanx.engines.transformers import image_tokens, load_processor
from phalanx.functional.looks import Features as Features
from phalanx.functional.looks import Look as Look
from phalanx.media.pictures import Picture
from phalanx.models.lm.chat import rendered
from phalanx.models.lm.model import decoder_of
from phalanx.models.lm.packing import Row, Share
from phalanx.models.lm.vision_families import FAMILIES
from phalanx.models.trained import Beside
from phalanx.types import Prompt

MOST_TEXTS = 2**16  # limit of rendered prompts that are kept
PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")  # a processor's outputs per token


class Vision:
    """The parts of a vision-language model besides its decoder, and its forward passes over prompts with images.

    `frozen`: the tower is not trained; `owner` is this tower's name in Look.seen.
    """

    def __init__(self, lm: Any, config: LMModelConfig) -> None:
        """Raises ValueError, in one line, for a model whose images cannot be read."""
        self.name, self.model, self.decoder = type(lm).__name__, lm.model, decoder_of(lm)
        self.frozen, self.owner = config.freeze_vision_tower or config.lora_rank > 0, f"{config:path}"
        if self.name not in FAMILIES:
            raise ValueError(f"{config:path}: {config.path!r} is a {self.name}; expected one of {', '.join(FAMILIES)}")
        self.family = FAMILIES[self.name]
        if "mm_encoder_outputs" not in inspect.signature(lm.model.forward).parameters:
            raise ValueError(
                f"{config:path}: {config.path!r}: transformers {transformers.__version__} gives a {type(lm).__name__} "
                "no mm_encoder_outputs, which images need; install a newer one"
            )
        settings = lm.config.to_dict()
        self.image = int(lm.config.image_token_id)
        # placeholders are never sampled, because there would be no image for them
        self.never = tuple({self.image, int(settings.get("video_token_id") or self.image)})
        self.dummy: Look | None = None  # see unseen

    def packing(self, given: str = "model.use_remove_padding: true", advice: str = "set it to false") -> Any:
        """The module whose attention packs samples into one row, or computes rows that ranks share. Raises ValueError
        for a model without causal masks; `given`: the setting that requires it.
        """
        if self.family.types:
            raise ValueError(
                f"{given} needs causal attention, and the tokens of an image of a {self.name} attend to each other in "
                f"both directions; {advice}"
            )
        return self.decoder

    def parts(self) -> list[nn.Module]:
        """The tower and its projector: all parts except the decoder."""
        return [child for child in self.model.children() if child is not self.decoder]

    def beside(self) -> Beside:
        """The parts, for TrainedModel to shard."""
        return Beside(self.parts(), () if self.frozen else self.blocks(), self.frozen)

    def blocks(self) -> list[nn.Module]:
        """The tower's layers: the ModuleList with the most weights."""
        lists = []
        for part in self.parts():
            lists += [module for module in part.modules() if isinstance(module, nn.ModuleList)]
        largest = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
        return list(largest)

    # -- features ---------------------------------------------------------------------------------

    def features(self, looks: Sequence[Look]) -> list[Features]:
        """The tower's output for the images of these prompts."""
        if not self.frozen:
            return self._compute_features(looks)
        for look in looks:
            if self.owner not in look.seen:
                with torch.no_grad():
                    look.seen[self.owner] = self._compute_features([look])[0]
        return [look.seen[self.owner] for look in looks]

    def _compute_features(self, looks: Sequence[Look]) -> list[Features]:
        inputs = self._join_inputs([look.inputs for look in looks])
        output = self.model.get_image_features(**inputs, return_dict=True)
        counts = [look.count for look in looks]
        pooled = _flatten_features(output.pooler_output).split(counts)
        deep = []
        for layer in output.get("deepstack_features") or ():
            deep.append(_flatten_features(layer).split(counts))
        listed = not isinstance(output.pooler_output, Tensor)
        features = []
        for i in range(len(looks)):
            features.append(Features(type(output), listed, pooled[i], tuple(layer[i] for layer in deep)))
        return features

    def _join_inputs(self, inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Concatenate the inputs of several prompts, on the device."""
        device = next(self.decoder.parameters()).device
        joined = {}
        for name in inputs[0]:
            tensors = [each[name] for each in inputs]
            if self.family.tiles:
                # images differ in size: the processor's pixel mask, which is padded as well, excludes the padding
                height, width = (max(tensor.shape[dim] for tensor in tensors) for dim in (-2, -1))
                tensors = [pad(t, (0, width - t.shape[-1], 0, height - t.shape[-2])) for t in tensors]
            joined[name] = torch.cat(tensors, self.family.tiles).to(device)
        return joined

    def arguments(self, looks: Sequence[Look | None]) -> dict[str, Any]:
        """Arguments of the model's forward with the features of the samples' images, concatenated."""
        distinct = list(dict.fromkeys(look for look in looks if look is not None))
        if not distinct:
            return {}
        features_of = dict(zip(distinct, self.features(distinct), strict=True))
        every = [features_of[look] for look in looks if look is not None]
        pooled = torch.cat([features.pooled for features in every])
        values: dict[str, Any] = {"pooler_output": (pooled,) if every[0].listed else pooled}
        if every[0].deep:
            values["deepstack_features"] = []
            for layers in zip(*(features.deep for features in every), strict=True):
                values["deepstack_features"].append((torch.cat(layers),))
        return {"mm_encoder_outputs": {"image": every[0].kind(last_hidden_state=None, **values)}}

    def unseen(self) -> Tensor | float:
        """0, computed by a trained tower: a pass without images must gather its shards as other ranks' passes do."""
        if self.frozen:
            return 0.0
        assert self.dummy is not None
        (features,) = self._compute_features([self.dummy])
        return 0.0 * sum(map(torch.sum, (features.pooled, *features.deep)))

    # -- passes -----------------------------------------------------------------------------------

    def outputs(
        self, ids: Tensor, row: Row | None, looks: Sequence[Look | None] | None, share: Share | None = None
    ) -> Any:
        """The model's output below the head for samples ids [B, T]; `looks` [B]: the images of their prompts.

        See phalanx.models.lm.model.outputs_at. share: the decoder computes this rank's positions only.
        """
        read = ids[:, :-1]
        looks = [None] * len(ids) if looks is None else looks
        at = self.positions(looks, read.shape[1]).to(ids.device)
        layout: dict[str, Any] = {"position_ids": at}
        if row is not None:
            layout = row.arguments(self.decoder)
            if self.family.rotary:
                # the first row is that of text positions, by which transformers detects where samples begin
                layout["position_ids"] = torch.cat([row.positions[None], row.read(at)[:, None]])
            read, looks = row.read(read)[None], [looks[sample] for sample in row.first]
        if share is None:
            return self.model(**self.inputs(read, looks), **layout, use_cache=False)
        # images are embedded on each rank, and their gradient is of the positions that the rank's decoder reads
        shared = share.arguments()
        del shared["position_ids"]
        cut = self.decoder.register_forward_pre_hook(partial(_own_positions, share), with_kwargs=True)
        try:
            return self.model(**self.inputs(read, looks), **layout | shared, use_cache=False)
        finally:
            cut.remove()

    def inputs(self, ids: Tensor, looks: Sequence[Look | None]) -> dict[str, Any]:
        """Arguments of the model's forward for tokens and the images among them."""
        arguments: dict[str, Any] = self.arguments(looks)
        if self.family.types:
            arguments["token_type_ids"] = (ids == self.image).long()
        if arguments.get("mm_encoder_outputs") or self.frozen:
            return {"input_ids": ids, **arguments}
        return {"inputs_embeds": self.model.get_input_embeddings()(ids) + self.unseen(), **arguments}

    def stock(self, ids: Tensor, look: Look) -> dict[str, Any]:
        """Arguments of the stock forward, without positions, for tokens [1, T] that begin with the look's prompt."""
        kinds = (ids == self.image).long()
        types = {"token_type_ids": kinds} if self.family.types else {}
        types |= {"mm_token_type_ids": kinds} if self.family.rotary else {}
        return {"input_ids": ids, **types, **self._join_inputs([look.inputs])}

    def positions(self, looks: Sequence[Look | None], width: int) -> Tensor:
        """Position ids [3, B, width], or [B, width], of samples whose prompts begin at 0."""
        at = torch.arange(width).repeat(len(looks), 1)
        if not self.family.rotary:
            return at
        at = at.repeat(3, 1, 1)
        for i, look in enumerate(looks):
            if look is not None:
                length = look.positions.shape[1]
                at[:, i] += look.following - length
                at[:, i, :length] = look.positions[:, :width]
        return at

    def places(self, ids: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, int]:
        """`positions` and `following` of a Look: those of a prompt's tokens ids [1, P] with the images of `inputs`."""
        if not self.family.rotary:
            return torch.arange(ids.shape[1])[None], ids.shape[1]
        grid = inputs["image_grid_thw"]
        at, delta = self.model.get_rope_index(ids, (ids == self.image).long(), image_grid_thw=grid)
        return at[:, 0], ids.shape[1] + int(delta)

    def prefill(
        self, ids: Tensor, lengths: Sequence[int], looks: Sequence[Look | None]
    ) -> tuple[dict[str, Any], list[int]]:
        """Arguments of a forward over left-padded prompts, ids [P, L], and the P positions after them."""
        at = self.positions(looks, ids.shape[1])
        shifted = torch.zeros_like(at)
        for i, length in enumerate(lengths):
            shifted[..., i, ids.shape[1] - length :] = at[..., i, :length]
        following = []
        for look, length in zip(looks, lengths, strict=True):
            following.append(length if look is None or not self.family.rotary else look.following)
        given: dict[str, Any] = {"position_ids": shifted.to(ids.device), "looks": looks}
        if self.family.types:
            given["token_type_ids"] = (ids == self.image).long()
        return given, following


class Reader:
    """Reads prompts with images by the model's processor."""

    def __init__(self, vision: Vision, tokenizer: Any, config: LMModelConfig, data: LMDataConfig) -> None:
        """Raises ValueError, in one line, for a folder without an image processor, or for settings it does not fit."""
        self.vision, self.path, self.tokenizer = vision, config.path, tokenizer
        self.processor = load_processor(config.path, config.revision, "model.path")
        tokenizer.chat_template = self.processor.chat_template  # some folders have another one that ignores images
        self._set_bounds(data)
        self._texts: dict[str, str] = {}  # rendered prompts with images, by their chats
        content = [{"type": "image"}, {"type": "text", "text": "?"}]
        prompt = Prompt("?", 0, {}, messages=[{"role": "user", "content": content}], images=(_random_picture(),))
        with loading(f"model.path: {config.path!r}: its processor fails"):
            self.tried = self.read(prompt, data)
        vision.dummy = self.tried[1]  # any image will do; see Vision.unseen

    def _set_bounds(self, data: LMDataConfig) -> None:
        """Set the bounds that images are resized to, in pixels, if `data` has them."""
        bounds = {"shortest_edge": data.min_pixels, "longest_edge": data.max_pixels}  # the processors' names for them
        given = {name: pixels for name, pixels in bounds.items() if pixels is not None}
        if given and not self.vision.family.sizes:
            key = "min_pixels" if data.max_pixels is None else "max_pixels"
            raise ValueError(f"data.{key}: images of a {self.vision.name} have sizes of its own; leave it out")
        size = self.processor.image_processor.size
        for name, pixels in given.items():
            size[name] = pixels
        if given and (size["shortest_edge"] is None or size["longest_edge"] is None):
            raise ValueError(
                f"data.min_pixels, data.max_pixels: {self.path!r} has no bounds of pixels, "
                "size.shortest_edge and longest_edge, in its preprocessor_config.json"
            )
        if given and size["shortest_edge"] > size["longest_edge"]:
            raise ValueError(
                f"data.min_pixels, data.max_pixels: {self.path!r} has images of at least {size['shortest_edge']} and "
                f"at most {size['longest_edge']} pixels; set both"
            )

    def in_parts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts with each message's content as a list of parts, which some templates require."""
        result = []
        for prompt in prompts:
            messages = []
            for message in prompt.messages or [{"role": "user", "content": prompt.text}]:
                content = message.get("content")
                if isinstance(content, str):
                    message = message | {"content": [{"type": "text", "text": content}]}
                messages.append(message)
            result.append(replace(prompt, messages=messages))
        return result

    def render(self, prompts: Sequence[Prompt], data: LMDataConfig) -> None:
        """Render many prompts at once, and keep their texts."""
        if len(self._texts) > MOST_TEXTS:  # environments may produce new ones in each step
            self._texts.clear()
        new = {_chat_key(prompt): prompt for prompt in prompts if _chat_key(prompt) not in self._texts}
        if new:
            texts = rendered(self.tokenizer, self.in_parts(list(new.values())), data, self.path)
            self._texts |= zip(new, texts, strict=True)

    def short(self, prompt: Prompt, data: LMDataConfig) -> tuple[str, list[int]]:
        """A prompt's text, and its tokens with one placeholder per image."""
        self.render([prompt], data)
        text = self._texts[_chat_key(prompt)]
        tokens: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        # Gemma's template has another token per image, which its processor replaces by the placeholders
        self.check(prompt, tokens, 0 if self.vision.family.types else len(prompt.images))
        return text, tokens

    def check(self, prompt: Prompt, tokens: Sequence[int], images: int) -> None:
        """Raise ValueError if the tokens have another number of placeholders than `images`."""
        for token in self.vision.never:
            if tokens.count(token) != (images if token == self.vision.image else 0):
                name = self.processor.tokenizer.convert_ids_to_tokens(token)
                raise ValueError(f"{named(prompt)}: its text contains {name!r}, which stands for an image; remove it")

    def length(self, prompt: Prompt, data: LMDataConfig) -> int:
        """Number of a prompt's tokens. If images keep their sizes, only the headers of their files are read."""
        if not self.vision.family.sizes:
            return len(self.read(prompt, data)[0])
        _, short = self.short(prompt, data)
        return len(short) - len(prompt.images) + sum(image_tokens(self.processor, prompt.images))

    def read(self, prompt: Prompt, data: LMDataConfig) -> tuple[list[int], Look]:
        """The tokens of a prompt, and its look. Raises ValueError, in one line, if its text does not fit its images."""
        pictures, place = prompt.images, named(prompt)
        text, short = self.short(prompt, data)
        images = [picture.pil() for picture in pictures]
        with loading(f"{place}: the processor of {self.path!r} fails"):
            made = self.processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
        ids = made["input_ids"]
        kinds = (ids == self.vision.image).long()
        inputs = {name: value for name, value in made.items() if name not in PER_TOKEN}
        positions, following = self.vision.places(ids, inputs)
        return ids[0].tolist(), Look(inputs, positions, following, int(kinds.sum()), short, tuple(pictures))


def _own_positions(share: Share, decoder: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a decoder for the positions of a rank, from those for all of them."""
    changed: dict[str, Any] = {"inputs_embeds": share.context.part(given["inputs_embeds"], 1)}
    changed["position_ids"] = share.context.part(given["position_ids"], -1)
    seen = given.get("visual_pos_masks")
    if seen is not None:
        changed["visual_pos_masks"] = share.context.part(seen, 1)
        rank = torch.arange(seen.shape[1], device=seen.device) // share.ids.shape[1]
        chosen = rank.expand_as(seen)[seen] == share.context.place  # [n], of the placeholders
        changed["deepstack_visual_embeds"] = list(map(itemgetter(chosen), given["deepstack_visual_embeds"]))
    return args, given | changed


def named(prompt: Prompt) -> str:
    """How messages name a prompt."""
    return prompt.place or f"the prompt {cut(prompt.text)!r}"


def _chat_key(prompt: Prompt) -> str:
    return json.dumps([prompt.messages, prompt.meta.get("tools")], default=str)


def _random_picture() -> Picture:
    """A picture of random pixels, to test a model with."""
    pixels = torch.randint(0, 256, (24, 48, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    file = BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return Picture(file.getvalue, Path(), "a picture that the model is tested with")


def _flatten_features(values: Any) -> Tensor:
    """Features [n, H] from a tower's output, which is one tensor for all images or one for each."""
    return torch.cat([value.reshape(-1, value.shape[-1]) for value in values])
