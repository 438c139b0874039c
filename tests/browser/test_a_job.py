"""A job of two ranks with roles, watched in a browser until `phalanx stop` ends it."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from phalanx.tools.board import runs
from phalanx.tools.board.report import write_report
from tests.browser.visits import DESKTOP, PHONE, Visitor, check_looks

ROOT = Path(__file__).parents[2]
PATIENCE_MS = 240_000


def test_a_job_is_followed_until_it_is_stopped(tmp_path: Path, visitor: Visitor, serve: Any) -> None:
    out = tmp_path / "out"
    keys = [
        "trainer.total_training_steps=500",
        "trainer.test_freq=5",
        "trainer.save_freq=5",
        f"trainer.output_dir={out}",
    ]
    keys += ["placement={rollout: 0, actor: 1}", "trainer.val_before_train=false"]
    command = ["sh", "train.sh", "tasks/train_grpo.py", "configs/grpo/quickstart.yaml", *keys]
    env = os.environ | {"NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            while not (out / "metrics.jsonl").is_file() and job.poll() is None:
                time.sleep(0.2)
            page = visitor.open(serve(out).url)
            status, events = page.locator("#ranks .status"), page.locator("#ranks .events")
            expect(status).to_contain_text("2 ranks on 1 host", timeout=PATIENCE_MS)
            expect(status).to_contain_text("running")
            roles = page.locator("#ranks .table tbody tr td:nth-child(2)")
            expect(roles).to_have_text(["rollout", "actor"])
            expect(page.locator("#samples")).to_contain_text("Step 5", timeout=PATIENCE_MS)
            expect(events).to_contain_text("checkpoint")
            expect(page.locator("#ranks .legend")).to_contain_text("update")
            expect(page.locator("#ranks .note")).to_contain_text("Ranks of one role waited ")
            check_looks(page, "light")
            assert runs.main("stop", [str(out)]) == 0
            assert job.wait(60) == 143, (tmp_path / "log").read_text()
            expect(status).to_contain_text("stopped · step ")
            expect(events).to_contain_text("the same command resumes from")
            page.get_by_label("Log of rank").select_option("1")
            expect(page.locator("#ranks .log")).to_contain_text("step 5/500")
        finally:
            job.terminate()
            job.wait()
    for scheme, device in (("light", DESKTOP), ("dark", PHONE)):
        page = visitor.open(write_report(out), scheme, **device)
        expect(page.locator("#ranks .table tbody tr")).to_have_count(2)
        check_looks(page, scheme)
