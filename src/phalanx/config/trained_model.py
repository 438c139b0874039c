"""The section `model` of each kind of job: the model that is trained."""

from dataclasses import dataclass
from typing import Optional

from phalanx.config.choices import BLOCKS, FULL, LORA
from phalanx.config.fields import arg
from phalanx.config.ranges import COUNT, DTYPES, TIMES
from phalanx.config.section import Section

ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention")
EXPERTS = ("eager", "batched_mm", "grouped_mm")


@dataclass
class ModelConfig(Section, name="model"):
    """The model that is trained."""

    path: str = arg("???", "model folder, or hub id if the hub is reachable", path=True)
    revision: Optional[str] = arg(None, "commit, tag or branch of a hub id; null: its main branch")
    dtype: str = arg("bfloat16", "dtype of the computation", choices=DTYPES)
    lora_rank: int = arg(0, "rank of the LoRA; 0: no LoRA, train all weights", ge=0, le=65536)
    lora_alpha: Optional[float] = arg(None, "the LoRA is scaled by lora_alpha / lora_rank; null: 2 x lora_rank", gt=0)
    lora_init: str = arg(
        "gaussian",
        "initialization of the LoRA, as peft's init_lora_weights",
        choices=("gaussian", "kaiming", "orthogonal", "pissa"),
    )
    target_modules: Optional[list[str]] = arg(
        None,
        "name suffixes of the modules that get a LoRA, or all-linear; null: the model family's default",
        single="all-linear",  # which peft accepts in place of a list
    )
    lora_path: Optional[str] = arg(
        None,
        "LoRA to start from: a file or folder in the format of diffusers or peft, such as an export; it is merged into "
        "the weights, including those of the KL reference, or kept beside weights in 4 bits",
        path=True,
    )
    lora_dtype: str = arg("float32", "dtype in which the LoRA weights are stored and optimized", choices=DTYPES)
    quantization: Optional[str] = arg(
        None,
        "storage format of the frozen weights under a LoRA: nf4 quantizes the linear layers of the model's blocks to 4 "
        "bits, for sampling and training; null: model.dtype",
        choices=("nf4",),
        only=(LORA,),
    )
    gradient_checkpointing: bool = arg(False, "recompute activations block by block in the backward pass")
    gradient_checkpointing_blocks: Optional[int] = arg(
        None, "with gradient_checkpointing: number of blocks, from the first, that are recomputed; null: all", ge=1
    )
    compile: bool = arg(False, "torch.compile each transformer block")
    cpu_linear: Optional[str] = arg(
        None,
        "library of float32 linear layers on CPUs; null: that of the resumed checkpoint, or else chosen by CPU",
        choices=("torch", "onednn"),
    )

    def recomputed(self, blocks: int) -> int:
        """Number of recomputed blocks in a model with `blocks` blocks. Raises ValueError if more are asked for."""
        if not self.gradient_checkpointing:
            return 0
        limit = self.gradient_checkpointing_blocks
        if limit is not None and limit > blocks:
            raise ValueError(
                f"{self:gradient_checkpointing_blocks}: {limit}; expected 1 to {blocks}, the model's blocks"
            )
        return blocks if limit is None else limit


@dataclass
class FlowModelConfig(ModelConfig):
    """The model that is trained: a diffusers model folder."""

    family: Optional[str] = arg(
        None, "model family: module of phalanx.zoo.families, or a dotted module; null: from model_index.json"
    )
    reference_size: int = arg(
        1024, "side in pixels of the square whose area the image to edit is scaled to for an editing model's VAE", ge=32
    )
    reference_count: int = arg(
        1, "number of images in each row's `image`, a list if more than 1 (Qwen-Image-Edit 2509 and 2511)", **COUNT
    )
    attn_backend: Optional[str] = arg(
        None, "attention backend of diffusers' dispatcher, such as native or flash; null: torch's"
    )
    target_components: Optional[list[str]] = arg(
        None,
        "transformers of Wan 2.2 A14B to train: transformer (high noise levels), transformer_2 (low noise levels) or "
        "both; null: both",
    )


@dataclass
class LMModelConfig(ModelConfig):
    """The model that is trained: the folder of a causal language model in transformers' format."""

    attn_implementation: str = arg("sdpa", "attention implementation of transformers", choices=ATTENTION)
    use_remove_padding: Optional[bool] = arg(
        None,
        "pack the samples of a forward and backward pass into one row without padding; null: if the model packs, and "
        "if old log-probabilities stay as exact as without",
    )
    use_prefix_grouper: Optional[bool] = arg(
        None,
        "with use_remove_padding: compute a prompt, with its images, once for all samples of a pass that share it; "
        "null: if use_remove_padding is null as well, and samples are packed by torch's SDPA",
    )
    block_size: Optional[int] = arg(
        None, "block diffusion: tokens of a block, which are denoised together; null: an autoregressive model", **TIMES
    )
    mask_token: Optional[str] = arg(None, "block diffusion: the mask token; null: the tokenizer's", only=(BLOCKS,))
    experts_implementation: Optional[str] = arg(
        None, "how transformers computes layers with experts; null: its best, grouped_mm", choices=EXPERTS
    )
    freeze_vision_tower: bool = arg(
        True,
        "prompts with images: do not train the vision tower and its projector, as with a LoRA, so that each image is "
        "encoded once per rollout, independently of its batch; false, verl's default, trains them",
        only=(FULL,),
    )
