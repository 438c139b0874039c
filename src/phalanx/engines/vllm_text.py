"""A language model in vLLM, inside the rank's own process, on a copy of the weights that each rollout renews."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.distributed.vllm_groups import VllmGroups
from phalanx.engines.vllm import CPU_KV_CACHE, executor
from phalanx.functional.tokens import Truncation
from phalanx.media.pictures import Picture
from phalanx.types import JobError


@dataclass(frozen=True)
class Sampling:
    """Settings of a call: at most `limit` tokens, fewer where one of `ends` is drawn or one of the texts `stop` is
    complete; temperature 0 is greedy. Tokens of `never` are not drawn.
    """

    limit: int
    temperature: float
    truncation: Truncation
    ends: Sequence[int]
    stop: Sequence[str]
    never: Sequence[int] = ()


@dataclass(frozen=True)
class Shown:
    """The images of a prompt, and its tokens with one placeholder for each, of which vLLM makes as many as the image
    has tokens. `place` names the prompt in messages.
    """

    short: list[int]
    pictures: tuple[Picture, ...]
    place: str


@dataclass(frozen=True)
class TextEngineConfig:
    """Settings of an engine: `longest` tokens of a prompt with its response, `together` responses at once. With
    `images` prompts may have some, at most `limit_images`, which the model's processor reads with these keywords.
    """

    path: str
    revision: str | None
    dtype: str
    tensor_parallel_size: int
    gpu_memory_utilization: float
    longest: int
    together: int
    sleep: bool
    images: dict[str, Any] | None = None
    limit_images: int | None = None


class TextEngine:
    """One rank of a replica. All ranks of the replica make the same calls, each with its part of the weights."""

    def __init__(self, config: TextEngineConfig, groups: VllmGroups, rank: int, local_rank: int) -> None:
        """Build it, without images with weights of no meaning; ValueError where vLLM refuses the model."""
        self._groups, self._dtype = groups, getattr(torch, config.dtype)
        cuda = torch.cuda.is_available()
        self._sleeps, self._images = config.sleep and cuda, config.images is not None
        with groups.active():
            from vllm.exceptions import VLLMError

            from vllm import LLM

            if not cuda:
                torch.cpu._init_amx()
                _keep_linears_plain()
            try:
                self._llm: Any = LLM(
                    config.path,
                    revision=config.revision,
                    tokenizer_revision=config.revision,
                    # `refresh` brings the weights, but not what vLLM itself makes of a processor's settings
                    load_format="dummy" if config.images is None else "auto",
                    tensor_parallel_size=config.tensor_parallel_size,
                    distributed_executor_backend=executor(groups, rank, local_rank),
                    dtype=config.dtype,
                    max_model_len=config.longest,
                    max_num_seqs=config.together,
                    # prompts that are read at once; a GPU needs more of them than a CPU to be busy
                    max_num_batched_tokens=max(8192 if cuda else 2048, config.longest),
                    seed=0,
                    gpu_memory_utilization=config.gpu_memory_utilization,
                    kv_cache_memory_bytes=None if cuda else CPU_KV_CACHE,
                    enable_sleep_mode=self._sleeps,
                    async_scheduling=False,  # so that the ranks of a replica surely take the same steps
                    enable_chunked_prefill=cuda,  # on a CPU a seeded request that is cut in two crashes
                    enforce_eager=not cuda,
                    enable_prefix_caching=True,
                    use_tqdm_on_load=False,
                    logprobs_mode="processed_logprobs",  # of the distribution that is sampled, temperature included
                    **_reads_images(config.images, config.limit_images),
                )
            except (OSError, ValueError, VLLMError) as error:
                reason = " ".join(str(error).split())  # pydantic's have several lines
                raise ValueError(f"rollout.engine: vLLM does not take {config.path!r} as set: {reason}") from error
            if self._sleeps:
                self._llm.sleep(level=2)  # without weights: each rollout brings them

    @contextmanager
    def awake(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
        """For the time of the block the engine has these weights, which all ranks draw together, and a cache."""
        if self._sleeps:
            torch.cuda.empty_cache()  # vLLM takes its memory from the device, not from torch's cache
            with self._groups.active():
                self._llm.wake_up(tags=["weights"])
        self.refresh(weights)
        if self._sleeps:
            with self._groups.active():
                self._llm.wake_up(tags=["kv_cache"])
        yield
        if self._sleeps:
            with self._groups.active():
                self._llm.sleep(level=2)

    def refresh(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take over (name, tensor) pairs, and forget what the old weights computed."""
        cast = ((name, tensor.to(self._dtype)) for name, tensor in weights)
        with self._groups.active(), torch.no_grad():
            # without an iterator vLLM would read the folder's files again
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": cast})
            for _ in cast:  # what vLLM has no use for, such as a tied head
                pass
            self.forget()

    def forget(self) -> None:
        """Drop cached keys and values, which are those of other weights."""
        with self._groups.active():
            done = self._llm.reset_prefix_cache()
            if self._images:  # features of images, by the images
                self._llm.llm_engine.reset_encoder_cache()
        assert done, "requests are running"

    def generate(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, shown: Sequence[Shown | None] = ()
    ) -> tuple[list[list[int]], list[list[float]]]:
        """A response to each prompt, a function of it and its seed, and the log-probabilities of its tokens. Prompts
        with images are `shown`; JobError where vLLM does not read one as its tokens are.
        """
        settings = [_settings(sampling, seed) for seed in seeds]
        images = shown or [None] * len(prompts)
        asked = _asked(prompts, images)
        with self._groups.active(), torch.no_grad():
            requests = self._llm.generate(asked, settings, use_tqdm=False)
        for request, prompt, image in zip(requests, prompts, images, strict=True):
            if image is not None and request.prompt_token_ids != prompt:
                raise JobError(
                    f"rollout.engine: vLLM reads {len(request.prompt_token_ids)} tokens in the prompt {image.place}, "
                    f"and the policy {len(prompt)}: their processors make different tokens of its images"
                )
        tokens, log_probs = [], []
        for request in requests:
            response, scores = _response(request)
            tokens.append(response)
            log_probs.append(scores)
        return tokens, log_probs

    @contextmanager
    def requests(self) -> Iterator["Requests"]:
        """For the time of the block, the engine answers requests that come one by one."""
        with self._groups.active(), torch.no_grad():
            yield Requests(self._llm.llm_engine, self._groups)


class Requests:
    """Requests to an engine, step by step. All ranks of the replica add the same ones in one order before each step."""

    def __init__(self, engine: Any, groups: VllmGroups) -> None:
        self._engine = engine
        self.gather, self.rank, self.ranks = groups.gather, groups.cpu_group.rank(), groups.cpu_group.size()
        self._keys: dict[str, tuple[int, int]] = {}  # those that are not answered

    @property
    def running(self) -> bool:
        """Whether any request is not answered yet; the same on all ranks of the replica."""
        return bool(self._keys)

    def add(self, key: tuple[int, int], prompt: list[int], seed: int, sampling: Sampling) -> None:
        """Ask for a response, a function of these; `step` names it by its key, which has no other request now."""
        from vllm.sampling_params import RequestOutputKind

        name = f"{key[0]}:{key[1]}"
        settings = _settings(sampling, seed, output_kind=RequestOutputKind.FINAL_ONLY)  # not each token by itself
        self._keys[name] = key
        self._engine.add_request(name, {"prompt_token_ids": prompt}, settings)

    def step(self) -> list[tuple[tuple[int, int], list[int], list[float]]]:
        """A token more for those that run: keys, responses and log-probabilities of those that end with it."""
        ended = []
        for request in self._engine.step():
            ended.append((self._keys.pop(request.request_id), *_response(request)))
        return ended


def _reads_images(processor: dict[str, Any] | None, limit: int | None) -> dict[str, Any]:
    """Arguments of an engine whose prompts have images, but neither videos nor sounds."""
    if processor is None:
        return {}
    # the samples of a prompt follow one another: what the processor makes of its images is kept so long
    beside = {"mm_processor_cache_gb": 1, "mm_processor_kwargs": processor or None}
    images = {} if limit is None else {"image": limit}
    return beside | {"limit_mm_per_prompt": {"video": 0, "audio": 0, **images}}


def _asked(prompts: list[list[int]], shown: Sequence[Shown | None]) -> list[dict[str, Any]]:
    """The prompts as vLLM takes them; samples of one prompt share its images."""
    pictures: dict[int, list[Any]] = {}
    asked: list[dict[str, Any]] = []
    for prompt, images in zip(prompts, shown, strict=True):
        if images is None:
            asked.append({"prompt_token_ids": prompt})
            continue
        if id(images) not in pictures:
            pictures[id(images)] = [picture.pil() for picture in images.pictures]
        data = {"image": pictures[id(images)]}
        asked.append({"prompt_token_ids": images.short, "multi_modal_data": data})
    return asked


def _settings(sampling: Sampling, seed: int, **beside: Any) -> Any:
    """Those of a request."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        **asdict(sampling.truncation),
        max_tokens=sampling.limit,
        stop_token_ids=list(sampling.ends),
        ignore_eos=not sampling.ends,
        logprobs=0,
        seed=seed % 2**63,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        logit_bias=dict.fromkeys(sampling.never, -math.inf) or None,
        **beside,
    )


def _response(request: Any) -> tuple[list[int], list[float]]:
    """The tokens of a response, and their log-probabilities."""
    sample = request.outputs[0]
    scored = zip(sample.logprobs, sample.token_ids, strict=True)
    return list(sample.token_ids), [entry[token].logprob for entry, token in scored]


def _keep_linears_plain() -> None:
    """On a CPU vLLM packs the weights of linear layers, and a packed copy would not follow new weights."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = plain
