"""The reward model in transformers, for models that vLLM does not support and for machines without vLLM."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx.config.reward import RewardModelConfig
from phalanx.distributed.seed import fold_in
from phalanx.distributed.tensor_parallel import KEY, parallelize, wildcard
from phalanx.engines.loading import (
    Question,
    Turns,
    as_talk,
    check_weights,
    load_with_info,
    loading,
    special_tokens,
    without_videos,
)
from phalanx.media.pictures import Picture, decoded


class TransformersEngine:
    """One rank of a replica. All ranks of the replica answer the same questions in the same order, each with its shard
    of the weights; the first rank chooses the tokens, so that all ranks take the same steps.
    """

    def __init__(
        self, cfg: RewardModelConfig, mesh: DeviceMesh | None, *, text: bool = False, images: bool = True
    ) -> None:
        """Load the model; ValueError if it cannot be loaded, or cannot be sharded over the ranks.

        `mesh`: the ranks of the replica; None: only this one. `text`: questions contain texts of a policy, whose
        special tokens are broken up. `images`: the model is a vision-language model, otherwise a language model.
        """
        assert cfg.path is not None
        self._cfg, self._group = cfg, None if mesh is None else mesh.get_group()
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        with _randomness_kept():
            # a language model has only a tokenizer
            self._processor = (load_processor if images else load_tokenizer)(cfg.path, cfg.revision)
            self._tokenizer = self._processor.tokenizer if images else self._processor
            self._model = _load_model(cfg.path, cfg.dtype, cfg.revision, text=not images)
        self._reads_images = images
        self._special = special_tokens(self._tokenizer) if text else []
        if mesh is not None:
            parallelize(self._model, tensor_parallel_plan(self._model, mesh.size()), mesh)
        self._limit = cfg.max_model_len or self._model.config.get_text_config(decoder=True).max_position_embeddings
        self._set_tokens(cfg.path)
        sleeps = cfg.sleep and cuda
        self._model.to("cpu" if sleeps else self._device)
        self._sleeping = Sleeping(self._model, self._device) if sleeps else None

    def _set_tokens(self, path: str) -> None:
        """Set the end and padding tokens, and drop all other settings of the model's generation config."""
        from transformers import GenerationConfig

        tokenizer, known = self._tokenizer, self._model.generation_config.eos_token_id
        ends = {tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])} - {None}
        if not ends:
            raise ValueError(f"reward.model.path: {path!r} has no token that ends an answer (eos_token_id)")
        pad = min(ends) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        tokenizer.pad_token, tokenizer.padding_side = tokenizer.convert_ids_to_tokens(pad), "left"
        self._model.generation_config = GenerationConfig(eos_token_id=sorted(ends), pad_token_id=pad)

    def awake(self) -> AbstractContextManager[None]:
        """Keep the weights on the device for the duration of the block."""
        return nullcontext() if self._sleeping is None else self._sleeping.awake()

    @torch.no_grad()
    def answer(self, files: Sequence[bytes], questions: Sequence[Question]) -> list[str]:
        """Answer questions about images; each question has the indices of its images in `files`.

        ValueError for a question that leaves no room for an answer within reward.model.max_model_len, and for an image
        that cannot be read.
        """
        answers = [""] * len(questions)
        size = self._cfg.micro_batch_size
        with _randomness_kept():
            # processors take a batch in which either all texts have images or none has
            for with_images in (True, False):
                rows = [i for i, (numbers, _) in enumerate(questions) if bool(numbers) == with_images]
                # questions of similar length are often similar, and so are the lengths of their answers
                order = sorted(rows, key=lambda i: len("".join(questions[i][1])))
                for first in range(0, len(order), size):
                    batch = order[first : first + size]
                    # judges may ask several questions about an image, which is decoded only once
                    picture = cache(lambda number: decoded(files[number], "an image for the reward model"))
                    illustrated = [(list(map(picture, questions[i][0])), questions[i][1]) for i in batch]
                    for i, text in zip(batch, self._answer_batch(illustrated), strict=True):
                        answers[i] = text
        return answers

    def _answer_batch(self, batch: list[tuple[list[Any], Turns]]) -> list[str]:
        """Answer a batch of questions, all or none of which have pictures."""
        cfg, inputs = self._cfg, self._model_inputs(batch)
        lengths: list[int] = inputs["attention_mask"].sum(1).tolist()
        if max(lengths) >= self._limit:
            its, smaller = (" with its image", "or images smaller") if batch[0][0] else ("", "shorter")
            raise ValueError(
                f"reward.model.max_model_len: a question{its} has {max(lengths)} tokens, and {self._limit} "
                f"are allowed with the answer; raise it, or make questions {smaller}"
            )
        begin = inputs["input_ids"].shape[1]
        # generation stops when the shortest question reaches the limit; answers to longer ones are truncated below
        tokens = self._model.generate(
            **inputs,
            max_new_tokens=min(cfg.max_tokens, self._limit - min(lengths)),
            do_sample=False,
            logits_processor=[Choice(cfg.temperature, cfg.seed, begin, self._group)],  # samples at temperatures above 0
            synced_gpus=False,
        )[:, begin:].tolist()
        answers = []
        for row, length in zip(tokens, lengths, strict=True):
            answers.append(str(self._processor.decode(row[: self._limit - length], skip_special_tokens=True)))
        return answers

    def _model_inputs(self, batch: list[tuple[list[Any], Turns]]) -> Any:
        """The model's inputs: `input_ids` and `attention_mask` [B, S], left-padded, and pixels."""
        if not self._reads_images:
            talks = []
            for _, question in batch:
                talk = as_talk(question, (), self._special)
                talks.append([message | {"content": message["content"][0]["text"]} for message in talk])
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
            return self._tokenizer.apply_chat_template(talks, **options).to(self._device)
        texts = []
        for pictures, question in batch:
            talk = as_talk(question, [{"type": "image"} for _ in pictures], self._special)
            texts.append(self._processor.apply_chat_template(talk, add_generation_prompt=True))
        first = self._tokenizer.bos_token
        return self._processor(
            text=texts,
            images=[pictures for pictures, _ in batch] if batch[0][0] else None,
            padding=True,
            return_tensors="pt",
            add_special_tokens=not (first and texts[0].startswith(first)),  # the chat template may have added them
        ).to(self._device, dtype=self._model.dtype)


class Choice:
    """A logits processor that chooses the next token of each answer, and makes all other tokens impossible.

    Every answer is sampled with the same random numbers (Gumbel noise [vocabulary] per token), so it depends neither on
    the other answers in the batch nor on the ranks.
    """

    def __init__(self, temperature: float, seed: int, begin: int, group: dist.ProcessGroup | None) -> None:
        """`begin`: number of tokens before the answers; `group`: the ranks that follow the choice of its first rank."""
        self._temperature, self._seed, self._begin, self._group = temperature, seed, begin, group

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [B, V] after the tokens [B, S] -> 0 for the chosen token and -inf for all others [B, V]."""
        if self._temperature > 0:
            stream = torch.Generator().manual_seed(fold_in(self._seed, input_ids.shape[1] - self._begin))
            noise = torch.empty(scores.shape[1], dtype=torch.float32).exponential_(generator=stream).log().neg()
            scores = scores.float() / self._temperature + noise.to(scores.device)
        chosen = scores.argmax(1, keepdim=True)
        if self._group is not None:
            dist.broadcast(chosen, group=self._group, group_src=0)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


def load_processor(path: str, revision: str | None = None, key: str = "reward.model.path") -> Any:
    """The processor for texts and images of the model at `path`, the value of `key`; ValueError if it has none."""
    from transformers import AutoConfig, AutoProcessor, ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    with loading(f"{key}: {path!r} does not load"):
        try:
            processor = AutoProcessor.from_pretrained(path, revision=revision, trust_remote_code=False)
        except ImportError:
            # many processors include one for videos, which needs torchvision; images do not need it
            settings = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
            kind = without_videos(PROCESSOR_MAPPING[type(settings)])
            processor = kind.from_pretrained(path, revision=revision, trust_remote_code=False)
    if not isinstance(processor, ProcessorMixin) or processor.chat_template is None:
        raise ValueError(f"{key}: {path!r} has no chat template for images; expected a model that has one")
    return processor


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    """The tokenizer of a language model; ValueError if it does not load or has no chat template."""
    from transformers import AutoTokenizer

    with loading(f"reward.model.path: {path!r} does not load"):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    if tokenizer.chat_template is None:
        raise ValueError(f"reward.model.path: {path!r} has no chat template; expected a model that has one")
    return tokenizer


def reads_images(path: str, revision: str | None) -> bool:
    """Whether the reward model is a vision-language model; ValueError if its configuration does not load."""
    from transformers import PreTrainedConfig

    with loading(f"reward.model.path: {path!r} does not load"):
        settings, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
    return "vision_config" in settings


def _load_model(path: str, dtype: str, revision: str | None = None, *, text: bool = False) -> Any:
    """Load the whole model on the CPU, frozen."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForCausalLM if text else AutoModelForImageTextToText
    with loading(f"reward.model.path: {path!r} does not load"):
        model, info = load_with_info(kind, path, revision=revision, dtype=getattr(torch, dtype))
    check_weights(info, f"reward.model.path: {path!r} is not a whole model")
    return model.requires_grad_(False).eval()


def tensor_parallel_plan(model: Any, tp: int) -> Mapping[str, str]:
    """transformers' tensor parallel plan of `model`, or Llama's if it has none and has the same matrices."""
    from transformers import LlamaConfig

    plan = dict(model.tp_plan)
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    # vision-language models often have no plan, although the layers of their language model are Llama's
    if not any(name.startswith(f"{prefix}.layers.") for name in plan):
        like = LlamaConfig.base_model_tp_plan
        matrices = set()
        for name, parameter in decoder.named_parameters():
            if name.startswith("layers.") and parameter.ndim > 1:
                matrices.add(wildcard(name))
        if like is None or matrices != {f"{name}.weight" for name in like}:
            raise ValueError(
                f"{KEY}: {tp}: transformers has no tensor parallel plan for {type(model).__name__}; expected 1, or "
                "reward.model.engine=vllm"
            )
        plan |= {f"{prefix}.{name}": style for name, style in like.items()}
    head: nn.Module | None = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        # the tied matrix is kept whole for the embedding, so sharding it for the head would save nothing
        plan.pop(next(name for name, module in model.named_modules() if module is head), None)
    return plan


def _randomness_kept() -> AbstractContextManager[None]:
    """Restore torch's random states after the block."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def image_tokens(processor: Any, images: Sequence[Picture]) -> list[int]:
    """The number of tokens of each image, from the headers of the files. Raises ValueError, in one line, for an image
    that cannot be read, or whose size the processor rejects.
    """
    counts = []
    for image in images:
        height, width = image.size
        try:
            made = processor._get_num_multimodal_tokens(image_sizes=[[height, width]])
        except ValueError as error:
            raise ValueError(f"{image.where}: {' '.join(str(error).split())}") from error
        counts.append(int(made.num_image_tokens[0]))
    return counts


class Sleeping:
    """Keeps the weights in main memory, and a copy of them on the device while the model is awake.

    Frozen weights do not change and are not copied back; buffers, which are small and may change, are.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """`model` must be frozen and on the CPU; if `device` is a GPU, its weights move to pinned memory."""
        self._device, self._modules = device, list(model.modules())
        pin = device.type == "cuda"
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # tied weights have several places
        for module in self._modules:
            for name, weight in module.named_parameters(recurse=False):
                places.setdefault(weight, []).append((module, name))
        self._weights: list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = []
        while places:  # one by one, so that only one weight is in memory twice at a time
            weight, slots = places.popitem()
            weight = nn.Parameter(torch.empty_like(weight, pin_memory=pin).copy_(weight), requires_grad=False)
            self._weights.append((weight, slots))
            _set_weight(weight, slots)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the model on the device for the duration of the block."""
        try:
            for weight, slots in self._weights:
                _set_weight(nn.Parameter(weight.to(self._device, non_blocking=True), requires_grad=False), slots)
            self._move_buffers(self._device)
            yield
        finally:
            for weight, slots in self._weights:
                _set_weight(weight, slots)
            self._move_buffers(torch.device("cpu"))
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _move_buffers(self, device: torch.device) -> None:
        for module in self._modules:
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))


def _set_weight(weight: nn.Parameter, slots: list[tuple[nn.Module, str]]) -> None:
    for module, name in slots:
        setattr(module, name, weight)
