"""Faults put into phalanx, one at a time and for one process: lines of its source that are changed."""

import gc
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import phalanx

SOURCE = Path(phalanx.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """`old` in a module's source becomes `new`, which a job must stop."""

    job: str
    module: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.job}-{self.module}-{self.old}"

    def sources(self) -> tuple[dict[tuple[str, int], CodeType], dict[tuple[str, int], CodeType]]:
        """The code of the module's functions, and what it becomes."""
        path = SOURCE / self.module
        source = path.read_text()
        assert self.old in source, f"{self.module} has no {self.old!r}"
        texts = source, source.replace(self.old, self.new, 1)
        before, changed = (dict(_codes(compile(text, str(path), "exec"))) for text in texts)
        assert any(changed[key] != code for key, code in before.items()), f"{self}: no function changes"
        return before, changed

    def apply(self) -> None:
        """Change the functions of this process; lines stay where they are."""
        path = SOURCE / self.module
        importlib.import_module(".".join(("phalanx", *Path(self.module).with_suffix("").parts)))
        before, changed = self.sources()
        gc.unfreeze()  # tests freeze what there is before they fork
        count = 0
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType) and thing.__code__.co_filename == str(path):
                key = _key(thing.__code__)
                if key in changed and changed[key] != before[key]:
                    thing.__code__ = changed[key]
                    count += 1
        assert count > 0, f"no function of {self.module} changed"


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield _key(constant), constant
            yield from _codes(constant)


POLICY = "models/flow/policy.py"
MINI = "training/minibatches.py"
OFFLOAD = "training/offload.py"
IN_POLICY = "rollout/flow/in_policy.py"
LM_POLICY = "rollout/lm/in_policy.py"
SESSION = "rollout/lm/policy_session.py"
GRAPH = "rollout/lm/step_graph.py"
BLOCKS = "rollout/lm/denoise_blocks.py"
JUDGE = "engines/transformers.py"
TEXT_ENGINE = "engines/vllm_text.py"
JUDGE_ENGINE = "engines/vllm.py"
TEXT_ROLLOUT = "rollout/lm/vllm_rollout.py"
LINK = "run/link.py"
EXPERTS = "distributed/expert_parallel.py"

MUTANTS = [
    Mutant("sd3_lora", "distributed/seed.py", "torch.Generator(device).manual", "torch.Generator().manual"),
    Mutant("sd3_lora", POLICY, "sampler.width).cpu())", "sampler.width))"),
    Mutant("sd3_lora", POLICY, "model.vae.to(world.device)", "model.vae.to('cpu')"),
    Mutant("sd3_lora", POLICY, "moved(self.model.text_encoders, device)", "moved(self.model.text_encoders, 'cpu')"),
    Mutant("sd3_lora", IN_POLICY, "value.to(self.world.device) for", "value for"),
    Mutant("sd3_lora", IN_POLICY, "sigmas.to(device), timesteps.to(device)", "sigmas, timesteps.to(device)"),
    Mutant("sd3_lora", IN_POLICY, "sigmas.to(device), timesteps.to(device)", "sigmas.to(device), timesteps"),
    Mutant("sd3_lora", MINI, "advantage=self.advantage.to(self.device)[at]", "advantage=self.advantage[at.cpu()]"),
    Mutant("sd3_lora", MINI, "weights = weight.to(self.device)", "weights = weight"),
    Mutant("sd3_lora", "training/optim.py", 'device=device if fused else "cpu")', 'device="cpu")'),
    Mutant("sd3_lora", "distributed/fsdp.py", "module.to(world.device)", "module.to('cpu')"),
    Mutant("sd3_lora", "run/world.py", '"cpu:gloo,cuda:nccl" if cuda', '"nccl" if cuda'),
    Mutant(
        "qwen_2_ranks", "run/world.py", "min(slow, most.total_seconds()))", 'min(slow, most.total_seconds()), "nccl")'
    ),
    Mutant("offload", OFFLOAD, "computing.wait_event(fetched[i])", "pass"),
    Mutant("offload", OFFLOAD, "coming.wait_event(returned[i - SLOTS])", "pass"),
    Mutant("offload", OFFLOAD, "going.wait_event(updated[i])", "pass"),
    Mutant("offload", OFFLOAD, "returned[-1].synchronize()", "pass"),
    Mutant("offload", OFFLOAD, "stream.wait_stream(computing)", "pass"),
    Mutant("offload", OFFLOAD, "returned[i].record(going)", "pass"),
    Mutant("offload", OFFLOAD, "fetched[i].record(coming)", "pass"),
    Mutant("offload", OFFLOAD, "updated[i].record(computing)", "pass"),
    Mutant("sd3_full", OFFLOAD, "dtype=torch.uint8, device=self._device)", "dtype=torch.uint8)"),
    Mutant("lm", MINI, "weights = weight.to(self.device)", "weights = weight"),
    Mutant("lm", LM_POLICY, "ids.to(device), starts.to(device)", "ids, starts.to(device)"),
    Mutant("lm", LM_POLICY, "starts.to(device), lengths.to(device)", "starts, lengths.to(device)"),
    Mutant("lm", LM_POLICY, "lengths.to(device), width", "lengths, width"),
    Mutant("lm", SESSION, "self._moved(ids, mask)", "ids, mask"),
    Mutant("lm", SESSION, "self._moved(self._uniform(begun))", "[self._uniform(begun)]"),
    Mutant("blocks", BLOCKS, "self._moved(ids, seen[:, None], position)", "ids, seen[:, None], position"),
    Mutant("blocks", BLOCKS, "arguments(columns, width, seen)", "arguments(columns, width, seen.cpu())"),
    Mutant("blocks", BLOCKS, "mask_id) & drawing", "mask_id) & drawing.cpu()"),
    Mutant("lm", GRAPH, "tensor.to(self._device, non_blocking=True) for", "tensor for"),
    Mutant("lm_2_ranks", GRAPH, "self._root.set_post_optim_event(side.record_event())", "pass"),
    Mutant("lm", GRAPH, "        torch.cuda.current_stream(self._device).wait_stream(side)", "        pass"),
    Mutant("lm", GRAPH, "side.wait_stream(torch.cuda.current_stream(self._device))", "pass"),
    Mutant("lm_packed", "models/lm/packing.py", "torch.cat(positions)]).to(ids.device)", "torch.cat(positions)])"),
    Mutant("ppo", "training/critic_trainer.py", "weight = weight.to(self.world.device)", "weight = weight"),
    Mutant("blocks", "rollout/lm/in_blocks.py", "step.to(ids.device), seeds.to", "step.to('cpu'), seeds.to"),
    Mutant("judge", JUDGE, "noise.to(scores.device)", "noise"),
    Mutant("judge_beside", JUDGE, ").to(self._device, dtype=self._model.dtype)", ")"),
    Mutant("roles", LINK, "store, device.type)", "store)"),
    Mutant(
        "roles",
        LINK,
        "torch.empty(usual, dtype=torch.uint8, device=self._device)",
        "torch.empty(usual, dtype=torch.uint8)",
    ),
    Mutant("roles", LINK, "list(digest), dtype=torch.uint8, device=self._device)", "list(digest), dtype=torch.uint8)"),
    Mutant("roles", LINK, "work.popleft().wait()", "work.popleft()"),
    Mutant("roles", LINK, "            work.wait()\n            upcoming", "            pass\n            upcoming"),
    Mutant("inference", "run/disaggregated/wire.py", "(world), kind, world.device", '(world), kind, "cpu"'),
    Mutant("inference", "training/exchange.py", "tensors[name] = tensors[name].to(device)", "pass"),
    Mutant("vllm", TEXT_ROLLOUT, "TokenTrace(ids.to(device), ", "TokenTrace(ids, "),
    Mutant("vllm", TEXT_ROLLOUT, "scored(trace, 1.0).log_prob.cpu()", "scored(trace, 1.0).log_prob"),
    Mutant("vllm", TEXT_ROLLOUT, ", self.engine.awake(self.policy.engine_weights(base=beside), adapter):", ":"),
    Mutant("vllm_judge", "rewards/judge_pool.py", "with self._model.awake():", "if True:"),
    Mutant("experts", EXPERTS, "here = torch.empty_like(there)", "here = torch.empty(there.shape, dtype=there.dtype)"),
    Mutant("experts", EXPERTS, "torch.arange(counts.shape[1], device=rows.device)", "torch.arange(counts.shape[1])"),
    Mutant("sleeping_rollout", TEXT_ENGINE, "torch.cuda.empty_cache()", "pass"),
    Mutant("sleeping_rollout", TEXT_ENGINE, 'self._llm.wake_up(tags=["weights"])', "pass"),
    Mutant("sleeping_rollout", TEXT_ENGINE, "self.refresh(self._receipt.noted(self._cast_weights(weights)))", "pass"),
    Mutant("sleeping_rollout", TEXT_ENGINE, 'self._llm.wake_up(tags=["kv_cache"])', "pass"),
    Mutant(
        "sleeping_rollout",
        TEXT_ENGINE,
        "                self._llm.sleep(level=self._level)\n            self._has",
        "                pass\n            self._has",
    ),
    Mutant("sleeping_judge", JUDGE_ENGINE, "torch.cuda.empty_cache()", "pass"),
    Mutant("sleeping_judge", JUDGE_ENGINE, "self._llm.wake_up()", "pass"),
    Mutant(
        "sleeping_judge",
        JUDGE_ENGINE,
        "            self._llm.sleep(level=1)\n\n    def answer",
        "            pass\n\n    def answer",
    ),
]
