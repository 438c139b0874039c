"""A check at load time that all code paths of a job give a language model the same log-probabilities.

Samples are drawn by decoding with a cache, and trained by passes over whole samples, padded or packed into one row. The
reference is the model's own forward over each sample separately. The check rejects classes that would be sampled and
trained as two different models: that scale states outside of decoder and head, that build no mask from position ids, or
that keep a state which padding disturbs.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from phalanx.config.messages import reason
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.context_parallel import KEY
from phalanx.functional.tokens import FAR, left_padded
from phalanx.models.lm import packing
from phalanx.models.lm.kv_rows import CACHE, Columns, KVRows, states_of
from phalanx.models.lm.model import CausalLM

log = logging.getLogger(__name__)

PACKED, GROUPED = "passes over packed samples", "passes over samples that share a prompt"
CACHED = "decoding with a cache"
LENGTHS = (14, 9)  # tokens of the two samples
RESPONSE = 5  # last tokens of each that count as its response, and are decoded
# Bounds of the difference. In float32: of each token's log-probability, in nats. In bfloat16, whose logits have a
# resolution of 1/256: of its mean over the tokens, as a fraction of their mean log-probability.
FLOAT32_BOUND, BFLOAT16_BOUND = 1e-4, 0.02


@dataclass(frozen=True)
class Probe:
    """Two short samples ids [2, T]: their `lengths`, the `counts` of their last tokens that are scored, the positions
    `predicting` [2, T - 1] of these, and the `looks` of their images.
    """

    ids: Tensor
    lengths: list[int]
    counts: list[int]
    predicting: Tensor
    looks: list[Any]

    @classmethod
    def of(
        cls, module: CausalLM, tokenizer: Any, device: torch.device, image_prompt: tuple[list[int], Any] | None
    ) -> "Probe":
        """Random tokens; the first sample has the prompt with an image, if one is given."""
        rows = module.lm.get_input_embeddings().num_embeddings
        ids, lengths, looks = _random_samples(tokenizer, rows).to(device), list(LENGTHS), [None, None]
        counts = [length - 1 for length in lengths]
        if image_prompt is not None:
            prompt, looks[0] = torch.tensor(image_prompt[0], device=device), image_prompt[1]
            lengths[0], counts[0] = len(prompt) + RESPONSE, RESPONSE
            ids = pad(ids, (0, max(lengths) - ids.shape[1]))
            ids[0] = torch.cat([prompt, ids[0, :RESPONSE]])
        at, ends = torch.arange(1, ids.shape[1], device=device), torch.tensor(lengths, device=device)[:, None]
        predicting = (at < ends) & (at >= ends - torch.tensor(counts, device=device)[:, None])
        return cls(ids, lengths, counts, predicting, looks)

    def reference(self, module: CausalLM) -> Tensor:
        """Log-probs of all scored tokens by the model's own forward over each sample."""
        parts = []
        for i, length in enumerate(self.lengths):
            parts.append(_stock_log_probs(module, self.ids[i, :length], self.looks[i])[-self.counts[i] :])
        return torch.cat(parts)

    def log_probs(self, module: CausalLM, path: str) -> Tensor:
        """Log-probs of all scored tokens, or only of the responses, by one of the paths."""
        if path == CACHED:
            return _decoded_log_probs(module, self.ids, self.lengths, self.looks)
        if path == GROUPED:
            return self._grouped_log_probs(module)
        row = packing.Row.of(self.ids, self.lengths) if path == PACKED else None
        scores: Tensor = module(self.ids, self.predicting, 1.0, row, looks=self.looks)[0]
        return scores

    def _grouped_log_probs(self, module: CausalLM) -> Tensor:
        """By a row with each sample twice and its prompt once; returned are those of the second copies."""
        twice = torch.tensor([0, 1, 0, 1], device=self.ids.device)
        starts = [length - RESPONSE for length in self.lengths] * 2
        row = packing.Row.of(self.ids[twice], self.lengths * 2, starts, [0, 1, 0, 1])
        values: Tensor = module(self.ids[twice], self.predicting[twice], 1.0, row, looks=self.looks * 2)[0]
        return values[len(values) // 2 :]


def check_agreement(
    module: CausalLM,
    config: LMModelConfig,
    tokenizer: Any,
    device: torch.device,
    *,
    decodes: bool,
    image_prompt: tuple[list[int], Any] | None = None,
) -> None:
    """Score two short samples by each path. All ranks run the same passes, and exchange no results.

    module: may be sharded. decodes: it samples as well. image_prompt: prompt of the first sample, tokens with an image
    and its look (phalanx.models.lm.vision). Raises ValueError, in one line, if paths differ by more than the bounds
    above, or if the model fails in one.
    """
    probe = Probe.of(module, tokenizer, device, image_prompt)
    trains = "this model cannot be trained here" if module.context is None else f"set {KEY} to 1"
    hints = {"passes over padded samples": trains}
    if module.packs:
        hints[PACKED] = f"set {config:use_remove_padding}=false"
    if module.groups:
        hints[GROUPED] = f"set {config:use_prefix_grouper}=false"
    if decodes:
        hints[CACHED] = f"this model cannot sample here; set {config:.rollout.engine}=vllm"
    values: dict[str, Tensor] = {}
    # Eager, so that blocks are compiled later for the shapes of the job, and not for these few tokens.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        path = "its forward pass"
        try:
            reference = probe.reference(module)
            for path in hints:
                values[path] = probe.log_probs(module, path)
        except (dist.DistError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a class of transformers may raise any type
            problem = f"a {type(module.lm).__name__} fails in {path} ({reason(error)})"
            if _goes_without(module, path, problem):
                check_agreement(module, config, tokenizer, device, decodes=decodes, image_prompt=image_prompt)
                return
            hint = hints.get(path, "expected a causal language model")
            raise ValueError(f"model.path: {config.path!r}: {problem}; {hint}") from error
    if not reference.isfinite().all():
        raise ValueError(f"model.path: {config.path!r}: log-probs of a {type(module.lm).__name__} are NaN or infinite")
    for path, value in values.items():
        expected = reference
        if len(value) < len(reference):  # of the responses only
            expected = torch.cat([part[-RESPONSE:] for part in reference.split(probe.counts)])
        difference = (value.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
        if config.dtype == "float32":
            size, bound = float(difference.max()), FLOAT32_BOUND
        else:
            size, bound = float(difference.mean()), BFLOAT16_BOUND * float(expected.abs().mean())
        if not size <= bound:
            problem = (
                f"log-probs of a {type(module.lm).__name__} by {path} differ by {size:.2g} from its forward pass's, "
                f"more than {bound:.2g}"
            )
            if not _goes_without(module, path, problem):
                raise ValueError(f"model.path: {config.path!r}: {problem}; {hints[path]}")
            if path == CACHED:
                check_agreement(module, config, tokenizer, device, decodes=decodes, image_prompt=image_prompt)


def _goes_without(module: CausalLM, path: str, problem: str) -> bool:
    """Whether the model can do without `path`, which is only tried; from then on it does."""
    if path == CACHED and module.masks:
        module.masks = False
        return True
    if not module.tries or path not in (PACKED, GROUPED):
        return False
    if module.groups or path == PACKED:
        log.info("samples are %s: %s", "padded, not packed" if path == PACKED else "packed with their prompts", problem)
    module.packs, module.groups = path == GROUPED and module.packs, False
    return True


def _random_samples(tokenizer: Any, rows: int) -> Tensor:
    """[2, longest] random ids without special tokens; those after a sample's length are padding."""
    special = set(tokenizer.all_special_ids)
    vocabulary = [token for token in range(min(len(tokenizer), rows)) if token not in special] or [0]
    at = torch.randint(len(vocabulary), (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    return torch.tensor(vocabulary)[at]


def _stock_log_probs(module: CausalLM, ids: Tensor, look: Any) -> Tensor:
    """Log-probs [T - 1] of a sample's ids [T] by the model's own forward."""
    inputs = {"input_ids": ids[None, :-1]} if look is None else module.vision.stock(ids[None, :-1], look)
    logits = module(**inputs, use_cache=False).logits[0]
    return _log_probs(module, logits, ids[1:])


def _log_probs(module: CausalLM, logits: Tensor, tokens: Tensor) -> Tensor:
    if module.never:
        logits = logits.index_fill(-1, torch.tensor(module.never, device=logits.device), FAR)
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def _decoded_log_probs(module: CausalLM, ids: Tensor, lengths: Sequence[int], looks: Sequence[Any]) -> Tensor:
    """Log-probs [2 x RESPONSE] of the responses, decoded as in phalanx.rollout.lm.policy_session.

    Prompts are left-padded, and the second one gets two samples, of which only the last goes on, as when one has ended.
    """
    prompts, device = [length - RESPONSE for length in lengths], ids.device
    read, mask = left_padded([ids[i, :length].tolist() for i, length in enumerate(prompts)], pad=0)
    read, mask = read.to(device), mask.to(device)
    cache, following = DynamicCache(config=module.lm.config), prompts
    first: dict[str, Any] = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    if module.vision is not None:
        first, following = module.vision.prefill(read, prompts, looks)
    out = module(input_ids=read, attention_mask=mask, **first, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    if module.masks and KVRows.serves(module.lm.config):
        kept: Any = KVRows(module.lm.config, 3, max(lengths))
        for row, prompt in enumerate((0, 1, 1)):
            kept.fill([row], states_of(cache, prompt, prompts[prompt]))
    else:
        kept = Columns(cache, mask, (0, 1, 1))
    kept.select([0, 2], max(prompts))
    columns = []
    for t in range(RESPONSE):
        tokens = torch.stack([ids[i, length + t] for i, length in enumerate(prompts)])
        columns.append(_log_probs(module, out.logits[:, -1], tokens))
        if t + 1 < RESPONSE:
            at, positions = (torch.tensor(start, device=device)[:, None] + t for start in (prompts, following))
            given = kept.arguments(at, max(prompts) + t + 1)
            out = module(input_ids=tokens[:, None], position_ids=positions, **given, use_cache=True)
    return torch.stack(columns, 1).flatten()
