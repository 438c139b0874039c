"""tasks/generate.py: its prompts."""

import json
from pathlib import Path

from phalanx.config import load
from phalanx.config.tasks import GenerateConfig
from phalanx.jobs.generate import read_prompts


def test_a_file_of_supervised_training_is_answered_anew(tmp_path: Path) -> None:
    """The answers at the end of chats are not part of the prompts."""
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    answered = [*turns, {"role": "assistant", "content": "1"}]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (answered, turns)))
    cfg = load(GenerateConfig, None, ["model.path=x", f"prompt_file={file}"])
    prompts = read_prompts(cfg, "messages")
    assert [(p.text, p.messages, p.group_id) for p in prompts] == [("one", turns, 0), ("one", turns, 1)]
