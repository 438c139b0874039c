"""vLLM on the ranks that only sample: weights reach it from the actor's ranks, and are proven there."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.lm import tiny_lm_config
from tests.helpers.roles import learned, run_roles

VLLM = ("rollout.engine=vllm", "data.max_prompt_length=200", "trainer.total_training_steps=2", "optim.lr=1e-2")
TWO = "rollout.tensor_parallel_size=2"
LORA, ADAPTER = "model.lora_rank=4", "rollout.lora_sync=adapter"


def language(cfg: Any) -> Any:
    from phalanx.run.rl import build

    return build(cfg)


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (4, ("placement={rollout: 0-1, actor: 2-3}", TWO, LORA, ADAPTER)),
        (4, ("placement={rollout: 0-1, inference: 2, actor: 3}",)),
        (3, ("placement={rollout: 0, inference: 1, actor: 2}", "rollout.schedule=one_step_off")),
    ],
    ids=["rollout of two", "inference", "inference one step off"],
)
def test_the_engine_follows_the_actor(ranks: int, keys: tuple[str, ...], lm_folder: Path, tmp_path: Path) -> None:
    """The engine agrees with the weights that came after each sync, and the actor trains on the policy's log-probs."""
    run_roles(language, ranks, tiny_lm_config(lm_folder, tmp_path, *VLLM, *keys), timeout=280)
    rows = read(tmp_path)
    assert [row["rollout/sync_error"] < 1e-4 for row in rows] == [True, True]
    assert all(row["rollout/logprob_abs_diff_max"] < 1e-3 for row in rows)
    if "one_step_off" not in str(keys):
        assert [row["actor/first_ratio_error"] for row in rows] == [0, 0]
    else:
        assert [row["rollout/staleness_max"] for row in rows] == [0, 1]


def test_inference_does_what_the_actor_would(lm_folder: Path, tmp_path: Path) -> None:
    """Who takes the old log-probabilities is no part of the result."""
    cfg = tiny_lm_config(lm_folder, tmp_path / "a", *VLLM, "placement={rollout: 0, actor: 1}")
    run_roles(language, 2, cfg, timeout=280)
    cfg = tiny_lm_config(lm_folder, tmp_path / "b", *VLLM, "placement={rollout: 0, inference: 1, actor: 2}")
    run_roles(language, 3, cfg, timeout=280)
    assert learned(tmp_path / "a") == learned(tmp_path / "b")


def read(folder: Path) -> list[dict[str, Any]]:
    from phalanx.run.telemetry.curves import read_metrics
    from phalanx.run.telemetry.run_folder import METRICS_FILE

    return [row for row in read_metrics(folder / "out" / METRICS_FILE) if row["step"] > 0]
