"""The documentation tells the truth: its commands, configurations, examples, messages and links are tried."""

import importlib.util
import re
import runpy
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from phalanx.__main__ import COMMANDS, find_config
from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.environment import EnvironmentConfig
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRewardConfig, FlowRLConfig
from phalanx.config.joint import JointConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.lm_supervised import DPOConfig, SFTConfig
from phalanx.config.reward import RewardConfig, RewardFunctionConfig
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
from phalanx.data.prompts import load_prompts, validation_sets
from phalanx.environments import EnvironmentFailure, Environments
from phalanx.models.flow.folder import model_index
from phalanx.rewards import RewardSet
from phalanx.run.cli import _plan_words
from phalanx.run.rules import load_config
from phalanx.run.telemetry.curves import read_metrics
from phalanx.tools.plan import clusters
from phalanx.types import Prompt
from tests.helpers import lm
from tests.helpers.jobs import PROMPTS, base_overrides, one_step
from tests.helpers.kinds import plan_of
from tests.helpers.ranks import ROOT, run_ranks

FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")]
PAGES = [*FRONT, *sorted((ROOT / "docs").glob("*.md"))]
SCHEMAS: dict[str, type] = {
    "tasks/train_flowgrpo.py": FlowRLConfig,
    "tasks/train_flow_matching.py": FlowMatchingTaskConfig,
    "tasks/train_grpo.py": LMRLConfig,
    "tasks/train_sft.py": SFTConfig,
    "tasks/train_dpo.py": DPOConfig,
    "tasks/train_joint.py": JointConfig,
    "tasks/train_block_diffusion.py": BlockDiffusionTaskConfig,
    "tasks/sample.py": SampleConfig,
    "tasks/generate.py": GenerateConfig,
    "tasks/evaluate.py": EvaluateConfig,
    "tasks/export_checkpoint.py": ExportConfig,
    "tasks/check_cluster.py": CheckClusterConfig,
    "tasks/check_numerics.py": CheckNumericsConfig,
    "tasks/serve_reward.py": ServeRewardConfig,
    "tasks/prepare_data.py": PrepareDataConfig,
}
FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
WORKFLOWS = "../../actions/workflows/"


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: Path
    language: str
    title: str | None
    text: str


def blocks(language: str) -> list[Block]:
    return [
        Block(page, lang, title or None, textwrap.dedent(text))
        for page in PAGES
        for _, lang, title, text in FENCE.findall(page.read_text())
        if lang == language
    ]


def commands() -> Iterator[tuple[Path, dict[str, str], list[str]]]:
    """Page, environment and words of every command of a sh block, and of those in backticks that begin so."""
    for page in PAGES:
        inline = re.findall(r"`((?:sh|make|phalanx) [^`…]+)`", page.read_text())
        for text in [*(b.text for b in blocks("sh") if b.page == page), *inline]:
            for line in text.replace("\\\n", " ").splitlines():
                words, env = shlex.split(line, comments=True), {}
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    name, _, env[name] = words.pop(0).partition("=")
                if words:
                    yield page, env, words


def test_commands() -> None:
    """`sh train.sh TASK …` has a task, a file and keys that are there, and its batches divide; `make` has the target."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = set()
    for page, env, words in commands():
        if words[:2] == ["sh", "train.sh"]:
            task, (arguments, asked) = words[2], _plan_words(words[3:])
            assert (ROOT / task).is_file(), (page, words)
            if task in SCHEMAS and "--help" not in arguments:
                if asked:  # --plan on a cluster of its own
                    env = {"NPROC_PER_NODE": str(clusters(asked, env)[0].ranks)}
                try_arguments(SCHEMAS[task], arguments, env)
                seen.add(task)
        elif words[0] == "phalanx":
            assert words[1] in {*COMMANDS, "--help"}, (page, words)
            if "--config" in words:
                assert find_config(words[words.index("--config") + 1], words[2]).is_file()
            seen.add("phalanx")
        elif words[0] == "make":
            assert {w for w in words[1:] if "=" not in w} <= targets, (page, words)
            seen.add("make")
    assert {"make", "phalanx", "tasks/train_flowgrpo.py", "tasks/sample.py", "tasks/export_checkpoint.py"} <= seen


def try_arguments(schema: type, arguments: list[str], env: dict[str, str]) -> None:
    file = arguments[0] if arguments and "=" not in arguments[0] else None
    overrides = arguments[1:] if file else arguments
    if file is not None and file.startswith("outputs/"):  # what a run leaves behind
        file = "configs/flowgrpo/quickstart.yaml"
    path = ROOT / file if file else None
    cfg = load_config(schema, path and str(path), overrides)
    if isinstance(cfg, FlowRLConfig) and path is not None:
        made_for = re.search(r"^# ranks: (\d+)$", path.read_text(), re.MULTILINE)
        ranks = env.get("NPROC_PER_NODE", made_for[1] if made_for else "1")
        assert plan_of(cfg, int(ranks)).exact, overrides


def test_configurations(tmp_path: Path) -> None:
    found = blocks("yaml")
    assert found
    for i, block in enumerate(found):
        file = tmp_path / f"{i}.yaml"
        file.write_text(block.text)
        if block.text.startswith("rewrite:"):
            load_config(JointConfig, str(file), ["writer.model.path=x", "painter.model.path=x"])
            continue
        of_tokens = block.text.startswith("environment:") or "partial_rollout" in block.text
        schema = LMRLConfig if of_tokens else FlowRLConfig
        load_config(schema, str(file), [] if "path: stabilityai" in block.text else ["model.path=x"])


def test_links() -> None:
    for page in PAGES:
        for target in LINK.findall(page.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            if target.startswith(WORKFLOWS):  # GitHub resolves it from the README
                name = target.removeprefix(WORKFLOWS).removesuffix("/badge.svg")
                assert (ROOT / ".github" / "workflows" / name).is_file(), target
                continue
            file, _, anchor = target.partition("#")
            path = page.parent / file if file else page
            assert path.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor in anchors(path), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def test_the_table_of_features_is_one() -> None:
    """It stands in the README alone, and each row but the head links to its page."""
    assert [page.name for page in PAGES if "\n## Features\n" in page.read_text()] == ["README.md"]
    section = (ROOT / "README.md").read_text().split("## Features\n")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("|")][2:]
    assert len(rows) > 15
    assert [row for row in rows if "](docs/" not in row] == []


def test_every_page_is_in_the_navigation_once() -> None:
    groups = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    files = [file for group in groups for pages in group.values() for page in pages for file in page.values()]
    assert sorted(files) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    # the home page names them in the same order
    section = (ROOT / "docs" / "index.md").read_text().split("## Documentation\n")[1].split("\n## ")[0]
    assert re.findall(r"\]\(([\w-]+\.md)\)", section) == files[1:]


def test_the_pages_stay_short() -> None:
    """What is new replaces what it supersedes, or is worth a larger number here."""
    readme, *pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    words = {page.name: len(page.read_text().split()) for page in (readme, *pages)}
    assert words["README.md"] <= 1_250
    assert len((ROOT / "CHANGELOG.md").read_text().split()) <= 700
    assert sum(words.values()) <= 75_000, sorted(words.items(), key=lambda item: -item[1])[:10]


def test_pages_are_found_by_the_words_that_users_type() -> None:
    """In headings, which the site's search ranks above texts."""
    words = ("SFT", "DPO", "agents", "multi-turn", "LoRA", "VLM", "video", "QLoRA", "GRPO", "PPO", "reward")
    headings = "\n".join(re.findall(r"^#+ .+$", "\n".join(page.read_text() for page in PAGES), re.MULTILINE)).lower()
    assert [word for word in words if word.lower() not in headings] == []


REMOTE = re.compile(
    r"""!\[[^]]*\]\(\s*<?(?:https?:)?//            # a picture of another server
    |<(?:script|link|img|iframe|video|source|object|embed|image|use)\b[^>]*?[\s"'](?:src|srcset|href|data|poster)\s*=\s*["']?(?:https?:)?//
    |(?:url\(|@import)\s*["']?(?:https?:)?//     # of a style
    |^[ ]*(?:```|~~~)[ ]*\{?[ ]*\.?mermaid          # the theme fetches its script""",
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)


def test_the_site_fetches_nothing() -> None:
    """Neither the site's settings nor its pages and styles name a script, style, font or picture of another server."""
    settings = (ROOT / "mkdocs.yml").read_text()
    site = yaml.safe_load(settings)
    assert "//" not in settings  # repo_url too: the theme would ask GitHub for its stars
    assert site["theme"]["font"] is False
    scripts = [script["path"] for script in site["extra_javascript"]]
    polyfills = site["extra"]["polyfills"]
    assert "offline" in site["plugins"]
    assert any("iframe-worker" in path for path in polyfills)  # else the plugin names a server's
    docs = ROOT / site["docs_dir"]
    assert [path for path in [*site["extra_css"], *scripts, *polyfills] if not (docs / path).is_file()] == []
    pages = [*docs.rglob("*.md"), *docs.rglob("*.css")]
    assert [(page.name, found[0]) for page in pages for found in REMOTE.finditer(page.read_text())] == []


def test_the_fonts_of_formulas_are_there() -> None:
    style = ROOT / "docs" / "assets" / "katex" / "katex.min.css"
    fonts = set(re.findall(r"url\((fonts/[^)]+\.woff2)\)", style.read_text()))
    assert len(fonts) == 20
    assert {font for font in fonts if not (style.parent / font).is_file()} == set()


@pytest.mark.parametrize(
    "text",
    [
        "![stars](https://img.shields.io/x.svg)",
        "![stars](//img.shields.io/x.svg)",
        '<script defer src="https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-mml-chtml.js"></script>',
        "<img width=3 src='http://example.org/a.png'>",
        '<link rel="stylesheet" href="//example.org/a.css">',
        "a { background: url(https://example.org/a.png) }",
        '@import "https://example.org/a.css";',
        "text\n\n    ```mermaid\n",
    ],
)
def test_what_would_be_fetched_is_found(text: str) -> None:
    assert REMOTE.search(text)


def test_the_configuration_reference_is_up_to_date() -> None:
    module = import_file(ROOT / "scripts" / "generate_configuration.py")
    text = module.PAGE.read_text()
    assert module.page(text) == text, "run: python scripts/generate_configuration.py"
    assert module.RULES_PAGE.read_text() == "\n".join(module.rules_page())
    models = module.MODELS_PAGE.read_text()
    assert module.models_page(models) == models, "run: python scripts/generate_configuration.py"
    assert "| `qwen_image_edit` | yes | no | no | images, text | image |" in models
    assert text.count("- `optim.lr` (`0.0001`): peak learning rate\n") == 1


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "override",
    [
        "optim.lrr=1",
        "optim.lr=fast",
        "rollout.sde_type=spe",
        "data.train_files=[assets/digits/trian.txt]",
        "model.path=nowhere",
        "actor.ppo_mini_batch_size=5",
    ],
)
def test_messages(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages that configuration.md shows are those that a user gets."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError) as error:
        model = ["model.path=assets/digits/base", "data.train_files=[assets/digits/train.txt]"]
        cfg = load_config(FlowRLConfig, None, [*model, override])
        plan_of(cfg, 2)
        load_prompts(cfg.data.train_files, "data.train_files")
        model_index(cfg.model.path)
    assert f"error: {error.value}\n" in (ROOT / "docs" / "configuration.md").read_text()


def test_faults_are_proved_by_tests() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "faults.md").read_text()))
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 15
    assert {name for name in named if f"def {name}(" not in sources} == set()


def test_excerpts_of_the_source_are_its_lines() -> None:
    """The loop, of which concepts shows two pieces."""
    excerpts = [block for block in blocks("python") if block.title is not None and block.title.startswith("src/")]
    assert len(excerpts) >= 2
    for block in excerpts:
        source = (ROOT / str(block.title)).read_text()
        assert any(textwrap.indent(block.text, " " * depth) in source for depth in range(0, 40, 4)), block


def test_files_of_ones_own_are_the_examples() -> None:
    named = re.findall(r"`(examples/\w+\.py)`", (ROOT / "docs" / "extending.md").read_text())
    assert {"examples/my_kind.py", "examples/my_logger.py"} <= set(named)
    assert all((ROOT / name).is_file() for name in named)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all examples that have a file name, as the working directory."""
    for block in blocks("python"):
        if block.title is not None and not block.title.startswith("src/"):
            file = tmp_path / block.title
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def score(functions: str, images: torch.Tensor, metadata: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The terms of a `reward.functions` on images, one a prompt."""
    cfg = load_config(FlowRLConfig, None, ["model.path=x", f"reward.functions={functions}"])
    reward = RewardSet(FlowRewardConfig(functions=cfg.reward.functions), "cpu")
    reward.submit(images, [Prompt(f"prompt {i}", i, meta) for i, meta in enumerate(metadata)])
    return {name: values.tolist() for name, values in reward.collect().items()}


def test_reward_examples(examples: Path) -> None:
    red, grey = torch.tensor([1.0, 0, 0]), torch.tensor([0.5, 0.5, 0.5])
    images = torch.stack([red, grey])[:, :, None, None].expand(2, 3, 4, 4)
    wanted = [{"colour": [1.0, 0.0, 0.0]}] * 2
    terms = score("[{path: 'rewards/colour.py:redness'}, {path: 'rewards/colour.py:Palette'}]", images, wanted)
    assert terms["redness"] == pytest.approx([1.0, 1 / 3], abs=1e-5)
    assert terms["Palette"] == pytest.approx([1.0, torch.exp(torch.tensor(-(0.75**0.5) / 0.5)).item()])
    motion = "[{path: 'rewards/videos.py:motion'}]"
    assert score(motion, images, wanted)["motion"] == [0.0, 0.0]
    videos = torch.stack([torch.stack([i, 1 - i, 1 - i]) for i in images])  # the grey one stays grey
    assert score(motion, videos, wanted)["motion"] == pytest.approx([0.5, 0.0])


def test_the_reward_examples_of_text(examples: Path) -> None:
    paths = ("rewards/answers.py:exact", "rewards/ported.py:accuracy", "rewards/ported.py:compute_score")
    functions = [RewardFunctionConfig(path=path) for path in paths]
    reward = RewardSet(RewardConfig(functions=functions), "cpu", outputs="completions")
    prompts = [Prompt("6 x 7?", i, {"ground_truth": "42", "solution": "42"}) for i in range(3)]
    reward.submit(["Let me think.\n42\n", "42\n", "42"], prompts)
    rows = {name: scores.tolist() for name, scores in reward.collect().items()}
    assert rows == {"exact": [1, 1, 1], "accuracy": [0, 0, 1], "compute_score": [0, 1, 1]}


def test_the_environment_examples(examples: Path) -> None:
    (block,) = [block for block in blocks("yaml") if block.title == "environments.yaml"]
    Path("environments.yaml").write_text(block.text)
    cfg = load_config(LMRLConfig, "environments.yaml", ["model.path=x"]).environment
    environments = Environments(cfg)
    guess = environments.open({"environment": "guess", "prompt": "Play."}, 5, 0)
    guess.reset().result(9)
    answers = [guess.hear({"role": "assistant", "content": text}).result(9) for text in ("what?", "0")]
    assert [turn.messages[0]["content"] for turn in answers] == ["This is no number.", "higher"]
    assert guess.reward().result(9) == pytest.approx(-0.1)
    cfg = EnvironmentConfig(path="environments/shop.py:Shop", tools=["environments/units.py:to_miles"])
    environments = Environments(replace(cfg, max_calls_per_turn=4))
    shop = environments.open({"prompt": "Sell.", "stock": {"apple": 2}}, 5, 0)
    assert shop.reset().result(9)[0]["content"] == "\n\nThere are 1 goods."
    calls = [("count", {"name": "apple"}), ("sell", {"name": "apple"}), ("sell", {"name": "apple", "amount": 2})]
    calls += [("to_miles", {"kilometers": 1.609344}), ("count", {})]
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    turns = [shop.hear({"role": "assistant", "content": "", "tool_calls": [call]}).result(9) for call in made]
    texts = [turn.messages[0]["content"] for turn in turns]
    assert texts[:4] == ["2", "sold", "error: there are only 1", "1.0"]
    page = (ROOT / "docs" / "environments.md").read_text()
    assert f"`{texts[4]}`" in page
    assert shop.reward().result(9) == pytest.approx(1 / 3)
    pear = {"type": "function", "function": {"name": "sell", "arguments": {"name": "pear", "amount": 0}}}
    shop.hear({"role": "assistant", "content": "", "tool_calls": [pear]}).result(9)
    with pytest.raises(EnvironmentFailure) as error:
        environments.check()
    assert str(error.value).replace(f"{examples}/", "") in page.replace("\n", " ")
    environments = Environments(EnvironmentConfig(path="environments/review.py:solve", kwargs={"rounds": 1}))
    review = environments.open({"prompt": [{"role": "user", "content": "Write."}]}, 5, 0)
    assert review.reset().result(9) == []
    drafts = [review.hear({"role": "assistant", "content": text}).result(9) for text in ("long text", "text")]
    assert [turn.messages for turn in drafts] == [[{"role": "user", "content": "Shorten it."}], []]
    assert review.reward().result(9) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=algorithms/reinforce.py", "algorithm.scale=2"],
        ["model.family=families/sd3_rescaled.py", "model.lora_rank=4"],
        ["algorithm.name=flow_grpo", "rollout.engine=engines/autocast.py:AutocastRollout"],
    ],
    ids=["algorithm", "family", "engine"],
)
def test_examples_train(overrides: list[str], examples: Path, sd3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    base = [o for o in base_overrides(sd3_folder, tmp_path) if not o.startswith("algorithm.")]
    cfg = load_config(FlowRLConfig, None, [*base, *overrides])
    (result,) = run_ranks(one_step, 1, cfg, timeout=240)
    assert (result["row"]["actor/first_ratio_error"] == 0) is cfg.rollout.facts.exact  # `one_step` takes none again
    assert result["row"]["actor/grad_norm"] > 0
    if "model.family" in overrides[0]:
        assert any("norm1_context.linear.lora_A" in name for name in result["weights"])


def test_the_engine_example_of_text(examples: Path, lm_folder: Path, tmp_path: Path) -> None:
    keys = ("rollout.engine=engines/echo.py:Echo", "data.max_response_length=4")
    (echo,) = run_ranks(lm.one_step, 1, lm.tiny_lm_config(lm_folder, tmp_path, *keys), timeout=240)
    assert all(len(text) == 4 and text == 4 * text[0] for text in echo["texts"])


def test_the_parts_of_a_text_job_train_together(examples: Path, lm_folder: Path, tmp_path: Path) -> None:
    """The reward, the environment and the data of the page on extending, in one step."""
    keys = [
        "data.train_files=[data/sums.py:train]",
        "data.val_files=[data/sums.py:held_out]",
        "environment.path=environments/consistent.py:Consistent",
        "reward.functions=[{path: rewards/brief_answers.py:brevity, kwargs: {words: 50}}, {name: environment}]",
        "data.max_response_length=24",
        "trainer.total_training_steps=1",
    ]
    run_ranks(lm.fit, 1, lm.tiny_lm_config(lm_folder, tmp_path, *keys))
    row = read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]
    assert row["reward/mean"] == pytest.approx(row["reward/brevity"] + row["reward/environment"])
    assert 0 < row["reward/brevity"] <= 1
    (sums,) = validation_sets(["data/sums.py:held_out"], 100, quoted=False).items()
    assert sums[0] == "sums_held_out" and len(sums[1]) == 100
    for prompt in sums[1]:
        a, b = map(int, re.findall(r"\d+", prompt.text))
        assert prompt.meta["ground_truth"] == str(a + b)


@pytest.mark.parametrize("script", ["draw_block_attention.py", "draw_loop.py"])
def test_pictures_are_what_their_scripts_draw(script: str) -> None:
    module = import_file(ROOT / "scripts" / script)
    assert module.FILE.read_text() == module.draw(), f"run: python scripts/{script}"


def test_every_picture_has_a_command() -> None:
    text = (ROOT / "docs" / "contributing.md").read_text()
    section = text[text.index("## Pictures") : text.index("## Style")]
    assert set(re.findall(r"`(\w+\.(?:png|svg))`", section)) == {
        path.name for path in (ROOT / "docs" / "images").iterdir()
    }
    scripts = re.findall(r"(?:scripts|benchmarks)/\w+\.py", section)
    assert len(scripts) > 6 and [script for script in scripts if not (ROOT / script).is_file()] == []


def run_file(name: str) -> None:
    runpy.run_path(name)
