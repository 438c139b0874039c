"""vLLM serves an exported language model, and writes what the checkpoint writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from phalanx.config.tasks import ExportConfig
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import ROOT, run_ranks
from tests.helpers.tasks import run_task

SERVE = """
import json, sys, torch
torch.cpu._init_amx()
from vllm import LLM, SamplingParams
folder, file = sys.argv[1:]
llm = LLM(folder, dtype="float32", max_model_len=128, enforce_eager=True)
chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in open(file)]
for out in llm.chat(chats, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False):
    print("text", json.dumps(out.outputs[0].text))
"""
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1", "TORCHDYNAMO_DISABLE": "1"}


def test_vllm_writes_as_the_checkpoint_does(tmp_path: Path) -> None:
    """Of the quickstart's base, which writes whole letters."""
    keys = ("trainer.save_freq=2", "model.lora_rank=4", "optim.lr=3e-3")
    run_ranks(fit, 1, tiny_lm_config(ROOT / "assets/words/base", tmp_path, *keys))
    folder, file = tmp_path / "export", tmp_path / "texts.jsonl"
    words = [f"checkpoint={tmp_path / 'out'}", f"output_dir={folder}", "merge_lora=true"]
    Export(load_config(ExportConfig, None, words)).run()
    words = [f"checkpoint={tmp_path / 'out'}", f"prompt_file={tmp_path / 'prompts.jsonl'}", f"output_file={file}"]
    assert run_task(["tasks/generate.py", *words]).returncode == 0
    environment = {**os.environ, **ALONE, "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-c", SERVE, str(folder), str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    served = [json.loads(line.removeprefix("text ")) for line in done.stdout.splitlines() if line.startswith("text ")]
    assert served == [json.loads(line)["text"] for line in file.read_text().splitlines()]
