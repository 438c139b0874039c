"""Bad inputs, each through the real task: one line that says what is wrong, an exit status, and an end.

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

from phalanx.data.prompts import PromptStream, load_prompts
from tests.jobs import base_overrides
from tests.ranks import torchrun
from tests.tasks import run_task

TASK = "tasks/train_flowgrpo.py"
LIMIT_S = 120.0  # a bad input takes a second; this is the end of a hang
FORMATS = "a .txt, .jsonl or .parquet file, or the folder of a Hugging Face dataset (folder:split for one split)"
BUILT_IN = (
    "aesthetic, clip_score, hps_v2, hps_v3, http, jpeg_compressibility, jpeg_incompressibility, ocr, pickscore, preferred, "
    "unified_reward, vlm_ocr"
)
WEIGHTS = "diffusion_pytorch_model.safetensors"
FIRST = 'a sign that says "alpha"'
PAIRS = ("rollout.engine=dataset", "rollout.n=2", "algorithm.name=awm", "reward.functions=[{name: preferred}]")

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

def two_arguments(images, prompts):
    return [0.5] * len(images)
"""


class Place:
    """A folder with all that the inputs refer to, and the overrides of a job that would run."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.good = [*base_overrides(model, folder), "trainer.total_training_steps=1", "parallel.timeout_s=30"]
        (folder / "prompts.txt").write_text(f'{FIRST}\na "beta"\na "gamma"\nthe "delta"\n')
        (folder / "rewards.py").write_text(REWARDS)

    def write(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def data(self, name: str, content: str | bytes, key: str = "data.train_files") -> str:
        return f"{key}=[{self.write(name, content)}]"

    def reward(self, function: str) -> str:
        return f"reward.functions=[{{path: '{self.folder}/rewards.py:{function}'}}]"

    def broken(self, name: str, change: Callable[[Path], None]) -> str:
        """A copy of the model folder with one change."""
        copy = self.folder / name
        shutil.copytree(self.model, copy)
        change(copy)
        return f"model.path={copy}"


Arguments = Callable[[Place], list[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, sd3_folder: Path) -> Place:
    import phalanx.models.flow.families.qwen_image
    import phalanx.models.flow.families.sd3
    import phalanx.training.rl  # noqa: F401 - imported here once, and not in each fork

    return Place(tmp_path_factory.mktemp("bad"), sd3_folder)


def task(arguments: list[str], nproc: int = 1) -> CompletedProcess[str]:
    """The real task with these arguments; fails where it does not end."""
    return run_task([TASK, *arguments], nproc, timeout=LIMIT_S)


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    """Change keys of a JSON file."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def cut(name: str) -> Callable[[Path], None]:
    """Keep the first half of a file, as where the disk was full."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def lose(name: str, tensor: str) -> Callable[[Path], None]:
    """Take one tensor out of a safetensors file."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / name)
        del tensors[tensor]
        save_file(tensors, folder / name, {"format": "pt"})

    return change


def shards(place: Place, name: str) -> list[str]:
    """Nothing more to say, but an index in the model folder `name` that names a shard too many."""
    names = {"a": WEIGHTS, "b": "b.safetensors"}
    (place.folder / name / "transformer" / "x.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return []


# --- (name, arguments, message): {folder} is the place's folder. Status 2, and nothing but the line on stderr.
CONFIG: list[tuple[str, Arguments, str]] = [
    ("unknown key", lambda p: ["trainer.sead=1"], "unknown key trainer.sead; did you mean trainer.seed?"),
    (
        "unknown key in a list",
        lambda p: ["reward.functions=[{name: ocr, wieght: 2}]"],
        "unknown key reward.functions[0].wieght; did you mean reward.functions[0].weight?",
    ),
    ("wrong type", lambda p: ["rollout.n=many"], "rollout.n: expected an integer, got 'many'"),
    ("out of bounds", lambda p: ["optim.lr=-1e-4"], "optim.lr: expected more than 0, got -0.0001"),
    (
        "not a choice",
        lambda p: ["rollout.sde_type=sd"],
        "rollout.sde_type: expected one of sde, cps, dance_sde, got 'sd'; did you mean sde?",
    ),
    (
        "missing value",
        lambda p: ["model.path=???"],
        "model.path is not set; give model.path=...: model folder (or hub id, where a hub is reachable)",
    ),
    (
        "unset environment variable",
        lambda p: ["trainer.output_dir=${oc.env:PHALANX_TEST_UNSET}"],
        "trainer.output_dir: Environment variable 'PHALANX_TEST_UNSET' not found",
    ),
    (
        "not an override",
        lambda p: ["trainer.seed"],
        "'trainer.seed': an override is written key=value, e.g. trainer.seed=1",
    ),
    (
        "unknown option",
        lambda p: ["--config", "x.yaml"],
        "unknown option --config; expected [config.yaml] [key=value ...], or --help",
    ),
    (
        "unknown algorithm",
        lambda p: ["algorithm.name=flow_gpro"],
        "algorithm.name: 'flow_gpro' is unknown; did you mean flow_grpo? known: awm, cps, dance_grpo, "
        "diffusion_dpo, diffusion_nft, flow_dppo, flow_grpo, grpo_guard, mix_grpo, opd, rwr, sft, a dotted module, or "
        "path/to/file.py",
    ),
    (
        "a key of another algorithm",
        lambda p: ["algorithm.horizon=1"],
        "unknown key algorithm.horizon; known here: name, adv_clip_max, global_std, norm_adv_by_std_in_grpo, "
        "group_filter, group_filter_k, kl_loss_coef, kl_convention, importance, timestep_weight, clip_ratio",
    ),
    (
        "mini-batches that do not divide",
        lambda p: ["actor.ppo_mini_batch_size=3"],
        "actor.ppo_mini_batch_size: 3 prompts do not divide data.train_batch_size 4; nearest that work: "
        "actor.ppo_mini_batch_size=2 or 4",
    ),
    (
        "ranks that do not divide",
        lambda p: ["parallel.fsdp_size=3"],
        "parallel.fsdp_size: 3 does not divide the world's 1 ranks; nearest that does: 1",
    ),
    (
        "a window that does not fit",
        lambda p: ["rollout.sde_window_range=[1, 9]"],
        "rollout.sde_window_range: [1, 9] should satisfy 0 <= a < b <= 4 (rollout.num_inference_steps)",
    ),
    (
        "the last step of cps",
        lambda p: ["rollout.sde_type=cps", "rollout.sde_window_range=[1, 4]"],
        "rollout.sde_window_range: [1, 4] holds the last step, which has no log-probability under cps; "
        "its end should be at most 3",
    ),
    (
        "unknown logger",
        lambda p: ["trainer.logger=[wandbb]"],
        "trainer.logger: 'wandbb' should be one of console, tensorboard, wandb (did you mean wandb?)",
    ),
    (
        "a file where the run's folder should be",
        lambda p: [f"trainer.output_dir={p.write('taken', '')}/run"],
        "trainer.output_dir: '{folder}/taken/run' cannot be a folder: {folder}/taken is a file",
    ),
    (
        "no reward",
        lambda p: ["reward.functions=[]"],
        "reward.functions: [] leaves nothing to optimise; give at least one, e.g. reward.functions=[{{name: ocr}}]",
    ),
    (
        "pairs for an algorithm on denoising steps",
        lambda p: ["rollout.engine=dataset", "rollout.n=2"],
        "rollout.engine: dataset brings images, and algorithm.name flow_grpo trains on sampled denoising steps; "
        "take one that trains on images, such as diffusion_dpo",
    ),
    (
        "pairs of four",
        lambda p: ["rollout.engine=dataset", "algorithm.name=awm"],
        "rollout.n: 4 should be 2 where rollout.engine is dataset: the chosen image and the rejected one",
    ),
]

# As the first argument.
CONFIG_FILES: list[tuple[str, str, str]] = [
    ("broken.yaml", "trainer:\n  seed: [1\n", "{file}:3:1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("list.yaml", "- trainer\n", "{file}: the top level must be sections (key: value), not a list"),
    ("nested.yaml", "rollout:\n  val:\n    stepz: 3\n", "unknown key rollout.val.stepz; known here: n, seed, "
     "num_inference_steps, height, width, num_frames, guidance_scale, true_cfg_scale, noise_level, solver"),
    ("typed.yaml", "data:\n  val_files: a.txt\n", "data.val_files: expected a list of strings, got 'a.txt'; write [a.txt]"),
]  # fmt: skip

DATA: list[tuple[str, Arguments, str]] = [
    (
        "no such data file",
        lambda p: [f"data.train_files=[{p.folder}/prompt.txt]"],
        "data.train_files: {folder}/prompt.txt does not exist; did you mean {folder}/prompts.txt?",
    ),
    ("no prompts", lambda p: [p.data("blank.txt", "\n \n")], "data.train_files: {folder}/blank.txt has no prompts"),
    (
        "not UTF-8",
        lambda p: [p.data("latin.txt", b"a cat\na caf\xe9\n")],
        "data.train_files: {folder}/latin.txt:2: not UTF-8 (byte 0xe9); save the file as UTF-8",
    ),
    (
        "broken JSON",
        lambda p: [p.data("broken.jsonl", '{"prompt": "a cat"}\n{"prompt": \n')],
        "data.train_files: {folder}/broken.jsonl:2: not JSON (Expecting value at column 11); "
        'expected one object per line, {{"prompt": "..."}}',
    ),
    (
        "no prompt column",
        lambda p: [p.data("columns.jsonl", '{"text": "a cat", "id": 3}\n')],
        "data.train_files: {folder}/columns.jsonl:1: no 'prompt'; it has text, id",
    ),
    (
        "a pair without its other image",
        lambda p: [*PAIRS, p.data("pairs.jsonl", '{"prompt": "a cat", "chosen": "a.png"}\n')],
        "data.train_files: {folder}/pairs.jsonl:1: no 'rejected'; it has prompt, chosen",
    ),
    (
        "a prompt that is a number",
        lambda p: [p.data("number.jsonl", '{"prompt": 3}\n')],
        "data.train_files: {folder}/number.jsonl:1: prompt is of type number; expected text, or a chat of texts",
    ),
    (
        "unknown ending",
        lambda p: [p.data("table.csv", "prompt\na cat\n")],
        f"data.train_files: {{folder}}/table.csv ends in .csv; expected {FORMATS}",
    ),
    (
        "a folder that is no dataset",
        lambda p: [f"data.train_files=[{p.folder}]"],
        f"data.train_files: {{folder}} is a folder, but not a dataset written by save_to_disk; expected {FORMATS}",
    ),
    (
        "two validation sets of one name",
        lambda p: [f"data.val_files=[{p.folder}/prompts.txt, {p.folder}/prompts.txt]"],
        "data.val_files: {folder}/prompts.txt and {folder}/prompts.txt would both be the validation set 'prompts'; "
        "rename one of them",
    ),
]

MODELS: list[tuple[str, Arguments, str]] = [
    ("no model folder", lambda p: [f"model.path={p.folder}/none"], "model.path: '{folder}/none': no such folder"),
    (
        "a hub id without a hub",
        lambda p: ["model.path=user/model"],
        "model.path: 'user/model': no such folder, and no hub has it within reach",
    ),
    (
        "a folder without model_index.json",
        lambda p: [p.broken("no_index", lambda f: (f / "model_index.json").unlink())],
        "model.path: '{folder}/no_index' is not a diffusers model folder: it has no model_index.json",
    ),
    (
        "an unsupported pipeline",
        lambda p: [p.broken("sana", edit("model_index.json", _class_name="SanaPipeline"))],
        "model.path: '{folder}/sana' is a SanaPipeline; supported: FluxPipeline, QwenImageEditPipeline, "
        "QwenImageEditPlusPipeline, QwenImagePipeline, StableDiffusion3Pipeline, WanPipeline, ZImagePipeline",
    ),
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
        "a broken config.json",
        lambda p: [p.broken("config", lambda f: (f / "transformer/config.json").write_text("{"))],
        "model.path: {folder}/config/transformer/config.json:1:2 is not valid JSON: "
        "Expecting property name enclosed in double quotes",
    ),
    (
        "a component without its config.json",
        lambda p: [p.broken("no_config", lambda f: (f / "vae/config.json").unlink())],
        "model.path: {folder}/no_config/vae has no config.json",
    ),
    (
        "weights that are not there",
        lambda p: [p.broken("bare", lambda f: (f / f"transformer/{WEIGHTS}").unlink())],
        "model.path: {folder}/bare/transformer has no weights (*.safetensors)",
    ),
    (
        "a shard that is not there",
        lambda p: [p.broken("shards", edit("model_index.json")), *shards(p, "shards")],
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
        lambda p: [p.broken("ddim", edit("model_index.json", scheduler=["diffusers", "DDIMScheduler"]))],
        "model.path: '{folder}/ddim' has the scheduler DDIMScheduler; expected FlowMatchEulerDiscreteScheduler",
    ),
]

# The model is loaded before these are known: libraries may have said something by then.
SETTINGS: list[tuple[str, Arguments, str]] = [
    ("image size", lambda p: ["rollout.height=20"], "rollout.height: 20 should be a multiple of 8, e.g. 16 or 24"),
    ("image too large", lambda p: ["rollout.width=4096"], "rollout.width: 4096 is more than the model's 128 pixels"),
    (
        "videos of a model that makes images",
        lambda p: ["rollout.num_frames=5"],
        "rollout.num_frames: 5: StableDiffusion3Pipeline makes images, not videos; set it to 1",
    ),
    (
        "the guidance of another family",
        lambda p: ["rollout.true_cfg_scale=4"],
        "rollout.true_cfg_scale: 4 has no effect on this model; its guidance is rollout.guidance_scale",
    ),
    (
        "a LoRA on no layer",
        lambda p: ["model.lora_rank=4", "model.target_modules=[attn.to_x]"],
        "model.target_modules: no linear layer ends in 'attn.to_x'; in a block: attn.add_k_proj, attn.add_q_proj, "
        "attn.add_v_proj, attn.to_add_out, attn.to_k, attn.to_out.0, attn.to_q, attn.to_v, attn2.to_k, attn2.to_out.0, "
        "attn2.to_q, attn2.to_v, ff.net.0.proj, ff.net.2, ff_context.net.0.proj, ff_context.net.2, norm1.linear, "
        "norm1_context.linear",
    ),
    (
        "a checkpoint that is not there",
        lambda p: [f"trainer.resume={p.folder}/step_000007"],
        "trainer.resume: '{folder}/step_000007' cannot be used: no such folder",
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
        "no such reward file",
        lambda p: [f"reward.functions=[{{path: '{p.folder}/none.py:f'}}]"],
        "reward.functions[0].path: '{folder}/none.py': no such file",
    ),
    (
        "no such function in a reward file",
        lambda p: [p.reward("bom")],
        "reward.functions[0].path='{folder}/rewards.py:bom': {folder}/rewards.py has no 'bom'; did you mean boom?",
    ),
    (
        "a reward with other arguments",
        lambda p: [p.reward("two_arguments")],
        "reward.functions[0].kwargs: two_arguments(images, prompts, metadata, **kwargs): too many positional arguments; "
        "its kwargs: none",
    ),
    (
        "a reward without its model",
        lambda p: ["reward.functions=[{name: pickscore, kwargs: {model: /none}}]"],
        "reward.functions[0] (pickscore): model='/none' is not a folder; give a folder with a CLIP model, or a hub id",
    ),
]

# The job runs, and fails: status 1.
JOBS: list[tuple[str, Arguments, str]] = [
    (
        "a reward that raises",
        lambda p: [p.reward("boom")],
        f"reward 'boom' raised KeyError: 'no such\\nthing' on the prompt \"{FIRST}\"",
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
        f"reward 'texts' returned no numbers but a list on the prompt \"{FIRST}\"; "
        "expected 4 numbers: a list, an array or a tensor",
    ),
    (
        "a reward that leaves the process",
        lambda p: [p.reward("leaves")],
        f"reward 'leaves' raised SystemExit: 0 on the prompt \"{FIRST}\"",
    ),
    (
        "a reward that hangs",
        lambda p: [p.reward("hangs"), "reward.timeout_s=0.5"],
        f"reward 'hangs' ran longer than reward.timeout_s=0.5 seconds on the prompt \"{FIRST}\"",
    ),
    (
        "an image of a pair that is none",
        lambda p: [
            *PAIRS,
            p.data("broken_pairs.jsonl", '{"prompt": "a", "chosen": "prompts.txt", "rejected": "prompts.txt"}\n' * 4),
        ],
        "data.train_files: {folder}/broken_pairs.jsonl:1: rejected: the image cannot be read: its format is unknown",
    ),
    (
        "a prompt without the text that OCR should read",
        lambda p: ["reward.functions=[{name: ocr, kwargs: {detect: false}}]", p.data("plain.txt", "a cat\n" * 4)],
        "reward 'ocr' raised ValueError: no ground_truth for the prompt \"a cat\" (expected a text in double quotes in the "
        'prompt, or a column ground_truth in the data) on the prompt "a cat"',
    ),
]


def named(*tables: list[tuple[str, Arguments, str]]) -> list[ParameterSet]:
    return [pytest.param(arguments, message, id=name) for table in tables for name, arguments, message in table]


def check(done: CompletedProcess[str], message: str, status: int) -> None:
    """The line is the last one said, and the only one of an error."""
    assert "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1:] == [f"error: {message}"]
    assert [line for line in lines if line.startswith("error")] == lines[-1:]
    assert done.returncode == status


def test_the_job_itself_is_good(place: Place) -> None:
    """Each input below differs from this one."""
    done = task(place.good)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr and "report: " in done.stdout


@pytest.mark.parametrize(("arguments", "message"), named(CONFIG, DATA, MODELS))
def test_refused_at_once(place: Place, arguments: Arguments, message: str) -> None:
    done = task([*place.good, *arguments(place)])
    check(done, message.format(folder=place.folder), 2)
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


@pytest.mark.parametrize(("name", "content", "message"), CONFIG_FILES)
def test_refused_files(place: Place, name: str, content: str, message: str) -> None:
    file = place.write(name, content)
    check(task([file, *place.good]), message.format(file=file), 2)


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
    ("no model folder", lambda p: [f"model.path={p.folder}/none"], "model.path: '{folder}/none': no such folder"),
    (
        "a reward that raises on one rank",
        lambda p: [p.reward("boom_on_rank_1")],
        "rank 1: reward 'boom_on_rank_1' raised KeyError: 'no such thing' on the prompt \"{prompt}\"",
    ),
    (
        "a reward that hangs on one rank",
        lambda p: [p.reward("hangs_on_rank_1"), "reward.timeout_s=1"],
        "rank 1: reward 'hangs_on_rank_1' ran longer than reward.timeout_s=1 seconds on the prompt \"{prompt}\"",
    ),
]


def told_once(done: CompletedProcess[str], place: Place, message: str) -> str:
    """The line, which is the only one of an error."""
    # rank 1 samples the last 2 of the step's 4 prompts, one after the other
    prompts = PromptStream(load_prompts([str(place.folder / "prompts.txt")], ""), 4, seed=0).batch(0)
    line = f"error: {message.format(folder=place.folder, prompt=prompts[2].text)}"
    assert done.returncode != 0
    assert [said for said in (done.stdout + done.stderr).splitlines() if said.startswith("error")] == [line]
    return line


@pytest.mark.parametrize(("arguments", "message"), named(TWO_RANKS))
def test_told_once_on_two_ranks(place: Place, arguments: Arguments, message: str) -> None:
    told_once(task([*place.good, *arguments(place)], nproc=2), place, message)


@pytest.mark.quick("unknown key")
@pytest.mark.parametrize(("arguments", "message"), named(TWO_RANKS[:1], TWO_RANKS[-1:]))
def test_told_once_by_torchrun(place: Place, arguments: Arguments, message: str) -> None:
    done = torchrun([TASK, *place.good, *arguments(place)], nproc=2, timeout=LIMIT_S)
    assert done.stderr.splitlines()[-2].endswith(told_once(done, place, message))
