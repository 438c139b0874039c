"""FlowGRPO of a small Stable Diffusion 3 in Phalanx, in flow_grpo's script and in Flow-Factory's trainer, alternating.

    git clone https://github.com/yifan123/flow_grpo && git clone https://github.com/X-GenGroup/Flow-Factory
    pip install absl-py ml-collections accelerate peft wandb imageio einops
    python benchmarks/beside_flow_trainers.py --flow-grpo flow_grpo --flow-factory Flow-Factory [--runs 3]

Each runs in one process on one thread in float32, with the same model folder, LoRA, prompts and reward, and half of the
workload of benchmarks/cpu_reference.yaml: 2 prompts x 8 images in batches of 8, 10 denoising steps with guidance, nine
of them trained, two updates. Their code runs unchanged from the checkout, except for the length of T5's texts, wandb,
and autocast to bfloat16, which Flow-Factory cannot do without on a CPU. Figures are CPU seconds of the whole process in
a step after the first one, separately for the rollout with rewards and for the update.

flow_grpo's script (ac4c86e) drops the gradient through the unconditional branch of guidance, and Flow-Factory keeps it.
`detached` drops it in Phalanx (`actor.detach_uncond=true`). `compiled` is `model.compile=true`, which needs a C++
compiler, and a minute in the first step. The last line is JSON.
"""

import argparse
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from alone import ROOT, in_turns, trainer_of

CONFIG = ROOT / "benchmarks" / "cpu_reference.yaml"
SHAPE, TEXT = "sd3_cpu", 128  # of shapes.py; tokens of T5
PROMPTS, IMAGES, STEPS, SIZE, RANK = 2, 8, 10, 256, 32

Seconds = dict[str, float]


class Clock:
    """CPU seconds of the phases of each step; the first step is not counted."""

    def __init__(self, steps: int) -> None:
        self.steps, self.found = steps, {"rollout": [], "update": []}
        self._last = time.process_time()

    def start(self) -> None:
        """A phase begins now."""
        self._last = time.process_time()

    def end(self, phase: str) -> None:
        """A phase ends now, and the next one begins."""
        now = time.process_time()
        self.found[phase].append(now - self._last)
        self._last = now

    @property
    def done(self) -> bool:
        """Whether there are enough steps."""
        return len(self.found["update"]) > self.steps

    def seconds(self) -> Seconds:
        """Medians over the steps, and their sum."""
        phases = {name: statistics.median(values[1:]) for name, values in self.found.items()}
        return phases | {"step": sum(phases.values())}


def phalanx(folder: Path, clock: Clock, keys: list[str]) -> None:
    """The job that benchmarks/cpu_reference.yaml describes."""
    from phalanx.config.flow import FlowRLConfig

    settings = {
        "model.path": folder / "model",
        "model.family": "sd3",
        "data.train_files": f"[{folder / 'train.txt'}]",
        "data.train_batch_size": PROMPTS,
        "actor.ppo_mini_batch_size": PROMPTS // 2,
    }
    words = [*(f"{key}={value}" for key, value in settings.items()), *keys]
    trainer = trainer_of(FlowRLConfig, CONFIG, clock.steps + 1, folder / "out", words)
    sample, reward, end_step = trainer.collector.sample, trainer.collector.reward, trainer.job.end_step

    def timed_sample(*args: Any) -> Any:
        clock.start()
        return sample(*args)

    def timed_reward(*args: Any) -> Any:
        scored = reward(*args)
        clock.end("rollout")
        return scored

    def timed_end(step: int, row: dict[str, float]) -> None:
        clock.end("update")
        end_step(step, row)

    trainer.collector.sample, trainer.collector.reward = timed_sample, timed_reward
    trainer.job.end_step = timed_end
    trainer.fit()


def flow_grpo(folder: Path, clock: Clock, checkout: Path) -> None:
    """scripts/train_sd3.py of the checkout; its phases are timed when it logs."""

    def log(row: dict[str, Any], step: int) -> None:
        if "epoch" in row and "policy_loss" not in row:  # logged when the rewards are available
            clock.end("rollout")
        elif "policy_loss" in row and step % 2 == 1:  # logged after the second of two updates
            clock.end("update")
            if clock.done:
                raise Done

    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)  # libraries look for it
    vars(wandb).update(init=lambda **_: None, log=log, Image=lambda *_, **__: None)
    sys.modules["wandb"] = wandb
    settings = {
        "pretrained.model": str(folder / "model"),
        "dataset": str(folder),
        "prompt_fn": "general_ocr",
        "reward_fn": {"jpeg_compressibility": 1.0},
        "mixed_precision": "no",
        "resolution": SIZE,
        "eval_freq": 10**6,
        "save_freq": 10**6,
        "logdir": str(folder / "logs"),
        "sample.num_steps": STEPS,
        "sample.eval_num_steps": 1,
        "sample.train_batch_size": IMAGES,
        "sample.num_image_per_prompt": IMAGES,
        "sample.num_batches_per_epoch": PROMPTS,
        "train.batch_size": IMAGES,
        "train.timestep_fraction": (STEPS - 1) / STEPS,
    }
    lines = ["from config.base import get_config as base", "def get_config():", "    config = base()"]
    lines += [f"    config.{key} = {value!r}" for key, value in settings.items()]
    (folder / "config.py").write_text("\n".join([*lines, "    return config"]))
    sys.path.insert(0, str(checkout))
    sys.argv = ["train_sd3.py", "--config", str(folder / "config.py")]
    try:
        runpy.run_path(str(checkout / "scripts" / "train_sd3.py"), run_name="__main__")
    except Done:
        return


class Done(BaseException):
    """Leaves an endless loop after enough steps."""


def flow_factory(folder: Path, clock: Clock, checkout: Path) -> None:
    """The trainer of the checkout, timed around its own methods."""
    sys.path.insert(0, str(checkout / "src"))
    import torch
    import yaml
    from flow_factory.hparams import Arguments
    from flow_factory.rewards.abc import PointwiseRewardModel, RewardModelOutput
    from flow_factory.rewards.registry import register_reward_model
    from flow_factory.trainers import load_trainer

    from phalanx.zoo.rewards.image.jpeg_compressibility import jpeg_compressibility

    class Jpeg(PointwiseRewardModel):
        def __call__(self, prompt: list[str], image: list[Any], **_: Any) -> Any:
            import numpy as np

            pixels = torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in image]) / 255
            return RewardModelOutput(rewards=jpeg_compressibility(pixels, prompt, [{}] * len(prompt)))

    globals()["Jpeg"] = register_reward_model("jpeg")(Jpeg)
    settings = {
        "launcher": "accelerate",
        "num_processes": 1,
        "mixed_precision": "no",
        "data": {"dataset_dir": str(folder), "cache_dir": str(folder / "cache"), "dataloader_num_workers": 0},
        "model": {
            "finetune_type": "lora",
            "lora_rank": RANK,
            "lora_alpha": 2 * RANK,
            "target_modules": "default",
            "model_name_or_path": str(folder / "model"),
            "model_type": "sd3-5",
            "master_weight_dtype": "fp32",
        },
        "log": {"logging_backend": "none", "save_dir": str(folder / "saves"), "save_freq": 0, "run_name": "run"},
        "train": {
            "trainer_type": "grpo",
            "max_epochs": clock.steps + 1,
            "resolution": SIZE,
            "num_inference_steps": STEPS,
            "guidance_scale": 4.5,
            "per_device_batch_size": IMAGES,
            "group_size": IMAGES,
            "unique_sample_num_per_epoch": PROMPTS,
            "gradient_step_per_epoch": 2,
            "kl_beta": 0,
            "ema_device": "cpu",
            "ref_param_device": "cpu",
            "latent_storage_dtype": "fp32",
        },
        "scheduler": {
            "dynamics_type": "Flow-SDE",
            "noise_level": 0.7,
            "num_sde_steps": STEPS - 1,
            "sde_steps": list(range(STEPS - 1)),
        },
        "eval": {"resolution": SIZE, "eval_freq": 0},
        "rewards": [{"name": "jpeg", "reward_model": "jpeg", "device": "cpu", "dtype": "float32"}],
    }
    (folder / "factory.yaml").write_text(yaml.safe_dump(settings))
    from diffusers import StableDiffusion3Pipeline

    encode = StableDiffusion3Pipeline.encode_prompt
    StableDiffusion3Pipeline.encode_prompt = lambda *args, **options: encode(  # type: ignore[method-assign]
        *args, **options | {"max_sequence_length": TEXT}
    )
    trainer = load_trainer(Arguments.load_from_yaml(str(folder / "factory.yaml")))
    trainer.autocast = nullcontext
    sample, feedback, optimize = trainer.sample, trainer.prepare_feedback, trainer.optimize

    def timed_sample() -> Any:
        clock.start()
        return sample()

    def timed_feedback(samples: Any) -> None:
        feedback(samples)
        clock.end("rollout")

    def timed_optimize(samples: Any) -> None:
        optimize(samples)
        clock.end("update")

    trainer.sample, trainer.prepare_feedback, trainer.optimize = timed_sample, timed_feedback, timed_optimize
    trainer.start()


def make_model(folder: Path) -> None:
    """Write a folder with the model of SHAPE, text encoders and tokenizers of the usual classes, and prompts."""
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from shapes import SHAPES, random_weights
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        T5Config,
        T5EncoderModel,
        T5Tokenizer,
    )

    shape, characters = SHAPES[SHAPE], [chr(c) for c in range(33, 127)]
    clip = CLIPTokenizer.from_pretrained(ROOT / "assets" / "digits" / "base" / "tokenizer", model_max_length=77)
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((c, -2.0) for c in ["▁", *characters])]
    t5 = T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)
    ends = {"bos_token_id": clip.bos_token_id, "eos_token_id": clip.eos_token_id, "pad_token_id": clip.pad_token_id}
    width = shape.transformer["pooled_projection_dim"] // 2
    small = CLIPTextConfig(
        vocab_size=len(clip), hidden_size=width, intermediate_size=4 * width, projection_dim=width,
        num_hidden_layers=2, num_attention_heads=2, **ends,
    )  # fmt: skip
    wide = shape.transformer["joint_attention_dim"]
    large = T5Config(vocab_size=len(t5), d_model=wide, d_kv=16, d_ff=2 * wide, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    StableDiffusion3Pipeline(
        transformer=random_weights(SD3Transformer2DModel, shape.transformer, torch.float32),
        vae=random_weights(AutoencoderKL, shape.vae, torch.float32),
        scheduler=FlowMatchEulerDiscreteScheduler(**shape.scheduler),
        text_encoder=CLIPTextModelWithProjection(small),
        text_encoder_2=CLIPTextModelWithProjection(small),
        text_encoder_3=T5EncoderModel(large),
        tokenizer=clip,
        tokenizer_2=clip,
        tokenizer_3=t5,
    ).save_pretrained(folder / "model")
    (folder / "train.txt").write_text("".join(f"number {i}\n" for i in range(64)))
    (folder / "test.txt").write_text("number 64\n")


def sides(args: argparse.Namespace) -> dict[str, Callable[[Path, Clock], None]]:
    """The compared trainers and variants, by name."""
    found: dict[str, Callable[[Path, Clock], None]] = {}
    for name, keys in (("phalanx", []), ("phalanx, detached", ["actor.detach_uncond=true"])):
        for suffix, more in (("", []), (", compiled", ["model.compile=true"])):
            found[name + suffix] = partial(phalanx, keys=[*keys, *more])
    if args.flow_grpo is not None:
        found["flow_grpo"] = partial(flow_grpo, checkout=args.flow_grpo.resolve())
    if args.flow_factory is not None:
        found["Flow-Factory"] = partial(flow_factory, checkout=args.flow_factory.resolve())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow-grpo", type=Path, help="a checkout of flow_grpo")
    parser.add_argument("--flow-factory", type=Path, help="a checkout of Flow-Factory")
    parser.add_argument("--steps", type=int, default=1, help="steps per run after the first one (1)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side (3)")
    parser.add_argument("--only", help="run one side once, in this process")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = sides(args)
    if args.only:
        clock = Clock(args.steps)
        known[args.only](args.folder, clock)
        print(json.dumps(clock.seconds()))
        return
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        found = in_turns([__file__, *sys.argv[1:], "--folder", name], known, args.runs)
    medians = {
        side: {phase: round(statistics.median(run[phase] for run in runs), 2) for phase in runs[0]}
        for side, runs in found.items()
    }
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
