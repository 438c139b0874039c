"""Supervised block diffusion: predict a block's masked tokens from its other tokens and the clean blocks before it.

    L = mean over masked tokens of  -log p(x_0 | x_t, clean blocks),   x_t: each token masked with probability t

t ~ U(low, high) is drawn for each sample or each block. With weights 1/t, t ~ U(0, 1) for each block, and a mean over
all tokens, the loss bounds the likelihood (BD3-LM, https://arxiv.org/abs/2503.09573, equation 8); LLaDA2 uses
t ~ U(.3, .8). Mesh, model, checkpoints, validation and logs are shared with reinforcement learning.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config.block_diffusion import BlockDiffusionRunConfig, BlockDiffusionTaskConfig
from phalanx.data.data_files import DataError
from phalanx.data.prompts import answer_of, load_prompts, question, refuse_images
from phalanx.data.unusable import above_limit
from phalanx.distributed.collectives import reduce_float, reduce_int
from phalanx.distributed.mesh import World
from phalanx.distributed.seed import fold_in
from phalanx.functional.block_states import States, Views, states_of
from phalanx.models.lm.blocks import BlockDiffusionPolicy
from phalanx.run import rules
from phalanx.run.kind import sampling_parts
from phalanx.run.lm_kind import Blocks
from phalanx.run.start import start_job
from phalanx.run.supervised_job import supervised_trainer
from phalanx.training.supervised import Shares, SupervisedTrainer, Task, share_of_rank
from phalanx.types import Prompt

log = logging.getLogger(__name__)

LEVELS = 5  # bins of the noise level; the loss is logged for each


@dataclass(frozen=True)
class Example:
    """The tokens of a prompt and of its response."""

    prompt: list[int]
    response: list[int]


@dataclass(frozen=True)
class Noised:
    """The rows of one pass.

    rate: [B, C, S], the probability with which each predicted token was masked. count: number of tokens that the loss
    of this pass averages over. scale: factor of the summed loss in the loss of the whole batch.
    """

    states: States
    rate: Tensor
    count: int
    scale: float = 0.0


class Training(Blocks):
    """The job's kind, and that of its checkpoints: see phalanx.run.kind."""

    schemas = (BlockDiffusionRunConfig,)
    drawn = "samples"
    section = "block_diffusion"
    planner = "phalanx.tools.plan.lm_jobs:rehearsed_blocks"
    together = 64
    adds_mask = True

    def check_config(self) -> None:
        rules.check_start(self.cfg)

    def plan(self, ranks: int) -> int:
        """The samples per rank and step."""
        return share_of_rank(self.cfg, self.section, self.drawn, ranks)

    def options(self) -> dict[str, Any]:
        return super().options() | {"chunk": self.cfg.block_diffusion.log_prob_chunk_size, "trim": True}


def build(cfg: BlockDiffusionTaskConfig) -> SupervisedTrainer:
    """Build the job; all ranks call this together. A ValueError is the user's mistake."""
    kind = Training(cfg)
    kind.check()
    form = kind.form(answered=cfg.data.response_key is None)
    rows = load_prompts(cfg.data.train_files, "data.train_files", **form)
    val_sets = kind.read_sets(answered=cfg.data.response_key is None)
    for some in (*val_sets.values(), rows):
        refuse_images(some, "block diffusion reads none")
    world = start_job(cfg)
    val_sets = {name: list(map(question, prompts)) for name, prompts in val_sets.items()}
    components = sampling_parts(kind, world, val_sets)
    policy: Any = components.policy
    examples = fitting(rows, policy, cfg.data.response_key, first=world.rank == 0)
    return supervised_trainer(cfg, components, BlockDiffusion(cfg, policy, examples, world), cfg.block_diffusion.ema)


def fitting(
    rows: list[Prompt], policy: BlockDiffusionPolicy, response_key: str | None, *, first: bool
) -> list[Example]:
    """Tokenize the rows, and filter, truncate or refuse overlong samples according to data.overlong_prompts.

    Raises DataError for a row without a response, or whose response contains the mask token.
    """
    data, key, examples = policy.data, "data.train_files", []
    policy.encode_ahead(list(map(question, rows)))
    for number, row in enumerate(rows):
        example = encoded(row, policy, response_key, f"{key}, sample {number}")
        lengths = {"prompt": (len(example.prompt), data.max_prompt_length)}
        lengths["response"] = len(example.response), data.max_response_length
        over = [(part, length, limit) for part, (length, limit) in lengths.items() if length > limit]
        if not over:
            examples.append(example)
        elif data.overlong_prompts == "truncate":
            # cut at the end of a block: padding in the rest of a block would look like the end of the response
            kept = data.max_response_length
            kept -= (len(example.prompt) + kept) % policy.size
            examples.append(Example(example.prompt, example.response[:kept]))
        elif data.overlong_prompts == "error":
            part, length, limit = over[0]
            where = f"{key}, sample {number}: its {part}"
            raise above_limit(where, f"{length} tokens", f"data.max_{part}_length", limit)
    if not examples:
        raise DataError(f"{key}: all {len(rows)} samples are longer than data.max_prompt_length or max_response_length")
    if first and len(examples) < len(rows):
        log.warning("%s: %d of %d samples are too long and are left out", key, len(rows) - len(examples), len(rows))
    return examples


def encoded(row: Prompt, policy: BlockDiffusionPolicy, response_key: str | None, where: str) -> Example:
    """Tokenize a row; the response ends with an end token."""
    if response_key is not None:
        text = answer_of(row.meta.get(response_key), response_key, where)
    else:
        last = row.messages[-1] if row.messages else {"role": None}
        text = last.get("content") if last["role"] == "assistant" else None
    if not isinstance(text, str):
        column = "the last message of its chat is not the assistant's" if response_key is None else f"no {response_key}"
        raise DataError(f"{where} has no response ({column}); see data.prompt_key and data.response_key")
    if not text.strip():
        raise DataError(f"{where}: its response is empty")
    response = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    if policy.mask_id in response:
        raise DataError(f"{where}: its response contains the mask token {policy.tokenizer.mask_token!r}")
    return Example(policy.encode(question(row)), [*response, policy.tokenizer.eos_token_id])


class BlockDiffusion(Task):
    """The task: see phalanx.training.supervised.Task. `build` makes its job."""

    noun = "samples"
    policy: BlockDiffusionPolicy

    def __init__(
        self, cfg: BlockDiffusionTaskConfig, policy: BlockDiffusionPolicy, examples: list[Example], world: World
    ) -> None:
        self.cfg, self.policy, self.examples, self.world = cfg, policy, examples, world
        self.shares = Shares(len(examples), cfg, Training.section, self.noun, world)

    def passes(self, share: list[int], step: int) -> list[Noised]:
        """The samples with fresh noise, a function of (trainer.seed, step, the sample's number in the batch)."""
        passes, first, micro = list[Noised](), self.shares.first, self.shares.micro
        for place in range(0, len(share), micro):
            examples = [self.examples[i] for i in share[place : place + micro]]
            numbers = range(first + place, first + place + len(examples))
            passes.append(self.noised(examples, [fold_in(self.cfg.trainer.seed, step, number) for number in numbers]))
        if self.cfg.block_diffusion.loss_agg_mode == "micro-batch-mean":
            return [
                replace(part, scale=1 / (max(part.count, 1) * len(passes) * self.world.data_size)) for part in passes
            ]
        total = reduce_int(sum(part.count for part in passes), "sum")
        return [replace(part, scale=1 / max(total, 1)) for part in passes]

    def noised(self, examples: list[Example], seeds: list[int]) -> Noised:
        """States of the blocks of some samples, with random tokens of the responses masked."""
        c, size, end = self.cfg.block_diffusion, self.policy.size, self.policy.tokenizer.eos_token_id
        lengths = [len(e.prompt) + len(e.response) for e in examples]
        if c.train_fill == "max_length":
            lengths = [self.cfg.data.max_prompt_length + self.cfg.data.max_response_length] * len(examples)
        widths = [-(-length // size) * size for length in lengths]
        shape = (len(examples), max(widths))
        ids, maskable = torch.full(shape, end), torch.zeros(shape, dtype=torch.bool)
        rate, uniform = torch.ones(shape), torch.ones(shape)
        for i, (example, width, seed) in enumerate(zip(examples, widths, seeds, strict=True)):
            tokens = example.prompt + example.response
            ids[i, : len(tokens)] = torch.tensor(tokens)
            # the end tokens that pad a complete response are trained as well; a truncated response has none
            maskable[i, len(example.prompt) : width if tokens[-1] == end else len(tokens)] = True
            # draw for the sample's own width, so that its noise does not depend on the other samples of the pass
            stream = torch.Generator().manual_seed(seed)
            levels = torch.rand(width // size if c.noise_per_block else 1, generator=stream)
            levels = levels.repeat_interleave(width // len(levels))
            rate[i, :width] = c.noise_range_low + (c.noise_range_high - c.noise_range_low) * levels
            uniform[i, :width] = torch.rand(width, generator=stream)
        masked = maskable & (uniform < rate)
        weight = masked / rate if c.elbo_weight else masked.float()
        # the likelihood bound averages over all tokens of the responses, not only the masked ones
        count = int((maskable if c.elbo_weight else masked).sum())
        target = ids
        if not c.same_token_labels:
            # a masked token is predicted at the position before it, even if that is in the previous block
            weight, rate, target = weight.roll(-1, 1), rate.roll(-1, 1), ids.roll(-1, 1)
        views = Views(*(values.unflatten(1, (-1, size))[:, :, None] for values in (masked, weight)))
        states = states_of(ids, views, mask_id=self.policy.mask_id, count=max(int(views.count.max()), 1))

        def there(values: Tensor) -> Tensor:
            """[B, C, S] of values [B, T]."""
            return values.gather(1, states.place.flatten(1)).view_as(states.place)

        states = replace(states, target=there(target)).closed(torch.tensor(widths) - size)
        return Noised(states.to(self.world.device), there(rate).to(self.world.device), count)

    def loss(self, batch: Noised) -> tuple[Tensor, dict[str, Tensor]]:
        """See Task; the sums are of losses and token counts by noise level, among others."""
        c, states = self.cfg.block_diffusion, batch.states
        predicted = states.weight != 0
        log_prob, entropy, right = self.policy.trained.module(states, right=True)
        losses, weight = -log_prob, states.weight[predicted]
        loss = (losses * weight).sum() * batch.scale
        if c.confidence_beta > 0:
            part = batch.scale * (entropy * right).sum()
            if c.loss_agg_mode == "micro-batch-mean":  # the mean over only the correctly predicted tokens
                part = part * batch.count / right.sum().clamp(min=1)
            loss = loss + c.confidence_beta * part
        # without a masked token the loss is 0 but still has a gradient, as the collectives of all ranks need
        sums = {"tokens": predicted.sum(), "right": right.sum(), "entropy": entropy.detach().sum()}
        span = max(c.noise_range_high - c.noise_range_low, 1e-6)
        level = ((batch.rate[predicted] - c.noise_range_low) / span * LEVELS).long().clamp(0, LEVELS - 1)
        for i in range(LEVELS):
            sums[f"loss_{i}"] = losses.detach()[level == i].sum()
            sums[f"count_{i}"] = (level == i).sum()
        return loss, sums

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """train/... metrics over the masked tokens of all ranks."""
        c, total = self.cfg.block_diffusion, {name: reduce_float(value, "sum") for name, value in sums.items()}
        tokens = max(total["tokens"], 1.0)
        row = {
            "train/masked_tokens": total["tokens"],
            "train/accuracy": total["right"] / tokens,
            "train/entropy": total["entropy"] / tokens,
        }
        width = (c.noise_range_high - c.noise_range_low) / LEVELS
        for i in range(LEVELS):
            if total[f"count_{i}"]:
                middle = c.noise_range_low + width * (i + 0.5)
                row[f"train/loss_at_{middle:.2f}"] = total[f"loss_{i}"] / total[f"count_{i}"]
        return row
