"""examples/launch: each file is what its tool accepts, and starts the job that it names on every node."""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import jsonschema
import pytest
import yaml

from phalanx.config.flow import FlowRLConfig
from phalanx.run.rules import load_config
from tests.helpers.kinds import plan_of
from tests.helpers.ranks import LIMIT_S, ROOT
from tests.helpers.shells import (
    DSTACK,
    EIGHT_GPUS,
    SCONTROL,
    SKYPILOT,
    SLURM_BATCH,
    SRUN,
    TRAIN_JOB,
    shellcheck,
    torchrun_arguments,
    write_tool,
)

EXAMPLES = sorted((ROOT / "examples" / "launch").iterdir())
SCRIPTS = [path for path in EXAMPLES if path.suffix in (".sh", ".sbatch")]
BATCHES = [path for path in SCRIPTS if path.suffix == ".sbatch"]
COMMAND = re.compile(r"sh,? train\.sh[, ]+(tasks/\w+\.py)[, ]+([\w/]+\.yaml)")
OVERRIDE = re.compile(r"\btrainer\.output_dir=[^\s\]]+")
every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / "examples" / "launch" / name).read_text()))


DOCUMENTS = {
    "skypilot": ("skypilot.yaml", 0),
    "dstack": ("dstack.yml", 0),
    "trainjob": ("kubeflow_trainjob.yaml", 0),
    "service": ("kubernetes_job.yaml", 0),
    "job": ("kubernetes_job.yaml", 1),
}
# Below these stand names of the user's own: of variables, folders, resources, labels.
FREE = {
    "skypilot": ("envs", "volumes"),
    "dstack": (),
    "trainjob": ("limits",),
    "service": ("selector",),
    "job": ("limits",),
}
every_schema = pytest.mark.parametrize("name", DOCUMENTS)


def example(name: str) -> tuple[Any, dict[str, Any]]:
    """An example's document, and the schema of it."""
    file, index = DOCUMENTS[name]
    return documents(file)[index], json.loads((ROOT / "tests" / "schemas" / f"{name}.json").read_text())


@every_example
def test_it_is_edited_in_two_places(path: Path) -> None:
    assert re.findall(r"# EDIT (\d): ", path.read_text()) == ["1", "2"]
    assert len(path.read_text().splitlines()) <= 60


@every_example
def test_its_job_exists_and_divides(path: Path) -> None:
    text = path.read_text()
    (command,) = COMMAND.findall(text)
    assert command[0] == "tasks/train_flowgrpo.py"
    overrides = [word.replace('"', "").replace("$folder", "/shared") for word in OVERRIDE.findall(text)]
    file = ROOT / command[1]
    made_for = re.search(r"^# ranks: (\d+)$", file.read_text(), re.MULTILINE)
    assert made_for is not None
    assert plan_of(load_config(FlowRLConfig, str(file), overrides), int(made_for[1])).exact
    assert made_for[1] == "32"  # the 4 nodes of 8 GPUs that every example asks for
    nodes = re.search(
        r"--nodes=4 --gpus-per-node=8|num_nodes: 4|^nodes: 4|numNodes: 4|completions: 4|NNODES=4", text, re.M
    )
    assert nodes is not None


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck(path: Path) -> None:
    assert shellcheck(path) == ""


# -- what their tools accept ------------------------------------------------------------------------------------------


@every_schema
def test_its_tool_accepts_it(name: str) -> None:
    value, schema = example(name)
    assert re.match(r"from [a-z-]+ [\d.]+, by tests/schemas/generate.py$", schema["$comment"])
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(value, schema)


@every_schema
def test_a_misspelt_key_is_refused(name: str) -> None:
    value, schema = example(name)
    validator = jsonschema.Draft202012Validator(schema)
    tried = 0
    for where in mappings(value):
        if where and where[-1] in FREE[name]:
            continue
        for key in at(value, where):
            wrong = copy.deepcopy(value)
            place = at(wrong, where)
            place[f"{key}x"] = place.pop(key)
            assert not validator.is_valid(wrong), (where, key)
            tried += 1
    assert tried >= 8


def mappings(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all mappings in a document."""
    if isinstance(value, dict):
        yield where
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from mappings(inner, (*where, key))


def at(value: Any, where: tuple[Any, ...]) -> Any:
    for key in where:
        value = value[key]
    return value


# -- what they start --------------------------------------------------------------------------------------------------


@pytest.fixture
def project(folder: Path) -> Path:
    """A copy of train.sh beside a task, with stubs of all tools that the examples call."""
    shutil.copy(ROOT / "train.sh", folder)
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "tasks" / "train.py").rename(folder / "tasks" / "train_flowgrpo.py")
    for tool in ("sh", "bash", "head"):
        (folder / "bin" / tool).symlink_to(str(shutil.which(tool)))
    write_tool(folder, "scontrol", f'[ "$1" = requeue ] && echo "requeued $2" && exit\n{SCONTROL}')
    write_tool(folder, "srun", SRUN)
    for tool in ("pip", "uv"):
        write_tool(folder, tool, "")
    # a container: the command after the image
    write_tool(folder, "apptainer", 'while [ "$1" != phalanx.sif ]; do shift; done; shift; exec "$@"')
    write_tool(folder, "docker", 'echo "<$*>"; while [ "$1" != phalanx-rocm:latest ]; do shift; done; shift; exec "$@"')
    return folder


def run(project: Path, words: list[str], env: Mapping[str, str]) -> CompletedProcess[str]:
    path = {"PATH": str(project / "bin"), "HOME": str(project)}
    return subprocess.run(
        words,
        cwd=project,
        env={**path, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )


TRAINING = ["tasks/train_flowgrpo.py", "configs/flowgrpo/qwen_image_ocr_lora_multinode.yaml"]


@pytest.mark.parametrize("path", BATCHES, ids=lambda p: p.name)
def test_a_batch_script(project: Path, path: Path) -> None:
    done = run(project, ["bash", str(path)], {**SLURM_BATCH, **EIGHT_GPUS})
    assert (done.returncode, done.stderr) == (0, "")
    words = [line[1:-1] for line in done.stdout.splitlines() if line.startswith("[")]
    wanted = {"--node-rank": ["0", "1"], "--master-addr": ["10.0.0.1"] * 2, "--nproc-per-node": ["8"] * 2}
    for option, values in wanted.items():
        assert [words[i + 1] for i, word in enumerate(words) if word == option] == values
    assert words[-2:] == TRAINING
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280\n" in done.stdout
    given = [line[1:-1] for line in done.stdout.splitlines() if line.startswith("<")]
    assert {"--ntasks-per-node=1", "--kill-on-bad-exit=1"} < set(given)
    assert "requeued" not in done.stdout


@pytest.mark.parametrize("path", BATCHES, ids=lambda p: p.name)
@pytest.mark.parametrize(("status", "again"), [("143", True), ("1", False)])
def test_a_batch_script_that_ran_out_of_time_is_queued_again(
    project: Path, path: Path, status: str, again: bool
) -> None:
    done = run(project, ["bash", str(path)], {**SLURM_BATCH, "STUB_STATUS": status})
    assert done.returncode == int(status)
    assert ("requeued 1234567\n" in done.stdout) == again


def test_rocm(project: Path) -> None:
    script = str(ROOT / "examples" / "launch" / "rocm_docker.sh")
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "HIP_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    second_of_two(run(project, ["sh", script], env))


def test_skypilot(project: Path) -> None:
    (task,) = documents("skypilot.yaml")
    assert run(project, ["bash", "-c", task["setup"]], SKYPILOT).returncode == 0
    second_of_two(run(project, ["bash", "-c", task["run"]], SKYPILOT))


def test_dstack(project: Path) -> None:
    (task,) = documents("dstack.yml")
    second_of_two(run(project, ["bash", "-c", " && ".join(task["commands"])], DSTACK))


def test_kubeflow(project: Path) -> None:
    (job,) = documents("kubeflow_trainjob.yaml")
    trainer = job["spec"]["trainer"]
    env = {variable["name"]: variable["value"] for variable in trainer["env"]}
    second_of_two(run(project, [*trainer["command"], *trainer["args"]], {**env, **TRAIN_JOB}), trainer["args"], "29400")
    patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    grace = patch["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(env["GRACE_S"])


def test_kubernetes(project: Path) -> None:
    service, job = documents("kubernetes_job.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(env["NNODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["terminationGracePeriodSeconds"] > int(env["GRACE_S"])
    env |= {"JOB_COMPLETION_INDEX": "1", **EIGHT_GPUS}
    options = torchrun_arguments(run(project, [*container["command"], *container["args"]], env))
    assert options[:6] == ["--nnodes", "4", "--node-rank", "1", "--master-addr", "phalanx-0.phalanx"]


def second_of_two(
    done: CompletedProcess[str],
    overrides: Sequence[str] = ("trainer.output_dir=/shared/outputs/phalanx",),
    port: str = "29500",
) -> None:
    """It is node 1 of 2, with 8 ranks, and trains."""
    options = [line[1:-1] for line in done.stdout.splitlines() if line.startswith("[")]
    assert (done.returncode, done.stderr) == (0, "")
    assert options[:8] == ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", port]
    assert options[options.index("--nproc-per-node") + 1] == "8"
    assert options[-2 - len(overrides) :] == [*TRAINING, *overrides]
