"""Sample images or videos from a model folder or a checkpoint, on any number of ranks, as in validation.

An image depends only on its prompt and number, the seed, the settings and the micro-batch size, not on the number of
ranks. Image j of prompt i has the same noise as in validation, so a run's validation images can be reproduced.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from phalanx.config.flow import FlowRolloutConfig, FlowRunConfig
from phalanx.config.inside import write_inside
from phalanx.config.joint import PAINTER
from phalanx.config.messages import ConfigError, told_as
from phalanx.config.tasks import SampleConfig
from phalanx.config.trust import UNUSED, Use
from phalanx.data.prompts import load_prompts, share_of_rank
from phalanx.distributed import mesh
from phalanx.distributed.collectives import agree, broadcast_object, gather_object
from phalanx.distributed.launch_env import Launch
from phalanx.exit import Stopped
from phalanx.functional.frames import evenly_spaced
from phalanx.media.grids import STRIP, fit, pictures, sheet, side_by_side, standing
from phalanx.media.pictures import encode_image
from phalanx.media.videos import write_video
from phalanx.models.flow.family import FlowModel
from phalanx.models.flow.policy import DTYPES, FlowPolicy, load_family
from phalanx.models.flow.registry import family_of
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.flow.samplers import check_frames, check_guidance
from phalanx.run.devices import check_dtype
from phalanx.run.flow_components import check_references, name_unused_columns
from phalanx.run.flow_kind import Flow
from phalanx.run.outputs import check_place, writing
from phalanx.run.rules import check
from phalanx.run.world import start_world, stop_world
from phalanx.telemetry.records import read_index, write_index
from phalanx.tools.inputs import given, model_changes
from phalanx.tools.opening import check_command, open_checkpoint
from phalanx.types import Outputs, Prompt

# maximum in grid.mp4, because the encoder is limited to 16384 pixels per side, and all their frames stay in memory
GRID_VIDEOS = 16
SIZES = ("height", "width", "num_frames")
# further settings of rollout.val that the task may change
SETTINGS = (
    "num_inference_steps", "guidance_scale", "guidance_scale_2", "true_cfg_scale", "n", "noise_level", "seed",
)  # fmt: skip


class Generator:
    """The sampling job: `Generator(cfg)` builds the model, `run()` samples and writes files."""

    def __init__(self, cfg: SampleConfig) -> None:
        check(cfg)
        self.cfg = cfg
        self.prompts = read_prompts(cfg)
        self.output_dir = Path(cfg.output_dir).expanduser()
        check_place(self.output_dir, "output_dir")
        use = Use(cfg.trust_run, ("model", "data", "rollout"), UNUSED | {"model": given(**vars(cfg.model))})
        self.trained = None if cfg.checkpoint is None else open_checkpoint(cfg.checkpoint, cfg.weights, use, PAINTER)
        self.base: Any = FlowRunConfig()
        if self.trained is not None:
            check_command(self.trained, Flow.command)
            self.base = self.trained.run
        self.model = replace(self.base.model, gradient_checkpointing=False, **model_changes(cfg.model))
        family = family_of(self.model)
        if family.image_column is not None:
            self.prompts = read_prompts(cfg, (family.image_column,))
        check_references(self.model, self.prompts)
        check_guidance(cfg, family)
        check_frames(cfg, family)
        mesh.shard_size(cfg.parallel, Launch.from_env())
        self.world = start_world(cfg.parallel)
        check_dtype("model.dtype", self.model.dtype, self.world.device)
        # use rank 0's checkpoint on all ranks, because a run in progress may have written a newer one in between
        if self.trained is not None:
            folder = broadcast_object(str(self.trained.folder))
            if folder != str(self.trained.folder):
                self.trained = open_checkpoint(folder, cfg.weights, use, PAINTER)
        self.policy = self._build_policy(family)
        check_guidance(cfg, self.policy.model)
        settings = rollout_settings(cfg, self.base.rollout)
        with told_as(ConfigError, key=("rollout.", "")):  # the task's keys have no such prefix, unlike those of a run
            self.rollout = PolicyRollout(self.policy, settings, self.world, cfg.micro_batch_size_per_gpu)
        name_unused_columns([(self.prompts, self.rollout.val_sampler.guided)], self.policy.model)

    def _build_policy(self, family: type[FlowModel]) -> FlowPolicy:
        """Build the model on the mesh, with its weights in the compute dtype, since none is trained."""
        data = self.base.data
        if self.cfg.max_prompt_length is not None:
            data = replace(data, max_prompt_length=self.cfg.max_prompt_length)
        dtype = DTYPES[self.model.dtype]
        full = self.trained is not None and self.model.lora_rank == 0
        # as in training, a full fine-tune is loaded in float32; its buffers stay float32, its parameters get `dtype`
        model = load_family(family, self.model, dtype, torch.float32 if full else dtype)
        for p in model.transformer.parameters():
            p.data = p.data.to(dtype)
        model.vae.to(self.world.device)
        policy = FlowPolicy(model, self.world, self.model, self.cfg.parallel, data, seed=self.base.trainer.seed)
        if self.trained is not None:
            self.trained.check_fits(policy.trained.parameters, self.model.path)
        return policy

    def run(self) -> None:
        """Sample all images and write each on rank 0 once sampled, then the index and the grid. Raises Stopped."""
        self.world.watch.listen()
        if self.trained is not None:
            self.trained.load(self.policy.trained, self.world.checkpoint_group)
        fps = self.policy.model.fps
        seed = self.rollout.config.val.seed
        with writing(self.output_dir, "output_dir"):
            writer = Writer(self.output_dir, self.cfg.n, fps, seed=seed) if self.world.rank == 0 else None
        local = share_of_rank(self.prompts, self.world.rank, self.world.size)
        first, done = self.world.rank * len(local), 0

        def each(images: Outputs, prompts: list[Prompt]) -> None:
            nonlocal done
            assert isinstance(images, Tensor)
            start, done = first * self.cfg.n + done, done + len(images)
            pixels = (images * 255).round().byte().movedim(-3, -1).numpy()
            rows = [(start + j, prompts[j].text, pixels[j]) for j in range(len(prompts))]
            for rows_of_rank in gather_object(rows):
                for index, text, image in rows_of_rank:
                    if writer is not None and index < len(self.prompts) * self.cfg.n:
                        writer.add(index, text, image)
            _, stop = agree(None, self.world.watch.stop or 0)
            if stop and done < len(local) * self.cfg.n:
                if writer is not None:
                    writer.finish(self.cfg.columns)
                self.world.watch.close()
                raise Stopped(stop, f"; the images so far are in {self.output_dir}")

        with writing(self.output_dir, "output_dir"):
            with self.rollout.awake():
                self.rollout.sample_validation(local, each=each)
            if writer is not None:
                writer.finish(self.cfg.columns)
        stop_world()


def read_prompts(cfg: SampleConfig, images: Sequence[str] = ()) -> list[Prompt]:
    """Read the prompts of the task, numbered from 0. `images`: see `load_prompts`. Raises ValueError for a file that
    cannot be read.
    """
    if cfg.prompt_file is not None:
        rows = load_prompts([cfg.prompt_file], "prompt_file", images, cfg.prompt_key)
        return [Prompt(row.text, i, row.meta, row.negative) for i, row in enumerate(rows)]
    if images:
        raise ConfigError(
            f"prompts: the model takes an image with each text; give prompt_file, with a column {images[0]}"
        )
    return [Prompt(text, i, {}) for i, text in enumerate(cfg.prompts)]


def rollout_settings(cfg: SampleConfig, base: FlowRolloutConfig) -> FlowRolloutConfig:
    """A run's rollout settings with the task's changes to rollout.val."""
    val = replace(base.val, **given(**{name: vars(cfg)[name] for name in (*SIZES, *SETTINGS)}))
    # the sizes for training are not used here, but they are checked
    sizes = given(**{name: vars(val)[name] for name in SIZES})
    return replace(base, sde_type=cfg.sde_type or base.sde_type, val=val, **sizes)


class Writer:
    """Writes the images: `00003.png` is image 3 % n of prompt 3 // n, `index.jsonl` lists all images with their
    prompts, and `grid.png` shows all of them.

    Videos of `fps` frames per second are written as `00003.mp4` and so on; `grid.png` shows some frames of each, and
    `grid.mp4` the first GRID_VIDEOS videos.
    """

    def __init__(self, folder: Path, n: int, fps: int = 1, *, seed: int) -> None:
        """The index contains `seed`, which together with the number of an image determines the noise."""
        self.folder, self.n, self.fps, self.seed = folder, n, fps, seed
        self._rows: dict[int, dict[str, Any]] = {}  # rows of the index, by image number
        self._tiles: dict[int, list[Image.Image]] = {}
        for row in read_index(folder):  # delete the images of an earlier call, which may have written more
            if re.fullmatch(r"[0-9]+\.(png|mp4)", row["file"]):  # the index may be of another program
                (folder / row["file"]).unlink(missing_ok=True)
        for name in ("index.jsonl", "grid.mp4"):
            (folder / name).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, index: int, prompt: str, image: NDArray[np.uint8]) -> None:
        """Write an image [H, W, 3] or a video [F, H, W, 3], and keep small versions of the frames for the grids."""
        frames = image if image.ndim == 4 else image[None]
        if len(frames) > 1:
            file = f"{index:05d}.mp4"
            write_video(self.folder / file, frames, self.fps)
        else:
            file = f"{index:05d}.png"
            write_inside(self.folder, file, encode_image(frames[0]))
        shown = frames if index < GRID_VIDEOS else standing(frames)
        self._rows[index] = {"index": index, "prompt": prompt, "seed": self.seed, "reward": None, "file": file}
        self._tiles[index] = [fit(picture) for picture in pictures(shown)]

    def finish(self, columns: int | None) -> None:
        """Write the index and the grids, and print their location."""
        order = sorted(self._rows)
        rows = [self._rows[i] for i in order]
        tiles = [self._tiles[i] for i in order]
        prompts = [row["prompt"] for row in rows]
        write_index(self.folder, rows)
        if columns is None:
            columns = self.n if self.n > 1 else math.ceil(math.sqrt(len(order)))
        strips = []
        for frames in tiles:
            strips.append(side_by_side([frames[k] for k in evenly_spaced(len(frames), STRIP)]))
        write_inside(self.folder, "grid.png", encode_image(np.asarray(sheet(strips, prompts, columns))))
        moving = len(tiles[0]) > 1
        if moving:
            at_once = zip(*tiles[:GRID_VIDEOS], strict=True)
            grids = (np.asarray(sheet(now, prompts[:GRID_VIDEOS], columns)) for now in at_once)
            write_video(self.folder / "grid.mp4", grids, self.fps)
        what = "videos" if moving else "images"
        print(f"{len(order)} {what} in {self.folder}, all of them in {self.folder / 'grid.png'}", flush=True)
