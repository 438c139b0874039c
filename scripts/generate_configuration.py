"""Write the reference part of docs/configuration.md, below its marker, from the schema, docs/rules.md, and the table of
models in docs/models.md.

python scripts/generate_configuration.py
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from string import Formatter
from typing import Any, get_type_hints

from phalanx.config.choices import Choice
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig, FlowRunConfig
from phalanx.config.joint import OF_IMAGES, JointConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.lm_supervised import DPOConfig, SFTConfig
from phalanx.config.load import Row, rows
from phalanx.config.registry import known_modules, resolve_registry
from phalanx.config.tasks import (
    CheckClusterConfig,
    CheckNumericsConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    PrepareDataConfig,
    SampleConfig,
    ServeRewardConfig,
)
from phalanx.config.validate import hints_of
from phalanx.models.flow.registry import families
from phalanx.run.rules import LAUNCH_RULES, MODEL_RULES, RULES, START_RULES, Rule

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
MARKER = "<!-- Below this line: written by scripts/generate_configuration.py -->\n"
RULES_PAGE = PAGE.with_name("rules.md")
MODELS_PAGE = PAGE.with_name("models.md")
MODELS_MARKER = "<!-- Between these lines: written by scripts/generate_configuration.py -->\n"
RECIPES = PAGE.parents[1] / "configs" / "flowgrpo"
# prefixes of the names of each family's recipes
RECIPES_OF = {
    "flux": ("flux1_dev",),
    "flux2_klein": ("flux2_klein",),
    "flux_kontext": ("flux1_kontext",),
    "hunyuan_video_15": ("hunyuan_video_15_pickscore",),
    "hunyuan_video_15_i2v": ("hunyuan_video_15_i2v",),
    "qwen_image": ("qwen_image_ocr", "qwen_image_2512", "qwen_image_vlm"),
    "qwen_image_edit": ("qwen_image_edit",),
    "sd3": ("sd35", "quickstart"),
    "wan": ("wan21_t2v", "wan22_t2v"),
    "wan_i2v": ("wan22_i2v",),
    "z_image": ("z_image",),
}
JOINT_SHARED = ("writer", "painter", "parallel", "reward", "trainer")
JOBS = {
    "RunConfig": "all training",
    "RLConfig": "reinforcement learning",
    "FlowRunConfig": "training of flow models",
    "FlowRLConfig": "reinforcement learning of flow models",
    "FlowMatchingTaskConfig": "supervised flow matching",
    "LMRunConfig": "training of language models",
    "LMRLConfig": "reinforcement learning of language models",
    "BlockDiffusionTaskConfig": "supervised block diffusion",
    "JointConfig": "joint runs",
    "SampleConfig": "`tasks/sample.py`",
    "GenerateConfig": "`tasks/generate.py`",
    "EvaluateConfig": "`tasks/evaluate.py`",
    "PrepareDataConfig": "`tasks/prepare_data.py`",
}


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))
    RULES_PAGE.write_text("\n".join(rules_page()))
    MODELS_PAGE.write_text(models_page(MODELS_PAGE.read_text()))


def models_page(text: str) -> str:
    """The whole page: `text` with the current table of models."""
    parts = text.split(MODELS_MARKER)
    assert len(parts) == 3, f"{MODELS_PAGE} should have the line {MODELS_MARKER!r} twice"
    return MODELS_MARKER.join([parts[0], "\n" + "\n".join(models_table()), parts[2]])


def models_table() -> Iterator[str]:
    """The table of models, with a row of each family's properties."""
    yield ("| `model.family` | context parallelism | `vllm_omni` | supervised | input | samples | export | recipes |")
    yield "|---|---|---|---|---|---|---|---|"
    recipes = {path.stem for path in RECIPES.glob("*.yaml")}
    for name, family in families().items():
        assert family.lora_targets, f"{name} trains no LoRA, as {MODELS_PAGE.name} says of all"
        prefixes = RECIPES_OF.get(name, ())
        some = sorted(recipe for recipe in recipes if recipe.startswith(prefixes))  # none by no prefix
        recipes -= set(some)
        takes = "images, text" if family.takes_several else "image, text"
        if family.image_column is None:
            takes = "text"
        cells = (
            f"`{name}`",
            "yes" if family.transformer_class._cp_plan else "no",
            "no" if family.omni_pipeline is None else "yes",
            "yes" if family.image_column is None and family.encodes_images else "no",
            takes,
            "video, image" if family.makes_videos else "image",
            f"`{family.pipeline_class}`",
            ", ".join(f"`{recipe}`" for recipe in some) or "none",
        )
        yield f"| {' | '.join(cells)} |"
    assert not recipes, f"recipes of no family: {sorted(recipes)}"
    yield ""


def rules_page() -> Iterator[str]:
    """The lines of the page of rules."""
    yield "<!-- Written by scripts/generate_configuration.py -->\n"
    yield "# Rules across keys\n"
    yield "A job that breaks one of these rules ends before it starts, with this line and, often, what to set"
    yield "instead. They are defined in `phalanx.run.rules`; [the reference](configuration.md) limits single keys.\n"
    yield "## Keys that need a choice\n"
    yield "A file may set such a key to its default without the choice, as the saved configurations of runs do.\n"
    yield from choice_list()
    yield "## When the configuration is loaded\n"
    yield from rule_list(RULES)
    yield "## Before a job starts\n"
    yield from rule_list(START_RULES)
    yield "## When the ranks are known\n"
    yield "The arithmetic of [batches](configuration.md#batch-sizes) and [roles](placement.md) is checked here, too.\n"
    yield from rule_list(LAUNCH_RULES)
    yield "## When the model is known\n"
    yield "Null keys of `tasks/generate.py` are those of the run whose checkpoint is given.\n"
    yield from rule_list(MODEL_RULES)
    yield "## Features of language models that exclude each other\n"
    yield "Tried in pairs, all other features of text jobs work together. Two engines, algorithms or values of a"
    yield "key are alternatives; so are block diffusion and engines without blocks.\n"
    yield "| feature | and | why not |"
    yield "|---|---|---|"
    for one, other, reason in PAIRS:
        yield f"| {one} | {other} | {reason} |"
    yield ""


# Pairs of features that the rules refuse, see tests/unit/test_feature_pairs.py, and the reasons
PAIRS = (
    ("vllm", "judge", "vLLM lets one engine of a process sleep; with `reward.model.sleep=false` they work"),
    ("environment", "block diffusion", "its block goes on after a response's end, and all its tokens are trained"),
    ("block diffusion", "images", "no supported family of block diffusion reads images"),
    ("block diffusion", "top-k", "which tokens are kept differs in each state in which a position is masked"),
    ("block diffusion", "packing", "a packed row is read from left to right, and blocks are read in both directions"),
    ("block diffusion", "critic", "a value before each token needs an order of tokens, which a block does not have"),
    ("context parallelism", "compiled blocks", "ranks exchange tokens within a layer, which is compiled as a whole"),
    ("new prompts", "new samples", "two answers to one question: what replaces a group whose rewards are equal"),
    ("new prompts", "teacher", "distillation has no rewards that could be equal"),
    ("new samples", "teacher", "distillation has no rewards that could be equal"),
)  # fmt: skip


def choice_list() -> Iterator[str]:
    """The choices, with the keys that exist only with each."""
    keys: dict[Choice, list[str]] = {}
    algorithms = [resolve_registry("phalanx.algorithms", n, "").Config for n in known_modules("phalanx.algorithms")]
    schemas = [FlowRLConfig, LMRLConfig, JointConfig, EvaluateConfig]
    for schema, prefix in [*((schema, "") for schema in schemas), *((config, "algorithm.") for config in algorithms)]:
        for key, choices in needed(schema, prefix):
            for choice in choices:
                keys.setdefault(choice, [])
                keys[choice] += [] if key in keys[choice] else [key]
    by_jobs: dict[str, list[str]] = {}
    for choice, names in keys.items():
        line = f"- {', '.join(f'`{name}`' for name in names)}: {choice.name}"
        by_jobs.setdefault(JOBS[choice.schema], []).append(line)
    for jobs, lines in by_jobs.items():
        yield f"In {jobs}, only with:\n"
        yield from lines
        yield ""


def needed(schema: Any, prefix: str) -> Iterator[tuple[str, tuple[Choice, ...]]]:
    """Iterate over the keys and sections of a schema that need choices, with these."""
    for f in fields(schema):
        hint = hints_of(schema)[f.name]
        if "only" in f.metadata:
            yield f"{prefix}{f.name}" + (".*" if is_dataclass(hint) else ""), tuple(f.metadata["only"])
        if is_dataclass(hint) and f.name not in ("writer", "painter", "algorithm"):
            yield from needed(hint, f"{prefix}{f.name}.")


ADVICE = re.compile(r"(?:set|leave|give|lower) [^;`]*")  # the usual one: it is in the message, and not on the page


def rule_list(rules: Iterable[Rule]) -> Iterator[str]:
    """The messages of rules by the jobs that have them, each with the keys that its message does not name."""
    having: dict[str, list[str]] = {}
    for rule in rules:
        text = said(rule)
        fact, _, advice = text.rpartition("; ")
        if (
            fact
            and ADVICE.fullmatch(advice)
            and not set(re.findall(r"\w+\.\w+|\d+", advice)) - set(re.findall(r"\w+\.\w+", fact))
        ):
            text = fact
        others = [f"`{key}`" for key in rule.keys.split() if not re.search(rf"{re.escape(key)}(?![\w.])", text)]
        text += f" (also {', '.join(others)})" if others else ""
        having.setdefault(text, []).append(JOBS[rule.schema])
    by_jobs: dict[str, list[str]] = {}
    for text, jobs in having.items():
        by_jobs.setdefault(", ".join(jobs), []).append(text)
    for jobs, texts in by_jobs.items():
        yield f"In {jobs}:\n"
        yield from [f"- {text}" for text in texts]
        yield ""


def said(rule: Rule) -> str:
    """A rule's message with its keys as code, and … for values that depend on the job."""
    text = f"`{rule.keys.split()[0]}: …`" if rule.message[0] in " ;:" else ""
    for literal, field, spec, _ in Formatter().parse(rule.message):
        text += literal
        key = spec and spec.rstrip("=:")
        if (
            field is not None and field.startswith("c.") and key and key != "g"
        ):  # the name of a key, with its value or not
            value = "=…" if spec.endswith("=") else "" if spec == key else ": …"
            text += f"`{field.removeprefix('c.')}.{key}{value}`"
        elif field is not None:
            text += "…"
    return text


def page(text: str) -> str:
    """The whole page: the part of `text` above the marker, and the current reference below it."""
    head, marker, _ = text.partition(MARKER)
    assert marker, f"{PAGE} has lost the line {MARKER!r}"
    return head + marker + "\n" + "\n".join(reference())


def reference() -> Iterator[str]:
    """The lines below the marker: each key once, where its meaning and default are the same in several tasks."""
    MEANINGS.clear()
    SENTENCES.clear()
    TRAINED.clear()
    flow, texts = list(rows(FlowRLConfig)), list(rows(LMRLConfig))
    common = [row for row in flow if row in texts]
    yield "## Keys of all training jobs\n"
    yield "Jobs of [images and videos](#images-and-videos) and of [texts](#language-models) have further keys."
    yield "In brackets stand the possible values, in parentheses the default, or the type if it is null (none: text).\n"
    yield from sections(FlowRLConfig, common)
    yield "## Images and videos\n"
    yield "Further keys of `tasks/train_flowgrpo.py`. `tasks/train_flow_matching.py` has `flow_matching` in place of"
    yield "`actor`, `algorithm` and `placement`.\n"
    yield from sections(FlowRLConfig, [row for row in flow if row not in common])
    supervised = [row for row in rows(FlowMatchingTaskConfig) if row.key.startswith("flow_matching.")]
    yield from sections(FlowMatchingTaskConfig, supervised)
    yield "## Language models\n"
    yield "Further keys of `tasks/train_grpo.py`.\n"
    yield from sections(LMRLConfig, [row for row in texts if row not in common])
    stated = {*flow, *texts}
    TRAINED.update(row.key for row in stated)
    for heading, schema in (("Supervised fine-tuning", SFTConfig), ("Preference optimisation", DPOConfig)):
        yield f"## {heading} of language models\n"
        yield f"{sentence(schema)} The keys are those of `tasks/train_grpo.py`, some with other defaults:\n"
        yield from keys(row for row in rows(schema) if row not in texts)
    yield "## Algorithms\n"
    yield "Keys of the section `algorithm`, by the values of `algorithm.name` that have them.\n"
    yield from algorithm_keys()
    yield "## Joint runs\n"
    yield "Keys of `tasks/train_joint.py` beside `parallel`, `reward` and `trainer`. `writer` has the sections of"
    yield "`tasks/train_grpo.py`, and `painter` those of `tasks/train_flowgrpo.py`.\n"
    unused = {f"data.{key}" for key in OF_IMAGES}
    own_rows = (row for row in rows(JointConfig) if row.key.split(".")[0] not in JOINT_SHARED)
    yield from keys(row for row in own_rows if row.key not in unused and row not in stated)
    tasks = {
        "Sampling": SampleConfig,
        "Generating texts": GenerateConfig,
        "Evaluation": EvaluateConfig,
        "Export": ExportConfig,
        "Checking a cluster": CheckClusterConfig,
        "Checking numerics": CheckNumericsConfig,
        "Serving rewards": ServeRewardConfig,
        "Preparing data": PrepareDataConfig,
    }
    for heading, schema in tasks.items():
        yield f"## {heading}\n"
        yield f"{sentence(schema)}\n"
        yield from task(schema, stated)
        stated |= {row for row in rows(schema) if "." not in row.key}


def sections(schema: type, shown: list[Row]) -> Iterator[str]:
    """A heading, a sentence and a list of keys for each section of a schema that has some of the rows `shown`."""
    hints = get_type_hints(schema)
    for f in fields(schema):
        some = [row for row in shown if row.key.split(".")[0] == f.name]
        if not some or f.name == "algorithm":
            continue
        yield f"### {f.name}\n"
        if is_dataclass(hints[f.name]) and sentence(hints[f.name]) not in SENTENCES:
            SENTENCES.add(sentence(hints[f.name]))
            yield f"{sentence(hints[f.name])}\n"
        yield from keys(some)


def algorithm_keys() -> Iterator[str]:
    """All algorithms' keys, by the algorithms that have them."""
    names = known_modules("phalanx.algorithms")
    having: dict[Row, list[str]] = {}
    for name in names:
        config = resolve_registry("phalanx.algorithms", name, "algorithm.name").Config
        for row in rows(config, "algorithm."):
            if row.key != "algorithm.name":
                having.setdefault(row, []).append(name)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row, some in having.items():
        groups.setdefault(tuple(some), []).append(row)
    for some in sorted(groups, key=lambda some: (-len(some), some)):
        without = [f"`{name}`" for name in names if name not in some]
        few = len(without) <= len(names) / 2
        yield f"{'All but ' + ', '.join(without) if few else ', '.join(f'`{name}`' for name in some)}:\n"
        yield from keys(sorted(groups[some], key=lambda row: row.key))


def task(schema: type, stated: Iterable[Row]) -> Iterator[str]:
    """A task's keys, without sections that training jobs have too, and without those that stand above."""
    hints = get_type_hints(schema)
    shared = {hint for hint in get_type_hints(FlowRunConfig).values() if is_dataclass(hint)}
    skipped = [name for name, hint in hints.items() if hint in shared]
    if schema is CheckClusterConfig:
        skipped += [name for name, hint in hints.items() if is_dataclass(hint) and name not in skipped]
    shown = [row for row in rows(schema) if row.key.split(".")[0] not in skipped]
    yield from keys(row for row in shown if row not in stated)
    if schema is not CheckClusterConfig:
        skipped += [row.key for row in shown if row in stated]
        if skipped:
            yield f"As above: {', '.join(f'`{name}`' for name in skipped)}.\n"


def keys(shown: Iterable[Row]) -> Iterator[str]:
    """A line for each row; one for all rows of a section that have the meaning of the same key of another one."""
    same: dict[tuple[str, str], list[str]] = {}
    of_run: dict[str, list[str]] = {}
    for row in shown:
        before, null, value = row.help.partition("; null: the run's, or ")
        trained = [key for key in (row.key, f"rollout.{row.key}", f"data.{row.key}") if key in TRAINED]
        if null and trained and len(before.split()) > 1:
            place = trained[0].rpartition(".")[0]
            of_run.setdefault(place, []).append(f"`{row.key}` ({value.partition(' [')[0]})")
            continue
        section, _, end = row.key.rpartition(".")
        first = MEANINGS.setdefault((end, row.help), row)
        other, _, _ = first.key.rpartition(".")
        if row.help.endswith("; null: rollout's"):
            same.setdefault((section, "rollout`, whose values are the defaults"), []).append(f"`{end}`")
        elif section and other != section and row.default == first.default:
            same.setdefault((section, f"{other}`"), []).append(f"`{end}`")
        elif section and other != section and len(row.help.split()) > 4:
            same.setdefault((section, f"{other}`"), []).append(f"`{end}` ({shown_default(row) or 'null'})")
        else:
            yield f"- {described(row)}"
    for place, names in of_run.items():
        yield f"- as `{place}` in training, or without a run as in parentheses: {', '.join(names)}"
    for (section, other), names in same.items():
        yield f"- `{section}`: {', '.join(names)}: as in `{other}"
    yield ""


MEANINGS: dict[tuple[str, str], Row] = {}  # the row with which a meaning stands on the page, by a key's end and meaning
SENTENCES: set[str] = set()  # on sections, which stand on the page
TRAINED: set[str] = set()  # keys of training jobs, which stand on the page


def described(row: Row) -> str:
    """A key, its default, its meaning, and the choices that the meaning does not name."""
    text = row.help.replace(" | ", ", ").replace("<", "&lt;")
    meaning, _, choices = text.rpartition(" [")
    names = [name for name in choices.rstrip("]").split(", ") if ":" not in name]
    if not meaning or not all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", meaning) for name in names):
        meaning = text
    default = shown_default(row)
    return f"`{row.key}`{f' ({default})' if default else ''}: {meaning}"


def shown_default(row: Row) -> str:
    """The default, or the type of what is null by default, which is a text if this is empty."""
    default = {"True": "true", "False": "false"}.get(row.default, row.default).replace("'", "").replace("\n", "\\n")
    kind = row.type.removesuffix(" or null")
    if default in ("null", "required"):
        return f"{kind}, required" if default == "required" else kind if kind != "str" else ""
    return f"{kind}, `{default}`" if kind != row.type or default in ("[]", "{}") else f"`{default}`"


def sentence(schema: type) -> str:
    """A class's docstring as one paragraph."""
    return " ".join((schema.__doc__ or "").split())


if __name__ == "__main__":
    main()
