"""Does each algorithm learn? Measured on the quickstart's task, with the same number of images, over several seeds.

    make learn
    python benchmarks/learn.py flow_grpo diffusion_nft --seeds 0 --steps 25

Each recipe of learn.yaml is trained on one CPU process, `--jobs` of them concurrently, and validated during training;
its last checkpoint then samples the held-out prompts again with other noise. These images are scored by the OCR that
training uses, by Tesseract, which no recipe was trained on (its score shows whether a recipe fooled the OCR), and by
their diversity. Finished runs are not repeated. The teacher of a recipe is the quickstart's model, which is trained
first. The table is printed; that of docs/algorithms.md and its curves are of the leaderboard's rows (board.py).
"""

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from learning import Rows, Subject, main, remembered, task
from PIL import Image

HELD_OUT = "assets/digits/held_out.txt"
IMAGES_PER_PROMPT = 4
SCALE = 4  # Tesseract needs larger letters


def base(output: Path) -> dict[str, float]:
    """Scores of the base model, sampled as a run of the quickstart validates."""
    size = ["height=24", "width=48", "num_inference_steps=10", "max_prompt_length=1"]
    return sampled(output / "base", ["model.path=assets/digits/base", "model.dtype=float32", *size])


def after(folder: Path, rows: Rows) -> dict[str, float]:
    """Scores of a run's last checkpoint."""
    samples = folder / "samples"
    return remembered(samples / "scores.json", lambda: sampled(samples, [f"checkpoint={folder}"]))


def sampled(folder: Path, source: list[str]) -> dict[str, float]:
    """Sample and score images of the held-out prompts, from a checkpoint or a model folder."""
    keys = [f"prompt_file={HELD_OUT}", f"n={IMAGES_PER_PROMPT}", "seed=99", "micro_batch_size_per_gpu=64"]
    task("sample", [*source, *keys, f"output_dir={folder}"], folder.with_suffix(".log"))
    return scores(folder)


def scores(folder: Path) -> dict[str, float]:
    """Scores of the images in a folder: `ocr` and `tesseract`, their mean scores in 0..1; `pixels`, the mean RMS
    distance in 0..1 of two images of the same prompt; `colours`, the standard deviation of the images' mean colors. The
    scores of prompts by `ocr` go to prompts.json.
    """
    import torch

    from phalanx.zoo.rewards.image.ocr import Ocr

    index = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    images = np.stack([np.asarray(Image.open(folder / row["file"]).convert("RGB")) for row in index]) / 255.0
    prompts = [row["prompt"] for row in index]
    reader = Ocr(detect=False)
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    ocr = reader(tensor, prompts, [{"ground_truth": target(prompt)} for prompt in prompts])
    by_prompt = np.round(np.reshape(ocr, (-1, IMAGES_PER_PROMPT)).mean(1), 4)
    (folder / "prompts.json").write_text(json.dumps(by_prompt.tolist()))
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


def of_prompts(folder: Path) -> list[float]:
    """The score by `ocr` of each held-out prompt in a finished run."""
    known: list[float] = json.loads((folder / "samples" / "prompts.json").read_text())
    return known


def target(prompt: str) -> str:
    """The number in a prompt."""
    return "".join(c for c in prompt if c.isdigit())


def similar(wanted: str, read: str) -> float:
    """The similarity of two texts, as in the reward `ocr`."""
    from rapidfuzz.distance import Levenshtein

    return 1.0 - min(1.0, Levenshtein.distance(wanted, "".join(read.lower().split())) / len(wanted))


def tesseract(images: np.ndarray[Any, Any]) -> list[str]:
    """Tesseract's texts of images [N, H, W, 3] in 0..1, each with one line of text."""
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
    command = ["tesseract", str(file), "stdout", "--psm", "7", "-c", "tessedit_char_whitelist=0123456789"]
    one_thread = os.environ | {"OMP_THREAD_LIMIT": "1"}  # its own wait for each other, on a busy machine for minutes
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread).stdout
    folder.cleanup()
    texts = out.split("\f")[: len(pages)]
    assert len(texts) == len(pages), (len(texts), len(pages))
    return texts


SUBJECT = Subject(
    name="learn",
    task="train_flowgrpo",
    config="configs/flowgrpo/quickstart.yaml",
    fixed=[  # the quickstart's settings when the first rows were trained
        "data.train_batch_size=12",
        "rollout.num_inference_steps=10",
        "rollout.sde_window_range=[0,5]",
        "actor.ppo_mini_batch_size=6",
        "actor.ppo_micro_batch_size_per_gpu=24",
        "optim.lr=1e-4",
        "optim.lr_warmup_steps=0",
        "optim.lr_decay_fraction=0.3",
    ],
    page="algorithms.md",
    picture="learning.png",
    mark="learning",
    validation="val/held_out/reward/mean",
    scale="OCR of held-out numbers",
    noun="images",
    samples=192,  # of every recipe
    steps=40,
    test_freq=5,
    target=0.8,
    spreads={"ocr": "OCR", "tesseract": "Tesseract"},
    program="tesseract",
    means={"pixels": "pixels", "colours": "colours"},
    base=base,
    after=after,
    scores=of_prompts,
    board=True,
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
