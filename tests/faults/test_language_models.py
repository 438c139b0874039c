"""Jobs of language models that are killed, or stopped: the run is as if nothing had been."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.faults.jobs import Job, checkpoints, checksums, kill, killed, rows, steps
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_vision import shown_prompts, tiny_vision

SETTINGS = (
    *("algorithm.name=ppo", "critic.optim.lr=1e-3", "trainer.critic_warmup=1"),
    *("parallel.fsdp_size=2", "trainer.save_freq=3"),
)
# the second term has a process beside each rank
REWARD = "reward.functions=[{{path: '{}/reward.py:evenness'}}, {{name: format, kwargs: {{pattern: '.*e.*'}}}}]"


@pytest.mark.long
@pytest.mark.parametrize("images", [False, True], ids=["texts", "images"])
def test_a_killed_and_a_stopped_job_go_on(images: bool, lm_folder: Path, tmp_path: Path) -> None:
    """SIGKILL of one rank in an update, after which the launcher starts all again; SIGTERM in a rollout."""
    settings = (*SETTINGS, REWARD.format(tmp_path))
    if images:
        lm_folder = tiny_vision(tmp_path / "model", "qwen3_vl")
        files = shown_prompts(tmp_path / "data", "shown.jsonl")
        settings += (f"data.train_files=[{files}]", "data.max_prompt_length=100", "model.freeze_vision_tower=false")
    env = {"MAX_RESTARTS": "1", "PHASE_S": "0.1"}
    saved = tmp_path / "out" / "checkpoints" / "step_000003"  # it is written beside the next steps
    with Job(lm_folder, tmp_path, *settings, "trainer.total_training_steps=500", env=env, lm=True) as job:
        job.until(lambda: job.phase(1)[1] >= 4 and job.phase(1)[2] == "update" and saved.is_dir())
        old = set(job.ranks())
        kill(job.phase(1)[0], signal.SIGKILL)
        begin = time.monotonic()
        job.until(lambda: old.isdisjoint(job.ranks()))
        gone_after = time.monotonic() - begin
        job.until(lambda: job.phase(0)[0] not in old and job.phase(0)[1] >= 4 and job.phase(0)[2] == "rollout")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert len(re.findall(killed(1), job.said, re.MULTILINE)) == 1
        assert "Traceback" not in job.said
        assert re.search(r"resuming from \S+/step_00000([36]): step \1 of 500", job.said)
        assert job.processes() == {}
    print(f"all ranks gone after {gone_after:.1f} s")
    done = steps(tmp_path)[-1]
    assert checkpoints(tmp_path)[-1] == f"step_{done:06d}"
    for folder in (tmp_path, tmp_path / "whole"):
        total = f"trainer.total_training_steps={done + 1}"
        run_ranks(fit, 2, tiny_lm_config(lm_folder, folder, *settings, total))
    assert rows(tmp_path) == rows(tmp_path / "whole")
    assert checksums(tmp_path, done + 1) == checksums(tmp_path / "whole", done + 1)


TALK = """
import os, random, time
from pathlib import Path


class Talk:
    def reset(self, seed, sample_seed, prompt):
        self.random, self.turns = random.Random(sample_seed), 0
        return f" Number {seed % 1000}."

    def step(self, message: str):
        self.turns += 1
        here = Path(__file__).parent
        if os.environ.get("RANK") == "1" and self.turns == 2:  # of a torchrun's rank
            if (here / "phase_1").read_text().split()[1:] == ["3", "rollout"] and not (here / "talking").exists():
                (here / "talking").touch()
                time.sleep(1000)
        return "and " * self.random.randrange(4) + "more", (len(message) % 5) / 8, self.random.random() < 0.2
"""


@pytest.mark.long
def test_a_job_killed_in_a_conversation_goes_on(lm_folder: Path, tmp_path: Path) -> None:
    """SIGKILL of one rank while the environment answers a second turn, after the first checkpoint."""
    model = Path(shutil.copytree(lm_folder, tmp_path / "talker"))
    settings = json.loads((model / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], *range(300, 340)]  # turns of about ten tokens
    (model / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "envs.py").write_text(TALK)
    keys = (
        f"environment.path={tmp_path}/envs.py:Talk",
        "environment.max_turns=3",
        "environment.join=4",
        "data.max_response_length=64",
        "reward.functions=[{name: environment}]",
        "trainer.save_freq=2",
        "trainer.total_training_steps=5",
    )
    talking, saved = tmp_path / "talking", tmp_path / "out" / "checkpoints" / "step_000002"
    with Job(model, tmp_path, *keys, env={"MAX_RESTARTS": "1", "PHASE_S": "0.1"}, lm=True) as job:
        job.until(lambda: talking.exists() and saved.is_dir())
        kill(job.phase(1)[0], signal.SIGKILL)
        assert job.wait() == 0
        assert f"resuming from {tmp_path}/out/checkpoints/step_000002: step 2 of 5" in job.said
        assert "Traceback" not in job.said
    run_ranks(fit, 2, tiny_lm_config(model, tmp_path / "whole", *keys))
    killed, whole = rows(tmp_path), rows(tmp_path / "whole")
    for row in (*killed, *whole):
        del row["tools/seconds_mean"]
    assert killed == whole
    assert checksums(tmp_path, 5) == checksums(tmp_path / "whole", 5)
