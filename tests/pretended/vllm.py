"""A pretended vLLM with vLLM's own rules of sleeping, beside a pretended GPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from phalanx.config.reward import RewardModelConfig
from phalanx.distributed import vllm_groups
from phalanx.engines import vllm as judge_engine
from phalanx.engines.vllm import VllmEngine
from phalanx.engines.vllm_text import TextEngine, TextEngineConfig
from phalanx.functional.tokens import Decoding
from phalanx.rollout.lm import vllm_rollout as rollout_engine
from tests.pretended.record import RECORD

# a step of whoever sleeps
ROLLOUT = ["cache emptied", "rollout wakes weights", "rollout loads", "rollout wakes kv_cache", "rollout answers"]
ROLLOUT += ["rollout sleeps at 2"]
JUDGE = ["cache emptied", "judge wakes weights kv_cache", "judge answers", "judge sleeps at 1"]
DRAWN = Decoding(4, 1.0, [], 0)


class Groups:
    """The groups of an engine that is alone."""

    cpu_group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)

    def __init__(self, *_: Any) -> None:
        """See VllmGroups."""

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def any(self, values: torch.Tensor) -> torch.Tensor:
        return values


class LLM:
    """As vllm.LLM: where memory is, and what may be asked then; one sleeping engine in a process."""

    sleepers = 0

    def __init__(self, path: str, *, enable_sleep_mode: bool, load_format: str = "auto", **options: Any) -> None:
        self.options = options
        LLM.sleepers += enable_sleep_mode
        assert LLM.sleepers <= 1, "Sleep mode can only be used for one instance per process."
        self.sleeps, self.awake = enable_sleep_mode, {"weights", "kv_cache"}
        self.loaded = load_format != "dummy"
        self.name = "judge" if self.loaded else "rollout"
        self.asked: list[Any] = []

    def say(self, what: str) -> None:
        RECORD.event(f"{self.name} {what}")

    def sleep(self, level: int) -> None:
        assert self.sleeps and self.awake == {"weights", "kv_cache"}, "it sleeps already"
        self.awake, self.loaded = set(), self.loaded and level == 1
        self.say(f"sleeps at {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        assert RECORD.events[-1][1] == "cache emptied" or self.awake, "torch holds the memory"
        tags = tags or ["weights", "kv_cache"]
        assert not self.awake & set(tags), "it is awake already"
        self.awake |= set(tags)
        self.say(f"wakes {' '.join(tags)}")

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights" and "weights" in self.awake, "weights go to memory that is not there"
        self.model = torch.nn.Module()
        for name, tensor in kwargs["weights_iterator"]:
            assert tensor.device.type == "cuda", name
            self.model.register_buffer(name.replace(".", "_"), tensor.clone())
        self.loaded = True
        self.say("loads")

    def apply_model(self, function: Callable[[torch.nn.Module], Any]) -> list[Any]:
        assert self.loaded and "weights" in self.awake, "weights are read that are not there"
        return [function(self.model)]

    def reset_prefix_cache(self) -> bool:
        return True

    def generate(self, prompts: list[Any], settings: list[Any], **_: Any) -> list[Any]:
        self._asked()
        requests = []
        for setting in settings:
            tokens = [5] * (setting.max_tokens if setting.ignore_eos else 1 + setting.seed % 3)
            entries = [{5: SimpleNamespace(logprob=-1.0)} for _ in tokens]
            requests.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=entries)]))
        return requests

    @property
    def llm_engine(self) -> "LLM":
        return self

    def add_request(self, name: str, prompt: Any, setting: Any, **_: Any) -> None:
        self.asked.append((name, prompt, setting))

    def step(self) -> list[Any]:
        asked, self.asked = self.asked, []
        requests = self.generate([prompt for _, prompt, _ in asked], [setting for _, _, setting in asked])
        for request, (name, prompt, _) in zip(requests, asked, strict=True):
            request.request_id, request.prompt_token_ids = name, prompt["prompt_token_ids"]
        return requests

    def chat(self, talks: list[Any], *_: Any, **__: Any) -> list[Any]:
        self._asked()
        return [SimpleNamespace(outputs=[SimpleNamespace(text="Score: 5")]) for _ in talks]

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(all_special_tokens=[], get_added_vocab=dict)

    def _asked(self) -> None:
        assert self.loaded and self.awake == {"weights", "kv_cache"}, "asked while it sleeps"
        self.say("answers")


def pretend_vllm() -> None:
    """A module `vllm`, in a forked process with a pretended GPU."""
    modules = (
        "vllm",
        "vllm.exceptions",
        "vllm.sampling_params",
        "vllm.v1",
        "vllm.v1.executor",
        "vllm.v1.executor.uniproc_executor",
    )
    sys.modules.update({name: ModuleType(name) for name in modules})
    vars(sys.modules["vllm"]).update(LLM=LLM, SamplingParams=SimpleNamespace, __spec__=ModuleSpec("vllm", None))
    vars(sys.modules["vllm.sampling_params"]).update(RequestOutputKind=SimpleNamespace(FINAL_ONLY=None))
    vars(sys.modules["vllm.exceptions"]).update(VLLMError=RuntimeError)
    vars(sys.modules["vllm.v1.executor.uniproc_executor"]).update(UniProcExecutor=object)
    for module in (vllm_groups, rollout_engine):
        module.VllmGroups = Groups
    torch.cuda.empty_cache = lambda: RECORD.event("cache emptied")
    judge_engine.special_tokens = lambda tokenizer: []  # the tokenizer is pretended too


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield "w", torch.ones(2, device="cuda")


def steps(rollout_sleeps: bool, judge_sleeps: bool) -> list[str]:
    """Two steps of a rollout and a judge on one rank, as the loop runs them."""
    pretend_vllm()
    config = TextEngineConfig("rollout", None, "bfloat16", 1, 0.5, 64, 4, rollout_sleeps)
    rollout = TextEngine(config, Groups())  # type: ignore[arg-type]
    section = RewardModelConfig(path="judge", sleep=judge_sleeps)
    judge = VllmEngine(section, Groups(), text=True)  # type: ignore[arg-type]
    for _ in range(2):
        with rollout.awake(weights()):
            rollout.generate([[1, 2]], [0], DRAWN)
        with judge.awake():
            judge.answer([], [((), "?")])
        RECORD.event("update")
    return [what for _, what in RECORD.events]
