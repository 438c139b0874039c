"""Mistakes in a configuration: the exact line of each kind."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.run.rules import load_config
from tests.helpers.checks import refused
from tests.helpers.configs import refusal

SECTIONS = "model, parallel, data, rollout, optim, reward, trainer, sweep, algorithm, actor, placement"
ALGORITHM_KEYS = (
    "name, adv_clip_max, global_std, norm_adv_by_std_in_grpo, group_filter, group_filter_k, kl_loss_coef, "
    "kl_convention, importance, timestep_weight, clip_ratio"
)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "cfg.yaml"


MISTAKES = [
    # unknown keys, with the nearest known one
    (["trainer.sead=1"], "unknown key trainer.sead; did you mean trainer.seed?"),
    (["tariner.seed=1"], "unknown key tariner; did you mean trainer?"),
    (["rollout.val.step=1"], "unknown key rollout.val.step; did you mean rollout.val.seed?"),
    (["actor.emma.decay=0.5"], "unknown key actor.emma; did you mean actor.ema?"),
    (["seed=1"], "unknown key seed; did you mean one of data.seed, rollout.val.seed, reward.model.seed, trainer.seed?"),
    (["trainer.lr=1"], "unknown key trainer.lr; did you mean optim.lr?"),
    (["foo.bar=1"], f"unknown key foo; known here: {SECTIONS}"),
    # keys of other trainers
    (["actor_rollout_ref.rollout.n=8"], "unknown key actor_rollout_ref.rollout.n; here it is rollout.n"),
    (["trainer.nnodes=2"], "unknown key trainer.nnodes; here it is the environment variable NNODES"),
    (["++actor_rollout_ref.rollout.mode=x"], "unknown key ++actor_rollout_ref.rollout.mode; here there is nothing to set for it"),
    (["sample.num_steps=10"], "unknown key sample.num_steps; here it is rollout.num_inference_steps"),
    (["model.zzz=1"], "unknown key model.zzz; known here: path, revision, dtype, lora_rank, lora_alpha, lora_init, target_modules, "
     "lora_path, lora_dtype, quantization, gradient_checkpointing, gradient_checkpointing_blocks, compile, cpu_linear, family, reference_size, reference_count, attn_backend, target_components"),
    (["algorithm.clip_rate=1"], "unknown key algorithm.clip_rate; did you mean algorithm.clip_ratio?"),
    (["reward.functions=[{name: ocr}, {nam: ocr}]"], "unknown key reward.functions[1].nam; did you mean reward.functions[1].name?"),
    (["trainer={sed: 3}"], "unknown key trainer.sed; did you mean trainer.seed?"),
    (["+trainer.seed=3"], "unknown key +trainer; did you mean trainer?"),
    (["optim.LR=1"], "unknown key optim.LR; did you mean optim.lr?"),
    (["Trainer.seed=1"], "unknown key Trainer; did you mean trainer?"),
    (["trainer..seed=1"], "'trainer..seed=1': an override is written key=value, e.g. trainer.seed=1"),
    ([".trainer.seed=1"], "'.trainer.seed=1': an override is written key=value, e.g. trainer.seed=1"),
    # types
    (["data.train_files=[[a]]"], "data.train_files: expected a list of strings, got [['a']]"),
    (["trainer.output_dir=''"], "trainer.output_dir: expected a path, got ''"),
    (["trainer.seed=1", "trainer=[1]"], "trainer: expected a section, got [1]"),
    (["data.train_files=[a]", "data.train_files={a: b}"], "data.train_files: expected a list, got {a: b}"),
    (["trainer.seed=!!int"], "'trainer.seed=!!int': the value is not valid YAML: '' is not a value of the tag 'tag:yaml.org,2002:int'"),
    (["trainer.deterministic=2"], "trainer.deterministic: expected true or false, got 2"),
    (["model.compile=-1"], "model.compile: expected true or false, got -1"),
    (["trainer.seed=abc"], "trainer.seed: expected an integer, got 'abc'"),
    (["trainer.seed=1.5"], "trainer.seed: expected an integer, got 1.5"),
    (["trainer.seed=true"], "trainer.seed: expected an integer, got true"),
    (["trainer.seed=null"], "trainer.seed: expected an integer, got null"),
    (["trainer.seed="], "trainer.seed: expected an integer, got null"),
    (["trainer.seed={a: 1}"], "trainer.seed: expected an integer, got {'a': 1}"),
    (["optim.lr=fast"], "optim.lr: expected a number, got 'fast'"),
    (["optim.lr=nan"], "optim.lr: expected a finite number, got nan"),
    (["optim.lr=.inf"], "optim.lr: expected a finite number, got inf"),
    (["parallel.timeout_s=.inf"], "parallel.timeout_s: expected a finite number, got inf"),
    (["optim.betas=[a, b]"], "optim.betas: expected a list of numbers, got ['a', 'b']"),
    (["actor.ema.decay=x"], "actor.ema.decay: expected a number or null, got 'x'"),
    (["model.compile=maybe"], "model.compile: expected true or false, got 'maybe'"),
    (["model.path=[a]"], "model.path: expected a string, got ['a']"),
    (["trainer.logger=wandb"], "trainer.logger: expected a list of strings, got 'wandb'; write [wandb]"),
    (["data.train_files=null"], "data.train_files: expected a list of strings, got null"),
    (["rollout.sde_window_range=3"], "rollout.sde_window_range: expected a list of integers or null, got 3; write [3]"),
    (["rollout.sde_window_range=[0, x]"], "rollout.sde_window_range: expected a list of integers or null, got [0, 'x']"),
    (["rollout.val=5"], "rollout.val: expected a section, got 5; its keys: n, seed, num_inference_steps, height, width, num_frames, "
     "guidance_scale, guidance_scale_2, true_cfg_scale, noise_level, solver"),
    (["algorithm=flow_grpo"], f"algorithm: expected a section, got 'flow_grpo'; its keys: {ALGORITHM_KEYS}"),
    (["reward.functions=ocr"], "reward.functions: expected a list of sections, got 'ocr'"),
    (["reward.functions=[ocr]"], "reward.functions[0]: expected a section, got 'ocr'; its keys: name, path, weight, "
     "initial_weight, weight_steps, clip, kwargs, per_sample, frames"),
    (["reward.functions=[{weight: heavy}]"], "reward.functions[0].weight: expected a number, got 'heavy'"),
    (["reward.functions=[{weight: nan}]"], "reward.functions[0].weight: expected a finite number, got nan"),
    (["reward.functions=[{kwargs: 3}]"], "reward.functions[0].kwargs: expected a section of keys and values, got 3"),
    # choices and bounds
    (["model.dtype=float15"], "model.dtype: expected one of float32, bfloat16, got 'float15'; did you mean bfloat16?"),
    (["model.dtype=float16"], "model.dtype: expected float32, or bfloat16 on a GPU that computes in it; float16 would need a scaled loss, which is not supported, got 'float16'"),
    (["rollout.sde_type=SDE"], "rollout.sde_type: expected one of sde, cps, dance_sde, got 'SDE'; did you mean sde?"),
    (["rollout.sde_type=x"], "rollout.sde_type: expected one of sde, cps, dance_sde, got 'x'"),
    (["algorithm.kl_convention=exakt"], "algorithm.kl_convention: expected one of exact, flow_grpo, got 'exakt'; did you mean exact?"),
    (["rollout.n=1"], "rollout.n: expected at least 2, got 1"),
    (["optim.lr=0"], "optim.lr: expected more than 0, got 0.0"),
    (["model.lora_rank=4", "model.lora_alpha=0"], "model.lora_alpha: expected more than 0, got 0.0"),
    (["algorithm.name=opd", "algorithm.teachers={1: a}"], "algorithm.teachers: expected a section of names and strings, got {1: 'a'}"),
    (["actor.ema.decay=1"], "actor.ema.decay: expected less than 1, got 1.0"),
    (["rollout.timestep_fraction=1.5"], "rollout.timestep_fraction: expected at most 1, got 1.5"),
    (["rollout.ode_compression=0"], "rollout.ode_compression: expected more than 0, got 0.0"),
    (["rollout.val.solver=dpm"], "rollout.val.solver: expected one of euler, dpm_solver++, got 'dpm'"),
    (["rollout.val.n=0"], "rollout.val.n: expected at least 1, got 0"),
    (["algorithm.clip_ratio=-1"], "algorithm.clip_ratio: expected more than 0, got -1.0"),
    (["trainer.seed=-1"], "trainer.seed: expected at least 0, got -1"),
    (["trainer.seed=9223372036854775808"], "trainer.seed: expected less than 9.22337e+18, got 9223372036854775808"),
    # values that no key, list or argument of a reward accepts
    (["reward.functions=[{clip: [0, .inf]}]"], "reward.functions[0].clip[1]: expected a finite number, got inf"),
    (["reward.functions=[{kwargs: {a: {b: [1, .nan]}}}]"], "reward.functions[0].kwargs.a.b[1]: expected a finite number, got nan"),
    (["optim.betas=[.nan, 0.9]"], "optim.betas[0]: expected a finite number, got nan"),
    (["reward.functions=[{weight: -1e39}]"], "reward.functions[0].weight: expected at least -1e+09, got -1e+39"),
    (["optim.lr=1e30"], "optim.lr: expected at most 1e+09, got 1e+30"),
    (["parallel.timeout_s=1e300"], "parallel.timeout_s: expected at most 1e+09, got 1e+300"),
    (["rollout.n=1000000000000"], "rollout.n: expected at most 65536, got 1000000000000"),
    (["rollout.sde_window_range=[0, 10000000000]"], "rollout.sde_window_range[1]: expected at most 1e+09, got 10000000000"),
    (["data.train_batch_size=1000000000000"], "data.train_batch_size: expected at most 65536, got 1000000000000"),
    (["reward.num_workers=1000000"], "reward.num_workers: expected at most 1024, got 1000000"),
    (['trainer.experiment_name="a\\0b"'], "trainer.experiment_name: expected text in UTF-8 without control characters, got 'a\\x00b'"),
    (["model.path=/m\udce9"], "'model.path=/m\\udce9': the value is not valid YAML: the character #xdce9 is not allowed"),
    (["data.train_files=[\"a\\eb\"]"], "data.train_files[0]: expected text in UTF-8 without control characters, got 'a\\x1bb'"),
    # missing
    (["model.path=???"], "model.path is not set; give model.path=...: model folder, or hub id if the hub is reachable"),
    # interpolation
    (["trainer.output_dir=${trainer.nope}"], "trainer.output_dir: Interpolation key 'trainer.nope' not found"),
    (["trainer.output_dir=${oc.env:PHALANX_TEST_UNSET}"], "trainer.output_dir: Environment variable 'PHALANX_TEST_UNSET' not found"),
    (["data.train_files=['${oc.env:PHALANX_TEST_UNSET}']"], "data.train_files[0]: Environment variable 'PHALANX_TEST_UNSET' not found"),
    (["algorithm.name=${oc.env:PHALANX_TEST_UNSET}"], "algorithm.name: Environment variable 'PHALANX_TEST_UNSET' not found"),
    (["trainer.seed=${trainer.project_name}"], "trainer.seed: While dereferencing interpolation '${trainer.project_name}': "
     "Value 'phalanx' of type 'str' could not be converted to Integer"),
    (["trainer.seed=${data.seed}", "data.seed=${trainer.seed}"], "data.seed: Recursive interpolation detected"),
    (["trainer.seed=${nope:1}"], "trainer.seed: Unsupported interpolation type nope"),
    (["rollout.n=${data.seed}"], "rollout.n: expected at least 2, got 0"),
    (["trainer.output_dir=${nope"], "'trainer.output_dir=${nope': not a valid interpolation: no viable alternative at input '${nope'"),
    # overrides
    (["trainer.seed"], "'trainer.seed': an override is written key=value, e.g. trainer.seed=1"),
    (["=5"], "'=5': an override is written key=value, e.g. trainer.seed=1"),
    (["other.yaml"], "'other.yaml': the configuration file comes first, and there is only one"),
    (["trainer.logger=" + "[" * 60 + "]" * 60], f"'trainer.logger={'[' * 60}{']' * 60}': the value is not valid YAML: nested more than 50 deep"),
    ([".".join(["a"] * 60) + "=1"], f"'{'.'.join(['a'] * 60)}=1': the key is nested more than 50 deep"),
    (["trainer.seed=" + "9" * 6000], f"'trainer.seed={'9' * 186}… (6015 characters): the value is not valid YAML: Exceeds the limit (4300 digits) for "
     "integer string conversion: value has 6000 digits"),
    (["trainer.logger=[a"], "'trainer.logger=[a': the value is not valid YAML: expected ',' or ']', but got '<stream end>'; "
     "within [ ] or { } other texts than words need quotes"),
    (["data.train_files=[what?]"], "'data.train_files=[what?]': the value is not valid YAML: expected ',' or ']', but got '?'; "
     "within [ ] or { } other texts than words need quotes, as in data.train_files=[\"what?\"]"),
    (["trainer.logger=a, b"], "trainer.logger: expected a list of strings, got 'a, b'; write [\"a, b\"]"),
    (["reward.functions=[{name:ocr}]"], "unknown key reward.functions[0].name:ocr; YAML needs a blank after the colon: name: ocr"),
    (["data.train_files=[${oc.env:HOME}/a.txt]"], "'data.train_files=[${oc.env:HOME}/a.txt]': the value is not valid YAML: "
     "expected ',' or ']', but got '{'; within [ ] or { } an interpolation needs quotes"),
    (["reward.functions=[{name: ocr}]", "reward.functions[3].weight=1"], "'reward.functions[3].weight=1': list index out of range"),
    (["reward.functions=[{name: ocr}]", "reward.functions.ocr.weight=1"], "'reward.functions.ocr.weight=1': an element of a list is "
     "selected by its index, e.g. reward.functions[0].weight=2"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_mistakes(overrides: list[str], message: str) -> None:
    assert refusal(*overrides) == message


FILES = [
    ("- a\n- b\n", "{file}: the top level must be sections (key: value), not a list"),
    ("just text\n", "{file}: the top level must be sections (key: value), not 'just text'"),
    ("3\n", "{file}: the top level must be sections (key: value), not 3"),
    ("model:\n  path: [1\n", "{file}:3:1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("trainer: " + "{a: " * 3000 + "1" + "}" * 3000, "{file}:1:206: not valid YAML: nested more than 50 deep"),
    ("a: &a [1, *a]\n", "{file}:1:11: not valid YAML: the alias 'a' is within its own value"),
    ("a: &a [[[[[[[[[[1]]]]]]]]]]\n" + "".join(f"{b}: &{b} [[[[[[[[[[*{a}]]]]]]]]]]\n" for a, b in pairwise("abcdef")),
     "{file}:5:17: not valid YAML: nested more than 50 deep"),
    ("a: &a [" + "x, " * 999 + "x]\nb: [" + "*a, " * 99 + "*a]\n",
     "{file}:2:401: not valid YAML: more than 100000 values, counting those of aliases each time"),
    (f"a: &a '{'x' * 90_000}'\nb: [" + "*a, " * 111 + "*a]\n",
     "{file}:2:445: not valid YAML: more than 100000 values, counting those of aliases each time"),
    ("trainer:\n  experiment_name: a\x01b\n", "{file}:2:21: not valid YAML: the character #x01 is not allowed"),
    ("trainer:\n  seed: " + "9" * 6000, "{file}:2:9: not valid YAML: Exceeds the limit (4300 digits) for integer string conversion: value has 6000 digits"),
    ("trainer: {seed: 2020-99-01}\n", "{file}:1:17: not valid YAML: month must be in 1..12"),
    ("trainer:\n\tseed: 1\n", "{file}:2:1: not valid YAML: found character '\\t' that cannot start any token"),
    ("trainer: {seed: 1}\ndata: {}\ntrainer: {seed: 2}\n", "{file}:3:1: not valid YAML: found duplicate key trainer"),
    ("model: {path: !!python/name:os.system }\n", "{file}:1:15: not valid YAML: could not determine a constructor for the "
     "tag 'tag:yaml.org,2002:python/name:os.system'"),
    ("trainer: {seed: !!float ''}\n", "{file}:1:17: not valid YAML: '' is not a value of the tag 'tag:yaml.org,2002:float'"),
    ("trainer: {deterministic: !!bool x}\n", "{file}:1:26: not valid YAML: 'x' is not a value of the tag 'tag:yaml.org,2002:bool'"),
    ("trainer: {seed: !!timestamp x}\n", "{file}:1:17: not valid YAML: 'x' is not a value of the tag 'tag:yaml.org,2002:timestamp'"),
    ("trainer.seed: 1\n", "unknown key trainer.seed; in a file each part of it is a separate section, as in {trainer: {seed: …"),
    ('model: {path: "${"}\n', "{file}: model.path: not a valid interpolation: no viable alternative at input '${'"),
    ("1: 2\n", f"unknown key 1; known here: {SECTIONS}"),
    ("trainer:\n  seed: 1\n  sede: 2\n", "unknown key trainer.sede; did you mean trainer.seed?"),
    ("reward:\n  functions:\n    - nam: ocr\n", "unknown key reward.functions[0].nam; did you mean reward.functions[0].name?"),
    ("trainer: [1]\n", "trainer: expected a section, got [1]; its keys: total_training_steps, total_epochs, save_freq, test_freq, "
     "val_before_train, log_val_generations, logger, project_name, experiment_name, output_dir, seed, resume, max_bad_steps, undo_steps, peer_copy, end_below, end_below_from, max_checkpoints, "
     "keep_best, keep_best_mode, export_each_save, profile_steps, deterministic"),
    ("trainer: {seed: two}\n", "trainer.seed: expected an integer, got 'two'"),
    ("trainer: {logger: console}\n", "trainer.logger: expected a list of strings, got 'console'; write [console]"),
    ("data: {train_files: 7}\n", "data.train_files: expected a list of strings, got 7"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FILES)
def test_mistakes_in_a_file(text: str, message: str, yaml_file: Path) -> None:
    yaml_file.write_text(text)
    assert refusal(path=yaml_file) == message.replace("{file}", str(yaml_file))


def test_an_algorithm_of_another_kind_of_job() -> None:
    message = "algorithm.name: draft is for jobs with rollout.noise_level, and this one has none"
    with refused(message, ConfigError):
        load_config(LMRLConfig, None, ["model.path=x", "data.train_files=[x]", "algorithm.name=draft"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert refusal(path=tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: no such configuration file"
    (tmp_path / "quickstart.yaml").write_text("")
    assert refusal(path=tmp_path / "quikstart.yaml") == (
        f"{tmp_path}/quikstart.yaml: no such configuration file; did you mean {tmp_path}/quickstart.yaml?"
    )
    assert refusal(path=tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    os.mkfifo(tmp_path / "pipe.yaml")
    assert refusal(path=tmp_path / "pipe.yaml") == f"{tmp_path}/pipe.yaml: cannot be read: neither a file nor a folder"
    assert refusal(path="x" * 300) == f"{'x' * 200}… (300 characters): cannot be read: File name too long"
    (tmp_path / "image.yaml").write_bytes(b"\x89PNG\xff\x00")
    assert refusal(path=tmp_path / "image.yaml") == f"{tmp_path}/image.yaml: not a text file in UTF-8"


def test_what_nobody_gives_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"^model.path is not set; give model.path=...: model folder"):
        load_config(FlowRLConfig, None, [])
