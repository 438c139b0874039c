"""Does each algorithm learn? All on the quickstart's task, with an equal number of images, over several seeds.

    make learn
    python benchmarks/learn.py flow_grpo diffusion_nft --seeds 0 --steps 25 --no-docs

Each recipe of learn.yaml is trained on one CPU process, `--jobs` of them side by side, validated as it trains, and its
last checkpoint samples the held-out prompts again with other noise. These images are scored by the training's OCR, by
Tesseract, which no recipe has seen (its score shows whether an engine was fooled), and by how much they differ. Results
go to docs/learning.json, the table and the curves to docs/algorithms.md. A run whose result is there is not repeated,
and with `--keep` no run that docs/learning.json has. The teacher of a recipe is the quickstart's model, trained first.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/flowgrpo/quickstart.yaml"
HELD_OUT = "assets/digits/held_out.txt"
VALIDATION = "val/held_out/reward/mean"
IMAGES_PER_PROMPT = 4
IMAGES_A_STEP = 192  # of every recipe
TARGET = 0.8
SCALE = 4  # Tesseract wants larger letters
TEACHER = "{teacher}"  # in a recipe: the folder of the model that `make quickstart` ends with
TEACHING = threading.Lock()
RESULTS = ROOT / "docs" / "learning.json"
MARKS = ("<!-- learning: begin -->", "<!-- learning: end -->")


def main() -> None:
    """Train what is missing, then write the table and the curves."""
    recipes: dict[str, list[str]] = yaml.safe_load((ROOT / "benchmarks" / "learn.yaml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes of learn.yaml (all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="training steps of 192 images (40)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, a CPU core each (2)")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "learn")
    parser.add_argument("--keep", action="store_true", help="take the results that docs/learning.json has as they are")
    parser.add_argument("--no-docs", action="store_true", help="print the table, write nothing below docs/")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(recipes))
    if unknown:
        sys.exit(f"learn.py: unknown recipe {unknown[0]!r}; known: {', '.join(recipes)}")
    names = args.names or list(recipes)
    runs = [(name, seed) for seed in args.seeds for name in names]
    if args.keep:
        keep(args.output)
    base = sampled(args.output / "base", ["model.path=assets/digits/base", "model.dtype=float32", *picture()])
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(trained, args.output, name, recipes[name], seed, args.steps) for name, seed in runs]
        done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
        if any(job.exception() is not None for job in done):
            pool.shutdown(cancel_futures=True)
        results = [job.result() for job in jobs]
    lines = table(base, results)
    print("\n".join(lines))
    if not args.no_docs:
        RESULTS.write_text(json.dumps({"base": base, "runs": results}, indent=1) + "\n")
        curves(results, ROOT / "docs" / "images" / "learning.png")
        insert(ROOT / "docs" / "algorithms.md", lines)


def keep(output: Path) -> None:
    """Lay the results of docs/learning.json where those of runs are looked for; newer ones stay."""
    known = json.loads(RESULTS.read_text())
    for folder, file, result in [
        (output / "base", "scores.json", known["base"]),
        *((output / f"{slug(run['name'])}-{run['seed']}", "result.json", run) for run in known["runs"]),
    ]:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / file).is_file():
            (folder / file).write_text(json.dumps(result, indent=1) + "\n")


def picture() -> list[str]:
    """How the base is sampled: as a run of the quickstart validates."""
    return ["height=24", "width=48", "num_inference_steps=10", "max_prompt_length=1"]


def trained(output: Path, name: str, recipe: list[str], seed: int, steps: int) -> dict[str, Any]:
    """The result of one run, which is trained where it is not there yet."""
    folder = output / f"{slug(name)}-{seed}"
    file = folder / "result.json"
    wanted = {"name": name, "recipe": recipe, "seed": seed, "steps": steps}
    if file.is_file():
        result: dict[str, Any] = json.loads(file.read_text())
        if {key: result[key] for key in wanted} == wanted:
            return result
    shutil.rmtree(folder, ignore_errors=True)
    keys = [f"total_training_steps={steps}", "test_freq=5", "log_val_generations=0", f"seed={seed}"]
    keys += ["resume=never", f"output_dir={folder}", f"save_freq={steps}", "logger=[]"]
    recipe = [part.replace(TEACHER, str(teacher(output))) if TEACHER in part else part for part in recipe]
    arguments = [CONFIG, *recipe, *(f"trainer.{key}" for key in keys)]
    start = time.perf_counter()
    cpu_s = task("train_flowgrpo", arguments, output / f"{slug(name)}-{seed}.log")
    share = cpu_s / (time.perf_counter() - start)  # of a core: what else the machine does must not count
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve, seconds = [], 0.0
    for row in rows:
        seconds += row.get("perf/step_s", 0.0) * share
        if VALIDATION in row:
            curve.append([row["step"], round(row[VALIDATION], 4), round(seconds, 1)])
    result = wanted | {
        "curve": curve,
        "seconds": round(cpu_s, 1),
        "after": sampled(folder / "samples", [f"checkpoint={folder}"]),
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name}, seed {seed}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f} in {result['seconds']:.0f} CPU s", flush=True)
    return result


def teacher(output: Path) -> Path:
    """The folder of the quickstart's model, which the first that asks trains."""
    folder = output / "teacher"
    with TEACHING:
        if not (folder / "export").is_dir():
            keys = ["resume=never", f"output_dir={folder}", "log_val_generations=0", "logger=[]"]
            task("train_flowgrpo", [CONFIG, *(f"trainer.{key}" for key in keys)], output / "teacher.log")
            keys = [f"checkpoint={folder}", f"output_dir={folder / 'export'}"]
            task("export_checkpoint", keys, output / "export.log")
    return folder / "export"


def slug(name: str) -> str:
    """A recipe's name as a file's."""
    return name.replace(", ", "-").replace(" ", "_")


def sampled(folder: Path, source: list[str]) -> dict[str, float]:
    """What is said of images of the held-out prompts, from a checkpoint or a model folder."""
    file = folder / "scores.json"
    if not file.is_file():
        keys = [f"prompt_file={HELD_OUT}", f"n={IMAGES_PER_PROMPT}", "seed=99", "micro_batch_size_per_gpu=64"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        task("sample", [*source, *keys, f"output_dir={folder}"], folder.with_suffix(".log"))
        file.write_text(json.dumps(scores(folder)) + "\n")
    found: dict[str, float] = json.loads(file.read_text())
    return found


def task(name: str, arguments: Sequence[str], log: Path) -> float:
    """Run a task on one CPU process; what it says goes to `log`, and ends this program where it fails. Returns the
    CPU seconds that it took.
    """
    environment = os.environ | {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as file:
        command = ["sh", "train.sh", f"tasks/{name}.py", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)  # with its children
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"learn.py: {' '.join(command)}\nended with {process.returncode}; see {log}")
    return usage.ru_utime + usage.ru_stime


def scores(folder: Path) -> dict[str, float]:
    """The images of a folder: `ocr` and `tesseract`, their mean scores in 0..1; `pixels`, the mean distance (RMS, of
    1) of two images of one prompt; `colours`, the standard deviation of the images' mean colours.
    """
    import torch

    from phalanx.rewards.image.ocr import Ocr

    index = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    images = np.stack([np.asarray(Image.open(folder / row["file"]).convert("RGB")) for row in index]) / 255.0
    prompts = [row["prompt"] for row in index]
    reader = Ocr(detect=False)
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    ocr = reader(tensor, prompts, [{"ground_truth": target(prompt)} for prompt in prompts])
    groups = images.reshape(-1, IMAGES_PER_PROMPT, images[0].size)
    pairs = [(i, j) for i in range(IMAGES_PER_PROMPT) for j in range(i)]
    distances = [np.sqrt(np.square(groups[:, i] - groups[:, j]).mean(1)).mean() for i, j in pairs]
    return {
        "ocr": statistics.fmean(ocr),
        "tesseract": statistics.fmean(
            similar(target(p), text) for p, text in zip(prompts, tesseract(images), strict=True)
        ),
        "pixels": float(np.mean(distances)),
        "colours": float(images.mean((1, 2)).std(0).mean()),
    }


def target(prompt: str) -> str:
    """The number that a prompt asks for."""
    return "".join(c for c in prompt if c.isdigit())


def similar(wanted: str, read: str) -> float:
    """As the reward `ocr` scores a text."""
    from rapidfuzz.distance import Levenshtein

    return 1.0 - min(1.0, Levenshtein.distance(wanted, "".join(read.lower().split())) / len(wanted))


def tesseract(images: np.ndarray[Any, Any]) -> list[str]:
    """What Tesseract reads in images [N, H, W, 3] of 0..1, one line of text each."""
    program = shutil.which("tesseract")
    if program is None:
        sys.exit("learn.py: the program tesseract is not installed; apt-get install tesseract-ocr")
    height, width = images.shape[1:3]
    pages = [
        Image.fromarray((image * 255).round().astype(np.uint8)).resize(
            (width * SCALE, height * SCALE), Image.Resampling.BICUBIC
        )
        for image in images
    ]
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name) / "pages.tif"
    pages[0].save(file, save_all=True, append_images=pages[1:])
    options = ["--psm", "7", "-c", "tessedit_char_whitelist=0123456789"]
    out = subprocess.run([program, str(file), "stdout", *options], capture_output=True, text=True, check=True).stdout
    folder.cleanup()
    texts = out.split("\f")[: len(pages)]
    assert len(texts) == len(pages), (len(texts), len(pages))
    return texts


def table(base: dict[str, float], results: Iterable[dict[str, Any]]) -> list[str]:
    """The results as Markdown: means over the seeds, with the smallest and the largest."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        runs.setdefault(result["name"], []).append(result)
    lines = [
        f"| recipe | seeds | OCR | Tesseract | images to {TARGET:g} | CPU seconds to {TARGET:g} | pixels | colours |",
        "|---|---|---|---|---|---|---|---|",
        "| the base | | {ocr:.3f} | {tesseract:.3f} | | | {pixels:.3f} | {colours:.3f} |".format(**base),
    ]
    for name, found in runs.items():
        images, seconds = zip(*(reached(run["curve"]) for run in found), strict=True)
        cells = [spread([run["after"][key] for run in found], "{:.3f}") for key in ("ocr", "tesseract")]
        cells += [spread(images, "{:.0f}"), spread(seconds, "{:.0f}")]
        cells += [f"{statistics.fmean(run['after'][key] for run in found):.3f}" for key in ("pixels", "colours")]
        lines.append(f"| `{name}` | {len(found)} | {' | '.join(cells)} |")
    return lines


def reached(curve: list[list[float]]) -> tuple[float | None, float | None]:
    """Images and seconds of training until the validation's mean first reaches the target; None where it never does."""
    for step, value, seconds in curve:
        if value >= TARGET:
            return step * IMAGES_A_STEP, seconds
    return None, None


def spread(values: Sequence[float | None], form: str) -> str:
    """`mean (smallest to largest)`; where some runs never got there, how many did."""
    there = [value for value in values if value is not None]
    if not there:
        return "never"
    text = form.format(statistics.fmean(there))
    if len(there) > 1:
        text += f" ({form.format(min(there))} to {form.format(max(there))})"
    return text if len(there) == len(values) else f"{text}, {len(there)} of {len(values)} runs"


def curves(results: Iterable[dict[str, Any]], file: Path) -> None:
    """Validation over the sampled images, a panel for each recipe, all seeds in it and the others behind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs: dict[str, list[list[list[float]]]] = {}
    for result in results:
        runs.setdefault(result["name"], []).append(result["curve"])
    columns = min(4, len(runs))
    rows = -(-len(runs) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3 * columns, 2.3 * rows), sharex=True, sharey=True, squeeze=False
    )
    draw: Callable[..., Any]
    for panel, (name, own) in zip(axes.flat, runs.items(), strict=False):
        draw = panel.plot
        for curve in (c for others in runs.values() for c in others):
            draw(*axes_of(curve), color="0.87", linewidth=0.8)
        for curve in own:
            draw(*axes_of(curve), color="tab:blue", linewidth=1.4)
        panel.set_title(name, fontsize=9)
        panel.axhline(TARGET, color="0.6", linewidth=0.6, linestyle=":")
        panel.tick_params(labelsize=7)
    for panel in list(axes.flat)[len(runs) :]:
        panel.set_visible(False)
    figure.supxlabel("images sampled", fontsize=8)
    figure.supylabel("OCR of held-out numbers", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def axes_of(curve: list[list[float]]) -> tuple[list[float], list[float]]:
    """Images and scores of a run's validations."""
    return [step * IMAGES_A_STEP for step, _, _ in curve], [value for _, value, _ in curve]


def insert(page: Path, lines: list[str]) -> None:
    """Put the table between its marks on a page."""
    text = page.read_text()
    begin, end = (text.index(mark) for mark in MARKS)
    page.write_text(text[: begin + len(MARKS[0])] + "\n" + "\n".join(lines) + "\n" + text[end:])


if __name__ == "__main__":
    main()
