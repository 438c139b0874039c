"""phalanx.train, phalanx.sft and phalanx.evaluate: whole programs, on one rank and on two, by themselves and by torchrun."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.tasks import ExportConfig
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from phalanx.tools.from_python import _evaluation_folder
from phalanx.tools.reproduce.differences import compare_runs
from phalanx.tools.reproduce.rerun import prepare_rerun
from phalanx.tools.run_result import RunResult
from tests.helpers.jobs import rows
from tests.helpers.ranks import ROOT, torchrun
from tests.helpers.tasks import run_task

BEGIN = """
import gc, json, os, signal, sys, threading
import numpy as np
import torch.distributed as dist
from PIL import Image
import phalanx
from phalanx.config.messages import ConfigError
from phalanx.types import JobError

FOLDER = {folder!r}
ROWS = [{{"prompt": f"Ann has {{i}} books and {{i}} pens. How many things?", "answer": str(2 * i)}} for i in range(8)]
TEXTS = {{
    "model.dtype": "float32", "model.cpu_linear": "torch",
    "data": {{"train_batch_size": 4, "max_prompt_length": 64, "max_response_length": 16}},
    "actor": {{"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4}},
    "rollout.n": 4,
}}
IMAGES = {{
    "model": {{"dtype": "float32"}},
    "data": {{"train_batch_size": 2, "max_prompt_length": 1}},
    "actor": {{"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 4}},
    "rollout": {{"n": 4, "num_inference_steps": 3, "height": 24, "width": 48}},
}}

def steps(completions, prompts, metadata):
    return [float("=" in text) for text in completions]

def of(name, count=2):
    return {{"output_dir": f"{{FOLDER}}/{{name}}", "total_training_steps": count}}

def tell(**values):
    if os.environ.get("RANK", "0") == "0":
        print("TOLD", json.dumps(values), flush=True)
"""


def program(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "program.py"
    path.write_text(BEGIN.format(folder=str(folder)) + text)
    return path


def told(out: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("TOLD ")) for line in out.splitlines() if line.startswith("TOLD ")]


def run_program(folder: Path, text: str, nproc: int = 1) -> list[dict[str, Any]]:
    done = run_task([program(folder, text)], nproc=nproc)
    assert done.returncode == 0, done.stderr
    return told(done.stdout)


TWICE = """
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1), list(sys.argv)
for name in ("one", "one", "other"):
    run = phalanx.train("assets/words/base", ROWS, steps, val_data=ROWS[:2], config=TEXTS, trainer=of(name))
    tell(rewards=[row.get("reward/mean") for row in run.metrics], checkpoint=str(run.checkpoint), samples=run.samples)
after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1), list(sys.argv)
assert before == after and not dist.is_initialized()
assert not os.path.exists(FOLDER + "/one/running.json")
gc.collect()
threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
for thread in threads:
    thread.join(10)
assert not any(thread.is_alive() for thread in threads), threads
"""


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("twice")
    done = run_task([program(folder, TWICE)])
    assert done.returncode == 0, done.stderr
    kept = f"checkpoint {folder}/one/checkpoints/step_000002 was there before: it is kept as old_step_000002"
    assert kept in done.stderr.splitlines()  # and no warning
    return folder, told(done.stdout)


def test_one_process_trains_several_times(twice: tuple[Path, list[dict[str, Any]]]) -> None:
    """A function of __main__ scores rows that are no file; the process is afterwards as before."""
    folder, (first, again, other) = twice
    assert first == again  # resume=never: the second call begins anew
    assert first["rewards"] == other["rewards"]
    assert len(first["rewards"]) == 3 and 0 < first["rewards"][-1] < 1
    assert first["checkpoint"] == str(folder / "one" / "checkpoints" / "step_000002")
    for sample in first["samples"]:
        assert sample["reward"] == float("=" in sample["text"])
    assert {sample["prompt"] for sample in first["samples"]} == {
        f"Ann has {i} books and {i} pens. How many things?" for i in (0, 1)
    }


def test_the_run_can_be_repeated_from_its_folder(twice: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = twice
    again = prepare_rerun(folder / "one", folder / "again", ["trust_run=true"])
    assert (again.task, again.ranks, again.different) == (ROOT / "tasks" / "train_grpo.py", 1, [])
    done = run_task([again.task, *again.words])
    assert done.returncode == 0, done.stderr
    assert compare_runs(folder / "one", folder / "again").equal
    with pytest.raises(ValueError, match=r"would run code or read the environment: reward.functions\[0\].path="):
        prepare_rerun(folder / "one", folder / "again", [])


def test_its_model_card_names_no_command_that_lacks_the_model(
    twice: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    keys = [f"checkpoint={twice[0] / 'one'}", f"output_dir={tmp_path / 'mine'}", "trust_run=true"]
    Export(load_config(ExportConfig, None, keys)).run()
    text = (tmp_path / "mine" / "README.md").read_text()
    assert "## Command\n\nA call of `phalanx.train` in Python, with" in text and "sh train.sh" not in text
    assert "for 2 steps." in text and " on 1 rank |" in text


@pytest.mark.full
def test_two_ranks(twice: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """Each rank runs the program; the samples are those of one rank."""
    alone = twice[1][0]
    for run in run_program(tmp_path, TWICE, nproc=2)[:2]:
        assert run["samples"] == alone["samples"]
        assert run["rewards"] == alone["rewards"]


def test_the_command_line_trains_alike(tmp_path: Path) -> None:
    keys = ["trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1", "rollout.n=4"]
    done = run_task(
        ["tasks/train_grpo.py", "configs/grpo/quickstart.yaml", *keys, f"trainer.output_dir={tmp_path}/line"]
    )
    assert done.returncode == 0, done.stderr
    call = 'config="configs/grpo/quickstart.yaml", trainer=of("call") | {"val_before_train": False, "test_freq": -1}'
    run_program(tmp_path, f'phalanx.train({call}, **{{"rollout.n": 4}})')
    assert compare_runs(tmp_path / "line", tmp_path / "call").equal


SUPERVISED = """
answered = [{"prompt": row["prompt"], "completion": "#### " + row["answer"]} for row in ROWS]
chats, shared = [], []
for row in answered:
    chats.append({"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]})
    shared.append({"conversations": [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": row["completion"]}]})
keys = {key: value for key, value in TEXTS.items() if key != "rollout.n"}
for name, data in (("rows", answered), ("chats", chats), ("shared", shared)):
    run = phalanx.sft("assets/words/base", data, config=keys, trainer=of(name))
    tell(losses=[row["actor/nll"] for row in run.metrics])
scoring = {"reward": [steps, {"name": "gsm8k", "weight": 0.5}], "n": 2, "rollout.val.temperature": 1.0}
scored = phalanx.evaluate(run, ROWS[:2], output_dir=FOLDER + "/scored", **scoring)
tell(folder=str(scored.folder), samples=scored.samples, sets=list(scored.statistics["sets"]))
again = phalanx.evaluate(str(run.checkpoint), ROWS[:2], output_dir=FOLDER + "/again", **scoring)
tell(samples=again.samples)
run = phalanx.train("assets/words/base", ROWS, steps, config=TEXTS, trainer=of("mine", 1))
try:
    phalanx.evaluate(phalanx.RunResult(str(run.folder)), ROWS[:2])
except ConfigError as error:
    tell(text=str(error))
mine = phalanx.evaluate(run, ROWS[:2], output_dir=FOLDER + "/mine_scored")
tell(scores=list(mine.samples[0]["scores"]))
"""


@pytest.mark.full
def test_supervised_fine_tuning_and_an_evaluation(tmp_path: Path) -> None:
    """Rows with `prompt` and `completion` train as the chats of the same texts; the evaluation is of what was trained."""
    of_rows, of_chats, of_shared, first, again, foreign, mine = run_program(tmp_path, SUPERVISED)
    assert of_rows == of_chats == of_shared
    assert of_rows["losses"][1] < of_rows["losses"][0]
    assert (first["folder"], first["sets"]) == (str(tmp_path / "scored"), ["val"])
    assert len(first["samples"]) == 4
    for sample in first["samples"]:
        assert sample["scores"]["steps"] == float("=" in sample["text"])
        assert sample["reward"] == sample["scores"]["steps"] + 0.5 * sample["scores"]["gsm8k"]
    assert again["samples"] == first["samples"]
    assert "would run code" in foreign["text"] and "trust_run=true" in foreign["text"]
    assert mine == {"scores": ["steps"]}


def test_other_weights_are_evaluated_in_another_folder(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_000002"
    checkpoint.mkdir()
    folders = []
    for text, words in (("{}", ["n=1"]), ("{}", ["n=1"]), ("{1}", ["n=1"]), ("{}", ["n=2"])):
        (checkpoint / "meta.json").write_text(text)
        folders.append(_evaluation_folder(str(checkpoint), words))
    assert folders[0] == folders[1] and len(set(folders)) == 3
    assert folders[0].startswith("outputs/evaluation/step_000002-")


PICTURES = """
def bright(images, prompts, metadata):
    assert images.shape[1:] == (3, 24, 48)
    return images.mean(dim=(1, 2, 3)).tolist()

def work():
    numbers = [{"prompt": str(i)} for i in range(100, 106)]
    run = phalanx.train("assets/digits/base", numbers, bright, val_data={"held_out": [{"prompt": "777"}]}, config=IMAGES, trainer=of("flow"))
    (sample,) = [sample for sample in run.samples if sample["step"] == 0]
    pixels = np.asarray(Image.open(sample["file"])) / 255
    tell(mean=pixels.mean(), reward=sample["reward"], set=sample["set"])

thread = threading.Thread(target=work)  # which may not install handlers of signals
thread.start()
thread.join()
picture = Image.fromarray(np.full((24, 48, 3), 200, np.uint8))
shown = [{"prompt": str(i), "image": picture} for i in range(8)]
keys = {"model.dtype": "float32", "data.max_prompt_length": 1, "data.train_batch_size": 8, "rollout.height": 24, "rollout.width": 48}
run = phalanx.sft("assets/digits/base", shown, trainer=of("matching"), **keys)
tell(steps=len(run.metrics))
asked = [{"prompt": "<image>Which number?", "image": picture, "answer": "7"}] * 4
run = phalanx.train("assets/reading/base", asked, "gsm8k", config=TEXTS, trainer=of("vision", 1))
tell(steps=len(run.metrics))
run = phalanx.train("assets/words/base_blocks", ROWS, steps, config=TEXTS, trainer=of("blocks", 1), **{"model.block_size": 4})
tell(steps=len(run.metrics))
tell(svg=run.plot("reward/mean", "actor/grad_norm")._repr_svg_().count("<svg"))
"""


@pytest.mark.full
def test_the_kind_of_model_decides_the_task(tmp_path: Path) -> None:
    flow, matching, vision, blocks, plot = run_program(tmp_path, PICTURES)
    assert flow["set"] == "held_out" and flow["reward"] == pytest.approx(flow["mean"], abs=0.005)
    assert (matching, vision, blocks) == ({"steps": 2}, {"steps": 1}, {"steps": 1})
    assert plot == {"svg": 1}
    tasks = {
        name: json.loads((tmp_path / name / "provenance.json").read_text())[0]["task"]
        for name in ("flow", "matching", "vision", "blocks")
    }
    assert tasks == {
        "flow": "tasks/train_flowgrpo.py",
        "matching": "tasks/train_flow_matching.py",
        "vision": "tasks/train_grpo.py",
        "blocks": "tasks/train_grpo.py",
    }


MISTAKES = """
def fails(completions, prompts, metadata):
    raise KeyError("x") if prompts[0] == ROWS[0]["prompt"] else KeyError("y")

def leaves(completions, prompts, metadata):
    sys.exit("enough")

calls = [
    dict(data=ROWS),
    dict(model="nowhere", data=ROWS, reward=steps),
    dict(model="assets/words/base", data=ROWS, reward=steps, task="grop"),
    dict(model="assets/words/base", data=ROWS, reward=steps, config=3),
    dict(model="assets/words/base", data=ROWS, reward=steps, optim={"lrr": 1}),
    dict(model="assets/words/base", data=[{"question": "x"}], reward=steps),
    dict(model="assets/words/base", data=ROWS, reward=lambda images, prompts, metadata: [0.0]),
    dict(model="assets/words/base", data=ROWS, reward=steps, **{"data.max_prompt_length": 1000}),
    dict(model="assets/words/base", data=ROWS, reward=fails),
    dict(model="assets/words/base", data=ROWS, reward=leaves),
    dict(model="assets/words/base", data=ROWS, reward=steps),
]
for call in calls:
    try:
        phalanx.train(trainer=of("bad", 1), **{"config": TEXTS, **call})
    except (ConfigError, JobError) as error:
        tell(kind=type(error).__name__, text=str(error))
    except ValueError as error:
        tell(kind=type(error).__name__, text=str(error))
    else:
        tell(kind="", text="")
    assert not dist.is_initialized() and not os.path.exists(FOLDER + "/bad/running.json")
"""


def test_a_mistake_is_an_exception_of_one_line(tmp_path: Path) -> None:
    """And the process can go on: the last call trains."""
    errors = run_program(tmp_path, MISTAKES)
    expected = [
        ("ConfigError", "model is not set; give the folder of a model, or a hub id"),
        ("ConfigError", "model.path: 'nowhere': no such folder"),
        ("ConfigError", "task='grop': expected one of block_diffusion, dpo, flow_matching, flowgrpo, grpo, joint, sft"),
        ("ConfigError", "config: int; expected a YAML file, or its content as a dict"),
        ("UnknownKeys", "unknown key optim.lrr; did you mean optim.lr?"),
        ("DataError", "train.jsonl:1: no 'prompt'; it has question"),
        ("ConfigError", "reward.functions[0]: reward takes images, and this job makes completions"),
        ("ConfigError", "data.max_response_length: 16 with data.max_prompt_length 1000 is 1016 tokens, and 'assets/words/base' has 512 positions"),
        ("RewardError", "reward 'fails' raised KeyError: 'x' on the prompts"),
        ("RewardError", "SystemExit: enough"),
        ("", ""),
    ]  # fmt: skip
    assert len(errors) == len(expected)
    for error, (kind, text) in zip(errors, expected, strict=True):
        assert error["kind"] == kind and text in error["text"] and "\n" not in error["text"], error


DIFFER = """
phalanx.train("assets/words/base", [*ROWS[1:], {"prompt": os.environ["RANK"]}], steps, config=TEXTS, trainer=of("differ", 1))
"""


def test_ranks_with_other_rows_are_refused(tmp_path: Path) -> None:
    done = run_task([program(tmp_path, DIFFER)], nproc=2)
    assert done.returncode != 0
    assert (
        "ConfigError: the ranks have different settings, rows or functions; expected the same call on every rank"
        in done.stderr
    )


STOPPED = """
from phalanx.run.watchdog import Watch
from tests.helpers.checks import wait_for

calls = []

def kills(completions, prompts, metadata):
    calls.append(len(completions))
    if sum(calls) > 16:  # in the second step
        [watch] = [item for item in gc.get_objects() if isinstance(item, Watch)]
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: watch.stop)
    return [0.0 for _ in completions]

try:
    phalanx.train("assets/words/base", ROWS, kills, config=TEXTS, trainer=of("stopped", 3))
except KeyboardInterrupt as error:
    tell(text=str(error))
run = phalanx.train("assets/words/base", ROWS, steps, config=TEXTS, trainer=of("stopped", 2) | {"resume": "auto"})
tell(steps=[row["step"] for row in run.metrics])
"""


def test_an_interrupt_leaves_a_checkpoint(tmp_path: Path) -> None:
    stop, run = run_program(tmp_path, STOPPED)
    where = tmp_path / "stopped" / "checkpoints" / "step_000001"
    cause = "stopped by SIGINT after step 1 of 3"
    assert stop["text"] == f"{cause}; the same call with trainer.resume=auto resumes from {where}"
    assert run["steps"] == [1, 2]


@pytest.mark.full
def test_torchrun(tmp_path: Path) -> None:
    """The program ends by itself after its run; a mistake is one line of one rank, also of a program that goes on."""
    path = program(
        tmp_path,
        'phalanx.train("assets/words/base", ROWS, steps, config=TEXTS, trainer=of("run", 1))\nphalanx.train(oops=1)',
    )
    done = torchrun([path], nproc=2)
    assert done.returncode == 2, done.stderr
    assert len(rows(tmp_path / "run")) == 1
    assert [line for line in done.stderr.splitlines() if "rror" in line] == [
        "error: model is not set; give the folder of a model, or a hub id"
    ]
    assert "Traceback" not in done.stderr


def test_importing_it_is_light() -> None:
    """The first attribute loads torch, not the import."""
    code = "import sys, phalanx; assert 'torch' not in sys.modules and 'train' in dir(phalanx)"
    subprocess.run([os.sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_page_runs(tmp_path: Path) -> None:
    """The blocks of docs/python.md, as a program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    text = "\n".join(blocks)
    names = re.findall(r"`run\.(\w+)", (ROOT / "docs" / "python.md").read_text())
    assert set(names) == {"metrics", "samples", "checkpoint", "folder", "plot", "report"}
    assert all(name in {*dir(RunResult), "folder"} for name in names)
    moved = text.replace("outputs/pens", str(tmp_path / "pens")).replace(
        "n=2,", f"n=2, output_dir={str(tmp_path / 'scored')!r},"
    )
    (tmp_path / "page.py").write_text(moved)
    done = run_task([tmp_path / "page.py"])
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "pens")) == 3
    assert (tmp_path / "scored" / "evaluation.json").is_file()
