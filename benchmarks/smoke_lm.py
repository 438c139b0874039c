"""Checks of `make gpu-smoke` on language models: packed attention, and vLLM together with a judge."""

import math
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from measure import HERE
from smoke_kernels import has_vllm
from smoke_lines import CUDA_ONLY, Line, device, judged, nothing, tried
from smoke_steps import language_model, lm_config, measured
from torch import Tensor

from phalanx.functional.tokens import TokenTrace

WITHIN = 0.02  # nats: the largest accepted mean difference of log-probs in bfloat16
KINDS = ("sdpa", "flash_attention_2", "flex_attention")


def packed() -> Iterator[Line]:
    """Log-probabilities of packed samples with each kind of attention, compared with those of padded samples."""
    with tempfile.TemporaryDirectory(prefix="phalanx-smoke-packed-") as name:
        folder = language_model(Path(name))
        padded = log_probs(folder, "sdpa", False)
        for kind in KINDS:
            title = f"packed by {kind}, off from padded"
            if kind != "sdpa" and device().type == "cpu":
                yield nothing(title, CUDA_ONLY)
            elif kind == "flash_attention_2" and find_spec("flash_attn") is None:
                yield nothing(title, "flash-attn is not installed")
            else:
                yield from tried(title, partial(_packed, title, folder, kind, padded))


def _packed(title: str, folder: Path, kind: str, padded: Tensor) -> Iterator[Line]:
    off = float((log_probs(folder, kind, True) - padded).abs().mean())
    yield judged(title, off <= WITHIN, off, "nats")


def log_probs(folder: Path, kind: str, pack: bool) -> Tensor:
    """Log-probabilities of the tokens of four samples of different lengths."""
    keys = (f"model.attn_implementation={kind}", f"model.use_remove_padding={str(pack).lower()}")
    trainer, _ = measured(lm_config(folder, *keys))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 500, (4, 24), generator=generator).to(device())
    starts, lengths = torch.tensor([4, 9, 1, 2]).to(device()), torch.tensor([3, 11, 1, 7]).to(device())
    trace = TokenTrace(ids, starts, lengths, 11)
    with torch.no_grad():
        scored: Tensor = trainer.policy.scored(trace, 1.0).log_prob * trace.mask
    return scored.float().cpu()


def vllm_beside_a_judge() -> Iterator[Line]:
    """Steps that vLLM samples and a sleeping judge grades, with vLLM asleep or awake while the model trains."""
    for sleep in (True, False):
        title = f"vLLM {'asleep' if sleep else 'awake'} beside a judge, gradient norm"
        if not has_vllm() or device().type == "cpu":
            yield nothing(title, CUDA_ONLY if has_vllm() else "vllm is not installed")
        else:
            yield from tried(title, partial(_beside_a_judge, title, sleep))


def _beside_a_judge(title: str, sleep: bool) -> Iterator[Line]:
    with tempfile.TemporaryDirectory(prefix="phalanx-smoke-judge-") as name:
        folder = language_model(Path(name))
        rewards = f"[{{path: '{HERE / 'smoke_rewards.py'}:of_texts'}}, {{name: llm_judge, weight: 0}}]"
        keys = [f"reward.functions={rewards}", f"reward.model.path={folder}", "reward.model.engine=transformers"]
        keys += ["reward.model.max_tokens=8", "rollout.engine=vllm", "rollout.gpu_memory_utilization=0.3"]
        trainer, rows = measured(lm_config(folder, *keys, f"rollout.sleep={str(sleep).lower()}"))
        trainer.fit()
    norm = rows[0]["actor/grad_norm"]
    yield judged(
        title, 0 < norm < math.inf, norm, "", f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB by torch"
    )
