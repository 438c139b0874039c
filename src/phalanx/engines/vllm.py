"""The reward model in vLLM, in the rank's own process: no server and no worker processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from phalanx.config.reward import RewardModelConfig
from phalanx.distributed.vllm_groups import VllmGroups
from phalanx.engines.loading import Question, as_talk, special_tokens
from phalanx.media.pictures import decoded

CPU_KV_CACHE = 2**30  # bytes; on GPUs the size follows from gpu_memory_utilization


class VllmEngine:
    """One rank of a replica. All ranks of the replica answer the same questions in the same order, each with its shard
    of the weights; vLLM's schedule is the same on all of them.
    """

    def __init__(
        self,
        cfg: RewardModelConfig,
        groups: VllmGroups,
        *,
        text: bool = False,
        images: bool = True,
        pairs: bool = False,
    ) -> None:
        """Load the model; see TransformersEngine for `text` and `images`. ValueError if vLLM rejects it."""
        assert cfg.path is not None
        self._groups, self._of_text = groups, text
        # questions about a text or about two samples may have any number of images
        limits = {"video": 0, "audio": 0} if text or pairs else {"image": 1, "video": 0}
        self._sleeps = cfg.sleep and torch.cuda.is_available()
        with groups.active(), rejected("reward.model", cfg.path):
            from vllm import SamplingParams

            self._sampling = SamplingParams(temperature=cfg.temperature, max_tokens=cfg.max_tokens, seed=cfg.seed)
            self._llm = load_llm(
                cfg,
                groups,
                max_model_len=cfg.max_model_len,
                seed=cfg.seed,
                enforce_eager=True,  # answers are short, so compiling and capturing graphs would take longer
                enable_prefix_caching=False,  # an answer must not depend on earlier questions
                **({"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0} if images else {}),
            )
            if self._sleeps:
                self._llm.sleep(level=1)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep weights and KV cache on the GPU for the duration of the block."""
        if not self._sleeps:
            yield
            return
        torch.cuda.empty_cache()  # vLLM allocates from the device, not from torch's cache
        with self._groups.active():
            self._llm.wake_up()
        yield
        with self._groups.active():
            self._llm.sleep(level=1)

    def answer(self, files: Sequence[bytes], questions: Sequence[Question]) -> list[str]:
        """Answer questions about images; each question has the indices of its images in `files`.

        ValueError for an image that cannot be read.
        """
        from vllm.exceptions import VLLMError

        # judges may ask several questions about an image, which is decoded only once
        picture = cache(lambda number: decoded(files[number], "an image for the reward model"))
        special = special_tokens(self._llm.get_tokenizer()) if self._of_text else []
        talks = []
        for numbers, question in questions:
            shown = [{"type": "image_pil", "image_pil": picture(number)} for number in numbers]
            talks.append(as_talk(question, shown, special))
        with self._groups.active():
            try:
                outputs = self._llm.chat(talks, self._sampling, use_tqdm=False)
            except VLLMError as error:
                raise ValueError(f"reward.model: {error}") from error
        return [output.outputs[0].text for output in outputs]


@contextmanager
def rejected(key: str, path: str) -> Iterator[None]:
    """Turn errors of vLLM in the block into a ValueError that begins with the config `key`, about the model `path`."""
    from vllm.exceptions import VLLMError

    try:
        yield
    except (OSError, SafetensorError, ValueError, VLLMError) as error:
        reason = " ".join(str(error).split())  # pydantic's messages have several lines
        raise ValueError(f"{key}: vLLM rejects {path!r} as configured: {reason}") from error


def load_llm(config: Any, groups: VllmGroups, **options: Any) -> Any:
    """vLLM's engine by a RewardModelConfig or a TextEngineConfig, and by further `options` of vLLM."""
    from vllm import LLM

    cuda = torch.cuda.is_available()
    return LLM(
        config.path,
        revision=config.revision,
        tokenizer_revision=config.revision,
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend=executor(groups),
        dtype=config.dtype,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=None if cuda else CPU_KV_CACHE,
        enable_sleep_mode=config.sleep and cuda,
        # without it all ranks of a replica take the same steps; a single rank gets vLLM's default, on with GPUs
        async_scheduling=None if config.tensor_parallel_size == 1 else False,
        trust_remote_code=False,
        use_tqdm_on_load=False,
        **options,
    )


def executor(groups: VllmGroups) -> type:
    """An executor for ranks that the launcher has started: its only worker is this process, a rank of our world."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class InRank(UniProcExecutor):
        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", dist.get_rank(), groups.local_rank

        def determine_available_memory(self) -> list[int]:
            """Bytes for the KV cache: the minimum over the ranks of the replica."""
            free = torch.tensor(super().determine_available_memory(), dtype=torch.int64)
            dist.all_reduce(free, dist.ReduceOp.MIN, group=groups.cpu_group)
            return free.tolist()

    return InRank
