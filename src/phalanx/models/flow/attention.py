"""`model.attn_backend`: diffusers' attention dispatch, tried before it is used; SD3 obeys it too."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor

from phalanx.models.flow.family import FlowModel


def set_backend(model: FlowModel, backend: str, device: torch.device) -> None:
    """Let the transformer compute attention by `backend`, on `device`.

    Raises ValueError where diffusers does not know it, or where it cannot do what training asks of
    it: a backward pass, and a mask if the family has one. Several backends find that out no sooner
    than in their kernel.
    """
    known = sorted(b.value for b in AttentionBackendName)
    if backend not in known:
        raise ValueError(f"model.attn_backend: {backend!r} is unknown to diffusers; known: {', '.join(known)}")
    try:
        model.transformer.set_attention_backend(backend)
        _try(model, backend, device, masked=False)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"model.attn_backend: {backend!r} cannot be used here: {_line(error)}") from None
    if not model.masks_text:
        return
    try:
        _try(model, backend, device, masked=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"model.attn_backend: {backend!r} takes no mask, which this model needs for prompts of different lengths: "
            f"{_line(error)}"
        ) from None


@torch.enable_grad()
def _try(model: FlowModel, backend: str, device: torch.device, *, masked: bool) -> None:
    """A tiny attention, forward and backward, with the model's heads."""
    length = 8
    shape = (1, length, *model.heads())
    q, k, v = (torch.ones(shape, device=device, dtype=model.dtype) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    mask = torch.arange(length, device=device).view(1, 1, 1, -1) < length - 1 if masked else None
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=AttentionBackendName(backend))
    if not out.requires_grad:
        raise ValueError("it has no backward pass")
    out.sum().backward()


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


class DispatchedJointAttention:
    """SD3's joint attention, dispatched.

    diffusers' own processor for this family, JointAttnProcessor2_0, computes the same by torch's
    scaled_dot_product_attention and ignores the backend.
    """

    # diffusers' set_attention_backend writes these on processors
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """hidden_states [N, L, D], encoder_hidden_states [N, T, D] or None -> the same shapes."""
        q, k, v = (self._heads(attn, p(hidden_states)) for p in (attn.to_q, attn.to_k, attn.to_v))
        q, k = self._norm(attn.norm_q, q), self._norm(attn.norm_k, k)
        if encoder_hidden_states is not None:
            added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            tq, tk, tv = (self._heads(attn, p(encoder_hidden_states)) for p in added)
            tq, tk = self._norm(attn.norm_added_q, tq), self._norm(attn.norm_added_k, tk)
            q, k, v = torch.cat([q, tq], 1), torch.cat([k, tk], 1), torch.cat([v, tv], 1)
        out = dispatch_attention_fn(
            q, k, v, attn_mask=attention_mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
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
