"""Conversations in vLLM: the same on one rank per replica or two, exact, and what misbehaves costs only its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.lm import LMRLConfig
from phalanx.run.rules import load_config
from phalanx.types import JobError, Prompt
from tests.helpers.jobs import rows
from tests.helpers.lm import fit
from tests.helpers.ranks import ROOT, run_ranks

ASSETS = ROOT / "assets" / "calculator"
CALCULATOR = '''
import time

from phalanx.zoo.environments.calculator import Calculator as BuiltIn


class Calculator:
    """The built-in one, which hangs, raises or says too much where the row says so."""

    def reset(self, sample_seed, odd=False):
        self.manner = ["hangs", "raises", "long", "fine"][sample_seed % 4] if odd else "fine"

    def calculator(self, expression: str) -> str:
        """Computes.

        Args:
            expression: what to compute
        """
        if self.manner == "hangs":
            time.sleep(60)
        if self.manner == "raises":
            raise KeyError
        if self.manner == "long":
            return "9" * 10**7
        return BuiltIn().calculator(expression)
'''
CONFIG = ROOT / "configs" / "grpo" / "quickstart_tools.yaml"
Talk = tuple[list[int], list[bool], str, str]  # tokens, those that are drawn, the end, the answers of tools


def talks(rollout: Any, prompts: list[Prompt]) -> list[Talk]:
    """This rank's conversations."""
    rollout.sample(prompts, seed=1, step=0, each=lambda texts, asked: None)
    result = []
    for drawn in rollout.drawn:
        answers = [message["content"] for message in drawn.beside["messages"] if message["role"] == "tool"]
        assert len(drawn.log_probs) == sum(drawn.sampled) == drawn.length
        result.append((drawn.prompt + drawn.response, list(drawn.sampled), drawn.ended, " | ".join(answers)))
    return result


def job(cfg: LMRLConfig) -> dict[str, Any]:
    """Conversations with tools that behave, whose answers join at known steps or as they arrive, and with such that do
    not; then training; then a tool that ends the job.
    """
    from phalanx.run.rl import build

    trainer = build(cfg)
    rollout, prompts = trainer.collector.rollout, trainer.collector.prompts.batch(0)
    odd = [replace(prompt, meta=prompt.meta | {"odd": True}) for prompt in prompts]
    result: dict[str, Any] = {}
    with rollout.awake():
        result["fine"] = talks(rollout, prompts)
        result["odd"] = talks(rollout, odd)
        join, cfg.environment.join = cfg.environment.join, 0
        result["arriving"] = talks(rollout, prompts)
    cfg.environment.join = join
    trainer.fit()
    cfg.environment.on_error = "fail"
    half = len(prompts) // 2  # those of the second rank
    with rollout.awake(), pytest.raises(JobError) as error:
        talks(rollout, prompts[:half] + odd[half:])
    return result | {"error": str(error.value)}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[dict[str, Any]], Path]]:
    """Results of two ranks with tensor parallel 1 and 2, and where the run is."""
    result = {}
    for tp in (1, 2):
        folder = tmp_path_factory.mktemp(f"tp{tp}")
        (folder / "envs.py").write_text(CALCULATOR)
        keys = [
            f"environment.path={folder}/envs.py:Calculator",
            "environment.tools=[]",
            "environment.timeout_s=1",
            "environment.max_error_fraction=1",
            f"model.path={ASSETS / 'base'}",
            f"data.train_files=[{ASSETS / 'train.jsonl'}]",
            "data.val_files=[]",
            "data.train_batch_size=8",
            "rollout.engine=vllm",
            f"rollout.tensor_parallel_size={tp}",
            "actor.ppo_mini_batch_size=4",
            "actor.ppo_micro_batch_size_per_gpu=16",
            "trainer.total_training_steps=2",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.logger=[]",
            f"trainer.output_dir={folder / 'out'}",
        ]
        result[tp] = run_ranks(job, 2, load_config(LMRLConfig, CONFIG, keys), timeout=280), folder / "out"
    return result


def of_all(ranks: list[dict[str, Any]], name: str) -> list[Talk]:
    return [talk for rank in ranks for talk in rank[name]]


def test_replicas_of_two_ranks_hold_the_same_conversations(jobs: Any) -> None:
    (alone, _), (together, _) = jobs[1], jobs[2]
    fine = of_all(alone, "fine")
    for ranks in (alone, together):
        assert of_all(ranks, "fine") == of_all(ranks, "arriving") == fine
    turns = {str(sampled).count("False, True") for _, sampled, _, _ in fine}
    assert turns >= {1, 2}


def test_log_probs_are_taken_again(jobs: Any) -> None:
    """In two steps of two updates."""
    for _, out in jobs.values():
        trained = rows(out)
        assert len(trained) == 2
        for row in trained:
            assert row["actor/first_ratio_error"] == 0 and row["rollout/logprob_abs_diff_max"] < 1e-3
            assert row["rollout/sync_error"] < 1e-4 and row["conversation/turns_mean"] > 1
            assert row["response/length_mean"] < row["conversation/length_mean"]


def test_tools_that_misbehave_cost_only_their_own_conversation(jobs: Any) -> None:
    for ranks, _ in jobs.values():
        seen, others = set(), 0
        for fine, odd in zip(of_all(ranks, "fine"), of_all(ranks, "odd"), strict=True):
            calls, answers = fine[3], odd[3]
            if fine == odd:
                others += bool(calls)
            elif odd[2] == "timeout":
                seen.add("hangs")
            else:
                seen.add("raises" if "error: KeyError" in answers else "long")
                assert "KeyError" in answers or ("999" in answers and len(answers) < 200)
            assert calls or fine == odd
        assert seen == {"hangs", "raises", "long"} and others  # which call tools beside those


def test_a_failure_of_one_rank_ends_all_in_one_line(jobs: Any) -> None:
    for ranks, _ in jobs.values():
        first, second = ranks
        assert first["error"] == second["error"]
        assert first["error"].startswith("rank 1: environment Calculator: calculator ") and "\n" not in first["error"]


def test_partial_rollouts_go_on_with_their_tools(tmp_path: Path) -> None:
    """A replica of two ranks holds the conversations that two of one hold, wherever their tools are."""
    found = []
    for tp in (1, 2):
        keys = [
            f"model.path={ASSETS / 'base'}",
            f"data.train_files=[{ASSETS / 'train.jsonl'}]",
            "data.val_files=[]",
            "data.train_batch_size=2",
            "rollout.engine=vllm",
            f"rollout.tensor_parallel_size={tp}",
            "rollout.partial_rollout={over_sampling_batch_size: 4, tokens: 16}",
            "rollout.correction=token_tis",
            "actor.ppo_mini_batch_size=2",
            "actor.ppo_micro_batch_size_per_gpu=8",
            "trainer.total_training_steps=3",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.logger=[]",
            f"trainer.output_dir={tmp_path / str(tp) / 'out'}",
        ]
        run_ranks(fit, 2, load_config(LMRLConfig, CONFIG, keys), timeout=280)
        found.append(rows(tmp_path / str(tp) / "out"))
    for one, other in zip(*found, strict=True):
        for key in ("conversation/length_mean", "tools/call_frequency", "rollout/staleness_mean", "rollout/rounds"):
            assert one[key] == other[key]
        assert one["rollout/sync_error"] < 1e-4
    assert max(row["tools/call_frequency"] for row in found[0]) > 0
    assert max(row["rollout/staleness_max"] for row in found[0]) == 1 and found[0][1]["rollout/rounds"] > 1
