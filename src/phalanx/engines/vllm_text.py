"""A language model in vLLM, in the rank's own process, with a copy of the policy's weights that rollouts refresh."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.distributed.vllm_groups import VllmGroups
from phalanx.engines.receipt import Receipt
from phalanx.engines.vllm import load_llm, rejected
from phalanx.engines.vllm_lora import Adapter, asking, kept, lora_options, put, served, usable
from phalanx.functional.tokens import Decoding
from phalanx.media.pictures import Picture
from phalanx.types import JobError


@dataclass(frozen=True)
class Shown:
    """The images of a prompt, and its tokens with one placeholder per image, which vLLM expands to the tokens of the
    image. `place` names the prompt in error messages.
    """

    short: list[int]
    pictures: tuple[Picture, ...]
    place: str


@dataclass(frozen=True)
class Asked:
    """A request: its `name`, unique while it is not answered, the tokens before the response, with one placeholder per
    image, a seed and settings.
    """

    name: str
    tokens: list[int]
    seed: int
    decoding: Decoding
    shown: Shown | None = None


@dataclass(frozen=True)
class TextEngineConfig:
    """Settings of an engine: at most `longest` tokens per prompt and response, and `together` responses at once.
    `sleep_level`: 1 keeps the weights in main memory; 2 discards them, since each rollout brings them; None: 1 if
    rollouts bring only a LoRA.
    `images`: keyword arguments of the image processor, if prompts may have images, at most `limit_images` each.
    `adapter`: a LoRA that the engine keeps beside the weights of its base, if it can; `adapter_key`: its configuration
    key. `key`: that of the engine, for messages.
    """

    path: str
    revision: str | None
    dtype: str
    tensor_parallel_size: int
    gpu_memory_utilization: float
    longest: int
    together: int
    sleep: bool
    sleep_level: int | None = None
    enforce_eager: bool = False
    images: dict[str, Any] | None = None
    limit_images: int | None = None
    key: str = "rollout.engine"
    adapter: Adapter | None = None
    adapter_key: str = "rollout.lora_sync"


class TextEngine:
    """One rank of a replica. All ranks of the replica make the same calls, each with its shard of the weights."""

    def __init__(self, config: TextEngineConfig, groups: VllmGroups) -> None:
        """Build the engine, with dummy weights unless prompts have images. ValueError if vLLM rejects the model."""
        self._groups, self._dtype = groups, getattr(torch, config.dtype)
        cuda = torch.cuda.is_available()
        self._sleeps, self._images = config.sleep and cuda, config.images is not None
        self._key = config.key
        self._receipt = Receipt(config.tensor_parallel_size, config.key)
        self._adapter_receipt = Receipt(config.tensor_parallel_size, config.key, strict=True)
        self._number, self._asking = 0, None  # of the LoRA, as vLLM counts them, and how prompts ask for it
        self._has_base = self._unchecked = False
        with groups.active():
            if not cuda:
                torch.cpu._init_amx()
                _keep_linears_plain()
            with rejected(config.key, config.path):
                self.adapter = usable(config.adapter, config.path, config.revision, config.dtype, config.adapter_key)
                self._llm = load_llm(
                    config,
                    groups,
                    # `refresh` sets the weights, but does not restore what vLLM derives from a processor's settings
                    load_format="dummy" if config.images is None else "auto",
                    max_model_len=config.longest,
                    max_num_seqs=config.together,
                    # tokens of prompts that are read at once; a GPU needs more than a CPU to be fully used
                    max_num_batched_tokens=max(8192 if cuda else 2048, config.longest),
                    seed=0,
                    enable_chunked_prefill=cuda,  # on a CPU, vLLM crashes on a seeded request that is split
                    enforce_eager=config.enforce_eager or not cuda,
                    enable_prefix_caching=True,
                    logprobs_mode="processed_logprobs",  # of the sampled distribution, including temperature
                    **_image_options(config.images, config.limit_images),
                    **({} if self.adapter is None else lora_options(self.adapter)),
                )
            if (adapter := self.adapter) is not None:
                (taken,) = self._llm.apply_model(lambda model: served(model, adapter, config.adapter_key))
                self.adapter = adapter if taken else None
            # a base that stays needs no copy
            self._level = config.sleep_level or (2 if self.adapter is None else 1)
            if self._sleeps:
                self._llm.sleep(level=self._level)

    @contextmanager
    def awake(
        self, weights: Iterator[tuple[str, Tensor]], adapter: Iterator[tuple[str, Tensor]] | None = None
    ) -> Iterator[None]:
        """Give the engine these weights and a KV cache for the duration of the block. Iterating them is collective.

        adapter: the tensors of `self.adapter`, by peft's names, with B times the scale. Then `weights` are those of its
        base, which are iterated only if the engine has not kept them.
        """
        if self._sleeps:
            torch.cuda.empty_cache()  # vLLM allocates from the device, not from torch's cache
            with self._groups.active():
                self._llm.wake_up(tags=["weights"])
        if adapter is None or not self._has_base:
            self.refresh(self._receipt.noted(self._cast_weights(weights)))
            self._has_base = self._unchecked = True
        if adapter is not None:
            self.adapt(self._adapter_receipt.noted(self._cast_weights(adapter)))
        if self._sleeps:
            with self._groups.active():
                self._llm.wake_up(tags=["kv_cache"])
        yield
        if self._sleeps:
            with self._groups.active():
                self._llm.sleep(level=self._level)
            self._has_base = self._level == 1

    def _cast_weights(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self._dtype)) for name, tensor in weights)

    def refresh(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load (name, tensor) pairs of the engine's dtype, and drop everything computed with the old weights."""
        with self._groups.active(), torch.no_grad():
            # without an iterator vLLM would read the folder's files again
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            for _ in weights:  # consume what vLLM leaves, such as a tied head: producing the weights is collective
                pass
            self.forget()

    def adapt(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Let prompts be read and continued with these tensors of `self.adapter`, as with another model."""
        given, adapter = dict(tensors), self.adapter
        assert adapter is not None, "an engine without a LoRA"
        self._number += 1
        with self._groups.active(), torch.no_grad():
            self._llm.apply_model(lambda model: put(model, adapter, given, self._number))
        self._asking = asking(self._number)
        self.forget()

    def missing(self) -> list[str]:
        """Names of the tensors of the last `awake` that the replica does not hold as they were sent. Collective."""
        with self._groups.active(), torch.no_grad():
            (names,) = self._llm.apply_model(self._missing_weights)
        return names

    def _missing_weights(self, model: Any) -> list[str]:
        names = []
        if self._unchecked:
            names += self._receipt.missing((*model.parameters(), *model.buffers()), self._groups.any)
            self._unchecked = False
        if self.adapter is not None:
            names += self._adapter_receipt.missing(kept(model, self.adapter), self._groups.any)
        return names

    def forget(self) -> None:
        """Drop cached keys and values, which were computed with other weights."""
        with self._groups.active():
            done = self._llm.reset_prefix_cache()
            if self._images:  # cached features of images
                self._llm.llm_engine.reset_encoder_cache()
        assert done, "requests are running"

    def generate(
        self, prompts: list[list[int]], seeds: list[int], decoding: Decoding, shown: Sequence[Shown | None] = ()
    ) -> tuple[list[list[int]], list[list[float]]]:
        """A response to each prompt, a function of the prompt and its seed, and the log-probabilities of its tokens.

        `shown`: the images of each prompt. JobError if vLLM's tokens of a prompt with images differ from `prompts`.
        """
        settings = [_sampling_params(decoding, seed) for seed in seeds]
        images = shown or [None] * len(prompts)
        with self._groups.active(), torch.no_grad():
            short = [prompt if image is None else image.short for prompt, image in zip(prompts, images, strict=True)]
            inputs = _vllm_prompts(short, images)
            requests = self._llm.generate(inputs, settings, use_tqdm=False, lora_request=self._asking)
        for request, prompt, image in zip(requests, prompts, images, strict=True):
            if image is not None:
                self.check_read(request.prompt_token_ids, prompt, image.place)
        tokens, log_probs = [], []
        for request in requests:
            response, scores = _response_tokens(request)
            tokens.append(response)
            log_probs.append(scores)
        return tokens, log_probs

    def check_read(self, read: Sequence[int], prompt: Sequence[int], place: str) -> None:
        """Raise JobError if vLLM has read other tokens than the policy in a prompt with images."""
        if read != prompt:
            raise JobError(
                f"{self._key}: vLLM reads {len(read)} tokens in the prompt {place}, and the policy {len(prompt)}: "
                "their processors make different tokens of its images"
            )

    @contextmanager
    def called(self) -> Iterator[None]:
        """For a block that calls `add` and `step`. A replica's ranks add the same requests before the same steps."""
        with self._groups.active(), torch.no_grad():
            yield

    def add(self, requests: Sequence["Asked"]) -> None:
        """Request responses, each a function of the tokens, seed and settings."""
        from vllm.sampling_params import RequestOutputKind

        inputs = _vllm_prompts([request.tokens for request in requests], [request.shown for request in requests])
        for request, given in zip(requests, inputs, strict=True):
            # not token by token
            settings = _sampling_params(request.decoding, request.seed, output_kind=RequestOutputKind.FINAL_ONLY)
            self._llm.llm_engine.add_request(request.name, given, settings, lora_request=self._asking)

    def step(self) -> list[tuple[str, list[int], list[int], list[float]]]:
        """Draw one more token of each request; returns (name, tokens read, response, log-probabilities) of those that
        end.
        """
        return [(r.request_id, list(r.prompt_token_ids), *_response_tokens(r)) for r in self._llm.llm_engine.step()]


def _image_options(processor: dict[str, Any] | None, limit: int | None) -> dict[str, Any]:
    """Arguments of an engine whose prompts have images, but neither videos nor audio."""
    if processor is None:
        return {}
    images = {} if limit is None else {"image": limit}
    return {
        "mm_processor_cache_gb": 1,  # the processed images stay cached for the samples of a prompt, which are adjacent
        "mm_processor_kwargs": processor or None,
        "limit_mm_per_prompt": {"video": 0, "audio": 0, **images},
    }


def _vllm_prompts(prompts: list[list[int]], shown: Sequence[Shown | None]) -> list[dict[str, Any]]:
    """The prompts as vLLM takes them; samples of one prompt share its images."""
    pictures: dict[int, list[Any]] = {}
    inputs: list[dict[str, Any]] = []
    for prompt, images in zip(prompts, shown, strict=True):
        if images is None:
            inputs.append({"prompt_token_ids": prompt})
            continue
        if id(images) not in pictures:
            pictures[id(images)] = [picture.pil() for picture in images.pictures]
        data = {"image": pictures[id(images)]}
        inputs.append({"prompt_token_ids": prompt, "multi_modal_data": data})
    return inputs


def _sampling_params(decoding: Decoding, seed: int, **options: Any) -> Any:
    """vLLM's settings of a request."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=decoding.temperature,
        **asdict(decoding.truncation),
        max_tokens=decoding.limit,
        stop_token_ids=list(decoding.ends),
        ignore_eos=not decoding.ends,
        logprobs=0,
        seed=seed % 2**63,
        stop=list(decoding.stop),
        include_stop_str_in_output=True,
        detokenize=bool(decoding.stop),
        logit_bias=dict.fromkeys(decoding.never, -math.inf) or None,
        **options,
    )


def _response_tokens(request: Any) -> tuple[list[int], list[float]]:
    """The tokens of a response and their log-probabilities."""
    sample = request.outputs[0]
    scored = zip(sample.logprobs, sample.token_ids, strict=True)
    return list(sample.token_ids), [entry[token].logprob for entry, token in scored]


def _keep_linears_plain() -> None:
    """Stop vLLM from packing the weights of linear layers on CPUs: a packed copy would not follow new weights."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = plain
