"""The tiny base model and its task: small pictures of three-digit numbers, in the real models'
classes.

A model folder is made in three steps: `render` pictures, train the VAE (vae.py), and train the
transformer by supervised flow matching (tasks/train_flow_matching.py). The text encoders stay at
their random initial weights: for so few tokens, random features are as good as learned ones.
"""

import random
from functools import lru_cache
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

HEIGHT, WIDTH = 24, 48
TOKENS = 10  # the number " d d d " and both ends
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif", "DejaVuSerif-Bold")


def prompt(number: str) -> str:
    """The prompt of a number; the OCR target is the quoted part."""
    return f'the number "{number}"'


def split(held_out: int = 128) -> tuple[list[str], list[str]]:
    """The 1000 numbers as (training, held-out); neither the base nor RL trains on held-out ones."""
    numbers = [f"{i:03d}" for i in range(1000)]
    random.Random(0).shuffle(numbers)
    return numbers[held_out:], numbers[:held_out]


@lru_cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(folder / f"{name}.ttf", size)


def render(number: str, rng: random.Random) -> Image.Image:
    """A picture of a number, dark on light, with random font, size, colors and position."""
    name, size = rng.choice(FONTS), rng.randint(13, 17)
    left, top, right, bottom = _font(name, size).getbbox(number)
    while right - left > WIDTH - 4:
        size -= 1
        left, top, right, bottom = _font(name, size).getbbox(number)
    back = tuple(rng.randint(150, 255) for _ in range(3))
    ink = tuple(rng.randint(0, 110) for _ in range(3))
    image = Image.new("RGB", (WIDTH, HEIGHT), back)
    w, h = int(right - left), int(bottom - top)
    dx, dy = min(5, max(0, (WIDTH - w) // 2 - 1)), min(3, max(0, (HEIGHT - h) // 2 - 2))
    x, y = (WIDTH - w) // 2 + rng.randint(-dx, dx), (HEIGHT - h) // 2 + rng.randint(-dy, dy)
    ImageDraw.Draw(image).text((x - left, y - top), number, font=_font(name, size), fill=ink)
    return image


def write_data(folder: Path, images: int, seed: int) -> None:
    """Write prompts (train.txt, held_out.txt) and a dataset folder `images` of training numbers."""
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    train, held_out = split()
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in (("train", train), ("held_out", held_out)):
        (folder / f"{name}.txt").write_text("".join(f"{prompt(n)}\n" for n in numbers))
    rng = random.Random(seed)
    drawn = [rng.choice(train) for _ in range(images)]
    rows = {"image": [render(n, rng) for n in drawn], "prompt": [prompt(n) for n in drawn]}
    features = Features({"image": ImageFeature(), "prompt": Value("string")})
    Dataset.from_dict(rows, features=features).save_to_disk(folder / "images")


def write_untrained_model(folder: Path, seed: int) -> None:
    """Write a Stable Diffusion 3 pipeline with 2.7 M random weights as a diffusers folder."""
    import diffusers

    torch.manual_seed(seed)
    width, hidden = 128, (96, 32)
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=WIDTH,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=12,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=64,
        num_attention_heads=width // 64,
        joint_attention_dim=sum(hidden),
        caption_projection_dim=width,
        pooled_projection_dim=sum(hidden),
        pos_embed_max_size=12,
        qk_norm="rms_norm",
    )
    _initialize(transformer, width)
    tokenizer = _tokenizer()
    diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=_text_encoder(hidden[0], len(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=_text_encoder(hidden[1], len(tokenizer)),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    ).save_pretrained(folder)


def _initialize(transformer: nn.Module, width: int) -> None:
    """Start with open gates (1), and with modulations and output 0."""
    for name, module in transformer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
        if name.endswith(("norm1.linear", "norm1_context.linear")):
            nn.init.zeros_(module.weight)
            if module.out_features == 6 * width:
                for gate in (2, 5):
                    nn.init.ones_(module.bias[gate * width : (gate + 1) * width])
        elif name in ("norm_out.linear", "proj_out"):
            nn.init.zeros_(module.weight)


def _tokenizer():  # type: ignore[no-untyped-def]
    """A CLIP tokenizer whose merges know two words; digits and quotes are tokens of their own."""
    from transformers import CLIPTokenizer

    merges = [("t", "h"), ("th", "e</w>")]
    merges += [("n", "u"), ("nu", "m"), ("num", "b"), ("numb", "e"), ("numbe", "r</w>")]
    letters = sorted(set('thenumbr0123456789"'))
    vocabulary = ["<|startoftext|>", "<|pad|>", "<|unk|>", "<|endoftext|>", *letters]
    vocabulary += [letter + "</w>" for letter in letters]
    vocabulary += [a + b for a, b in merges]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=merges,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        model_max_length=TOKENS,
    )


def _text_encoder(hidden: int, vocabulary: int) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    encoder = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=max(1, hidden // 32),
            max_position_embeddings=TOKENS,
            projection_dim=hidden,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=3,  # transformers treats an eos_token_id of 2 as a mistake of old folders
        )
    )
    for name, p in encoder.named_parameters():
        if "embedding" in name:  # CLIP's own 0.02 is too little for a network that never learns
            nn.init.normal_(p, std=0.5)
    return encoder
