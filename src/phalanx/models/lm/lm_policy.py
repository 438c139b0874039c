"""The policy: a causal language model sharded over the mesh, and the replay of its samples."""

import copy
import hashlib
import json
import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import transformers
from torch import Tensor

from phalanx.config.lm import LMDataConfig
from phalanx.config.messages import cut
from phalanx.config.parallel import ParallelConfig
from phalanx.config.section import copy_with
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.collectives import reduce_int
from phalanx.distributed.mesh import World
from phalanx.functional.scores import trial
from phalanx.functional.tokens import TokenReplay, TokenTrace, Truncation
from phalanx.models.compiling import compiles, where_it_works
from phalanx.models.lm import experts, flex, packing
from phalanx.models.lm.agreement import check_agreement
from phalanx.models.lm.chat import prompt_tokens
from phalanx.models.lm.composite import name_in_whole
from phalanx.models.lm.load_folder import end_tokens, load_model, load_tokenizer, read_lora, unused_generation
from phalanx.models.lm.model import DTYPES, CausalLM, positions
from phalanx.models.lora import ALL_LINEAR, start_from_lora
from phalanx.models.trained import TrainedModel
from phalanx.telemetry.flops import forward_flops
from phalanx.telemetry.step_metrics import step_flops
from phalanx.types import Prompt, Samples

log = logging.getLogger(__name__)

LORA_TARGETS = (ALL_LINEAR,)  # default of model.target_modules


class LMPolicy:
    """See phalanx.types.Policy. `trained` has the trained weights; `temperature` and `truncation` are of sampling."""

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
        """`trim`: cut batches to the longest sample; `kept`: see Sharded. Raises ValueError for invalid settings."""
        self.tokenizer, self.world, self.data = tokenizer, world, data
        model.fused = world.device.type == "cuda" and compiles(world, "scores of tokens", trial)
        config = where_it_works(config, world)
        packing.settle(model, world, DTYPES[config.dtype], config)
        self.config = _as_loaded(config, model)
        self.parallel, self.temperature, self.truncation, self.trim = parallel, temperature, truncation, trim
        self.vision = model.vision
        self.tied = model.lm.config.tie_word_embeddings
        self.settings = model.lm.config if self.vision is None else model.lm.config.get_text_config(decoder=True)
        self.ends = end_tokens(model.lm, tokenizer)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._tokens: dict[bytes, array[int]] = {}  # of prompts, with the chat template
        self._looks: WeakValueDictionary[bytes, Any] = WeakValueDictionary()  # kept as long as samples refer to them
        self.reader: Any = None if self.vision is None else self.make_reader()  # for prompts with images
        self._cost: tuple[float, float] | None = None  # a and b of forward_flops
        self._weights = sum(p.numel() for p in model.parameters())
        self._head = 2 * model.lm.get_output_embeddings().weight.numel()  # FLOPs of a token's logits
        self._check_model(model)
        if not frozen and (unused := unused_generation(model.lm)):
            log.info("sampling is by rollout.*, not by %s of the model's generation_config.json", unused)
        model.share_positions(world, config.attn_implementation)
        names = dict(model.named_parameters())
        quantized = model.blocks() if config.quantization is not None else ()
        start_from_lora(model, config.lora_path, partial(read_lora, config=config, names=names), kept, quantized)
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
        """See phalanx.models.lm.agreement; called by all ranks that share the weights."""
        module, device = self.trained.module, self.world.device
        # with images first, because a trained tower that gives NaN spoils the passes without images as well
        for probe in (None,) if self.reader is None else (self.reader.tried, None):
            check_agreement(module, self.config, self.tokenizer, device, decodes=decodes, image_prompt=probe)
        if module.tries and self.world.size > 1:  # near a bound, ranks may find different things
            module.packs = not reduce_int(not module.packs, "max")
            module.groups = not reduce_int(not module.groups, "max")
        self.config = _as_loaded(self.config, module)
        # weights that stay gathered would hide those that a checkpoint loads
        self.trained.sharded.reshard()

    def _check_model(self, model: CausalLM) -> None:
        if self.config.attn_implementation == "flex_attention":
            if self.world.device.type == "cpu":
                # it has no backward pass on CPUs, and for some lengths compiles to invalid C++
                raise ValueError(
                    "model.attn_implementation: flex_attention needs a GPU; expected sdpa or eager on CPUs"
                )
            flex.one_graph()
        rows = self.rows = model.lm.get_input_embeddings().num_embeddings
        # some folders list special tokens for other modalities after the last token that the model embeds
        beyond = len(self.tokenizer) - rows
        if beyond > 0 and beyond > len(self.tokenizer.all_special_ids):
            raise ValueError(
                f"model.path: {self.config.path!r}: its tokenizer has {len(self.tokenizer)} tokens, and the model "
                f"embeds {rows}"
            )
        longest = positions(self.settings)
        total = self.data.max_prompt_length + self.data.max_response_length
        if longest is not None and total > longest:
            raise ValueError(
                f"data.max_response_length: {self.data.max_response_length} with data.max_prompt_length "
                f"{self.data.max_prompt_length} is {total} tokens, and {self.config.path!r} has {longest} positions"
            )

    # -- text -------------------------------------------------------------------------------------

    def make_reader(self) -> Any:
        """The reader of prompts with images (phalanx.models.lm.vision.Reader)."""
        from phalanx.models.lm.vision import Reader

        return Reader(self.vision, self.tokenizer, self.config, self.data)

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt, rendered by the chat template; a response follows them directly."""
        key = _prompt_digest(prompt)
        if key not in self._tokens:
            if prompt.images:
                self.look(prompt)
            else:
                self.encode_ahead([prompt])
        return self._tokens[key].tolist()

    def look(self, prompt: Prompt) -> Any:
        """The images of a prompt as a phalanx.models.lm.vision.Look, or None if it has none.

        Repeated calls return the same object while anything refers to it.
        """
        if not prompt.images:
            return None
        key = _prompt_digest(prompt)
        if key not in self._looks:
            tokens, look = self.reader.read(prompt, self.data)
            self._tokens[key], self._looks[key] = array("i", tokens), look
            return look
        return self._looks[key]

    def length(self, prompt: Prompt) -> int:
        """Number of a prompt's tokens; if the model's family allows it, only the headers of image files are read."""
        return self.reader.length(prompt, self.data) if prompt.images else len(self.encode(prompt))

    def encode_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Render and tokenize many prompts at once and keep their tokens, so that a training step only looks them up.

        Prompts with images are rendered here, and read by `look`.
        """
        new = {_prompt_digest(prompt): prompt for prompt in prompts if not prompt.images}
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
            self.check_embedded(tokens, f"data: the prompt {cut(prompt.text)!r}")
            self._tokens[key] = tokens

    def check_embedded(self, tokens: Sequence[int], what: str) -> None:
        """Raise ValueError, with `what` has the tokens, for one that the model does not embed."""
        if max(tokens, default=0) >= self.rows:
            token = self.tokenizer.convert_ids_to_tokens(max(tokens))
            raise ValueError(f"{what} contains {token!r}, which the model does not embed")

    def readable(self, tokens: Sequence[int]) -> list[int]:
        """Drop the placeholders of images from a text's tokens: spelled out in a text, they stand for no image."""
        never = self.trained.module.never
        return [token for token in tokens if token not in never]

    def decode(self, tokens: list[int]) -> str:
        """The text of a response, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    # -- replay -----------------------------------------------------------------------------------

    def replay(self, trace: TokenTrace) -> TokenReplay:
        """Score every token of the responses, in one forward pass, under the distributions that were sampled from.

        Truncated distributions keep the tokens that the trace records, or else those that this pass selects.
        """
        if trace.kept is None and self.truncation is None:
            return self.scored(trace, self.temperature)
        return self.scored(trace, self.temperature, self.truncation, trace.pool)

    def scored(self, trace: TokenTrace, temperature: float, *truncated: Any) -> TokenReplay:
        """As `replay`, at the given temperature, and without truncation unless it and the trace's pool are given."""
        trace, row = self.read(trace)
        given = trace.ids, trace.predicting, temperature, row, trace.looks, *truncated
        scores = self.trained.run(self.trained.module, *given)
        mask = trace.mask
        zeros = torch.zeros(mask.shape, device=mask.device)
        values = [zeros.masked_scatter(mask, part) for part in scores[:3]]
        return TokenReplay(*values, *(trace.pooled(*scores[3:]) if truncated else ()))

    def read(self, trace: TokenTrace) -> tuple[TokenTrace, packing.Row | None]:
        """The samples as a pass reads them: trimmed, and with the row that they are packed into, if they are."""
        if self.trim:
            trace = trace.trimmed()
        if not self.config.use_remove_padding:
            return trace, None
        if not self.config.use_prefix_grouper:
            return trace, packing.Row.of(trace.ids, trace.stops.tolist())
        starts, stops = torch.stack([trace.starts, trace.stops]).tolist()
        ids, looks = trace.ids.cpu().numpy(), trace.looks or [None] * len(starts)
        prompts = [(ids[i, :start].tobytes(), looks[i]) for i, start in enumerate(starts)]
        return trace, packing.Row.of(trace.ids, stops, starts, prompts)

    def predict(self, trace: Any, corrupted: Any) -> Tensor:
        """Only for policies that corrupt their samples."""
        raise AssertionError("a causal language model predicts nothing but the next token")

    def corrupt(self, samples: Samples, seeds: Sequence[int], *, levels: int, distribution: str) -> Any:
        """Only for policies that corrupt their samples."""
        raise AssertionError("a causal language model has no corrupted samples")

    def forward_flops(self, length: float, logits: float) -> float:
        """FLOPs of a forward pass over `length` tokens that computes `logits` logits: a length + b length^2 + c logits.

        Attention is counted without the causal mask, as if each token attended to all tokens.
        """
        if self._cost is None:
            short, long = self._count_flops(64), self._count_flops(128)
            b = (long / 128 - short / 64) / 64
            self._cost = short / 64 - 64 * b - self._head, b
        a, b = self._cost
        return a * length + b * length**2 + self._head * logits

    def _count_flops(self, length: int) -> int:
        def build() -> Any:
            settings = copy.deepcopy(self.settings)
            return transformers.AutoModelForCausalLM.from_config(
                settings, experts_implementation=experts.SHAPES, trust_remote_code=False
            )

        def inputs() -> dict[str, Any]:
            # a finished 4D mask, because transformers reads the values of others, which the meta device does not have
            mask = torch.zeros(1, 1, length, length)
            return {"input_ids": torch.zeros(1, length, dtype=torch.long), "attention_mask": mask, "use_cache": False}

        try:
            return forward_flops(build, inputs, f"{type(self.settings)} {self.settings.to_json_string(use_diff=False)}")
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # A class that does not accept such a mask: count 2 FLOPs per weight and token, without attention.
            return 2 * length * self._weights

    def sample_flops(self, samples: Samples) -> list[float]:
        """FLOPs of a forward pass over each sample, with the logits of its response."""
        assert samples.lengths is not None, "samples of this policy have lengths"
        return [self.forward_flops(p + r, drawn) for p, r, drawn in samples.lengths.tolist()]

    def decode_flops(self, samples: Samples) -> list[float]:
        """FLOPs of decoding each sample, including its prompt: those of one forward pass over all of it."""
        return self.sample_flops(samples)

    def step_flops(
        self, samples: Samples, *, actions: int, count: int, updates: float, references: float, recomputed: bool
    ) -> int:
        """See phalanx.training.components.TrainedPolicy. Padding does not count.

        Decoding reads each prompt once. Logits count as recomputed in the backward pass, as they are in passes of
        several chunks.
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

    def engine_weights(self, *, base: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, one full tensor at a time, under transformers' names, for an engine's copy of the model.

        The text part of a composite model has the names of the composite model. All ranks must iterate in lockstep, to
        the end. base: without the LoRA.
        """
        for name, tensor in self.trained.whole_weights(base=base):
            if not (self.tied and name == "lm.lm_head.weight"):
                yield self._name_in_folder(name), tensor

    def engine_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the LoRA as `engine_weights` does the weights: A [rank, in] and B [out, rank] times the scale."""
        for name, tensor in self.trained.adapter_weights():
            yield self._name_in_folder(name), tensor

    def adapted_layers(self) -> list[str]:
        """Names, as those of `engine_weights`, of the layers with a LoRA."""
        layers = []
        for name in self.trained.parameters:
            if ".lora_A." in name:
                layers.append(self._name_in_folder(name.partition(".lora_A.")[0]))
        return layers

    def _name_in_folder(self, name: str) -> str:
        return name_in_whole(name.removeprefix("lm."), self.trained.module.places)

    def unsharded(self) -> AbstractContextManager[None]:
        """See TrainedModel.unsharded."""
        return self.trained.unsharded()

    def using(self, weights: str) -> AbstractContextManager[None]:
        """See TrainedModel.using."""
        return self.trained.using(weights)


def _prompt_digest(prompt: Prompt) -> bytes:
    """Digest of everything that a prompt's tokens depend on."""
    chat = json.dumps([prompt.messages or prompt.text, prompt.meta.get("tools")], default=str)
    for picture in prompt.images:
        chat += picture.digest
    return hashlib.blake2b(chat.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _as_loaded(config: LMModelConfig, model: CausalLM) -> LMModelConfig:
    """`config` with what the model does of what was tried."""
    return copy_with(config, use_remove_padding=model.packs, use_prefix_grouper=model.groups)


def build_policy(
    config: LMModelConfig,
    parallel: ParallelConfig,
    data: LMDataConfig,
    world: World,
    *,
    chunk: int,
    frozen: bool = False,
    decodes: bool = True,
    images: bool = False,
    tries: bool = False,
    **options: Any,
) -> LMPolicy:
    """Load the model folder and shard it over the mesh. Raises ValueError, in one line, for an unusable folder.

    frozen: nothing is trained, as for a teacher. decodes: the policy's modules sample; see check_agreement. images:
    prompts may have images. tries: see causal_lm. options: further keywords of LMPolicy.
    """
    # full fine-tuning keeps float32 weights; a frozen base is kept in its compute dtype
    dtype = DTYPES[config.dtype] if config.lora_rank > 0 or frozen else torch.float32
    tokenizer = load_tokenizer(config)
    stored = config.lora_rank == 0
    model = load_model(config, dtype, chunk, stored=stored, images=images, tries=tries)
    kept = dtype if stored else None
    policy = LMPolicy(model, tokenizer, world, config, parallel, data, frozen=frozen, kept=kept, **options)
    policy.check_agreement(decodes=decodes and not frozen)
    return policy
