"""The policy: a causal language model over the mesh, and the replay of what it sampled."""

import copy
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import transformers
from torch import Tensor

from phalanx.config.lm import LMDataConfig, LMModelConfig
from phalanx.config.messages import cut
from phalanx.config.run import ParallelConfig
from phalanx.distributed.mesh import World
from phalanx.functional.tokens import TokenReplay, TokenTrace, Truncation
from phalanx.models.lm import experts
from phalanx.models.lm.agreement import check_agreement
from phalanx.models.lm.chat import prompt_tokens
from phalanx.models.lm.model import (
    DTYPES,
    CausalLM,
    end_tokens,
    load_model,
    load_tokenizer,
    name_in_whole,
    positions,
    read_lora,
)
from phalanx.models.lm.packing import Row
from phalanx.models.lora import ALL_LINEAR, start_from_lora
from phalanx.models.trained import TrainedModel
from phalanx.telemetry.flops import forward_flops, step_flops
from phalanx.types import Prompt, Samples

LORA_TARGETS = (ALL_LINEAR,)  # of a LoRA unless model.target_modules names others


class LMPolicy:
    """See phalanx.types.Policy. `trained` has the weights, `temperature` and `truncation` are those of sampling;
    `config`, `parallel` and `data` are sections of the configuration.
    """

    trace_type: type = TokenTrace

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Any,
        world: World,
        config: LMModelConfig,
        parallel: ParallelConfig,
        data: LMDataConfig,
        *,
        temperature: float,
        seed: int,
        trim: bool = False,
        frozen: bool = False,
        kept: torch.dtype | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        """`trim`: a pass is no wider than its longest sample; `kept`: see Sharded. Raises ValueError for what the model
        refuses.
        """
        self.tokenizer, self.world, self.config, self.data = tokenizer, world, config, data
        self.parallel, self.temperature, self.truncation, self.trim = parallel, temperature, truncation, trim
        self.vision = model.vision
        self.tied = model.lm.config.tie_word_embeddings
        self.settings = model.lm.config if self.vision is None else model.lm.config.get_text_config(decoder=True)
        self.ends = end_tokens(model.lm, tokenizer)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._tokens: dict[bytes, array[int]] = {}  # of prompts, with the chat template
        self._looks: WeakValueDictionary[bytes, Any] = WeakValueDictionary()  # as long as samples have them
        # of prompts with images
        self.reader: Any = None if self.vision is None else self.make_reader()
        self._cost: tuple[float, float] | None = None  # see forward_flops
        self._weights = sum(p.numel() for p in model.parameters())
        self._head = 2 * model.lm.get_output_embeddings().weight.numel()  # operations of a token's logits
        self._check(model)
        model.share_positions(world, config.attn_implementation)
        names = dict(model.named_parameters())
        start_from_lora(model, config.lora_path, partial(read_lora, names=names), kept)
        self.trained = TrainedModel(
            model,
            model.blocks(),
            world,
            config,
            parallel,
            DTYPES[config.dtype],
            lora_targets=LORA_TARGETS,
            seed=seed,
            frozen=frozen,
            experts=experts.spread(model.lm, config, parallel, world.shard_size),
            kept=kept,
            beside=None if self.vision is None else self.vision.beside(),
        )

    def check_agreement(self, *, decodes: bool) -> None:
        """See phalanx.models.lm.agreement; on all ranks that hold the weights."""
        module, device = self.trained.module, self.world.device
        # images first: a trained tower that gives NaN is in the passes without images as well
        for tried in (None,) if self.reader is None else (self.reader.tried, None):
            check_agreement(module, self.config, self.tokenizer, device, decodes=decodes, tried=tried)
        # gathered weights would hide those that a checkpoint brings
        self.trained.sharded.reshard()

    def _check(self, model: CausalLM) -> None:
        if self.config.attn_implementation == "flex_attention" and self.world.device.type == "cpu":
            # it has no backward pass there, and what is compiled for some lengths is no valid C++
            raise ValueError("model.attn_implementation: flex_attention needs a GPU; expected sdpa or eager on CPUs")
        rows = self.rows = model.lm.get_input_embeddings().num_embeddings
        # some folders list special tokens of their other inputs behind those that are embedded
        beyond = len(self.tokenizer) - rows
        if beyond > 0 and beyond > len(self.tokenizer.all_special_ids):
            raise ValueError(
                f"model.path: {self.config.path!r}: its tokenizer has {len(self.tokenizer)} tokens, and the model "
                f"embeds {rows}"
            )
        longest = positions(self.settings)
        wanted = self.data.max_prompt_length + self.data.max_response_length
        if longest is not None and wanted > longest:
            raise ValueError(
                f"data.max_response_length: {self.data.max_response_length} behind data.max_prompt_length "
                f"{self.data.max_prompt_length} is {wanted} tokens, and {self.config.path!r} has {longest} positions"
            )

    # -- text -------------------------------------------------------------------------------------

    def make_reader(self) -> Any:
        """The reader of prompts with images (phalanx.models.lm.vision.Reader)."""
        from phalanx.models.lm.vision import Reader

        return Reader(self.vision, self.tokenizer, self.config, self.data)

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt with the chat template, behind which a response begins."""
        key = _key(prompt)
        if key not in self._tokens:
            if prompt.images:
                self.look(prompt)
            else:
                self.encode_ahead([prompt])
        return self._tokens[key].tolist()

    def look(self, prompt: Prompt) -> Any:
        """The images of a prompt (phalanx.models.lm.vision.Look), None for none; one object as long as it is held."""
        if not prompt.images:
            return None
        key = _key(prompt)
        if key not in self._looks:
            tokens, look = self.reader.read(prompt, self.data)
            self._tokens[key], self._looks[key] = array("i", tokens), look
            return look
        return self._looks[key]

    def length(self, prompt: Prompt) -> int:
        """The number of a prompt's tokens; of most images only the heads of their files are read."""
        return self.reader.length(prompt, self.data) if prompt.images else len(self.encode(prompt))

    def encode_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Render and tokenize prompts, all at once, and keep their tokens: a step then only looks them up. Those with
        images are left to `look`.
        """
        new = {_key(prompt): prompt for prompt in prompts if not prompt.images}
        given = list(new.values())
        if self.reader is not None:
            given = self.reader.in_parts(given)
            self.reader.render([prompt for prompt in prompts if prompt.images], self.data)
        every = prompt_tokens(self.tokenizer, given, self.data, self.config.path)
        for (key, prompt), tokens in zip(new.items(), every, strict=True):
            if self.data.overlong_prompts == "truncate":
                tokens = tokens[-self.data.max_prompt_length :]
            if self.reader is not None:
                self.reader.check(prompt, tokens, 0)
            if max(tokens, default=0) >= self.rows:
                token = self.tokenizer.convert_ids_to_tokens(max(tokens))
                raise ValueError(
                    f"data: the prompt {cut(prompt.text)!r} holds {token!r}, which the model does not embed"
                )
            self._tokens[key] = tokens

    def readable(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of a text without those that stand for images: what a text says of them stands for none."""
        never = self.trained.module.never
        return [token for token in tokens if token not in never]

    def decode(self, tokens: list[int]) -> str:
        """The text of a response, without its special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    # -- replay -----------------------------------------------------------------------------------

    def replay(self, trace: TokenTrace) -> TokenReplay:
        """Every token of the responses, in one forward pass, of the distributions that were sampled: truncated to the
        tokens that the trace has, or else to those of this pass.
        """
        if trace.kept is None and self.truncation is None:
            return self.scored(trace, self.temperature)
        return self._scored(trace, self.temperature, self.truncation, trace.pool)

    def scored(self, trace: TokenTrace, temperature: float) -> TokenReplay:
        """The same at another temperature, of whole distributions."""
        return self._scored(trace, temperature)

    def _scored(self, trace: TokenTrace, temperature: float, *truncated: Any) -> TokenReplay:
        trace, row = self.read(trace)
        given = trace.ids, trace.predicting, temperature, row, trace.looks, *truncated
        scores = self.trained.run(self.trained.module, *given)
        mask = trace.mask
        zeros = torch.zeros(mask.shape, device=mask.device)
        values = [zeros.masked_scatter(mask, part) for part in scores[:3]]
        return TokenReplay(*values, *(trace.pooled(*scores[3:]) if truncated else ()))

    def read(self, trace: TokenTrace) -> tuple[TokenTrace, Row | None]:
        """The samples of a pass, and the row that they stand in where they are packed."""
        if self.trim:
            trace = trace.trimmed()
        if not self.config.use_remove_padding:
            return trace, None
        if not self.config.use_prefix_grouper:
            return trace, Row.of(trace.ids, trace.stops.tolist())
        starts, stops = torch.stack([trace.starts, trace.stops]).tolist()
        ids, looks = trace.ids.cpu().numpy(), trace.looks or [None] * len(starts)
        prompts = [(ids[i, :start].tobytes(), looks[i]) for i, start in enumerate(starts)]
        return trace, Row.of(trace.ids, stops, starts, prompts)

    def predict(self, trace: Any, corrupted: Any) -> Tensor:
        """Only of kinds of policy that corrupt their samples."""
        raise AssertionError("a causal language model predicts nothing but the next token")

    def corrupt(self, samples: Samples, seeds: Sequence[int], *, levels: int, distribution: str) -> Any:
        """Only of kinds of policy that corrupt their samples."""
        raise AssertionError("a causal language model has no corrupted samples")

    # -- cost -------------------------------------------------------------------------------------

    def forward_flops(self, length: float, logits: float) -> float:
        """Operations of a forward pass over `length` tokens, with the logits of some: a length + b length^2 + c logits.

        Attention is counted whole, as if each token saw those behind it, too.
        """
        if self._cost is None:
            short, long = self._flops(64), self._flops(128)
            b = (long / 128 - short / 64) / 64
            self._cost = short / 64 - 64 * b - self._head, b
        a, b = self._cost
        return a * length + b * length**2 + self._head * logits

    def _flops(self, length: int) -> int:
        def build() -> Any:
            settings = copy.deepcopy(self.settings)
            return transformers.AutoModelForCausalLM.from_config(settings, experts_implementation=experts.SHAPES)

        def inputs() -> dict[str, Any]:
            # a mask that is made already: transformers would look at the values of others
            mask = torch.zeros(1, 1, length, length)
            return {"input_ids": torch.zeros(1, length, dtype=torch.long), "attention_mask": mask, "use_cache": False}

        try:
            return forward_flops(build, inputs, f"{type(self.settings)} {self.settings.to_json_string(use_diff=False)}")
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # A class that takes no such mask. Its layers count by their weights, without attention.
            return 2 * length * self._weights

    def sample_flops(self, samples: Samples) -> list[float]:
        """Operations of a pass forward over each sample, with the logits of its response."""
        assert samples.lengths is not None, "samples of this policy have lengths"
        return [self.forward_flops(p + r, drawn) for p, r, drawn in samples.lengths.tolist()]

    def decode_flops(self, samples: Samples) -> list[float]:
        """Operations of decoding each sample, with its prompt: as many as of a pass over all of it."""
        return self.sample_flops(samples)

    def step_flops(
        self, samples: Samples, *, actions: int, count: int, updates: float, references: float, recomputed: bool
    ) -> int:
        """See phalanx.training.components.TrainedPolicy: of the tokens that there are, without padding.

        Decoding reads each prompt once. Logits count as computed again, which they are in passes of several chunks.
        """
        assert samples.lengths is not None, "samples of this policy have lengths"
        prompts, scored = samples.lengths[:, 0].tolist(), sum(self.sample_flops(samples))
        read = {prompt.group_id: length for prompt, length in zip(samples.prompts, prompts, strict=True)}
        again = sum(self.forward_flops(length, 0) for length in prompts)
        decoded = sum(self.decode_flops(samples)) - again
        decoded += sum(self.forward_flops(length, 0) for length in read.values())
        passes = step_flops(
            round(scored / len(prompts)),
            samples=count,
            steps=0 if samples.on_policy else 1,  # the old log-probabilities
            updates_per_sample=updates,
            lora=self.trained.lora,
            checkpointing=recomputed * self.trained.recomputed,
            references=references,
        )
        if recomputed:
            decoded += (1 - self.trained.recomputed) * updates * self.forward_flops(0, int(samples.lengths[:, 2].sum()))
        return passes + round(decoded / len(prompts) * count)

    # -- weights ----------------------------------------------------------------------------------

    def engine_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under transformers' own names, those of the whole where the model is a part of it, one whole
        tensor after the other, for an engine's copy.

        All ranks must draw all of them, in step.
        """
        for name, tensor in self.trained.whole_weights():
            if not (self.tied and name == "lm.lm_head.weight"):
                yield name_in_whole(name.removeprefix("lm."), self.trained.module.places), tensor

    def unsharded(self) -> AbstractContextManager[None]:
        """See TrainedModel.unsharded."""
        return self.trained.unsharded()

    def using(self, weights: str) -> AbstractContextManager[None]:
        """See TrainedModel.using."""
        return self.trained.using(weights)


def _key(prompt: Prompt) -> bytes:
    """A digest of all that the tokens of a prompt depend on."""
    chat = json.dumps([prompt.messages or prompt.text, prompt.meta.get("tools")], default=str)
    for picture in prompt.images:
        chat += picture.digest
    return hashlib.blake2b(chat.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def build_policy(
    config: LMModelConfig,
    parallel: ParallelConfig,
    data: LMDataConfig,
    world: World,
    *,
    chunk: int,
    temperature: float,
    seed: int,
    trim: bool = False,
    frozen: bool = False,
    decodes: bool = True,
    truncation: Truncation | None = None,
    images: bool = False,
) -> LMPolicy:
    """Load the model folder and lay it out over the mesh. Raises ValueError, with one line, for one that cannot be.

    `frozen`: a teacher, of which nothing is trained; `decodes`: the policy's modules sample, see check_agreement;
    `images`: prompts may have images.
    """
    # full fine-tuning keeps float32 weights; a frozen base is kept in the dtype that it computes in
    dtype = DTYPES[config.dtype] if config.lora_rank > 0 or frozen else torch.float32
    tokenizer = load_tokenizer(config)
    stored = config.lora_rank == 0
    model = load_model(config, dtype, chunk, stored=stored, images=images)
    policy = LMPolicy(
        model,
        tokenizer,
        world,
        config,
        parallel,
        data,
        temperature=temperature,
        seed=seed,
        trim=trim,
        frozen=frozen,
        kept=dtype if stored else None,
        truncation=truncation,
    )
    policy.check_agreement(decodes=decodes and not frozen)
    return policy
