"""Responses of a language model from a folder or a checkpoint, sampled as in validation, in one process.

A response is a function of its prompt and number, the seed and the settings, so a run's validation can be reproduced.
The model of a run with an environment interacts with it. For block-diffusion models, the tokens per forward pass are
reported.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from phalanx.config.joint import WRITER
from phalanx.config.lm import LMRunConfig
from phalanx.config.messages import ConfigError
from phalanx.config.parallel import ParallelConfig
from phalanx.config.tasks import GenerateConfig
from phalanx.config.trust import UNUSED, Use
from phalanx.data.prompts import load_prompts, question
from phalanx.distributed.launch_env import Launch
from phalanx.environments.environments import Environments, with_tools
from phalanx.exit import Stopped
from phalanx.models.lm.model import positions
from phalanx.rollout.lm import build_rollout
from phalanx.rollout.lm.conversations import Conversed
from phalanx.rollout.lm.in_blocks import BlockDiffusionRollout
from phalanx.rollout.lm.in_policy import Drawn
from phalanx.run.devices import check_dtype
from phalanx.run.kind import kind_of
from phalanx.run.lm_kind import LM, reads_images
from phalanx.run.outputs import check_place, writing
from phalanx.run.rules import check, check_model
from phalanx.run.world import start_world, stop_world
from phalanx.telemetry.records import CONVERSATION, as_text, storable, summary
from phalanx.tools.inputs import given, model_changes
from phalanx.tools.opening import check_command, open_checkpoint
from phalanx.types import Prompt
from phalanx.zoo.loggers.console import plain

LIMIT = 1024  # default maximum of tokens in a response, for a model from a folder


class Generation:
    """The job: `Generation(cfg)` builds the model (a ValueError is the user's mistake), `run()` writes responses."""

    def __init__(self, cfg: GenerateConfig) -> None:
        self.cfg = cfg
        if Launch.from_env().world_size > 1:
            raise ConfigError("generation runs in one process; start it with python3, or set NPROC_PER_NODE=1")
        check(cfg)
        sections = ("model", "data", "rollout", *(("environment",) if cfg.environment else ()))
        use = Use(cfg.trust_run, sections, UNUSED | {"model": given(**vars(cfg.model))})
        self.trained = None if cfg.checkpoint is None else open_checkpoint(cfg.checkpoint, cfg.weights, use, WRITER)
        run: Any = LMRunConfig()
        if self.trained is not None:
            check_command(self.trained, LM.command)
            run = self.trained.run
        self.prompts = read_prompts(cfg, cfg.prompt_key or run.data.prompt_key, run.data.image_key)
        self.environments: Environments | None = None
        if run.talks and cfg.environment:
            if cfg.stop:
                raise ConfigError(
                    "stop: with an environment, a turn ends with an end token of the model; leave stop out, or set "
                    "environment=false"
                )
            self.environments = Environments(run.environment)
            self.prompts = with_tools(self.prompts, self.environments)
        self.file = None if cfg.output_file is None else Path(cfg.output_file).expanduser()
        if self.file is not None and self.file.is_dir():
            raise ConfigError(f"output_file: {cfg.output_file!r} is a folder; give a file")
        if self.file is not None:
            check_place(self.file, "output_file", folder=False)
        training: dict[str, Any] = dict.fromkeys(
            ("gradient_checkpointing", "use_remove_padding", "use_prefix_grouper"), False
        )
        config = replace(run.model, **model_changes(cfg.model), **training)
        check_model(cfg, config)
        data = replace(run.data, overlong_prompts="error", **given(system_prompt=cfg.system_prompt))
        data.chat_template_kwargs = run.data.chat_template_kwargs | cfg.chat_template_kwargs
        place = next((prompt.place for prompt in self.prompts if prompt.images), None)
        images = reads_images(config, place, None if self.trained is None else self.trained.entries)
        self.world = start_world(ParallelConfig())
        check_dtype("model.dtype", config.dtype, self.world.device)
        # placeholder limits, since the policy must first count the tokens of the prompts
        shortest = replace(data, max_prompt_length=1, max_response_length=1)
        kind: LM = kind_of(replace(run, model=config, data=shortest, parallel=ParallelConfig()))
        self.policy = kind.plain_policy(self.world, images=images)
        self.policy.encode_ahead(self.prompts)
        lengths = [self.policy.length(prompt) for prompt in self.prompts]
        room = positions(self.policy.trained.module.lm.config) or 2**20
        limit = self._limit(run, lengths, room, config.block_size or 1)
        longest = max(lengths)
        if self.environments is not None:  # an environment may extend prompts
            longest = max(longest, min(data.max_prompt_length, room - limit))
        self.policy.data = replace(data, max_prompt_length=longest, max_response_length=limit)
        settings = given(n=cfg.n, temperature=cfg.temperature, top_p=cfg.top_p, seed=cfg.seed)
        settings |= given(top_k=cfg.top_k, min_p=cfg.min_p)
        settings |= given(denoising_steps_per_block=cfg.denoising_steps_per_block, threshold=cfg.threshold)
        self.val = replace(run.rollout.val, **settings, max_response_length=limit)
        run = replace(run, rollout=replace(run.rollout, engine="policy", **given(stop=cfg.stop), val=self.val))
        self.tokens = self.forwards = 0  # counted for block diffusion
        self.policy.check_agreement(decodes=True)
        together = cfg.micro_batch_size_per_gpu
        self.rollout: Any = build_rollout(run, self.policy, self.world, together, None, self.environments)
        if self.trained is not None:
            self.trained.check_fits(self.policy.trained.parameters, config.path)

    def _limit(self, run: LMRunConfig, lengths: Sequence[int], positions: int, size: int) -> int:
        """The maximum response length in tokens, a multiple of `size`; raises ConfigError if there is no room for it
        after the longest prompt.
        """
        longest = max(lengths)
        room = (positions - longest) // size * size
        if room <= 0:
            raise ConfigError(
                f"prompt {lengths.index(longest)} has {longest} tokens with the chat template, and the model has "
                f"{positions} positions"
            )
        requested = self.cfg.max_response_length
        if requested is not None and requested > room:
            raise ConfigError(
                f"max_response_length: {requested} tokens after a prompt of {longest} are more than the model's "
                f"{positions} positions; expected at most {room}"
            )
        if requested is not None:
            return requested
        limit = run.rollout.val.max_response_length or run.data.max_response_length
        return max(min(limit if self.trained is not None else LIMIT, room) // size, 1) * size

    def run(self) -> None:
        """Print all responses and write them to the file, micro-batch by micro-batch. Raises Stopped."""
        self.world.watch.listen()
        if self.trained is not None:
            self.trained.load(self.policy.trained, self.world.checkpoint_group)
        n = self.val.n
        together = max(1, self.cfg.micro_batch_size_per_gpu // n)
        with ExitStack() as stack:
            file = None
            if self.environments is not None:
                stack.callback(self.environments.close)
            if self.file is not None:
                stack.enter_context(writing(self.file, "output_file"))
                self.file.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self.file.open("w", encoding="utf-8"))
            stack.enter_context(self.rollout.awake())
            for start in range(0, len(self.prompts), together):
                if self.world.watch.stop is not None:
                    self.world.watch.close()
                    raise Stopped(self.world.watch.stop, f" after {start} of {len(self.prompts)} prompts")
                prompts = self.prompts[start : start + together]
                responses = self.rollout.draw_validation(prompts, each=lambda *_: None)
                for number, drawn in enumerate(responses):
                    self._tell_response(prompts[number // n], number % n, drawn, file)
        if self.file is not None:
            print(f"{len(self.prompts) * n} responses in {self.file}", flush=True)
        if self.forwards:
            each = f"{self.tokens / self.forwards:.2f} tokens per forward pass"
            print(f"{each}: {self.tokens} tokens in {self.forwards} passes over a block", flush=True)
        stop_world()

    def _tell_response(self, prompt: Prompt, number: int, drawn: Drawn, file: TextIO | None) -> None:
        """Print a response and write it to the file."""
        forwards = self.rollout.forwards(drawn) if isinstance(self.rollout, BlockDiffusionRollout) else 0
        self.tokens, self.forwards = self.tokens + len(drawn.response), self.forwards + forwards
        name = f"prompt {prompt.group_id}" + (f", response {number}" if self.val.n > 1 else "")
        cut, text = f"\n[cut after {len(drawn.response)} tokens]" if drawn.truncated else "", drawn.text
        talk = None
        if isinstance(drawn, Conversed):
            talk = storable({name: drawn.beside[name] for name in CONVERSATION})
            text, cut = as_text(talk["messages"]), f"\n[{summary(talk)}]"
        print(f"--- {name}: {plain(' '.join(prompt.text.split()))}\n{plain(text)}{cut}\n", flush=True)
        if file is not None:
            row = {"index": prompt.group_id, "response": number, "prompt": prompt.text, "text": drawn.text}
            row |= {"tokens": drawn.length, "truncated": drawn.truncated, "seed": self.val.seed} | (talk or {})
            if forwards:
                row["forward_passes"] = forwards
            if prompt.images:
                row["images"] = [picture.where for picture in prompt.images]
            if "ground_truth" in prompt.meta:
                row["ground_truth"] = prompt.meta["ground_truth"]
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def read_prompts(cfg: GenerateConfig, key: str, image_key: str | None = None) -> list[Prompt]:
    """Read the prompts of the task, numbered from 0; raises ValueError for a file that cannot be read."""
    if cfg.prompt_file is not None:
        # the file may be one for supervised training, which also contains answers
        form: dict[str, Any] = {"prompt": key, "quoted": False, "answered": True, "image_key": image_key}
        rows = load_prompts([cfg.prompt_file], "prompt_file", **form)
        return [question(replace(row, group_id=i)) for i, row in enumerate(rows)]
    return [Prompt(text, i, {}, place=f"prompts[{i}]") for i, text in enumerate(cfg.prompts)]
