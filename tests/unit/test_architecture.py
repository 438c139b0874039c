"""The layers of the code, read from its imports: docs/contributing.md says what they are for.

The checks are functions of source text, so that the tests at the end can show that each of them fails where it must.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the outside in: a ring imports those inside it, and no ring imports outwards. `core` is all that no other ring
# names; the run's modules find those of the zoo by their names in the configuration only.
RINGS = ("tools", "run", "zoo", "core")
OUTERMOST = ("tasks", "__main__")
# The core from the top down. A module imports what lies below; on one layer, only modules of its own package. A new module
# of the core gets its place here.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"training"}),
    frozenset({"rollout"}),
    frozenset({"environments"}),
    frozenset({"algorithms", "models", "rewards", "data"}),
    frozenset({"telemetry"}),
    frozenset({"engines"}),
    frozenset({"media"}),
    frozenset({"distributed"}),
    frozenset({"functional"}),
    frozenset({"types", "exit", "garbage", "kept", "sandbox"}),
    frozenset({"config"}),
)

# Heavy libraries, and the only modules (or packages) that import them.
OWNERS: dict[str, tuple[str, ...]] = {
    "av": ("media.videos",),
    "datasets": ("data",),
    "diffusers": ("models.flow", "rollout.flow.solver", "zoo.families"),
    "fastapi": ("tools.reward_server",),
    "httpx2": ("zoo.rewards.http",),
    "math_verify": ("zoo.rewards.text._verdicts",),
    "onnxruntime": ("zoo.rewards.image.ocr",),
    "openenv": ("zoo.adapters.openenv",),
    "peft": ("models.lora", "models.fused_lora"),
    "pyarrow": ("data",),
    "rapidfuzz": ("zoo.rewards.image.ocr", "zoo.rewards.judge.vlm_ocr"),
    "rapidocr": ("zoo.rewards.image.ocr",),
    "reasoning_gym": ("zoo.environments.reasoning_gym", "zoo.rewards.text._verdicts", "tools.prepare_data"),
    "sympy": ("zoo.rewards.text._verdicts",),
    "torch.utils.tensorboard": ("zoo.loggers.tensorboard",),
    "transformers": (
        "environments.tools",
        "models",
        "tools",
        "engines.transformers",
        "zoo.families",
        "zoo.rewards.image",
        "zoo.rewards.video",
        "rollout.lm",
    ),
    "uvicorn": ("tools.reward_server",),
    "verifiers": ("zoo.adapters.verifiers",),
    "vllm": ("engines", "distributed.vllm_groups", "zoo.engines"),
    "vllm_omni": ("zoo.engines",),
}
# a logger's file is called as the library that it needs
LOGGERS = sorted(path.stem for path in (ROOT / "src" / "phalanx" / "zoo" / "loggers").glob("[!_]*.py"))
OWNERS |= {name: (f"zoo.loggers.{name}",) for name in LOGGERS}

PURE = ("functional", "algorithms")
IMPURE_LIBRARIES = ("torch.distributed", "diffusers", "vllm")
# a mistake in a configuration is told before torch is imported
LIGHT = ("__main__", "config", "exit", "garbage", "run.cli", "run.launch", "run.rules")
LIGHT_LIBRARIES = {"omegaconf", "pydantic", "rich", "yaml"}
GROUP_MAKERS = {
    "DeviceMesh",
    "init_device_mesh",
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}
LONGEST_CHAIN = {"core": 14, "all": 20}  # modules that import one another, one after the other
# Names of files that several folders have: those that a configuration or a user's file names.
SAME_NAMES = {
    "__init__.py": "a package's own",
    "registry.py": "the names of a package's parts",
    "environment.py": "the section `environment`, and the name of a reward",
    "flow.py": "users' algorithms and families import phalanx.functional.flow and phalanx.config.flow",
    "in_policy.py": "users' engines derive from phalanx.rollout.flow.in_policy and phalanx.rollout.lm.in_policy",
    "qwen_image.py": "the name of a family, and of its part in vLLM-omni",
    "reasoning_gym.py": "the name of an environment, and of its reward",
    "sd3.py": "the name of a family, and of its part in vLLM-omni",
}
# Classes of kinds of policies and jobs. Who asks for one by isinstance should ask phalanx.run.kind.Kind instead, so that
# another kind needs no line there.
OF_A_KIND = re.compile(
    r"\w*(RunConfig|RLConfig|TaskConfig|JointConfig|ModelConfig|DataConfig|RewardFunctionConfig|Policy|Rollout|Rehearsal)"
    r"|\w+LM|Denoising|Conversed|TokenAlgorithm"
)
MOST_OF_A_KIND = 8
MAX_LINES = 400
MAX_TEST_LINES = 500
# Of all modules of a ring. What a change adds for a new capability is worth a larger number here; its commit says so.
MOST_LINES = {"tools": 12_850, "run": 10_720, "zoo": 7_320, "core": 33_380}

# What a distribution is imported as, where the names differ.
IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml", "huggingface-hub": "huggingface_hub", "mlflow-skinny": "mlflow"}


@dataclass(frozen=True)
class Module:
    """A source file: `name` is dotted, without `phalanx.`; tasks are `tasks.<name>`."""

    name: str
    source: str

    @property
    def part(self) -> str:
        """What LAYERS lists: the top-level package or module."""
        return self.name.split(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def imports(self) -> list[str]:
        return list(imports(self.tree))


def read_modules() -> list[Module]:
    """All of src/phalanx and tasks; packages are named without `__init__`."""
    found = []
    for root, prefix in ((ROOT / "src" / "phalanx", ()), (ROOT / "tasks", ("tasks",))):
        for path in sorted(root.rglob("*.py")):
            parts = (*prefix, *path.relative_to(root).with_suffix("").parts)
            name = ".".join(part for part in parts if part != "__init__")
            found.append(Module(name, path.read_text()))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` gives both `a` and `a.b`. Ruff forbids relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or "."
    yield from imported(tree)


def imported(tree: ast.AST) -> Iterator[str]:
    """As `imports`, but `from a import b` gives only `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[str]:
    """Dotted attribute chains, such as `torch.distributed.barrier` and all that it starts with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", chain):
                yield chain


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def ring_of(part: str) -> int:
    """The number of a part's ring, from the outside in."""
    return 0 if part in OUTERMOST else RINGS.index(part) if part in RINGS else len(RINGS) - 1


def layer_of(part: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if part in layer), None)


def layer_errors(module: Module) -> list[str]:
    """Imports of phalanx that point outwards, or up or sideways in the core; lazy and type-only ones too."""
    if module.name == "":
        return [f"phalanx/__init__.py imports {name}" for name in module.imports if within(name, "phalanx")]
    ring, here = ring_of(module.part), layer_of(module.part)
    if RINGS[ring] == "core" and here is None:
        return [f"{module.name}: {module.part} has no place in LAYERS"]
    errors = []
    for name in sorted(set(module.imports)):
        if not within(name, "phalanx") or name == "phalanx":
            continue
        part = name.split(".")[1]
        if part.startswith("__"):
            continue  # phalanx.__version__
        inner, there = ring_of(part), layer_of(part)
        if RINGS[inner] == "core" and there is None:
            errors.append(f"{module.name} imports {name}: {part} has no place in LAYERS")
        elif inner < ring:
            errors.append(f"{module.name} imports {name}: imports point inwards")
        elif (RINGS[ring], RINGS[inner]) == ("run", "zoo"):
            errors.append(f"{module.name} imports {name}: the run finds the zoo by name only")
        elif part != module.part and here is not None and there is not None and there <= here:
            errors.append(f"{module.name} imports {name}: imports point down")
    return errors


Graph = dict[str, list[str]]  # a module's name -> the modules of the package that it imports


def import_graph(modules: list[Module]) -> Graph:
    """The imports among these modules, lazy and type-only ones too; those of names in a module are of that module."""
    names, graph = {module.name for module in modules} - {""}, Graph()
    for module in modules:
        found = set()
        for name in imported(module.tree):
            inner = name.removeprefix("phalanx.") if within(name, "phalanx") else ""
            while inner and inner not in names:
                inner = inner.rpartition(".")[0]
            found |= {inner} - {"", module.name}
        graph[module.name] = sorted(found)
    return graph


def circle(graph: Graph) -> list[str]:
    """The modules of one circle of imports, each imported by the next; [] without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def longest_chain(graph: Graph) -> list[str]:
    """The modules of the longest chain of imports, each of which imports the next. `graph` has no circle."""
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():  # what a module imports comes before it
        chains[name] = [name, *max((chains[inner] for inner in graph[name]), key=len, default=[])]
    return max(chains.values(), key=len)


def pure_errors(module: Module) -> list[str]:
    """Libraries that functional and algorithms must not know."""
    if module.part not in PURE:
        return []
    used = {*module.imports, *attributes(module.tree)}
    found = sorted({library for library in IMPURE_LIBRARIES for name in used if within(name, library)})
    return [f"{module.name} uses {library}" for library in found]


def light_errors(module: Module) -> list[str]:
    """Module-level imports of config and cli that would make a typing error slow to be told."""
    if not any(within(module.name, light) for light in LIGHT):
        return []
    top = ast.Module([n for n in module.tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])
    allowed = {*sys.stdlib_module_names, *LIGHT_LIBRARIES}
    heavy = {n for n in imports(top) if n.split(".")[0] not in allowed and not within(n, "phalanx")}
    light = ("phalanx.config", "phalanx.exit", "phalanx.garbage", "phalanx.run.rules", "phalanx.__version__")
    heavy |= {n for n in imports(top) if n.startswith("phalanx.") and not any(within(n, m) for m in light)}
    return [f"{module.name} imports {name} at its top" for name in sorted(heavy)]


def group_errors(module: Module) -> list[str]:
    """Process groups and meshes that are made outside distributed/ and the start of the world."""
    if module.part == "distributed" or module.name == "run.world":
        return []
    called = [node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    names = {
        f.attr if isinstance(f, ast.Attribute) else f.id for f in called if isinstance(f, ast.Attribute | ast.Name)
    }
    return [f"{module.name} calls {name}" for name in sorted(names & GROUP_MAKERS)]


def owner_errors(module: Module) -> list[str]:
    """Heavy libraries that are imported by a file that does not own them."""
    errors = []
    for library, owners in OWNERS.items():
        used = any(within(name, library) for name in module.imports)
        if used and not any(within(module.name, owner) for owner in owners):
            errors.append(f"{module.name} imports {library}, which belongs to {' and '.join(owners)}")
    return errors


def style_errors(module: Module) -> list[str]:
    """hasattr, a getattr with a default, pickle but for the reader that refuses code, and torch.load."""
    errors = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("hasattr", "torch.load") or (called == "getattr" and len(node.args) == 3):
                errors.append(f"{module.name}, line {node.lineno}: {called}")
    if module.name != "run.checkpoint_reader":
        errors += [f"{module.name} imports {name}" for name in module.imports if name in ("pickle", "dill")]
    return errors


def declared() -> dict[str, str]:
    """Import name -> distribution, of all that pyproject.toml declares, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [spec for specs in project["optional-dependencies"].values() for spec in specs]
    names = [re.split(r"[<>=!~\[ ;]", spec)[0] for spec in [*project["dependencies"], *extras]]
    return {IMPORT_NAMES.get(name, name.replace("-", "_")): name for name in names if name != project["name"]}


def undeclared_errors(module: Module) -> list[str]:
    """Libraries that pyproject.toml does not name."""
    known = {*sys.stdlib_module_names, *declared(), "phalanx"}
    return [f"{module.name} imports {n}" for n in sorted({n.split(".")[0] for n in module.imports}) if n not in known]


def asks_of_kinds(module: Module) -> list[str]:
    """Calls of isinstance and issubclass with classes of OF_A_KIND."""
    found = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("isinstance", "issubclass"):
            continue
        if any(OF_A_KIND.fullmatch(name) for name in re.findall(r"\w+", ast.unparse(node.args[1]))):
            found.append(f"{module.name}: {ast.unparse(node)}")
    return found


MODULES = read_modules()
NAMES = {f"phalanx.{module.name}".rstrip(".") for module in MODULES}


def missing_errors(module: Module) -> list[str]:
    """Modules of phalanx that are imported and do not exist; mypy accepts those."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return [f"{module.name} imports {n}, which is not there" for n in sorted(found - NAMES) if within(n, "phalanx")]


PACKAGE = [module for module in MODULES if module.part != "tasks"]
CORE = [module for module in PACKAGE if module.name and RINGS[ring_of(module.part)] == "core"]


def test_the_modules_are_found() -> None:
    assert {"functional.sde", "config", "types"} <= {module.name for module in MODULES}


CHECKS = (
    missing_errors,
    layer_errors,
    pure_errors,
    light_errors,
    group_errors,
    owner_errors,
    style_errors,
    undeclared_errors,
)


@pytest.mark.parametrize("check", CHECKS)
def test_every_module_passes(check: Callable[[Module], list[str]]) -> None:
    assert [error for module in MODULES for error in check(module)] == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circle(import_graph(PACKAGE)) == []


@pytest.mark.parametrize(("modules", "limit"), [(CORE, LONGEST_CHAIN["core"]), (PACKAGE, LONGEST_CHAIN["all"])])
def test_chains_of_imports_are_short(modules: list[Module], limit: int) -> None:
    chain = longest_chain(import_graph(modules))
    assert len(chain) <= limit, " <- ".join(chain)


def test_few_ask_for_a_kind_of_policy() -> None:
    found = [ask for module in PACKAGE for ask in asks_of_kinds(module)]
    assert len(found) <= MOST_OF_A_KIND, found


def test_modules_are_short() -> None:
    lengths = {module.name: len(module.source.splitlines()) for module in MODULES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_the_rings_stay_small() -> None:
    lines = dict.fromkeys(RINGS, 0)
    for module in PACKAGE:
        lines[RINGS[ring_of(module.part)]] += len(module.source.splitlines())
    assert {ring: count for ring, count in lines.items() if count > MOST_LINES[ring]} == {}


def code_block(page: str, heading: str) -> str:
    """The first code block below a heading."""
    return page.split(f"\n## {heading}\n")[1].split("```text\n")[1].split("```")[0]


def test_the_page_has_these_layers_and_every_part() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text()
    assert tuple(code_block(page, "Rings").splitlines()[0].split(" → ")) == RINGS
    assert [frozenset(line.split(" · ")) for line in code_block(page, "Layers").splitlines()] == list(LAYERS)
    layout = set(re.findall(r"[\w.]+", code_block(page, "Layout")))
    parts = {module.part for module in MODULES} - {"", "tasks"}
    assert {part for part in parts if not {part, f"{part}.py"} & layout} == set()


def files_of_one_name(paths: Iterable[Path]) -> dict[str, list[str]]:
    """The names that several files have, with their folders."""
    folders: dict[str, list[str]] = {}
    for path in paths:
        folders.setdefault(path.name, []).append(str(path.parent))
    return {name: sorted(places) for name, places in folders.items() if len(places) > 1}


def test_a_name_leads_to_one_file() -> None:
    source = ROOT / "src" / "phalanx"
    same = files_of_one_name(path.relative_to(source) for path in source.rglob("*.py"))
    assert {name: places for name, places in same.items() if name not in SAME_NAMES} == {}
    assert set(SAME_NAMES) == set(same)  # no exception outlives its reason


def test_files_of_one_name_are_found() -> None:
    assert files_of_one_name([Path("a/x.py"), Path("b/x.py"), Path("b/y.py")]) == {"x.py": ["a", "b"]}


def test_the_reading_path_is_short() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text()
    files = [line.split()[0] for line in code_block(page, "Reading path").splitlines()]
    assert len(files) <= 25 and {ring_of(file.split("/")[0]) for file in files} == {RINGS.index("core")}
    assert sum(len((ROOT / "src" / "phalanx" / file).read_text().splitlines()) for file in files) <= 4000


def test_files_of_tests_are_short() -> None:
    lengths = {p.relative_to(ROOT): len(p.read_text().splitlines()) for p in (ROOT / "tests").rglob("*.py")}
    assert {file: length for file, length in lengths.items() if length > MAX_TEST_LINES} == {}


def test_libraries_are_explained() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    assert [name for name in declared().values() if f"`{name}`" not in page] == []


def test_pre_commit_has_the_ruff_of_the_constraints() -> None:
    pinned = re.findall(r"^ruff==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text())) == set(pinned) != set()


EXAMPLES: list[tuple[Callable[[Module], list[str]], str, str, list[str]]] = [
    (layer_errors, "config.load", "from phalanx import types", ["config.load imports phalanx.types: imports point down"]),
    (layer_errors, "models.sd3", "def f():\n    import phalanx.rollout.flow.in_policy",
     ["models.sd3 imports phalanx.rollout.flow.in_policy: imports point down"]),
    (layer_errors, "models.sd3", "from phalanx.training.update import Updater",
     ["models.sd3 imports phalanx.training.update: imports point down",
      "models.sd3 imports phalanx.training.update.Updater: imports point down"]),
    (layer_errors, "models.sd3", "def f():\n    import phalanx.run.job", ["models.sd3 imports phalanx.run.job: imports point inwards"]),
    (layer_errors, "zoo.rewards.text.math", "import phalanx.run.rl", ["zoo.rewards.text.math imports phalanx.run.rl: imports point inwards"]),
    (layer_errors, "run.job", "import phalanx.zoo.families.wan", ["run.job imports phalanx.zoo.families.wan: the run finds the zoo by name only"]),
    (layer_errors, "run.job", "import phalanx.training.loop", []),
    (layer_errors, "tools.export", "import phalanx.zoo.families.wan", []),
    (layer_errors, "run.job", "import phalanx.tools.export", ["run.job imports phalanx.tools.export: imports point inwards"]),
    (layer_errors, "models.sd3", "from phalanx.models.flow.family import FlowModel", []),
    (layer_errors, "newcomer", "", ["newcomer: newcomer has no place in LAYERS"]),
    (layer_errors, "", "import phalanx.run.rl", ["phalanx/__init__.py imports phalanx.run.rl"]),
    (missing_errors, "run.job", "def f():\n    from phalanx.models.no_such import A", ["run.job imports phalanx.models.no_such, which is not there"]),
    (pure_errors, "functional.sde", "import torch\ntorch.distributed.barrier()", ["functional.sde uses torch.distributed"]),
    (pure_errors, "algorithms.a", "from torch import distributed as dist", ["algorithms.a uses torch.distributed"]),
    (pure_errors, "algorithms.a", "from torch import Tensor", []),
    (light_errors, "config.load", "import torch", ["config.load imports torch at its top"]),
    (light_errors, "run.cli", "def f():\n    import torch", []),
    (group_errors, "checkpoint", "dist.new_group([0])", ["checkpoint calls new_group"]),
    (group_errors, "distributed.mesh", "init_device_mesh('cpu', (2,))", []),
    (owner_errors, "trainer", "def f():\n    import wandb", ["trainer imports wandb, which belongs to zoo.loggers.wandb"]),
    (owner_errors, "zoo.rewards.image.ocr", "from rapidocr import RapidOCR", []),
    (style_errors, "data", "hasattr(a, 'b')\ngetattr(a, 'b', None)\ngetattr(a, 'b')", ["data, line 1: hasattr", "data, line 2: getattr"]),
    (undeclared_errors, "data", "import os, scipy.stats", ["data imports scipy"]),
    (asks_of_kinds, "tools.plan", "isinstance(a, (x.FlowRLConfig, int))", ["tools.plan: isinstance(a, (x.FlowRLConfig, int))"]),
    (asks_of_kinds, "tools.plan", "isinstance(a, PolicyReward | FileConfig)", []),
]  # fmt: skip


@pytest.mark.parametrize(("check", "name", "source", "errors"), EXAMPLES)
def test_each_check_can_fail(check: Callable[[Module], list[str]], name: str, source: str, errors: list[str]) -> None:
    assert check(Module(name, source)) == errors


def test_circles_and_chains_are_found() -> None:
    lazy = "def f():\n    from phalanx.a import b"
    typed = "if TYPE_CHECKING:\n    import phalanx.a.c as c"
    modules = [Module("a", ""), Module("a.b", typed), Module("a.c", "from phalanx.d import X"), Module("d", "")]
    assert import_graph(modules) == {"a": [], "a.b": ["a.c"], "a.c": ["d"], "d": []}
    assert circle(import_graph(modules)) == []
    assert longest_chain(import_graph(modules)) == ["a.b", "a.c", "d"]
    assert set(circle(import_graph([*modules[:3], Module("d", lazy)]))) == {"a.b", "a.c", "d"}
