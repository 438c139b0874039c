"""Loading a configuration: valid ones are read, and --help lists all keys."""

import subprocess
import sys
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from phalanx.config import ConfigError, save
from phalanx.config.fields import arg
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig, FlowRunConfig
from phalanx.config.load import help_text, rows
from phalanx.config.registry import resolve_registry
from phalanx.config.run import RunConfig
from phalanx.config.sources import changed
from phalanx.config.tasks import GenerateConfig, SampleConfig, read_run
from phalanx.config.trained_model import ModelConfig
from phalanx.run.cli import parse
from phalanx.run.rules import load_config
from tests.helpers.configs import ALGORITHM, refusal, train
from tests.helpers.ranks import LIMIT_S, ROOT, launch_environment


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "cfg.yaml"


# --- valid configurations


def test_defaults_and_differences(yaml_file: Path) -> None:
    yaml_file.write_text(
        "model: {path: folder, lora_rank: 8}\n"
        "optim:\n  lr: 2e-4\n  betas: [0.8, 0]\n"
        "rollout: {val: {n: 3}}\n"
        "algorithm: {clip_ratio: 1e-5}\n"
        "reward:\n  functions:\n    - {name: ocr, kwargs: {scale: 1e-3, words: [a, b]}}\n    - {path: 'm:f', weight: -1}\n"
    )
    cfg = load_config(FlowRLConfig, str(yaml_file), [])
    assert (cfg.model.path, cfg.model.lora_rank, cfg.model.dtype) == ("folder", 8, "bfloat16")
    assert (cfg.optim.lr, cfg.optim.betas) == (2e-4, [0.8, 0.0])
    assert (cfg.rollout.val.n, cfg.rollout.val.seed) == (3, 1234)
    assert (cfg.algorithm.name, cfg.algorithm.clip_ratio, cfg.algorithm.adv_clip_max) == ("flow_grpo", 1e-5, 5.0)
    first, second = cfg.reward.functions
    assert (first.name, first.weight, first.kwargs) == ("ocr", 1.0, {"scale": 1e-3, "words": ["a", "b"]})
    assert (second.name, second.path, second.weight) == (None, "m:f", -1.0)
    assert type(cfg.algorithm) is resolve_registry("phalanx.algorithms", "flow_grpo", "").Config


def test_overrides_win_in_their_order(yaml_file: Path) -> None:
    yaml_file.write_text(
        "trainer: {seed: 1, logger: [console, wandb]}\nreward:\n  functions: [{name: ocr}, {name: aesthetic}]\n"
    )
    cfg = train(
        *["trainer.seed=2", "trainer.seed=3", "trainer.logger=[tensorboard]", "data.train_files=[a.txt,b=c.txt]"],
        *["reward.functions[1].weight=2.5", "reward.functions[0].kwargs.detect=false", "model.path=a=b"],
        path=yaml_file,
    )
    assert (cfg.trainer.seed, cfg.trainer.logger, cfg.model.path) == (3, ["tensorboard"], "a=b")
    assert cfg.data.train_files == ["a.txt", "b=c.txt"]
    assert [(f.name, f.weight, f.kwargs) for f in cfg.reward.functions] == [
        ("ocr", 1.0, {"detect": False}),
        ("aesthetic", 2.5, {}),
    ]


def test_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts become numbers and words booleans, but neither 1.0 nor true an integer."""
    cfg = train(
        "optim.lr='3e-4'", "actor.ema.decay=.5", "trainer.seed='7'", "parallel.timeout_s=60", "model.compile=yes"
    )
    assert (cfg.optim.lr, cfg.actor.ema.decay, cfg.trainer.seed, cfg.parallel.timeout_s) == (3e-4, 0.5, 7, 60.0)
    assert cfg.model.compile is True
    assert type(cfg.parallel.timeout_s) is float
    assert train("model.compile=1").model.compile is True
    assert [train(f"trainer.experiment_name={v}").trainer.experiment_name for v in ("7", "1.5", "true")] == [
        *["7", "1.5", "True"]
    ]
    for override in ("trainer.seed=1.0", "trainer.seed='7.0'", "optim.lr=true", "model.compile=5"):
        assert ": expected " in refusal(override)
    # a value is converted before another one refers to it
    monkeypatch.setenv("PHALANX_TEST_HEIGHT", "64")
    cfg = train(
        "rollout.guidance_scale=4",
        "rollout.height=${oc.env:PHALANX_TEST_HEIGHT}",
        "trainer.experiment_name=cfg${rollout.guidance_scale}",
        "reward.functions=[{name: ocr, kwargs: {size: '${rollout.height}'}}]",
    )
    assert (cfg.trainer.experiment_name, cfg.reward.functions[0].kwargs) == ("cfg4.0", {"size": 64})
    assert train("trainer.seed=???", "optim=???").trainer.seed == 0


def test_one_prompt_needs_no_list() -> None:
    for schema in (SampleConfig, GenerateConfig):
        cfg = load_config(schema, None, ["model.path=x", "prompts=What is 1+1, and why?"])
        assert cfg.prompts == ["What is 1+1, and why?"]


def test_a_file_need_not_hold_anything(yaml_file: Path) -> None:
    for text in ("", "# nothing\n", "trainer:\n  # seed: 1\nactor:\n  ema:\n", "algorithm:\n"):
        yaml_file.write_text(text)
        assert train(path=yaml_file) == train()
        assert (
            train("trainer.seed=5", "actor.ema.decay=0.5", "algorithm.clip_ratio=1", path=yaml_file).trainer.seed == 5
        )


def test_interpolation(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TEST_FOLDER", "/data")
    monkeypatch.setenv("PHALANX_TEST_SEED", "11")
    monkeypatch.delenv("PHALANX_TEST_UNSET", raising=False)
    yaml_file.write_text(
        "trainer:\n  experiment_name: first\n  seed: ${oc.env:PHALANX_TEST_SEED}\n"
        "data:\n  seed: ${trainer.seed}\n  train_files: ['${oc.env:PHALANX_TEST_FOLDER}/a.txt', b.txt]\n"
        "  val_files: ['${data.train_files[1]}']\n"
        "model:\n  path: ${oc.env:PHALANX_TEST_UNSET,${oc.env:PHALANX_TEST_FOLDER}}/model\n"
        "reward:\n  functions: [{name: ocr, weight: '${optim.lr}', kwargs: {size: '${rollout.height}'}}]\n"
        "rollout: {val: {height: '${rollout.height}'}}\n"
    )
    cfg = load_config(FlowRLConfig, str(yaml_file), ["trainer.project_name=p", "rollout.height=64"])
    assert cfg.trainer.output_dir == "outputs/p/first"
    assert (cfg.trainer.seed, cfg.data.seed) == (11, 11)
    assert (cfg.data.train_files, cfg.data.val_files) == (["/data/a.txt", "b.txt"], ["b.txt"])
    assert cfg.model.path == "/data/model"
    assert (cfg.reward.functions[0].weight, cfg.reward.functions[0].kwargs) == (1e-4, {"size": 64})
    assert cfg.rollout.val.height == 64
    assert train("trainer.seed=${oc.env:PHALANX_TEST_SEED}").trainer.seed == 11


def test_a_tilde_is_the_home_in_paths_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    cfg = train(
        "model.path=~/model", "trainer.output_dir=~/out", "trainer.project_name=~/p", "data.embeds_cache_dir=a/~b"
    )
    assert (cfg.model.path, cfg.trainer.output_dir) == ("/home/me/model", "/home/me/out")
    assert (cfg.trainer.project_name, cfg.data.embeds_cache_dir) == ("~/p", "a/~b")


def test_the_resolved_configuration_is_saved_and_reads_as_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TEST_FOLDER", "d\u00e4ta: #1 'x'")
    cfg = train(
        *[
            "model.path=${oc.env:PHALANX_TEST_FOLDER}",
            "optim.lr=1e-5",
            "optim.eps=1e-30",
            "algorithm.kl_loss_coef=0.04",
        ],
        *["reward.functions=[{name: ocr, kwargs: {a: 1e-7, b: [1, x], c: null, d: '1e3', e: 'yes'}}]"],
        *["rollout.sde_window_range=[0,5]", "trainer.experiment_name='007'", "trainer.resume='null'"],
    )
    save(cfg, tmp_path / "saved.yaml")
    assert changed(tmp_path / "saved.yaml", cfg) == []
    again = load_config(FlowRLConfig, str(tmp_path / "saved.yaml"), [])
    assert again == cfg
    assert again.model.path == "d\u00e4ta: #1 'x'" and again.trainer.resume == "null"
    assert again.reward.functions[0].kwargs == {"a": 1e-7, "b": [1, "x"], "c": None, "d": "1e3", "e": "yes"}
    assert "path: ${oc.env:PHALANX_TEST_FOLDER}\n" in (tmp_path / "saved.yaml").read_text()


def test_settings_that_differ_from_those_of_before(tmp_path: Path) -> None:
    before = tmp_path / "config.yaml"
    old = train("optim.lr=1e-5", "trainer.save_freq=3")
    old.placement = {"actor": "0"}
    save(old, before)
    now = train("trainer.save_freq=4", "trainer.seed=7", "optim.lr=1e-6", "reward.functions=[{name: ocr, weight: 2}]")
    now.placement = {"actor": "0", "rollout": "1"}
    lr, placement, rewards, seed = changed(before, now)
    assert (lr, seed) == ("optim.lr 1e-05 -> 1e-06", "trainer.seed 0 -> 7")
    assert placement == "placement {'actor': '0'} -> {'actor': '0', 'rollout': '1'}" and rewards.startswith(
        "reward.functions"
    )
    before.write_text("[")
    with pytest.raises(ConfigError, match="not valid YAML"):
        changed(before, now)


def test_the_configuration_of_a_run_is_read_as_that_of_its_kind(tmp_path: Path) -> None:
    @dataclass
    class OtherModelConfig(ModelConfig):
        vocabulary: int = arg(3, "size", ge=1)

    @dataclass
    class OtherRunConfig(RunConfig):
        model: OtherModelConfig = field(default_factory=OtherModelConfig)

    file = tmp_path / "config.yaml"
    flow = train("algorithm.name=awm", "model.family=sd3", "trainer.seed=5")
    save(flow, file)
    run = read_run(file, OtherRunConfig, FlowRunConfig)
    assert type(run) is FlowRunConfig and (run.model, run.trainer) == (flow.model, flow.trainer)
    assert "sweep: {}\n" in file.read_text()
    file.write_text(file.read_text().replace("sweep: {}\n", ""))  # of an older version
    assert read_run(file, OtherRunConfig, FlowRunConfig) == run
    other = load_config(OtherRunConfig, None, ["model.path=x", "model.vocabulary=7"])
    save(other, file)
    assert read_run(file, FlowRunConfig, OtherRunConfig) == other
    for text, message in (
        (file.read_text().replace("vocabulary: 7", "vocabulary: 0"), ": model.vocabulary: expected at least 1, got 0"),
        ("model: {path: x}\n", " is not the configuration of a training run"),
        ("[", " is not the configuration of a training run: expected the node content, but found '<stream end>'"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            read_run(file, FlowRunConfig, OtherRunConfig)
        assert str(error.value) == f"{file}{message}"


def test_another_algorithm_begins_with_its_own_defaults(tmp_path: Path) -> None:
    """algorithm.name=... suffices, whatever keys the file sets for its own algorithm."""
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: {name: flow_grpo, clip_ratio: 0.25, adv_clip_max: 2}\n")
    other = train("algorithm.name=awm", "algorithm.adv_clip_max=3", path=file).algorithm
    assert (other.name, other.clip_ratio, other.adv_clip_max) == ("awm", 1.0, 3.0)
    same = train("algorithm.name=flow_grpo", path=file).algorithm
    assert (same.clip_ratio, same.adv_clip_max) == (0.25, 2.0)
    file.write_text("algorithm: {clip_ratio: 0.25}\n")  # the default algorithm's
    assert train("algorithm.name=cps", path=file).algorithm.clip_ratio != 0.25
    assert train("algorithm={name: cps}", path=file).algorithm.clip_ratio != 0.25
    assert train("algorithm.name='flow_grpo'", path=file).algorithm.clip_ratio == 0.25  # the same in quotes
    assert train(path=file).algorithm.clip_ratio == 0.25


def test_an_algorithm_sets_defaults_elsewhere(tmp_path: Path) -> None:
    assert train("algorithm.name=cps").rollout.sde_type == "cps"
    assert train("algorithm.name=awm", "rollout.noise_level=0.3").rollout.noise_level == 0.3
    assert train("algorithm.name=sft").rollout.noise_level == 0.0
    assert train().rollout.noise_level == 0.7
    shown = help_text(FlowRLConfig, "", None, ["algorithm.name=cps"])
    assert "\n  rollout.sde_type: str = cps\n" in shown
    assert "\n  rollout.noise_level: float = 0.8\n" in shown


def test_an_algorithm_out_of_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_rule.py"
    file.write_text(ALGORITHM)
    cfg = train(f"algorithm.name={file}", "algorithm.temperature=2")
    assert (cfg.algorithm.temperature, cfg.algorithm.plain) == (2.0, 3)
    assert "Algorithm" in vars(resolve_registry("phalanx.algorithms", str(file), "algorithm.name"))
    for override, message in (
        ("algorithm.temp=2", "unknown key algorithm.temp; did you mean algorithm.temperature?"),
        ("algorithm.clip_ratio=2", "unknown key algorithm.clip_ratio; known here: name, temperature, plain"),
        ("algorithm.temperature=0", "algorithm.temperature: expected more than 0, got 0.0"),
        ("algorithm.plain=many", "algorithm.plain: expected an integer, got 'many'"),
    ):
        assert refusal(f"algorithm.name={file}", override) == message
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "rule.py").write_text(ALGORITHM)
    assert train("algorithm.name=pack.rule", "algorithm.plain=4").algorithm.plain == 4


HEAD = ALGORITHM.partition("class Algorithm")[0]
NO_CONFIG = "'{file}' has no Config, a dataclass of its keys derived from AlgorithmConfig"
ALGORITHM_FILES = [
    ("", NO_CONFIG),
    ("Config = 3\n", NO_CONFIG),
    ("class Config: pass\n", NO_CONFIG),
    ("from phalanx.config.run import TrainerConfig as Config\n", NO_CONFIG),
    (HEAD, "'{file}' has no class Algorithm, which is made of its Config"),
    (HEAD + "Algorithm = 3\n", "'{file}': class Algorithm is not a class"),
    (HEAD + "class Algorithm:\n    pass\n", "'{file}': class Algorithm lacks levels, last_steps, behaviour, references, averages, teachers, samples_per_unit, "
     "needs_reward, per_action, corrects, clip_range, max_ratio, advantage, sample_mask, units, credit, decay, corrupt, reference_output, loss; derive it from GroupAlgorithm, TransitionAlgorithm, "
     "ForwardAlgorithm or TokenAlgorithm of phalanx.algorithms"),
    (HEAD + "from phalanx.algorithms import TransitionAlgorithm as T\nclass Algorithm(T):\n    pass\n", "'{file}': class Algorithm lacks surrogate; "
     "derive it from GroupAlgorithm, TransitionAlgorithm, ForwardAlgorithm or TokenAlgorithm of phalanx.algorithms"),
    ("from phalanx.no_such import AlgorithmConfig\n", "{file}:1: No module named 'phalanx.no_such'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), ALGORITHM_FILES)
def test_a_file_that_is_no_algorithm(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "my_rule.py"
    file.write_text(text)
    assert refusal(f"algorithm.name={file}") == "algorithm.name: " + message.replace("{file}", str(file))


@pytest.mark.parametrize("name", ["flow_gpro", "zzz", "no_such.module", ".flow_grpo", "../etc/passwd"])
def test_an_algorithm_that_is_unknown(name: str) -> None:
    near = "; did you mean flow_grpo?" if "flow" in name else ";"
    assert refusal(f"algorithm.name={name}") == (
        f"algorithm.name: {name!r} is unknown{near} known: awm, cispo, cps, cross_entropy, dance_grpo, dgpo, diffusion_dpo, "
        "diffusion_nft, distillation, dpo, draft, flow_dppo, flow_grpo, flow_sdft, grpo, grpo_guard, mix_grpo, opd, ppo, raft, refl, reinforce_plus_plus, "
        "rloo, rwr, sapo, sdft, sdpo, sft, tempflow_grpo, a dotted module, or path/to/file.py"
    )


def test_an_algorithm_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the place in the user's file, and the traceback is chained."""
    file = tmp_path / "broken.py"
    assert refusal(f"algorithm.name={tmp_path}/no.py") == f"algorithm.name: '{tmp_path}/no.py': no such file"
    for text, message in (
        ("import sys\nsys.exit(0)\n", "SystemExit: 0 at {file}:2"),
        ("x = 1 / 0\n", "{file}:1: ZeroDivisionError: division by zero"),
        (
            "import phalanx.algorithms\n\nfrom phalanx.algorithms import NoSuchAlgorithm\n",
            "{file}:3: cannot import name 'NoSuchAlgorithm' from 'phalanx.algorithms'",
        ),
        ("import math\nimport a_module_that_is_not_there\n", "{file}:2: No module named 'a_module_that_is_not_there'"),
        ("def f():\n    from math import nope\n\nf()\n", "{file}:4: cannot import name 'nope' from 'math'"),
        ("class Config:\n    a = (1\n", "{file}:2: '(' was never closed"),
    ):
        file.write_text(text)
        assert refusal(f"algorithm.name={file}").startswith(f"algorithm.name: {message.format(file=file)}")
    with pytest.raises(ConfigError) as error:
        train(f"algorithm.name={file}")
    assert isinstance(error.value.__cause__, SyntaxError)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "uses_helper.py").write_text("\nimport needy_helper.inner\n")
    (tmp_path / "needy_helper").mkdir()
    helper = tmp_path / "needy_helper" / "inner.py"
    helper.write_text("import not_there\n")
    assert refusal(f"algorithm.name={tmp_path}/uses_helper.py") == (
        f"algorithm.name: {tmp_path}/uses_helper.py:2: No module named 'not_there'"
    )
    assert refusal("algorithm.name=needy_helper.inner") == f"algorithm.name: {helper}:1: No module named 'not_there'"
    helper.write_text("x = = 1\n")
    assert refusal(f"algorithm.name={tmp_path}/uses_helper.py") == f"algorithm.name: {helper}:1: invalid syntax"


def test_an_algorithm_that_contradicts_itself(tmp_path: Path) -> None:
    from phalanx import algorithms

    file, last = tmp_path / "my_rule.py", ALGORITHM.count("\n") + 2
    for line, problem in (
        ("references = ('olds',)", "references has 'olds'; expected one of policy, reference"),
        ("behaviour = 'old'", "behaviour is 'old', which is not one of its averages"),
        (
            "samples_per_unit = 2",
            "samples_per_unit is 2, and units of 2 prompts x 4 samples has shape [8, 1]; expected [2, 2]",
        ),
        ("advantage = lambda self, r, g: r[:3]", "advantage of 8 rewards has shape [3]; expected [8]"),
        (
            "advantage = lambda self, r, g: self.scale",
            f"advantage raised AttributeError: 'Algorithm' object has no attribute 'scale', at {file}:{last}",
        ),
    ):
        file.write_text(ALGORITHM + f"\n    {line}\n")
        with pytest.raises(ConfigError) as error:
            algorithms.build(train(f"algorithm.name={file}").algorithm)
        assert str(error.value) == f"algorithm.name: '{file}': {problem}"


# --- --help and the reference


def leaves(schema: type, prefix: str = "") -> list[str]:
    """All dotted keys of nested dataclasses; of a list's elements as `key[].name`."""
    found = []
    for f in fields(schema):
        hint = get_type_hints(schema)[f.name]
        inner = next((a for a in get_args(hint) if is_dataclass(a)), None)
        if is_dataclass(hint):
            found += leaves(hint, f"{prefix}{f.name}.")  # type: ignore[arg-type]
            continue
        found.append(prefix + f.name)
        if inner is not None:
            found += leaves(inner, f"{prefix}{f.name}[].")  # type: ignore[arg-type]
    return found


def test_help_lists_every_key_with_its_default_and_meaning(tmp_path: Path) -> None:
    file = tmp_path / "my_rule.py"
    file.write_text(ALGORITHM)
    task = ["tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml", f"algorithm.name={file}", "--help"]
    command = [sys.executable, *task]
    done = subprocess.run(
        command, cwd=ROOT, env=launch_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stderr == ""
    shown = done.stdout
    plan = "--plan [nnodes=4] [nproc=8] [gpu_memory_gb=80]: count what the job needs on that cluster, without training"
    assert f"[config.yaml] [key=value ...]\n  --help: this text\n  {plan}\n\n" in shown
    wanted = [key for key in leaves(FlowRLConfig) if key != "algorithm"]
    wanted += ["algorithm.name", "algorithm.temperature", "algorithm.plain"]
    assert len(wanted) > 80
    lines = shown.splitlines()
    for key in wanted:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"  {key}: "))
        assert " = " in lines[at]
        assert key == "algorithm.plain" or len(lines[at + 1].strip()) > 3, key
    for line in (
        "  model.path: str = required\n      model folder, or hub id if the hub is reachable\n",
        "  model.compile: bool = false\n",
        "  rollout.sde_type: str = sde\n      form of the stochastic step [sde | cps | dance_sde]\n",
        "  rollout.sde_window_range: list[int] or null = null\n",
        "  reward.functions[].weight: float = 1.0\n      weight in the sum\n",
        "  algorithm.temperature: float = 0.5\n      how hot\n",
        "  optim.betas: list[float] = [0.9, 0.999]\n",
    ):
        assert line in shown


def test_help_of_a_task_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(SampleConfig, "Sample images.", ["-h"])
    assert end.value.code in (None, 0)
    shown = capsys.readouterr().out
    assert "[config.yaml] [key=value ...]\n  --help: this text\n\n" in shown and "--plan" not in shown


def test_help_leaves_out_what_a_task_does_not_use() -> None:
    """Such keys are still accepted, because the config.yaml of earlier runs contains them."""
    shown = help_text(FlowMatchingTaskConfig, "", None, [])
    assert "\n  rollout.height: int = 512\n" in shown and "\n  rollout.val.n: int = 1\n" in shown
    assert "rollout.n:" not in shown and "window_" not in shown
    assert load_config(FlowMatchingTaskConfig, None, ["model.path=x", "rollout.n=4"]).rollout.n == 4


@pytest.mark.parametrize("schema", [FlowRLConfig, FlowMatchingTaskConfig])
def test_every_key_is_explained(schema: type) -> None:
    table = {row.key: row for row in rows(schema)}
    assert {key for key in leaves(schema) if key != "algorithm"} <= set(table)
    for row in table.values():
        assert len(row.help) > 3 and "\n" not in row.help, row
        assert row.type != "any" or row.key.endswith("kwargs"), row


def test_schemas_of_ones_own() -> None:
    """The loader is independent of training: it accepts any dataclass."""

    @dataclass
    class Part:
        size: int = arg(1, "size", ge=1)

    @dataclass
    class Whole:
        part: Part = field(default_factory=Part)
        parts: list[Part] = arg([], "parts")
        anything: Any = arg(None, "anything")

    assert load_config(Whole, None, ["part.size=2", "parts=[{size: 3}, {}]", "anything=[1]"]) == Whole(
        Part(2), [Part(3), Part(1)], [1]
    )
    with pytest.raises(ConfigError, match=r"^parts\[1\]\.size: expected at least 1, got 0$"):
        load_config(Whole, None, ["parts=[{size: 3}, {size: 0}]"])
