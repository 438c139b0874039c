"""SD3's joint attention through diffusers' dispatch, so that `model.attn_backend` is obeyed there too.

diffusers' own processor for this family calls torch's scaled_dot_product_attention and ignores the backend.
"""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor


class DispatchedJointAttention:
    """The computation of diffusers' JointAttnProcessor2_0 with the attention itself dispatched."""

    # diffusers' set_attention_backend writes these on processors
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Any:
        """hidden_states [N, L, D], encoder_hidden_states [N, T, D] or None -> the same shapes."""
        q, k, v = (self._heads(attn, p(hidden_states)) for p in (attn.to_q, attn.to_k, attn.to_v))
        q, k = self._norm(attn.norm_q, q), self._norm(attn.norm_k, k)
        if encoder_hidden_states is not None:
            added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            tq, tk, tv = (self._heads(attn, p(encoder_hidden_states)) for p in added)
            tq, tk = self._norm(attn.norm_added_q, tq), self._norm(attn.norm_added_k, tk)
            q, k, v = torch.cat([q, tq], 1), torch.cat([k, tk], 1), torch.cat([v, tv], 1)
        out = dispatch_attention_fn(q, k, v, backend=self._attention_backend, parallel_config=self._parallel_config)
        out = out.flatten(2, 3).to(q.dtype)
        image = attn.to_out[1](attn.to_out[0](out[:, : hidden_states.shape[1]]))
        if encoder_hidden_states is None:
            return image
        text = out[:, hidden_states.shape[1] :]
        return image, text if attn.context_pre_only else attn.to_add_out(text)

    @staticmethod
    def _heads(attn: Any, x: Tensor) -> Tensor:
        return x.unflatten(-1, (attn.heads, -1))

    @staticmethod
    def _norm(norm: Any, x: Tensor) -> Tensor:
        return x if norm is None else norm(x)
