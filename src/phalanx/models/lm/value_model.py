"""The critic: a causal language model with a value head instead of its logits, sharded over the mesh."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.critic import CriticModelConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.section import copy_with
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm import experts, packing
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.models.lm.load_folder import load_model
from phalanx.models.lm.model import DTYPES, CausalLM, decoder_of, layers_of, outputs_at, positions, set_checkpointing
from phalanx.models.lm.packing import Row
from phalanx.models.trained import TrainedModel


class ValueLM(nn.Module):
    """A language model's layers with a value head, which is initialised to 0."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.vision = model.vision  # see CausalLM
        self.backbone = decoder_of(model.lm) if self.vision is None else self.vision.model
        self.recomputes, self.context = model.recomputes, model.context
        self.value = nn.Linear(model.lm.get_output_embeddings().in_features, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(
        self, ids: Tensor, predicting: Tensor, row: Row | None = None, looks: Sequence[Any] | None = None
    ) -> Tensor:
        """Values [N] float32 of the text up to each position in `predicting` [B, T - 1] of ids [B, T].

        `row` and `looks` as in CausalLM.
        """
        if self.recomputes:
            set_checkpointing(self, torch.is_grad_enabled())
        output, share = outputs_at(self, self.backbone, ids, predicting, row, looks)
        # in float32, because bfloat16 has only about three significant digits
        states = output.last_hidden_state.float()
        values = nn.functional.linear(states, self.value.weight.float(), self.value.bias.float()).squeeze(1)
        return values if share is None else share.whole([values])[0]

    def blocks(self) -> list[nn.Module]:
        """The layers, which are sharded one by one."""
        return layers_of(self.backbone if self.vision is None else self.vision.decoder)


class LMCritic:
    """See phalanx.training.components.Critic."""

    def __init__(self, trained: TrainedModel, policy: LMPolicy) -> None:
        """`policy`: samples are padded or packed as for this policy."""
        self.trained, self.policy = trained, policy

    def values(self, trace: TokenTrace) -> Tensor:
        """[B, A] float32: the value before each token of the responses, and 0 after their ends."""
        trace, row = self.policy.read(trace)
        values = self.trained.run(self.trained.module, trace.ids, trace.predicting, row, trace.looks)
        mask = trace.mask
        return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


def build_critic(config: CriticModelConfig, parallel: ParallelConfig, policy: LMPolicy, seed: int) -> LMCritic:
    """Load the critic, by default from the policy's folder, and shard it over the policy's mesh.

    Raises ValueError, in one line, for a folder that does not load or that does not embed the policy's vocabulary.
    """
    plain = {"lora_rank": 0, "lora_path": None, "quantization": None, "gradient_checkpointing_blocks": None}
    named = {name: value for name, value in vars(config).items() if value is not None}
    named["revision"] = policy.config.revision if config.path is None else config.revision
    settings = copy_with(policy.config, **plain, **named)
    if config.path is not None:
        settings.rename_keys("critic.model")
    here, images = f"{settings:path}: {settings.path!r}", policy.vision is not None
    model = load_model(settings, torch.float32, chunk=1, stored=True, images=images)
    if images:
        if model.vision.name != policy.vision.name:
            raise ValueError(f"{here} is a {model.vision.name}; expected a {policy.vision.name}")
        model.vision.owner, model.vision.dummy = "critic", policy.vision.dummy
    rows, vocabulary = model.lm.get_input_embeddings().num_embeddings, len(policy.tokenizer)
    if rows < vocabulary:
        raise ValueError(f"{here} embeds {rows} tokens, and the policy's tokenizer has {vocabulary}")
    longest, limit = policy.data.max_prompt_length + policy.data.max_response_length, positions(model.lm.config)
    if limit is not None and limit < longest:
        raise ValueError(
            f"{here} has {limit} positions, and data.max_prompt_length "
            f"with data.max_response_length is {longest} tokens"
        )
    packing.settle(model, policy.world, DTYPES[settings.dtype], settings)
    model.share_positions(policy.world, settings.attn_implementation)
    spread = experts.spread(model.lm, settings, parallel, policy.world.shard_size)
    critic = ValueLM(model)
    trained = TrainedModel(
        critic,
        critic.blocks(),
        policy.world,
        settings,
        parallel,
        DTYPES[settings.dtype],
        seed=seed,
        experts=spread,
        kept=torch.float32,
        beside=model.vision.beside() if images else None,
    )
    return LMCritic(trained, policy)
