"""A causal language model of transformers, and its tokenizer."""

import logging
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from phalanx.config.lm import LMModelConfig
from phalanx.engines.loading import check_weights, loading
from phalanx.functional.tokens import token_scores
from phalanx.models.lm.headers import check_folder

log = logging.getLogger(__name__)

# multipliers of the logits that `CausalLM` would have to know of
_SCALED = ("logit_scale", "logits_scaling")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CausalLM(nn.Module):
    """A language model whose training does not hold logits of a whole batch: its forward returns the scores of tokens.

    Both ways of calling it go through this module, the root of FSDP; a call of `lm` would make that a second root.
    """

    def __init__(self, lm: Any, chunk: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.lm, self.chunk, self.recomputes = lm, chunk, recomputes
        softcap = lm.config.to_dict().get("final_logit_softcapping")
        self.softcap: float | None = softcap

    def forward(
        self, ids: Tensor | None = None, predicting: Tensor | None = None, temperature: float = 1.0, **decoding: Any
    ) -> Any:
        """Scores [N] of the tokens that follow the positions `predicting` [B, T - 1] of ids [B, T]: see token_scores.

        With other keywords, the language model's own forward.
        """
        if ids is None or predicting is None:
            self._recompute(False)
            return self.lm(**decoding)
        self._recompute(torch.is_grad_enabled())
        # padding stands behind, where a causal model does not look: no mask is needed
        states = self.lm.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[predicting]
        head = self.lm.get_output_embeddings()
        tokens = ids[:, 1:][predicting]
        return token_scores(states, head, tokens, temperature=temperature, softcap=self.softcap, chunk=self.chunk)

    def _recompute(self, on: bool) -> None:
        """Whether layers with gradient checkpointing do it: in transformers they do where they are in training mode,
        in which all else here is never.
        """
        if self.recomputes:
            for block in self.blocks():
                block.training = on

    def blocks(self) -> list[nn.Module]:
        """The layers, which are sharded one by one; they go by other names in older models."""
        lists = [child for child in self.lm.get_decoder().children() if isinstance(child, nn.ModuleList)]
        return list(lists[0])


def load_model(config: LMModelConfig, dtype: torch.dtype, chunk: int) -> CausalLM:
    """Load `config.path` in `dtype`; ValueError, in one line, for what does not load."""
    check_folder(config.path)
    transformers.utils.logging.disable_progress_bar()  # every rank would draw its own
    log.info("loading the model %s", config.path)
    with loading(f"model.path: {config.path!r} does not load"):
        settings = transformers.AutoConfig.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=False
        )
        lm, info = transformers.AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    if settings.to_dict().get("is_decoder") is False:
        raise ValueError(f"model.path: {config.path!r} is an encoder; expected a causal language model")
    if not any(isinstance(child, nn.ModuleList) for child in lm.get_decoder().children()):
        raise ValueError(f"model.path: {config.path!r}: the layers of a {type(lm).__name__} are not where others are")
    check_weights(info, f"model.path: {config.path!r}: its weights are not whole")
    scaled = [name for name in _SCALED if settings.to_dict().get(name) not in (None, 1, 1.0)]
    if scaled:
        raise ValueError(f"model.path: {config.path!r}: a model whose logits are scaled ({scaled[0]}) is not supported")
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return CausalLM(lm, chunk, recomputes=config.gradient_checkpointing)


def load_tokenizer(config: LMModelConfig) -> Any:
    """The tokenizer of `config.path`; ValueError for one that cannot end a response."""
    check_folder(config.path)
    with loading(f"model.path: the tokenizer of {config.path!r} does not load"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=False
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model.path: {config.path!r}: its tokenizer has no eos_token, by which a response would end")
    if tokenizer.chat_template is None:
        log.warning("the tokenizer of %s has no chat template: prompts are texts to go on with", config.path)
    return tokenizer


def end_tokens(lm: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a response: the tokenizer's, and those of the model's generation_config.json."""
    own = lm.generation_config.eos_token_id
    found = own if isinstance(own, list) else [own] if own is not None else []
    return sorted({tokenizer.eos_token_id, *found})
