"""`model.attn_backend`: diffusers' attention dispatch, tested before its use, and attention processors that use it.

That of SD3 and HunyuanVideo computes no outputs that are not used; Qwen-Image's is for `model.compile`.
"""

from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from phalanx.distributed.context_parallel import ContextGroup
from phalanx.models.flow.family import FlowModel

# LoRA targets: the projections of joint attention over image and text tokens
JOINT_ATTENTION = (
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
    "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
)  # fmt: skip


def set_backend(model: FlowModel, backend: str, device: torch.device) -> None:
    """Let the transformer compute attention by `backend`, on `device`.

    Raises ValueError if diffusers does not know the backend, or if it lacks what training needs: a backward pass, and a
    mask if the family uses one. Several backends report that only when their kernel runs, so it is tried here.
    """
    known = sorted(b.value for b in AttentionBackendName)
    if backend not in known:
        raise ValueError(f"model.attn_backend: {backend!r} is unknown to diffusers; known: {', '.join(known)}")
    problem = "cannot be used here"
    try:
        model.transformer.set_attention_backend(backend)
        _try_backend(model, backend, device, masked=False)
        if model.masks_text:
            problem = "takes no mask, which this model needs for prompts of different lengths"
            _try_backend(model, backend, device, masked=True)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        line = str(error).strip().split("\n")[0]
        raise ValueError(f"model.attn_backend: {backend!r} {problem}: {line}") from None


@torch.enable_grad()
def _try_backend(model: FlowModel, backend: str, device: torch.device, *, masked: bool) -> None:
    """Run the forward and the backward pass of a tiny attention with the model's heads."""
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


def sharing_ranks(parallel_config: Any) -> ContextGroup | None:
    """The ranks that share tokens, from the `_parallel_config` of a processor.

    It is for attention that diffusers cannot split: causal, or with different numbers of queries and keys.
    """
    return None if parallel_config is None else ContextGroup.of(parallel_config.context_parallel_config._mesh)


def image_heads(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, L, heads, head_dim] of image tokens x [N, L, D]."""
    q, k = _project_heads(attn, x, attn.to_q, attn.norm_q), _project_heads(attn, x, attn.to_k, attn.norm_k)
    return q, k, _project_heads(attn, x, attn.to_v)


def text_heads(attn: Any, x: Tensor, queried: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `image_heads`, of text tokens; `queried`: tokens to compute the queries of, by default all."""
    q = _project_heads(attn, x if queried is None else queried, attn.add_q_proj, attn.norm_added_q)
    k = _project_heads(attn, x, attn.add_k_proj, attn.norm_added_k)
    return q, k, _project_heads(attn, x, attn.add_v_proj)


def _project_heads(attn: Any, x: Tensor, projection: Any, norm: Any = None) -> Tensor:
    heads = projection(x).unflatten(-1, (attn.heads, -1))
    return heads if norm is None else norm(heads)


class DispatchedJointAttention:
    """The joint attention of SD3, and of HunyuanVideo with rotary embeddings of the image and a mask of the text.

    diffusers' own processor for SD3, JointAttnProcessor2_0, ignores the backend. In the last block it also computes the
    queries of the text, whose outputs are not used. The one for HunyuanVideo builds a mask of L x L for each block and
    row, which takes gigabytes for a video; here it is a mask of the keys.
    """

    # diffusers' set_attention_backend sets these on processors; None: its default backend
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """hidden_states [N, L, D], encoder_hidden_states [N, T, D] or None, its mask [N, T] -> the same shapes."""
        q, k, v = image_heads(attn, hidden_states)
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        if encoder_hidden_states is not None:
            # projecting zero tokens, instead of skipping the projection, gives the layer a gradient of 0 and not None
            queried = encoder_hidden_states[:, :0] if attn.context_pre_only else encoder_hidden_states
            text_q, text_k, text_v = text_heads(attn, encoder_hidden_states, queried)
            q, k, v = torch.cat([q, text_q], 1), torch.cat([k, text_k], 1), torch.cat([v, text_v], 1)
        mask = attention_mask
        if mask is not None:
            mask = torch.cat([mask.new_ones(hidden_states.shape[:2]), mask], 1)[:, None, None]
        out = self.attend(q, k, v, mask)
        image = attn.to_out[1](attn.to_out[0](out[:, : hidden_states.shape[1]]))
        if encoder_hidden_states is None:
            return image
        if attn.context_pre_only:
            return image, None
        return image, attn.to_add_out(out[:, hidden_states.shape[1] :])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention by diffusers' dispatch: [N, L, heads, head_dim] each -> [N, L, D]."""
        out = dispatch_attention_fn(
            q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return out.flatten(2, 3).to(q.dtype)


class RealRotaryAttention(DispatchedJointAttention):
    """Qwen-Image's joint attention with rotary embeddings [L, D / 2, 2] as real numbers.

    diffusers' own processor uses complex numbers, for which Inductor generates no fused kernel, so that each rotation
    takes several passes over queries and keys.
    """

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden_states [N, L, D], encoder_hidden_states [N, T, D], its mask [N, T] -> the same shapes.

        `attention_mask` is always None, as for diffusers' own processor.
        """
        assert encoder_hidden_states is not None and image_rotary_emb is not None
        image, text = image_rotary_emb
        length = encoder_hidden_states.shape[1]
        q, k, v = image_heads(attn, hidden_states)
        text_q, text_k, text_v = text_heads(attn, encoder_hidden_states)
        q = torch.cat([rotated(text_q, text), rotated(q, image)], 1)
        k = torch.cat([rotated(text_k, text), rotated(k, image)], 1)
        v = torch.cat([text_v, v], 1)
        mask = encoder_hidden_states_mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(hidden_states.shape[:2])], 1)[:, None, None]
        out = self.attend(q, k, v, mask)
        image_out = attn.to_out[1](attn.to_out[0](out[:, length:].contiguous()))
        return image_out, attn.to_add_out(out[:, :length].contiguous())


def use_real_rotations(transformer: Any) -> None:
    """Let a Qwen-Image transformer use RealRotaryAttention."""
    transformer.set_attn_processor(RealRotaryAttention())
    # converted outside the blocks, so that the compiled blocks have no complex inputs
    transformer.pos_embed.register_forward_hook(lambda module, args, out: tuple(map(torch.view_as_real, out)))


def rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate adjacent pairs in x [N, L, heads, D], in float32.

    rotations: cosines and sines [L, D / 2, 2], or [N, L, D / 2, 2] to rotate each row by its own.
    """
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotations.unsqueeze(-3).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(3).to(x.dtype)
