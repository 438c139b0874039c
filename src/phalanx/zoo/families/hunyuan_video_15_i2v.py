"""HunyuanVideo 1.5, image to video: the image is the first frame, and its vision tokens are added to the text's."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.family import Embeds, Instruction
from phalanx.zoo.families import hunyuan_video_15
from phalanx.zoo.families.hunyuan_video_15 import IMAGE


class Model(hunyuan_video_15.Model):
    """As text to video; `embeds["first"]` [N, 32, H/16, W/16] has the latents of the image.

    The image is center-cropped to the size of the video, as in the pipeline.
    """

    pipeline_class = "HunyuanVideo15ImageToVideoPipeline"
    image_column = "image"

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        self.text_encoders.append(self.pipeline.image_encoder)  # on the device only while it is needed

    def encode_instruction(self, instruction: Instruction, device: torch.device, max_length: int) -> Embeds:
        """As `encode`, with tokens of the image after those of the text, and with `first`."""
        p, (height, width) = self.pipeline, instruction.size
        image = p.video_processor.resize(instruction.picture.pil(), height=height, width=width, resize_mode="crop")
        (embeds,) = self.encode([instruction.text], device, max_length)
        seen = p.encode_image(image, 1, device, self.dtype)[0].cpu()
        seen = pad(seen, (0, embeds["prompt_embeds"].shape[1] - seen.shape[1]))
        latents = p._get_image_latents(self.vae, p.video_processor, image, height, width, device)
        return {
            "prompt_embeds": torch.cat([embeds["prompt_embeds"], seen]),
            "kinds": torch.cat([embeds["kinds"], torch.full((len(seen),), IMAGE)]),
            "first": latents[0, :, 0].to("cpu", self.dtype),
        }

    def most_tokens(self, max_length: int, height: int, width: int) -> int:
        vision = self.pipeline.image_encoder.config
        return super().most_tokens(max_length, height, width) + (vision.image_size // vision.patch_size) ** 2

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        batch = super().collate(embeds, length, padded)
        return batch | {"first": torch.stack([e["first"] for e in embeds])}

    def conditions(self, latents: Tensor, embeds: Embeds) -> Tensor:
        """The image as the first frame, and a mask of the frames that are given."""
        later = (0, 0, 0, 0, 0, latents.shape[2] - 1)  # frames of zeros
        first = embeds["first"][:, :, None]
        return pad(torch.cat([first, torch.ones_like(first[:, :1])], 1), later)

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        channels, _, rows, columns = self.latent_shape(height, width)
        first = torch.empty(channels, rows, columns, dtype=self.dtype)
        return super().embeds_like(length, height, width) | {"first": first}
