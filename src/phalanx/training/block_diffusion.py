"""Supervised block diffusion: masked tokens of a block, predicted from the rest of it and the clean blocks before.

    L = mean over masked tokens of  -log p(x_0 | x_t, clean blocks),   x_t: each token masked with probability t

t ~ U(low, high) for each sample, or block. With weights 1/t and t ~ U(0, 1) for each block the loss bounds the
likelihood (BD3-LM, https://arxiv.org/abs/2503.09573, equation 8); LLaDA2 takes none, and t ~ U(.3, .8). The mesh, the
model, checkpoints, validation and logs are those of reinforcement learning.
"""

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.load import ConfigError
from phalanx.data.prompts import DataError, PromptRow, load_prompts, numbered, validation_sets
from phalanx.distributed import mesh
from phalanx.distributed.collectives import reduce_float, reduce_int
from phalanx.distributed.seed import fold_in
from phalanx.functional.block_diffusion import States, Views, states_of
from phalanx.models.lm.blocks import BlockDiffusionPolicy, build_block_policy
from phalanx.rollout.lm.in_blocks import BlockDiffusionRollout
from phalanx.telemetry.metrics import check_loggers
from phalanx.training import batches
from phalanx.training.parts import Parts, build_rewards, start
from phalanx.training.supervised import Supervised, share_of_rank

log = logging.getLogger(__name__)

DECODED_TOGETHER = 64  # responses of a validation
LEVELS = 5  # of noise, whose losses are logged apart


@dataclass(frozen=True)
class Example:
    """The tokens of a prompt and of its response."""

    prompt: list[int]
    response: list[int]


@dataclass(frozen=True)
class Noised:
    """Rows of a pass, and the probability [B, C, S] with which each token was masked; `scale` is the factor of a
    token's loss.
    """

    states: States
    rate: Tensor
    scale: float


def samples_of_rank(cfg: BlockDiffusionTaskConfig, world_size: int) -> int:
    """A rank's samples per step; raises ConfigError where they do not divide."""
    micro, key = cfg.block_diffusion.micro_batch_size_per_gpu, "block_diffusion.micro_batch_size_per_gpu"
    return share_of_rank(cfg, micro, key, "samples", world_size)


def check(cfg: BlockDiffusionTaskConfig) -> int:
    """Refuse what cannot run here (ConfigError); returns the samples of a rank."""
    if not cfg.data.train_files:
        raise ConfigError("data.train_files: [] names no samples; give a .jsonl or .parquet file of chats")
    batches.check_run(cfg)
    check_loggers(cfg.trainer.logger)
    return mesh.check(cfg, lambda size: samples_of_rank(cfg, size))


def build(cfg: BlockDiffusionTaskConfig) -> "BlockDiffusion":
    """The job, built on all ranks in step; a ValueError is the user's mistake."""
    check(cfg)
    data, trained = cfg.data, cfg.data.train_files
    rows = load_prompts(trained, "data.train_files", prompt=data.prompt_key, quoted=False)
    val_sets = validation_sets(data.val_files, prompt=data.prompt_key, quoted=False)
    world = start(cfg)
    rewards = build_rewards(cfg, world, outputs="completions")
    policy = build_block_policy(
        cfg.model,
        cfg.parallel,
        data,
        world,
        chunk=cfg.block_diffusion.log_prob_chunk_size,
        temperature=1.0,
        seed=cfg.trainer.seed,
        trim=True,
        add_mask=True,
    )
    examples = fitting(rows, policy, cfg.data.response_key, first=world.rank == 0)
    decoded = cfg.rollout.micro_batch_size_per_gpu or DECODED_TOGETHER
    rollout = BlockDiffusionRollout(policy, cfg.rollout, data, world, decoded, None)
    return BlockDiffusion(cfg, examples, Parts(world, rewards, policy, rollout, val_sets))


def fitting(
    rows: list[PromptRow], policy: BlockDiffusionPolicy, response_key: str | None, *, first: bool
) -> list[Example]:
    """The samples that are short enough, as data.overlong_prompts wants it. Raises DataError for a row without a
    response, or one that has the mask token.
    """
    data, key, found = policy.data, "data.train_files", []
    for number, row in enumerate(rows):
        example = encoded(row, policy, response_key, f"{key}, sample {number}")
        lengths = {"prompt": (len(example.prompt), data.max_prompt_length)}
        lengths["response"] = len(example.response), data.max_response_length
        over = [(what, length, limit) for what, (length, limit) in lengths.items() if length > limit]
        if not over:
            found.append(example)
        elif data.overlong_prompts == "truncate":
            found.append(Example(example.prompt, example.response[: data.max_response_length]))
        elif data.overlong_prompts == "error":
            what, length, limit = over[0]
            raise DataError(
                f"{key}, sample {number}: its {what} has {length} tokens, more than data.max_{what}_length={limit}; "
                "raise that, or set data.overlong_prompts to filter or truncate"
            )
    if not found:
        raise DataError(f"{key}: all {len(rows)} samples are longer than data.max_prompt_length or max_response_length")
    if first and len(found) < len(rows):
        log.warning("%s: %d of %d samples are too long and are left out", key, len(rows) - len(found), len(rows))
    return found


def encoded(row: PromptRow, policy: BlockDiffusionPolicy, response_key: str | None, where: str) -> Example:
    """The tokens of a row; the response ends with an end token."""
    prompt = numbered(row, 0)
    if response_key is not None:
        text = row.meta.get(response_key)
    else:
        last = row.messages[-1] if row.messages else {"role": None, "content": None}
        text = last["content"] if last["role"] == "assistant" else None
        prompt = replace(prompt, messages=(row.messages or [])[:-1])
    if not isinstance(text, str) or not text.strip():
        column = "the last message of its chat is not the assistant's" if response_key is None else f"no {response_key}"
        raise DataError(f"{where} has no response ({column}); see data.prompt_key and data.response_key")
    response = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    if policy.mask_id in response:
        raise DataError(f"{where}: its response holds the mask token {policy.tokenizer.mask_token!r}")
    return Example(policy.encode(prompt), [*response, policy.tokenizer.eos_token_id])


class BlockDiffusion(Supervised):
    """Supervised training: `fit()` runs it. `build` makes it."""

    cfg: BlockDiffusionTaskConfig
    policy: BlockDiffusionPolicy

    def __init__(self, cfg: BlockDiffusionTaskConfig, examples: list[Example], parts: Parts) -> None:
        c = cfg.block_diffusion
        per_rank = samples_of_rank(cfg, parts.world.size)
        super().__init__(cfg, parts, len(examples), per_rank, c.micro_batch_size_per_gpu, c.ema)
        self.examples = examples

    def passes(self, share: list[int], step: int) -> list[Noised]:
        """The samples, noised anew: a function of (trainer.seed, step, the sample's number in the batch)."""
        device, found = self.world.device, []
        for place in range(0, self.per_rank, self.micro):
            part = [self.examples[i] for i in share[place : place + self.micro]]
            names = range(self.first + place, self.first + place + len(part))
            found.append(self.noised(part, [fold_in(self.cfg.trainer.seed, step, name) for name in names]))
        counts = [int((part.states.weight != 0).sum()) for part in found]
        if self.cfg.block_diffusion.loss_agg_mode == "micro-batch-mean":
            scales = [1 / (max(count, 1) * len(found) * self.world.size) for count in counts]
        else:
            total = reduce_int(sum(counts), "sum")
            scales = [1 / max(total, 1)] * len(found)
        return [
            Noised(part.states.to(device), part.rate.to(device), scale)
            for part, scale in zip(found, scales, strict=True)
        ]

    def noised(self, examples: list[Example], seeds: list[int]) -> Noised:
        """States of the blocks of some samples, with some of the response's tokens masked, on the CPU."""
        c, size, end = self.cfg.block_diffusion, self.policy.size, self.policy.tokenizer.eos_token_id
        data = self.cfg.data
        longest = max(len(e.prompt) + len(e.response) for e in examples)
        if c.train_fill == "max_length":
            longest = data.max_prompt_length + data.max_response_length
        width = -(-longest // size) * size
        ids, maskable = torch.full((len(examples), width), end), torch.zeros(len(examples), width, dtype=torch.bool)
        rate = torch.zeros(len(examples), width // size, size)
        uniform = torch.zeros(len(examples), width)
        for i, (example, seed) in enumerate(zip(examples, seeds, strict=True)):
            tokens = example.prompt + example.response
            ids[i, : len(tokens)] = torch.tensor(tokens)
            filled = width if c.train_fill == "max_length" else -(-len(tokens) // size) * size
            maskable[i, len(example.prompt) : filled] = True
            stream = torch.Generator().manual_seed(seed)
            levels = torch.rand(width // size if c.noise_per_block else 1, 1, generator=stream)
            rate[i] = c.noise_range_low + (c.noise_range_high - c.noise_range_low) * levels
            uniform[i] = torch.rand(width, generator=stream)
        masked = (maskable & (uniform < rate.flatten(1))).unflatten(1, (-1, size))
        weight = masked / rate if c.elbo_weight else masked.float()
        if not c.same_token_labels:
            # the position before a masked token predicts it, that of an earlier block, too
            weight = torch.cat([weight.flatten(1)[:, 1:], weight.new_zeros(len(ids), 1)], 1).view_as(weight)
        views = Views(masked[:, :, None], weight[:, :, None])
        states = states_of(ids, views, mask_id=self.policy.mask_id, count=max(int(views.count.max()), 1))
        if not c.same_token_labels:
            states = replace(states, target=ids.roll(-1, 1).gather(1, states.place.flatten(1)).view_as(states.place))
        rates = rate.flatten(1).gather(1, states.place.flatten(1)).view_as(states.weight)
        return Noised(states, rates, 0.0)

    def loss(self, batch: Noised) -> tuple[Tensor, dict[str, Tensor]]:
        """See Supervised; the sums are of losses and numbers of tokens, by levels of noise."""
        c, states = self.cfg.block_diffusion, batch.states
        asked = states.weight != 0
        log_prob, entropy, right = self.policy.trained.module(states, right=True)
        losses, weight = -log_prob, states.weight[asked]
        loss = (losses * weight).sum() * batch.scale
        if c.confidence_beta > 0:
            loss = loss + c.confidence_beta * (entropy * right).sum() * batch.scale
        # without a masked token the loss is 0, and has a gradient all the same, which all ranks wait for
        sums = {"tokens": asked.sum(), "right": right.sum(), "entropy": entropy.detach().sum()}
        span = max(c.noise_range_high - c.noise_range_low, 1e-6)
        level = ((batch.rate[asked] - c.noise_range_low) / span * LEVELS).long().clamp(0, LEVELS - 1)
        for i in range(LEVELS):
            sums[f"loss_{i}"] = losses.detach()[level == i].sum()
            sums[f"count_{i}"] = (level == i).sum()
        return loss, sums

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """train/... of the masked tokens of all ranks."""
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
