"""Sampling from a model folder or a checkpoint, on any number of ranks: the sampler of validation, and nothing else.

An image is a function of its prompt and number, the seed, the settings and the micro-batch size; the ranks only share
the work. Image j of prompt i has the noise that validation gives it, so a run's validation images can be made again.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.config.schema import DataConfig, ModelConfig, RolloutConfig, TrainerConfig
from phalanx.config.tasks import SampleConfig
from phalanx.data import load_prompts
from phalanx.distributed import mesh
from phalanx.distributed.collectives import broadcast_object, gather_object
from phalanx.export import Trained, open_checkpoint
from phalanx.functional.frames import evenly_spaced
from phalanx.images import CAPTION_SIZE, STRIP, TILE_MIN, caption, fit, read_index, side_by_side
from phalanx.models.family import FlowModel
from phalanx.models.flow import DTYPES, FlowPolicy, family_of
from phalanx.rollout.policy import PolicyRollout, check_frames, check_guidance
from phalanx.types import Prompt
from phalanx.videos import write_video

MARGIN = 8
GRID_VIDEOS = 16  # that move in grid.mp4: the encoder takes 16384 pixels a side, and all their frames stay in memory


class Generator:
    """`Generator(cfg)` builds the model (a ValueError is the user's mistake), `run()` samples and writes."""

    def __init__(self, cfg: SampleConfig) -> None:
        self.cfg = cfg
        self.prompts = read_prompts(cfg)
        self.output_dir = Path(cfg.output_dir).expanduser()
        if self.output_dir.exists() and not self.output_dir.is_dir():
            raise ConfigError(f"output_dir: {cfg.output_dir!r} is a file; give a folder")
        self.trained = self._open()
        run = self.trained.run if self.trained is not None else None
        given = {name: value for name, value in vars(cfg.model).items() if value is not None}
        self.model = replace(run.model if run is not None else ModelConfig(), gradient_checkpointing=False, **given)
        family = family_of(self.model)
        if family.image_column is not None:
            self.prompts = read_prompts(cfg, (family.image_column,))
        check_guidance(cfg, family)
        check_frames(cfg, family)
        mesh.shard_size(cfg.parallel, mesh.Launch.from_env())
        self.world = mesh.start(cfg.parallel)
        if self.trained is not None:  # a run that goes on may have written another one meanwhile
            folder = broadcast_object(str(self.trained.folder))
            if folder != str(self.trained.folder):
                self.trained = open_checkpoint(folder, cfg.weights)
        self.policy = self._policy(family)
        check_guidance(cfg, self.policy.model)
        settings = rollout_settings(cfg, run.rollout if run is not None else RolloutConfig())
        try:
            self.rollout = PolicyRollout(self.policy, settings, self.world, cfg.micro_batch_size_per_gpu)
        except ValueError as error:  # said of the section that these keys have in a run's configuration
            raise ConfigError(str(error).removeprefix("rollout.")) from None

    def _open(self) -> Trained | None:
        if self.cfg.checkpoint is not None:
            return open_checkpoint(self.cfg.checkpoint, self.cfg.weights)
        if self.cfg.model.path is None:
            raise ConfigError("neither model.path nor checkpoint is set; give one of them")
        if self.cfg.weights == "ema":
            raise ConfigError("weights: ema needs a checkpoint; a model folder has its own weights only")
        return None

    def _policy(self, family: type[FlowModel]) -> FlowPolicy:
        """The model over the mesh, with its weights in the dtype that it computes in: nothing is trained here."""
        run = self.trained.run if self.trained is not None else None
        data = run.data if run is not None else DataConfig()
        if self.cfg.max_prompt_length is not None:
            data = replace(data, max_prompt_length=self.cfg.max_prompt_length)
        dtype = DTYPES[self.model.dtype]
        full = run is not None and self.model.lora_rank == 0
        # full fine-tuning reads the folder in float32, and buffers stay so; parameters compute in `dtype` there too
        model = family(self.model, dtype, torch.float32 if full else dtype)
        for p in model.transformer.parameters():
            p.data = p.data.to(dtype)
        model.vae.to(self.world.device)
        seed = run.trainer.seed if run is not None else TrainerConfig().seed
        policy = FlowPolicy(model, self.world, self.model, self.cfg.parallel, data, seed=seed)
        if self.trained is not None:
            self.trained.check_fits({name: p.shape for name, p in policy.parameters.items()}, self.model.path)
        return policy

    def run(self) -> None:
        """Sample all images and write them on rank 0, each as soon as it is there, then the grid."""
        if self.trained is not None:
            tensors = {name: p.detach() for name, p in self.policy.parameters.items()}
            self.trained.read_into(tensors, self.world.checkpoint_group)
            self.policy.sharded.publish()
        writer = Writer(self.output_dir, self.cfg.n, self.policy.model.fps) if self.world.rank == 0 else None
        share = -(-len(self.prompts) // self.world.size)
        first = self.world.rank * share
        # ranks must do equal work, so the end is filled up with the last prompt; those images are dropped
        mine = [self.prompts[min(first + j, len(self.prompts) - 1)] for j in range(share)]
        done = 0

        def each(images: Tensor, prompts: list[Prompt]) -> None:
            nonlocal done
            start, done = first * self.cfg.n + done, done + len(images)
            pixels = (images * 255).round().byte().movedim(-3, -1).numpy()
            rows = [(start + j, prompts[j].text, pixels[j]) for j in range(len(prompts))]
            for index, text, image in (row for part in gather_object(rows) for row in part):
                if writer is not None and index < len(self.prompts) * self.cfg.n:
                    writer.add(index, text, image)

        with self.rollout.awake():
            self.rollout.sample_validation(mine, each=each)
        if writer is not None:
            writer.finish(self.cfg.columns)
        mesh.stop()


def read_prompts(cfg: SampleConfig, images: Sequence[str] = ()) -> list[Prompt]:
    """The prompts of the task, numbered from 0; raises ValueError where there are none, or two sources. `images`: see
    `load_prompts`.
    """
    if cfg.prompts and cfg.prompt_file is not None:
        raise ConfigError("prompts and prompt_file are both set; give one of them")
    if cfg.prompt_file is not None:
        rows = load_prompts([cfg.prompt_file], "prompt_file", images)
        return [Prompt(row.text, i, row.meta, row.negative) for i, row in enumerate(rows)]
    if not cfg.prompts:
        raise ConfigError("neither prompts nor prompt_file is set; give one of them, e.g. prompts='[a red apple]'")
    if images:
        raise ConfigError(f"prompts: the model edits images; give prompt_file, with a column {images[0]}")
    return [Prompt(text, i, {}) for i, text in enumerate(cfg.prompts)]


def rollout_settings(cfg: SampleConfig, base: RolloutConfig) -> RolloutConfig:
    """The settings of a run's rollout with what the task changes, where validation reads them."""
    shared = ("num_inference_steps", "height", "width", "num_frames", "guidance_scale", "true_cfg_scale")
    given = {name: vars(cfg)[name] for name in (*shared, "n", "noise_level", "seed") if vars(cfg)[name] is not None}
    val = replace(base.val, **given)
    # training's own sizes are never sampled here, but they are checked
    sizes = {name: vars(val)[name] for name in ("height", "width", "num_frames") if vars(val)[name] is not None}
    return replace(base, sde_type=cfg.sde_type or base.sde_type, val=val, **sizes)


class Writer:
    """The images on disk: `00003.png` is image 3 % n of prompt 3 // n; `index.jsonl` says which prompt; `grid.png`.

    Videos, of `fps` frames a second, are `00003.mp4` and so on; beside `grid.png`, which shows some
    frames of each, there is a `grid.mp4` of the first GRID_VIDEOS.
    """

    def __init__(self, folder: Path, n: int, fps: int = 1) -> None:
        self.folder, self.n, self.fps = folder, n, fps
        self._tiles: dict[int, tuple[str, str, list[Image.Image]]] = {}
        for row in read_index(folder):  # images of a call before, which may have been more
            (folder / row["file"]).unlink(missing_ok=True)
        for name in ("index.jsonl", "grid.mp4"):
            (folder / name).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, index: int, prompt: str, image: NDArray[np.uint8]) -> None:
        """Write an image [H, W, 3] or a video [F, H, W, 3]; what the grids show of it stays, small."""
        frames = [Image.fromarray(frame) for frame in (image if image.ndim == 4 else image[None])]
        file = f"{index:05d}.{'mp4' if len(frames) > 1 else 'png'}"
        if len(frames) > 1:
            write_video(self.folder / file, image, self.fps)
        else:
            frames[0].save(self.folder / file)
        shown = range(len(frames)) if index < GRID_VIDEOS else evenly_spaced(len(frames), STRIP)
        self._tiles[index] = (prompt, file, [fit(frames[k]) for k in shown])

    def finish(self, columns: int | None) -> None:
        """Write the index and the grids, and say where all is."""
        order = sorted(self._tiles)
        prompts, files, tiles = zip(*(self._tiles[i] for i in order), strict=True)
        rows = [
            {"index": i, "prompt": prompt, "reward": None, "file": file}
            for i, prompt, file in zip(order, prompts, files, strict=True)
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (self.folder / "index.jsonl").write_text(text, encoding="utf-8")
        if columns is None:
            columns = self.n if self.n > 1 else math.ceil(math.sqrt(len(order)))
        strips = [side_by_side([frames[k] for k in evenly_spaced(len(frames), STRIP)]) for frames in tiles]
        sheet(list(zip(prompts, strips, strict=True)), columns).save(self.folder / "grid.png")
        moving = len(tiles[0]) > 1
        if moving:
            frames_of = zip(*tiles[:GRID_VIDEOS], strict=True)
            grids = (sheet(list(zip(prompts[:GRID_VIDEOS], now, strict=True)), columns) for now in frames_of)
            write_video(self.folder / "grid.mp4", map(np.asarray, grids), self.fps)
        what = "videos" if moving else "images"
        print(f"{len(order)} {what} in {self.folder}, all of them in {self.folder / 'grid.png'}", flush=True)


def sheet(tiles: list[tuple[str, Image.Image]], columns: int) -> Image.Image:
    """Pictures in rows of `columns`, each with its prompt below it."""
    font = ImageFont.load_default(CAPTION_SIZE)
    width = max(TILE_MIN, *(tile.width for _, tile in tiles))
    captions = [caption(prompt, 0.0, font, width)[1:] for prompt, _ in tiles]  # without its first line, the reward
    line = CAPTION_SIZE + 4
    height = max(tile.height for _, tile in tiles) + max(map(len, captions)) * line + MARGIN
    rows = -(-len(tiles) // columns)
    size = (min(columns, len(tiles)) * (width + MARGIN) + MARGIN, rows * (height + MARGIN) + MARGIN)
    picture = Image.new("RGB", size, (255, 255, 255))
    draw = ImageDraw.Draw(picture)
    for i, ((_, tile), lines) in enumerate(zip(tiles, captions, strict=True)):
        x = MARGIN + i % columns * (width + MARGIN)
        y = MARGIN + i // columns * (height + MARGIN)
        picture.paste(tile, (x + (width - tile.width) // 2, y))
        for k, words in enumerate(lines):
            draw.text((x, y + tile.height + 3 + k * line), words, font=font, fill=(20, 20, 20))
    return picture
