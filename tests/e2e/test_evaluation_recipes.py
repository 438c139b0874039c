"""Every recipe of configs/evaluate: the commands in its comments create its files, and it evaluates a tiny model."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from phalanx.config.tasks import EvaluateConfig, PrepareDataConfig
from phalanx.run.rules import load_config
from phalanx.tools.prepare_data import PrepareData
from phalanx.zoo.rewards.text.gsm8k import Gsm8k
from phalanx.zoo.rewards.text.math import Math
from tests.helpers.judged import JUDGE
from tests.helpers.ranks import ROOT
from tests.helpers.tasks import run_task
from tests.unit.test_rewards_blip_vqa import blip_folder  # noqa: F401
from tests.unit.test_rewards_clip import clip_folder  # noqa: F401
from tests.unit.test_rewards_geneval import save_detector
from tests.unit.test_rewards_vbench import dino_folder  # noqa: F401

FOLDER = ROOT / "configs" / "evaluate"
ENDS = "-- end of a command"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


def download(folder: Path) -> None:
    """Write the benchmarks' files with the authors' columns, three rows each."""
    files: dict[str, list[dict[str, Any]]] = {
        "gsm8k/main/test-00000-of-00001.parquet": [],
        "math500/test.jsonl": [],
        "aime24/data/train-00000-of-00001.parquet": [],
        "aime25/data/train-00000-of-00001.parquet": [],
    }
    gsm8k, math500, aime24, aime25 = files.values()
    for i in range(3):
        gsm8k.append({"question": f"Ann has {i} books and buys 2.", "answer": f"{i}+2=<<{i}+2={i + 2}>>\n#### {i + 2}"})
        problem = {"problem": f"What is ${i}/7$?", "solution": f"It is $\\boxed{{\\frac{{{i}}}7}}$."}
        math500.append(
            problem | {"answer": rf"\frac{i}7", "subject": "Algebra", "level": 1 + i, "unique_id": f"test/{i}.json"}
        )
        problem = {"problem": f"What is 2{i}?", "solution": f"It is $\\boxed{{02{i}}}$."}
        aime24.append({"id": i} | problem | {"answer": f"02{i}", "url": "", "year": "2024"})
        aime25.append({"problem_idx": i, "problem": "What is it?", "answer": 20 + i, "problem_type": ["Algebra"]})
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), folder / name)
        else:
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare_commands(recipe: Path) -> list[list[str]]:
    """The words of each command `phalanx prepare` in the comments, split as by a shell."""
    block = [line[4:] for line in recipe.read_text().splitlines() if line.startswith("#   ")]
    shell = f"hf() {{ :; }}; phalanx() {{ shift; printf '%s\\n' \"$@\" '{ENDS}'; }}\n" + "\n".join(block)
    printed = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    return [command.strip("\n").split("\n") for command in printed.split(ENDS)[:-1]]


@pytest.mark.quick("aime")
@pytest.mark.parametrize(
    ("name", "sets", "samples", "statistics", "instruction"),
    [
        (
            "gsm8k",
            ["test"],
            1,
            ["mean", "pass@1"],
            'Let\'s think step by step and output the final answer after "####".',
        ),
        ("math500", ["test"], 4, ["mean", "avg@4", "pass@1", "pass@4", "majority@4"], BOXED),
        ("aime", ["aime24_test", "aime25_test"], 64, ["mean", "avg@64", "pass@1", "pass@64", "majority@64"], BOXED),
    ],
    ids=["gsm8k", "math500", "aime"],
)
def test_a_recipe(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sets: list[str],
    samples: int,
    statistics: list[str],
    instruction: str,
) -> None:
    recipe = FOLDER / f"{name}.yaml"
    monkeypatch.setenv("HOME", str(tmp_path))
    download(tmp_path / "downloads")
    monkeypatch.chdir(tmp_path)
    commands = prepare_commands(recipe)
    assert len(commands) == len(sets)
    for words in commands:
        PrepareData(load_config(PrepareDataConfig, None, words)).run()
    tiny = ["model.path=assets/words/base", "model.dtype=float32", "data.max_prompt_length=64"]
    out = tmp_path / "out"
    done = run_task(["tasks/evaluate.py", str(recipe), *tiny, "data.max_response_length=4", f"output_dir={out}"])
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "evaluation.json").read_text())["sets"]
    assert list(result) == sets
    (term,) = load_config(EvaluateConfig, str(recipe), ["model.path=x"]).reward["functions"]
    assert all(list(result[group]["scores"][term["name"]]) == statistics for group in sets)
    records = [json.loads(line) for line in (out / "records.jsonl").open()]
    assert len(records) == len(sets) * 3 * samples
    assert all(record["prompt"].endswith(f" {instruction}") for record in records)
    reward = {"gsm8k": Gsm8k, "math": Math}[term["name"]](**term.get("kwargs", {}))
    for record in records[::samples]:
        truth = record["columns"]["ground_truth"]
        right = f"#### {truth}" if name == "gsm8k" else rf"\boxed{{{truth}}}"
        output = reward([right, right.replace(truth, "777")], ["?"] * 2, [record["columns"]] * 2)
        assert list(output if isinstance(output, list) else output.scores) == [1, 0], truth


def evaluated(tmp_path: Path, name: str, *words: str, model: str = "assets/digits/base") -> dict[str, Any]:
    """The result of a recipe with a tiny flow model; its `records` are the samples."""
    tiny = [f"model.path={model}", "model.dtype=float32", "rollout.height=32", "rollout.width=32", *words]
    out = tmp_path / "out"
    recipe = str(FOLDER / f"{name}.yaml")
    done = run_task(["tasks/evaluate.py", recipe, *tiny, "rollout.val.num_inference_steps=2", f"output_dir={out}"])
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "evaluation.json").read_text())
    return result | {"records": [json.loads(line) for line in (out / "records.jsonl").open()]}


def test_the_recipe_of_ocr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the authors' file with one prompt per line; the text in quotation marks is the ground truth."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "data" / "flow_grpo_ocr"
    folder.mkdir(parents=True)
    (folder / "test.txt").write_text("".join(f'A sign that says "Stop {i}".\n' for i in range(3)))
    records = evaluated(tmp_path, "ocr")["records"]
    assert [record["columns"]["ground_truth"] for record in records] == ["Stop 0", "Stop 1", "Stop 2"]
    assert all(0 <= record["scores"]["ocr"] <= 1 for record in records)


@pytest.mark.long
def test_the_recipe_of_geneval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip_folder: Path) -> None:  # noqa: F811
    """From rows as the authors publish them: a mean per tag, and the mean over tags."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    clauses = {"single_object": {"class": "dog", "count": 1}, "colors": {"class": "dog", "count": 1, "color": "red"}}
    rows = []
    for tag, clause in clauses.items():
        rows.append({"tag": tag, "include": [clause], "prompt": f"a photo of a dog, {tag}"})
    rows.append(rows[0] | {"exclude": [{"class": "dog", "count": 2}], "prompt": "a photo of one dog"})
    (tmp_path / "data" / "geneval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    detector = save_detector(tmp_path / "detector")
    kwargs = (
        f"{{strict: true, detector: {detector}, clip_model: {clip_folder}, threshold: 0.01, detector_size: [64, 64]}}"
    )
    result = evaluated(tmp_path, "geneval", f"reward.functions=[{{name: geneval, kwargs: {kwargs}}}]")
    part = result["sets"]["geneval"]
    assert {name: group["prompts"] for name, group in part["groups"].items()} == {"colors": 1, "single_object": 2}
    means = [group["scores"]["geneval"]["mean"]["value"] for group in part["groups"].values()]
    assert part["mean_of_groups"]["scores"]["geneval"]["mean"]["value"] == pytest.approx(sum(means) / 2)
    assert "pass@4" in part["scores"]["geneval"] and len(result["records"]) == 12


@pytest.mark.long
def test_the_recipe_of_long_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qwen_folder: Path) -> None:
    """From rows as the authors publish them, whose column `text` is a list."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "data" / "long_text"
    folder.mkdir(parents=True)
    rows = []
    for i, category in enumerate(["sign", "poster"]):
        texts = {"prompt": f'A {category} that says "Stop" and "Go {i}".', "text": ["Stop", f"Go {i}"]}
        rows.append({"category": category, "length": "short", **texts, "text_length": 3, "prompt_id": i})
    (folder / "text_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = evaluated(tmp_path, "long_text", "n=2", model=str(qwen_folder))
    assert list(result["sets"]["text_prompts"]["groups"]) == ["poster", "sign"]
    assert [record["scores"]["ocr_expected"] for record in result["records"]] == [3.0] * 4


@pytest.mark.long
def test_the_recipe_of_vbench(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wan_folder: Path,
    clip_folder: Path,  # noqa: F811
    dino_folder: Path,  # noqa: F811
) -> None:
    """Its commands create a file per dimension of the authors' list, with the style of prompts that have one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    info = tmp_path / "downloads" / "VBench" / "vbench" / "VBench_full_info.json"
    info.parent.mkdir(parents=True)
    dimensions = [
        ["subject_consistency", "dynamic_degree"],
        ["scene", "background_consistency"],
        ["temporal_flickering"],
    ]
    rows: list[dict[str, Any]] = []
    for i, names in enumerate([*dimensions, ["appearance_style"], ["color"]]):
        rows.append({"prompt_en": f"a cat {i}", "dimension": names})
    rows[3]["auxiliary_info"] = {"appearance_style": {"appearance_style": "oil painting"}}
    info.write_text(json.dumps(rows))
    block = [line[4:] for line in (FOLDER / "vbench.yaml").read_text().splitlines() if line.startswith("#   ")]
    shell = "\n".join(["hf() { :; }; git() { :; }", *block])
    subprocess.run(["sh", "-c", shell], check=True, cwd=tmp_path)
    functions = load_config(EvaluateConfig, str(FOLDER / "vbench.yaml"), ["model.path=x"]).reward["functions"]
    folders = {"models/dino": dino_folder, "models/clip_b32": clip_folder}
    for function in functions:
        if "kwargs" in function:
            function["kwargs"]["model"] = str(folders[function["kwargs"]["model"]])
    words = ["n=1", "rollout.num_frames=5", f"reward.functions={json.dumps(functions)}"]
    result = evaluated(tmp_path, "vbench", *words, model=str(wan_folder))
    names = ["subject_consistency", "background_consistency", "temporal_flickering", "appearance_style"]
    assert list(result["sets"]) == names
    assert [record["columns"]["style"] for record in result["records"]] == [
        "a cat 0",
        "a cat 1",
        "a cat 2",
        "oil painting",
    ]
    for record in result["records"]:
        assert set(record["scores"]) == set(names) and all(-1 <= score <= 1 for score in record["scores"].values())


SPACY = """'''The parts of a text between `and` as noun phrases, in the place of spaCy.'''
from types import SimpleNamespace


class Chunk(list):
    def __init__(self, text):
        words = text.split()
        kinds = ["DET" if word == "a" else "ADJ" for word in words[:-1]] + ["NOUN"]
        super().__init__(SimpleNamespace(text=word, pos_=kind) for word, kind in zip(words, kinds))
        self.text, self.root = text, self[-1]
        self.root.lemma_ = words[-1].removesuffix("s")


def load(name):
    assert name == "en_core_web_sm"
    return lambda text: SimpleNamespace(noun_chunks=[Chunk(part) for part in text.split(" and ") + ["top"]])
"""
SETS = ["color", "shape", "texture", "spatial", "3d_spatial", "non_spatial", "complex", "numeracy"]


def write_t2i_compbench(tmp_path: Path) -> None:
    """Write the authors' prompts with their parts, by the commands of the recipe, which the docs name."""
    dataset = tmp_path / "downloads" / "T2I-CompBench" / "examples" / "dataset"
    dataset.mkdir(parents=True)
    for name in SETS:
        (dataset / f"{name}_val.txt").write_bytes(b"a green bench and red cats\r\na cat")  # as the authors' files end
    block = [line[4:] for line in (FOLDER / "t2i_compbench.yaml").read_text().splitlines() if line.startswith("#   ")]
    assert "configs/evaluate/t2i_compbench.yaml" in (ROOT / "docs" / "evaluation.md").read_text()
    (tmp_path / "spacy.py").write_text(SPACY)
    shell = "\n".join(["hf() { :; }; git() { :; }; pip() { false; }", *block])
    subprocess.run(["sh", "-c", shell], check=True, cwd=tmp_path)
    for name in SETS:
        lines = (tmp_path / "data" / "t2i_compbench" / f"{name}.jsonl").read_text().splitlines()
        first, second = map(json.loads, lines)
        parts = {"phrases": ["a green bench", "red cats"], "nouns": ["bench", "cat"], "attributes": ["green", "red"]}
        assert first == {"prompt": "a green bench and red cats", "category": name, **parts}
        assert (second["nouns"], second["attributes"]) == (["cat"], ["visible"])


@pytest.mark.long
def test_the_recipe_of_t2i_compbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blip_folder: Path) -> None:  # noqa: F811
    monkeypatch.setenv("HOME", str(tmp_path))
    write_t2i_compbench(tmp_path)
    words = [f"reward.functions=[{{name: blip_vqa, kwargs: {{model: {blip_folder}}}}}]", "n=2"]
    result = evaluated(tmp_path, "t2i_compbench", *words)
    assert list(result["sets"]) == SETS[:3]
    assert all(0 < record["scores"]["blip_vqa"] < 1 for record in result["records"])


@pytest.mark.long
def test_the_recipe_of_t2i_compbench_by_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge_model: Path
) -> None:
    """The tiny judge was taught other questions, so it gives no levels, and these failures are counted."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_t2i_compbench(tmp_path)
    words = [f"reward.model.path={judge_model}", "reward.model.engine=transformers", *JUDGE, "n=2"]
    result = evaluated(tmp_path, "t2i_compbench_judge", *words, "reward.model.unparseable_score=0.25")
    assert list(result["sets"]) == SETS and len(result["records"]) == 8 * 2 * 2
    for record in result["records"]:
        assert record["scores"] == {"t2i_compbench": 0.25, "t2i_compbench_unparseable": 1.0}


def test_every_recipe_is_tried() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == [
        "aime",
        "geneval",
        "gsm8k",
        "long_text",
        "math500",
        "ocr",
        "t2i_compbench",
        "t2i_compbench_judge",
        "vbench",
    ]
