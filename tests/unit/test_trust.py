"""A checkpoint's own config.yaml runs no code and reads no environment unless the user trusts the run."""

import ast
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from phalanx.config.flow import FlowRunConfig
from phalanx.config.lm import LMRunConfig, LMTurnRunConfig
from phalanx.config.messages import ConfigError
from phalanx.config.run import RunConfig
from phalanx.config.secrets import public
from phalanx.config.tasks import read_run
from phalanx.config.trust import UNUSED, Use

SOURCE = Path(__file__).parents[2] / "src" / "phalanx"
EVERY = ("model", "data", "rollout", "reward", "environment")
KINDS = (LMTurnRunConfig, LMRunConfig, FlowRunConfig)


def written(folder: Path, kind: type[RunConfig] = LMTurnRunConfig, **changes: Any) -> Path:
    """The config.yaml of a run, with keys such as `reward.functions` set to any value."""
    content = yaml.safe_load(OmegaConf.to_yaml(OmegaConf.create(public(kind()))))
    content["model"]["path"] = "base"
    for key, value in changes.items():
        section, _, name = key.partition("__")
        content[section][name] = value
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


MEMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "a reward": ({"reward__functions": [{"path": "/x/evil.py:score"}]}, "reward.functions[0].path=/x/evil.py:score"),
    "a module": ({"reward__functions": [{"path": "evil:score"}]}, "reward.functions[0].path=evil:score"),
    "an address": (
        {"reward__functions": [{"name": "http", "kwargs": {"url": "http://evil"}}]}, "reward.functions[0].name=http"
    ),
    "a value": (
        {"reward__functions": [{"name": "gsm8k", "kwargs": {"method": "${oc.env:PHALANX_SECRET}"}}]},
        "reward.functions[0].kwargs.method=${oc.env:PHALANX_SECRET}",
    ),
    "an environment": ({"environment__path": "/x/evil.py:E"}, "environment.path=/x/evil.py:E"),
    "environments": ({"environment__path": {"a": "python", "b": "e:E"}}, "environment.path.b=e:E"),
    "a tool": ({"environment__tools": ["calculator", "e:f"]}, "environment.tools[1]=e:f"),
    "a file of tools": ({"environment__tool_config_path": "/x.yaml"}, "environment.tool_config_path=/x.yaml"),
    "a format": ({"environment__tools": ["calculator"], "environment__format": "e:f"}, "environment.format=e:f"),
    "no sandbox": (
        {"environment__path": "python", "environment__kwargs": {"unconfined": True}}, "environment.kwargs.unconfined=True"
    ),
    "an engine": ({"rollout__engine": "/x/evil.py:Engine"}, "rollout.engine=/x/evil.py:Engine"),
    "a path": ({"model__path": "${oc.env:PHALANX_SECRET}"}, "model.path=${oc.env:PHALANX_SECRET}"),
    "nested": ({"model__path": "${oc.decode:${oc.env:PHALANX_SECRET}}"}, "model.path=${oc.decode:"),
    "rows": ({"data__val_files": ["a.txt", "/x/evil.py:rows"]}, "data.val_files[1]=/x/evil.py:rows"),
    "data": ({"data__val_files": ["${oc.env:PHALANX_SECRET}/a.txt"]}, "data.val_files[0]=${oc.env:PHALANX_SECRET}/a.txt"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
def test_what_would_run_is_named_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_SECRET", "hunter2hunter2")
    changes, item = MEMBERS[name]
    file = written(tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        read_run(file, *KINDS, use=Use(sections=EVERY))
    line = str(error.value)
    assert line.startswith(f"checkpoint: {file} would run code or read the environment: {item}") and "\n" not in line
    assert line.endswith("; give trust_run=true if you trust that run, or set these keys yourself")
    assert "hunter2" not in line
    section, key = item.partition("=")[0].partition("[")[0].split(".")[:2]
    trusted = read_run(file, *KINDS, use=Use(trusted=True, sections=EVERY))
    assert "${" not in str(vars(vars(trusted)[section])[key])
    # a task that does not use the section leaves the key out, whatever it is
    other = read_run(file, *KINDS, use=Use(sections=tuple({*EVERY} - {section})))
    default = "" if key == "path" and section == "model" else vars(vars(LMTurnRunConfig())[section])[key]
    assert vars(vars(other)[section])[key] == default


def test_a_models_family_is_code(tmp_path: Path) -> None:
    for family in ("evil.module", "/x/evil.py", "evil.py:Model"):
        file = written(tmp_path, FlowRunConfig, model__family=family)
        with pytest.raises(ConfigError, match=r"would run code or read the environment: model\.family="):
            read_run(file, *KINDS, use=Use(sections=("model",)))
    assert read_run(written(tmp_path, FlowRunConfig, model__family="sd3"), *KINDS, use=Use(sections=EVERY))


def test_built_in_names_need_no_trust(tmp_path: Path) -> None:
    reward = [{"name": "gsm8k", "weight": 2.0}, {"name": "length", "kwargs": {"target": 5}}]
    environment: dict[str, Any] = {
        "environment__path": {"a": "python", "b": "reasoning_gym"},
        "environment__format": "qwen3_coder",
    }
    environment["environment__kwargs"] = {"a": {"unconfined": False, "timeout_s": 5}}
    file = written(tmp_path, reward__functions=reward, rollout__engine="vllm", **environment)
    run = read_run(file, *KINDS, use=Use(sections=EVERY))
    assert [entry.name for entry in run.reward.functions] == ["gsm8k", "length"]
    assert run.rollout.engine == "vllm" and isinstance(run, LMTurnRunConfig) and run.environment.used


def test_keys_that_the_user_names_replace_those_of_the_run(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "reward__functions": [{"path": "e:f"}],
        "rollout__engine": "e:E",
        "data__val_files": ["${oc.env:A}"],
    }
    file = written(tmp_path, **changes)
    named: dict[str, Any] = {
        "reward": {"functions": [{"name": "gsm8k"}]},
        "rollout": {"engine": "policy"},
        "data": {"val_files": []},
    }
    run = read_run(file, *KINDS, use=Use(sections=EVERY, named=named))
    assert (run.reward.functions, run.rollout.engine, run.data.val_files) == ([], "policy", [])
    with pytest.raises(ConfigError, match=r"rollout.engine=e:E; give"):
        read_run(file, *KINDS, use=Use(sections=EVERY, named={**named, "rollout": {}}))
    # sections within a section are merged, so that what the user leaves out would still be the run's
    file = written(tmp_path, rollout__val={"n": "${oc.env:A}"}, environment__kwargs={"a": {"unconfined": True}})
    with pytest.raises(ConfigError, match=r"environment.kwargs.a.unconfined=True, rollout.val.n="):
        read_run(file, *KINDS, use=Use(sections=EVERY, named={"rollout": {"val": {}}, "environment": {"kwargs": {}}}))
    assert set(UNUSED) == {"data", "rollout"}


@pytest.mark.parametrize("section", ["model", "reward", "rollout"])
@pytest.mark.parametrize("value", ["${oc.env:PHALANX_SECRET}", ["${oc.env:PHALANX_SECRET}"]])
def test_a_whole_section_from_the_environment(section: str, value: Any, tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {section: value}))
    with pytest.raises(ConfigError, match=f"would run code or read the environment: {section}="):
        read_run(file, *KINDS, use=Use(sections=EVERY))


def test_a_configuration_of_nested_anchors_is_one_line(tmp_path: Path) -> None:
    file = written(tmp_path)
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x]\n"
    for i in range(1, 9):
        bomb += f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n"
    file.write_text(bomb + file.read_text())
    begin = time.process_time()
    with pytest.raises(
        ConfigError, match=f"^{file} is not the configuration of a training run: more than 100000 values"
    ):
        read_run(file, *KINDS)
    assert time.process_time() - begin < 2


def test_every_place_that_resolves_code_is_known() -> None:
    """A new key that names code has to be told to `trust._foreign_parts`, or is not one of a checkpoint's run."""
    callers = set()
    for file in SOURCE.rglob("*.py"):
        names = {"resolve_object", "resolve_registry", "import_file", "import_dotted"}
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.Call) and ast.unparse(node.func) in names for node in ast.walk(tree)):
            callers.add(file.relative_to(SOURCE).as_posix())
    assert callers == {
        "algorithms/__init__.py",  # algorithm.name, which tasks other than training leave out
        "config/engines.py",  # rollout.engine
        "config/load.py",  # algorithm and other sections of training
        "config/registry.py",
        "data/row_functions.py",  # data.train_files and data.val_files
        "environments/registry.py",  # environment.path and environment.tools
        "zoo/adapters/verl.py",  # environment.tool_config_path
        "models/flow/registry.py",  # model.family
        "models/lm/calls.py",  # environment.format
        "rewards/registry.py",  # reward.functions
        "run/kind.py",  # a configuration's class, which no file names
        "tools/convert.py",  # the schema of a task of ours
        "tools/from_python.py",  # the task of a call, which no file names
        "tools/plan/jobs.py",  # as run/kind.py
        "telemetry/loggers.py",  # trainer.logger, of training only
    }
