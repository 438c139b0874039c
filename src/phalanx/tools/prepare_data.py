"""Training data for language models: a source's prompts with an instruction, their answers, and a held-out split."""

import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from phalanx.config.messages import ConfigError, reason
from phalanx.config.tasks import PrepareDataConfig
from phalanx.data.prompts import load_prompts, refuse_images
from phalanx.exit import rank
from phalanx.run.outputs import writing
from phalanx.run.rules import check
from phalanx.types import Prompt
from phalanx.zoo.environments.reasoning_gym import check_task
from phalanx.zoo.rewards.text._answers import boxed, marked

PROMPT_KEYS = ("prompt", "question", "problem", "messages")  # columns tried in this order
INSTRUCTIONS = {
    "hash": 'Let\'s think step by step and output the final answer after "####".',
    "boxed": "Let's think step by step and put the final answer within \\boxed{}.",
    "line": 'Solve this step by step. The last line should be "Answer: " and the final answer.',
    "answer": "Think first, then give the final answer between <answer> and </answer>.",
    "none": "",
}
LONGEST_ANSWER = 100  # characters; longer unmarked solutions count as proofs
Row = dict[str, Any]  # of an output file


class PrepareData:
    """The job: `PrepareData(cfg)` reads the source (a ValueError is the user's mistake), `run()` writes the files."""

    def __init__(self, cfg: PrepareDataConfig) -> None:
        self.cfg = cfg
        self.proofs: list[str] = []  # messages about omitted proofs
        check(cfg)
        test, form = ([], "none") if cfg.test_source is None else self._read_answers(cfg.test_source, "test_source")
        rows: list[Row] = []
        if cfg.source is not None:
            rows, form = self._read_answers(cfg.source, "source")
        elif cfg.reasoning_gym:
            rows, form = list(self._generate_rows()), "answer"
        self.instruction = INSTRUCTIONS[cfg.instruction or form] if cfg.suffix is None else cfg.suffix
        self._split_rows(rows, test)

    def run(self) -> None:
        """Write those of train.jsonl, val.jsonl and test.jsonl that have rows."""
        if rank() != 0:
            return
        folder = Path(self.cfg.output_dir).expanduser()
        with writing(folder, "output_dir"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, rows in self.files.items():
                lines = [json.dumps(self._instruct_row(row), default=str) + "\n" for row in rows]
                (folder / name).write_text("".join(lines), encoding="utf-8")
        counts = [f"{folder / name}: {len(rows)} prompts" for name, rows in self.files.items()]
        print(", ".join(counts))
        print(f"instruction: {self.instruction or 'none'}")
        if self.repeated:
            print(f"{self.repeated} prompts of the source are duplicates: left out")
        for text in self.proofs:
            print(f"{text}: left out")
        if self.leaked:
            print(f"{self.leaked} prompts of the source are also in test_source: left out")

    def _split_rows(self, rows: list[Row], test: list[Row]) -> None:
        """Set `files`: the rows of each output file. No prompt is in two of them."""
        held_out = set(map(_prompt_name, test))
        distinct: dict[str, Row] = {}
        for row in rows:
            distinct.setdefault(_prompt_name(row), row)  # keep the first of several duplicates
        kept = [row for name, row in distinct.items() if name not in held_out]
        self.repeated, self.leaked = len(rows) - len(distinct), len(distinct) - len(kept)
        count = self.cfg.val_size if rows else 0  # a benchmark has only test_source
        if rows and count >= len(kept):
            raise ConfigError(f"val_size: {count} of {len(kept)} distinct prompts leave none to train on")
        chosen = set(random.Random(self.cfg.seed).sample(range(len(kept)), count))
        files = {
            "train.jsonl": [row for i, row in enumerate(kept) if i not in chosen],
            "val.jsonl": [kept[i] for i in sorted(chosen)],
            "test.jsonl": test,
        }
        self.files = {name: rows for name, rows in files.items() if rows}

    # -- files ----------------------------------------------------------------------------------------------------

    def _read_answers(self, file: str, key: str) -> tuple[list[Row], str]:
        """The rows of a file, and the form of its answers, a key of INSTRUCTIONS."""
        rows, form, plain = [], "none", list[int]()  # `plain`: rows whose answer is the whole text of the column
        problems = self._read_prompts(file, key)
        refuse_images(problems, "this task writes none")
        for number, row in enumerate(problems):
            answers = row.meta.get("ground_truth"), row.meta.get("solution")
            raw = answers[0] if answers[0] is not None else answers[1]
            if self.cfg.answer_key is not None:
                raw = row.meta.get(self.cfg.answer_key)
            if raw is None or not str(raw).strip():
                columns = self.cfg.answer_key or "ground_truth, reward_model.ground_truth, answer or solution"
                raise ConfigError(
                    f"{key}: {file}: prompt {number} has no answer; expected one in {columns}: answer_key"
                )
            text = str(raw)
            if "####" in text:
                answer, form = marked(text), "hash"
            elif "\\boxed" in text:
                answer, form = boxed(text), "boxed"
            else:
                answer = text.strip()
                plain.append(number)
                form = "boxed" if "\\boxed" in str(row.meta.get("solution")) else form
            if not answer:
                raise ConfigError(f"{key}: {file}: prompt {number} has a solution without an answer: {text[-80:]!r}")
            others = {name: value for name, value in row.meta.items() if name not in ("ground_truth", "reward_model")}
            rows.append({"prompt": row.messages or row.text, "ground_truth": answer, **others})
        return self._without_proofs(rows, plain, f"{key}: {file}"), form

    def _without_proofs(self, rows: list[Row], plain: list[int], place: str) -> list[Row]:
        """Omit rows whose ground truth is a proof, which no response can match. If some solutions of a file mark their
        answers, unmarked ones are proofs, unless they are the majority and at most LONGEST_ANSWER characters long.
        """
        marked_rows = len(rows) - len(plain)
        if marked_rows == 0:
            return rows
        proofs = set(plain)
        if marked_rows < len(plain):
            proofs = {number for number in plain if len(rows[number]["ground_truth"]) > LONGEST_ANSWER}
        if proofs:
            self.proofs.append(
                f"{place}: {len(proofs)} of {len(rows)} solutions do not mark an answer, first in prompt {min(proofs)}"
            )
        return [row for number, row in enumerate(rows) if number not in proofs]

    def _read_prompts(self, file: str, key: str) -> list[Prompt]:
        if self.cfg.prompt_key is not None:
            return load_prompts([file], key, prompt=self.cfg.prompt_key, quoted=False)
        problems = []
        for name in PROMPT_KEYS:
            try:
                return load_prompts([file], key, prompt=name, quoted=False)
            except ValueError as error:
                if f"no {name!r}" not in str(error) and f"no column {name!r}" not in str(error):
                    raise  # the column exists, but the file has another problem
                problems.append(error)
        raise ConfigError(f"{problems[0]}; prompt_key names the column of the prompts")

    def _instruct_row(self, row: Row) -> Row:
        """Append the instruction to a row's prompt; for a chat, to its last message."""
        if not self.instruction:
            return row
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return row | {"prompt": self._append_instruction(prompt)}
        last = prompt[-1] | {"content": self._append_instruction(prompt[-1]["content"])}
        return row | {"prompt": [*prompt[:-1], last]}

    def _append_instruction(self, text: str) -> str:
        """Append the instruction to a text, on a new line if the text has several lines."""
        text = text.rstrip()
        return text + ("\n" if "\n" in text else " ") + self.instruction

    # -- reasoning-gym --------------------------------------------------------------------------------------------

    def _generate_rows(self) -> Iterator[Row]:
        """cfg.size rows of each task, with the entries that its verifier needs."""
        if find_spec("reasoning_gym") is None:
            raise ConfigError("reasoning_gym is not installed; pip install 'phalanx[reasoning-gym]'")
        import reasoning_gym

        for spec in self.cfg.reasoning_gym:
            task, *words = spec.split("&")
            settings, given = dict[str, Any](), {"size": self.cfg.size, "seed": self.cfg.seed}
            try:
                for word in words:
                    name, _, value = word.partition("=")
                    (given if name in given else settings)[name] = yaml.safe_load(value)
                check_task(task, json.dumps(settings))
                entries = list(reasoning_gym.create_dataset(task, **given, **settings))
            except Exception as error:  # tasks may raise anything for invalid settings
                problem = error if isinstance(error, ValueError) else reason(error)
                raise ConfigError(f"reasoning_gym: {problem}") from error
            for entry in json.loads(json.dumps(entries)):
                row = {"prompt": entry["question"], "ground_truth": str(entry["answer"])}
                source = f"reasoning_gym/{task}"
                yield {**row, "data_source": source, "reasoning_gym": {"task": task, "entry": entry}}


def _prompt_name(row: Row) -> str:
    """The prompt without case and spacing, by which duplicates are recognized."""
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else "\n".join(message.get("content", "") for message in prompt)
    return " ".join(text.split()).casefold()
