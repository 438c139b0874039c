"""Supervised block diffusion: dFactory's loss of [x_t ; x_0], equal on all layouts."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.run.block_diffusion_sft import Noised, build
from phalanx.training.supervised import SupervisedTrainer
from tests.helpers.jobs import assert_same_weights, full_weights, rows
from tests.helpers.lm import tiny_sft_config
from tests.helpers.ranks import run_ranks

SIZE = 4
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "shifted": ("same_token_labels=false", "noise_per_block=true"),
    "bound": ("elbo_weight=true", "noise_per_block=true", "noise_range_low=1e-2", "noise_range_high=1"),
    "filled": ("train_fill=max_length", "loss_agg_mode=micro-batch-mean", "confidence_beta=2"),
    "sure": ("confidence_beta=2", "noise_range_high=1"),
    "cut": ("data.max_response_length=8", "data.overlong_prompts=truncate"),
}


def variant(model: Path, folder: Path, name: str, *keys: str) -> BlockDiffusionTaskConfig:
    own = [key if key.startswith("data.") else f"block_diffusion.{key}" for key in VARIANTS[name]]
    return tiny_sft_config(model, folder / name, *own, *keys)


def doubled(job: SupervisedTrainer, x_t: Tensor, x_0: Tensor) -> Tensor:
    """Logits [B, L, V] of the first half of [x_t ; x_0], with dFactory's attention rule applied to each position."""
    length = x_0.shape[1]
    block, clean = torch.arange(2 * length) % length // SIZE, torch.arange(2 * length) >= length
    query, key = block[:, None], block[None]
    within = (query == key) & (clean[:, None] == clean[None])
    past = (query > key) & ~clean[:, None] & clean[None]
    causal = (query >= key) & clean[:, None] & clean[None]
    mask = torch.zeros(2 * length, 2 * length).masked_fill(~(within | past | causal), torch.finfo(torch.float32).min)
    out = job.policy.trained.module.lm(
        input_ids=torch.cat([x_t, x_0], 1),
        attention_mask=mask[None, None].expand(len(x_0), 1, -1, -1),
        position_ids=torch.arange(length).repeat(2)[None],
        use_cache=False,
    )
    logits: Tensor = out.logits[:, :length]
    return logits.index_fill(-1, torch.tensor([job.policy.mask_id]), -torch.inf)  # which is no outcome here


def expected(job: SupervisedTrainer, batch: Noised, share: list[int]) -> tuple[Tensor, Tensor, int]:
    """The summed losses of a pass, the confidence losses, and the number of tokens that the former average over."""
    c, end, data = job.task.cfg.block_diffusion, job.policy.tokenizer.eos_token_id, job.task.cfg.data
    samples = [job.task.examples[i] for i in share]
    length = max(len(s.prompt) + len(s.response) for s in samples)
    if c.train_fill == "max_length":
        length = data.max_prompt_length + data.max_response_length
    length = -(-length // SIZE) * SIZE
    x_0 = torch.full((len(samples), length), end)
    response = torch.zeros(x_0.shape, dtype=torch.bool)
    for i, s in enumerate(samples):
        tokens = s.prompt + s.response
        x_0[i, : len(tokens)] = torch.tensor(tokens)
        last = length if c.train_fill == "max_length" else -(-len(tokens) // SIZE) * SIZE
        assert tokens[-1] == end or last == len(tokens), "what is cut is cut behind a block"
        response[i, len(s.prompt) : last] = True
    # what is masked, and how likely it was, are the job's
    s, rate = batch.states, torch.ones(x_0.shape)
    x_t = x_0.clone()
    real = (s.weight != 0).any(-1)
    for i, k in real.nonzero().tolist():
        x_t[i, s.place[i, k]] = s.tokens[i, s.at[i, k]]
        rate[i, s.place[i, k]] = batch.rate[i, k]
    masked = x_t == job.policy.mask_id
    assert not (masked & ~response).any() and torch.equal(x_t[~masked], x_0[~masked])
    logits = doubled(job, x_t, x_0)
    if not c.same_token_labels:
        logits, masked, x_0 = logits[:, :-1], masked[:, 1:], x_0[:, 1:]
    log_p = logits[masked].log_softmax(-1)
    losses = -log_p.gather(1, x_0[masked][:, None])[:, 0]
    right = log_p.argmax(-1) == x_0[masked]
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0))[right].sum(-1)
    if c.elbo_weight:
        return (losses / rate[masked]).sum(), entropy.sum(), int(response.sum())
    if c.loss_agg_mode == "micro-batch-mean":
        return losses.mean(), entropy.sum() / max(int(right.sum()), 1), 1
    return losses.sum(), entropy.sum(), int(masked.sum())


def compared(cfgs: dict[str, BlockDiffusionTaskConfig]) -> dict[str, Any]:
    """Loss and gradients of a step, actual and expected, by variant."""
    found = {}
    for name, cfg in cfgs.items():
        job = build(cfg)
        parameters = job.policy.trained.parameters
        for step in range(4):  # until some tokens are predicted right
            job.update(step)
        share = job.task.shares.of_step(4)
        passes = job.task.passes(share, 4)
        results = [job.task.loss(batch) for batch in passes]
        ours = torch.stack([loss for loss, _ in results]).sum()
        assert sum(int(sums["right"]) for _, sums in results) > 4
        parts = [expected(job, batch, share[2 * i : 2 * i + 2]) for i, batch in enumerate(passes)]
        count = sum(n for _, _, n in parts)
        theirs = sum(loss + cfg.block_diffusion.confidence_beta * sure for loss, sure, _ in parts) / count
        pairs = [torch.autograd.grad(loss, list(parameters.values())) for loss in (ours, theirs)]
        gaps = [float((a - b).abs().max()) for a, b in zip(*pairs, strict=True)]
        largest = max(float(g.abs().max()) for g in pairs[0])
        found[name] = (float(ours.detach()), float(theirs.detach()), max(gaps), largest)
    return found


def test_the_loss_is_that_of_two_halves(blocks_folder: Path, tmp_path: Path) -> None:
    (found,) = run_ranks(
        compared, 1, {name: variant(blocks_folder, tmp_path, name, "optim.lr=1e-2") for name in VARIANTS}
    )
    for name, (ours, theirs, gap, largest) in found.items():
        assert ours == pytest.approx(theirs, rel=1e-5), name
        assert gap < 1e-5 < largest, name


def trained(cfgs: dict[str, BlockDiffusionTaskConfig]) -> dict[str, Any]:
    """Run each job to its end; returns rows of metrics, and the weights."""
    found = {}
    for name, cfg in cfgs.items():
        job = build(cfg)
        job.fit()
        found[name] = {
            "rows": rows(Path(cfg.trainer.output_dir)) if job.world.rank == 0 else [],
            "weights": full_weights(job.policy.trained.parameters),
        }
    return found


@pytest.mark.long
def test_layouts_agree(blocks_folder: Path, tmp_path: Path) -> None:
    """Replicas and shards, passes of another size, and ranks that share samples: masks are drawn per sample."""

    def jobs(folder: str, micro: int, *keys: str) -> dict[str, BlockDiffusionTaskConfig]:
        size = f"block_diffusion.micro_batch_size_per_gpu={micro}"
        own = {name: variant(blocks_folder, tmp_path / folder, name, size, *keys) for name in ("bound", "shifted")}
        at = tmp_path / folder / "lora"
        val = (f"data.val_files=[{at / 'sure' / 'chats.jsonl'}]", "trainer.test_freq=1", "rollout.threshold=0.02")
        reward = f"reward.functions=[{{path: '{at / 'sure' / 'reward.py'}:evenness'}}]"
        lora = variant(blocks_folder, at, "sure", size, "model.lora_rank=4", reward, *val, *keys)
        return own | {"lora": lora}

    (one,) = run_ranks(trained, 1, jobs("one", 4))
    four = run_ranks(trained, 4, jobs("four", 1, "parallel.fsdp_size=2"))
    two = run_ranks(trained, 2, jobs("two", 4, "parallel.ulysses_sequence_parallel_size=2"))
    for others, name in product((four, two), one):
        for a, b in zip(one[name]["rows"], others[0][name]["rows"], strict=True):
            assert a.keys() == b.keys()
            for key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-6), (name, key)
        assert_same_weights(one[name]["weights"], others[0][name]["weights"], 1e-3)


def rare(cfgs: list[BlockDiffusionTaskConfig]) -> list[list[int]]:
    """The numbers of masked tokens in each pass of jobs that are trained to their end."""
    found = []
    for cfg in cfgs:
        job = build(cfg)
        passes = [batch for step in range(2) for batch in job.task.passes(job.task.shares.of_step(step), step)]
        assert all(job.task.loss(batch)[0].requires_grad for batch in passes)
        job.fit()
        found.append([batch.count for batch in passes])
    return found


@pytest.mark.full
def test_passes_without_a_masked_token(blocks_folder: Path, tmp_path: Path) -> None:
    """They have a loss of 0, and a backward pass, for which other ranks wait."""
    cfgs = []
    for name, rate in (("none", 1e-9), ("some", 0.06)):
        noise = [f"noise_range_low={rate}", f"noise_range_high={rate}", "micro_batch_size_per_gpu=1"]
        keys = [f"block_diffusion.{key}" for key in (*noise, "confidence_beta=1")]
        mean = "block_diffusion.loss_agg_mode=" + ("token-mean" if name == "none" else "micro-batch-mean")
        cfgs.append(tiny_sft_config(blocks_folder, tmp_path / name, *keys, mean, "parallel.fsdp_size=2"))
    none, some = zip(*run_ranks(rare, 2, cfgs), strict=True)
    assert not any(sum(counts) for counts in none)
    assert any(a == 0 < b for a, b in zip(*some, strict=True)) or any(b == 0 < a for a, b in zip(*some, strict=True))
    for name in ("none", "some"):
        for row in rows(tmp_path / name / "out"):
            assert row["train/loss"] >= 0 and row["actor/updates_non_finite"] == 0
            assert (row["train/masked_tokens"] == 0) == (name == "none") == (row["actor/grad_norm"] == 0)
