"""Bad inputs through the real tasks: each ends with one line that says what is wrong, and an exit status.

There are examples of each kind here; unit tests of the checks have the others.

The task runs in forked processes, which have imported everything already. On two ranks, the line must be printed once;
through `sh train.sh`, torchrun's report must end with it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from _pytest.mark import ParameterSet
from safetensors.torch import load_file, save_file

from phalanx.data.prompts import load_prompts
from phalanx.data.streams import PromptStream
from tests.helpers.checks import mistakes
from tests.helpers.jobs import base_overrides
from tests.helpers.ranks import torchrun
from tests.helpers.rewards import BUILT_IN
from tests.helpers.tasks import run_task

TASK = "tasks/train_flowgrpo.py"
WEIGHTS = "diffusion_pytorch_model.safetensors"
FOUR_CATS = "a cat\n" * 4
FIRST = 'a sign that says "alpha"'

REWARDS = """
import os
import time

def boom(images, prompts, metadata):
    raise KeyError("no such\\nthing")

def nan(images, prompts, metadata):
    return [float("nan")] * len(images)

def short(images, prompts, metadata):
    return [0.5]

def texts(images, prompts, metadata):
    return ["good"] * len(images)

def leaves(images, prompts, metadata):
    raise SystemExit(0)

def hangs(images, prompts, metadata):
    time.sleep(600)

def hangs_on_rank_1(images, prompts, metadata):
    if os.environ["RANK"] == "1":
        time.sleep(600)
    return [0.5] * len(images)

def boom_on_rank_1(images, prompts, metadata):
    if os.environ["RANK"] == "1":
        raise KeyError("no such thing")
    return [0.5] * len(images)
"""


class Place:
    """A folder with everything that the inputs refer to, and the overrides of a valid job."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.good = [*base_overrides(model, folder), "trainer.total_training_steps=1", "parallel.timeout_s=120"]
        (folder / "prompts.txt").write_text(f'{FIRST}\na "beta"\na "gamma"\nthe "delta"\n')
        (folder / "rewards.py").write_text(REWARDS)

    def write(self, name: str, content: str) -> str:
        (self.folder / name).write_text(content)
        return str(self.folder / name)

    def reward(self, function: str) -> str:
        return f"reward.functions=[{{path: '{self.folder}/rewards.py:{function}'}}]"

    def broken(self, name: str, change: Callable[[Path], None]) -> str:
        """A copy of the model folder with one change applied."""
        copy = self.folder / name
        shutil.copytree(self.model, copy)
        change(copy)
        return f"model.path={copy}"


Arguments = Callable[[Place], list[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, sd3_folder: Path) -> Place:

    return Place(tmp_path_factory.mktemp("bad"), sd3_folder)


def task(arguments: list[str], nproc: int = 1) -> CompletedProcess[str]:
    """Run the real task with these arguments; fails if it does not end."""
    return run_task([TASK, *arguments], nproc)


def cut(name: str) -> Callable[[Path], None]:
    """Keep only the first half of a file, as after a full disk."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def lose(name: str, tensor: str) -> Callable[[Path], None]:
    """Remove one tensor from a safetensors file."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / name)
        del tensors[tensor]
        save_file(tensors, folder / name, {"format": "pt"})

    return change


def name_a_shard_too_many(folder: Path) -> None:
    names = {"a": WEIGHTS, "b": "b.safetensors"}
    (folder / "transformer" / "x.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def name_another_scheduler(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "DDIMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))


# --- (name, arguments, message): {folder} is the place's folder. Status 2, and nothing but the line on stderr.
CONFIG: list[tuple[str, Arguments, str]] = [
    ("unknown key", lambda p: ["trainer.sead=1"], "unknown key trainer.sead; did you mean trainer.seed?"),
    (
        "unknown key in a list",
        lambda p: ["reward.functions=[{name: ocr, wieght: 2}]"],
        "unknown key reward.functions[0].wieght; did you mean reward.functions[0].weight?",
    ),
    (
        "unknown key two sections down",
        lambda p: ["rollout.val.stepz=3"],
        "unknown key rollout.val.stepz; known here: n, seed, num_inference_steps, height, width, num_frames, "
        "guidance_scale, guidance_scale_2, true_cfg_scale, noise_level, solver",
    ),
    ("wrong type", lambda p: ["rollout.n=many"], "rollout.n: expected an integer, got 'many'"),
    (
        "not a choice",
        lambda p: ["rollout.sde_type=sd"],
        "rollout.sde_type: expected one of sde, cps, dance_sde, got 'sd'; did you mean sde?",
    ),
    (
        "unknown option",
        lambda p: ["--config", "x.yaml"],
        "unknown option --config; expected [config.yaml] [key=value ...], or --help",
    ),
    (
        "unknown algorithm",
        lambda p: ["algorithm.name=flow_gpro"],
        "algorithm.name: 'flow_gpro' is unknown; did you mean flow_grpo? known: awm, cispo, cps, cross_entropy, dance_grpo, dgpo, "
        "diffusion_dpo, diffusion_nft, distillation, dpo, draft, flow_dppo, flow_grpo, flow_sdft, grpo, grpo_guard, mix_grpo, opd, ppo, raft, "
        "refl, reinforce_plus_plus, rloo, rwr, sapo, sdft, sdpo, sft, tempflow_grpo, a dotted module, or path/to/file.py",
    ),
    (
        "a key of another algorithm",
        lambda p: ["algorithm.horizon=1"],
        "unknown key algorithm.horizon; known here: name, adv_clip_max, global_std, norm_adv_by_std_in_grpo, "
        "group_filter, group_filter_k, kl_loss_coef, kl_convention, importance, timestep_weight, clip_ratio",
    ),
    (
        "unknown logger",
        lambda p: ["trainer.logger=[wandbb]"],
        "trainer.logger: 'wandbb' is not a built-in logger; did you mean wandb? built in: console, mlflow, swanlab, "
        "tensorboard, trackio, wandb; or give module:Class or path/to/file.py:Class",
    ),
]

DATA: list[tuple[str, Arguments, str]] = [
    (
        "no such data file",
        lambda p: [f"data.train_files=[{p.folder}/prompt.txt]"],
        "data.train_files: {folder}/prompt.txt does not exist; did you mean {folder}/prompts.txt?",
    )
]

MODELS: list[tuple[str, Arguments, str]] = [
    ("no model folder", lambda p: [f"model.path={p.folder}/none"], "model.path: '{folder}/none': no such folder"),
    (
        "a missing component",
        lambda p: [p.broken("no_vae", lambda f: shutil.rmtree(f / "vae"))],
        "model.path: '{folder}/no_vae' lacks the folder 'vae' that its model_index.json names",
    ),
    (
        "a broken model_index.json",
        lambda p: [p.broken("index", lambda f: (f / "model_index.json").write_text('{"a": '))],
        "model.path: {folder}/index/model_index.json:1:7 is not valid JSON: Expecting value",
    ),
    (
        "weights that are not there",
        lambda p: [p.broken("bare", lambda f: (f / f"transformer/{WEIGHTS}").unlink())],
        "model.path: {folder}/bare/transformer has no weights (*.safetensors)",
    ),
    (
        "a shard that is not there",
        lambda p: [p.broken("shards", name_a_shard_too_many)],
        "model.path: {folder}/shards/transformer lacks b.safetensors, which its x.safetensors.index.json names",
    ),
    (
        "weights that were cut short",
        lambda p: [p.broken("cut", cut(f"transformer/{WEIGHTS}"))],
        f"model.path: {{folder}}/cut/transformer/{WEIGHTS} is damaged or cut short: "
        "Error while deserializing header: incomplete metadata, file not fully covered",
    ),
    (
        "a text encoder that was cut short",
        lambda p: [p.broken("cut_text", cut("text_encoder/model.safetensors"))],
        "model.path: {folder}/cut_text/text_encoder/model.safetensors is damaged or cut short: "
        "Error while deserializing header: incomplete metadata, file not fully covered",
    ),
    (
        "an empty tokenizer",
        lambda p: [p.broken("mute", lambda f: [x.unlink() for x in (f / "tokenizer").iterdir()])],
        "model.path: {folder}/mute/tokenizer has no tokenizer.json or vocab.json or spiece.model or tokenizer.model",
    ),
    (
        "another scheduler",
        lambda p: [p.broken("ddim", name_another_scheduler)],
        "model.path: '{folder}/ddim' has the scheduler DDIMScheduler; expected FlowMatchEulerDiscreteScheduler",
    ),
]

# The model is loaded before these are detected, so libraries may have printed something.
SETTINGS: list[tuple[str, Arguments, str]] = [
    (
        "the guidance of another family",
        lambda p: ["rollout.true_cfg_scale=4"],
        "rollout.true_cfg_scale: 4 has no effect on this model; its guidance is rollout.guidance_scale",
    ),
    (
        "weights without a tensor",
        lambda p: [p.broken("lost", lose(f"transformer/{WEIGHTS}", "proj_out.weight"))],
        "model.path: '{folder}/lost': the weights of transformer lack the tensor proj_out.weight",
    ),
    (
        "a VAE without a tensor",
        lambda p: [p.broken("lost_vae", lose(f"vae/{WEIGHTS}", "decoder.conv_out.weight"))],
        "model.path: '{folder}/lost_vae': the weights of vae lack the tensor decoder.conv_out.weight",
    ),
    (
        "unknown reward",
        lambda p: ["reward.functions=[{name: orc}]"],
        f"reward.functions[0].name='orc' is not a built-in reward; did you mean ocr? built in: {BUILT_IN}; or give path: "
        "module:function or path/to/file.py:function",
    ),
    (
        "a prompt without the text that OCR should read",
        lambda p: [
            "reward.functions=[{name: ocr, kwargs: {detect: false}}]",
            f"data.train_files=[{p.write('plain.txt', FOUR_CATS)}]",
        ],
        "data.train_files: {folder}/plain.txt:1: reward 'ocr': no ground_truth for the prompt \"a cat\" (expected a text in "
        "double quotes in the prompt, or a column ground_truth in the data) (and 3 more of 4 rows)",
    ),
]

# The job runs, and fails: status 1.
JOBS: list[tuple[str, Arguments, str]] = [
    (
        "a reward that raises",
        lambda p: [p.reward("boom")],
        f"reward 'boom' raised KeyError: 'no such\\nthing' on the prompt \"{FIRST}\", at {{folder}}/rewards.py:6",
    ),
    (
        "a reward of NaN",
        lambda p: [p.reward("nan")],
        f"reward 'nan' returned nan for 4 of 4 images on the prompt \"{FIRST}\"; expected finite numbers",
    ),
    (
        "a reward of too few numbers",
        lambda p: [p.reward("short")],
        f"reward 'short' returned 1 scores for 4 images on the prompt \"{FIRST}\"; "
        "expected 4 numbers: a list, an array or a tensor",
    ),
    (
        "a reward of no numbers",
        lambda p: [p.reward("texts")],
        f"reward 'texts' returned a list with 'good' as scores[0] instead of numbers on the prompt \"{FIRST}\"; "
        "expected 4 numbers: a list, an array or a tensor",
    ),
    (
        "a reward that leaves the process",
        lambda p: [p.reward("leaves")],
        f"reward 'leaves' raised SystemExit: 0 at {{folder}}/rewards.py:18 on the prompt \"{FIRST}\"",
    ),
    (
        "a reward that hangs",
        lambda p: [p.reward("hangs"), "reward.timeout_s=0.5"],
        f"reward 'hangs' ran longer than reward.timeout_s=0.5 seconds on the prompt \"{FIRST}\"",
    ),
]


def named(*tables: list[tuple[str, Arguments, str]]) -> list[ParameterSet]:
    return [pytest.param(arguments, message, id=name) for table in tables for name, arguments, message in table]


def check(done: CompletedProcess[str], message: str, status: int) -> None:
    """Check that the message is the last line, and the only one with an error."""
    assert "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1:] == [f"error: {message}"]
    assert [line for line in lines if line.startswith("error")] == lines[-1:]
    assert done.returncode == status


def test_the_job_itself_is_good(place: Place) -> None:
    """The inputs below are changes of this valid one."""
    done = task(place.good)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr and "report: " in done.stdout


@pytest.mark.parametrize(("arguments", "message"), named(CONFIG, DATA, MODELS))
def test_refused_at_once(place: Place, arguments: Arguments, message: str) -> None:
    done = task([*place.good, *arguments(place)])
    check(done, message.format(folder=place.folder), 2)
    assert len(mistakes(done.stderr).splitlines()) == 1 and done.stdout == ""


def test_a_refused_file(place: Place) -> None:
    file = place.write("broken.yaml", "trainer:\n  seed: [1\n")
    check(task([file, *place.good]), f"{file}:3:1: not valid YAML: expected ',' or ']', but got '<stream end>'", 2)


@pytest.mark.parametrize(("arguments", "message"), named(SETTINGS))
def test_refused_while_building(place: Place, arguments: Arguments, message: str) -> None:
    check(task([*place.good, *arguments(place)]), message.format(folder=place.folder), 2)


@pytest.mark.parametrize(("arguments", "message"), named(JOBS))
def test_jobs_that_fail(place: Place, arguments: Arguments, message: str) -> None:
    check(task([*place.good, *arguments(place)]), message.format(folder=place.folder), 1)


# --- two ranks

TWO_RANKS: list[tuple[str, Arguments, str]] = [
    ("unknown key", lambda p: ["trainer.sead=1"], "unknown key trainer.sead; did you mean trainer.seed?"),
    (
        "images that do not divide over the ranks",
        lambda p: ["rollout.n=3", "actor.ppo_mini_batch_size=1", "actor.ppo_micro_batch_size_per_gpu=1"],
        "actor.ppo_mini_batch_size: 1 prompts x rollout.n 3 = 3 samples of an update do not divide over 2 ranks; "
        "nearest that work: actor.ppo_mini_batch_size=2",
    ),
    (
        "a reward that raises on one rank",
        lambda p: [p.reward("boom_on_rank_1")],
        "rank 1: reward 'boom_on_rank_1' raised KeyError: 'no such thing' on the prompt \"{prompt}\", at {folder}/rewards.py:30",
    ),
    (
        "a reward that hangs on one rank",
        lambda p: [p.reward("hangs_on_rank_1"), "reward.timeout_s=1"],
        "rank 1: reward 'hangs_on_rank_1' ran longer than reward.timeout_s=1 seconds on the prompt \"{prompt}\"",
    ),
]


def told_once(done: CompletedProcess[str], place: Place, message: str) -> str:
    """The line with the error, which must be the only one."""
    # rank 1 samples the last 2 of the step's 4 prompts, one after the other
    prompts = PromptStream(load_prompts([str(place.folder / "prompts.txt")], ""), 4, seed=0).batch(0)
    line = f"error: {message.format(folder=place.folder, prompt=prompts[2].text)}"
    assert done.returncode != 0
    assert [said for said in (done.stdout + done.stderr).splitlines() if said.startswith("error")] == [line]
    return line


@pytest.mark.parametrize(("arguments", "message"), named(TWO_RANKS))
def test_told_once_on_two_ranks(place: Place, arguments: Arguments, message: str) -> None:
    told_once(task([*place.good, *arguments(place)], nproc=2), place, message)


@pytest.mark.seldom("a reward that hangs on one rank")
@pytest.mark.parametrize(("arguments", "message"), named(TWO_RANKS[:1], TWO_RANKS[-1:]))
def test_told_once_by_torchrun(place: Place, arguments: Arguments, message: str) -> None:
    done = torchrun([TASK, *place.good, *arguments(place)], nproc=2)
    assert done.stderr.splitlines()[-1] == told_once(done, place, message)
