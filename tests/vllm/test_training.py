"""Judges in the training loop, in the ranks' own processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.data.prompts import load_prompts
from phalanx.data.streams import PromptStream
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr
from tests.helpers.jobs import one_step
from tests.helpers.judged import config, read, settings, step_and_terms
from tests.helpers.ranks import run_ranks


def test_a_judge_changes_nothing_else(sd3_folder: Path, judge_model: Path, tmp_path: Path) -> None:
    """With weight 0 beside a rule reward, the step is the same to the last bit as without the judge."""
    rule = "{name: jpeg_incompressibility}"
    plain = run_ranks(one_step, 2, config(sd3_folder, tmp_path / "a", f"reward.functions=[{rule}]"), timeout=100)
    both = settings(judge_model, rule, "{name: vlm_ocr, weight: 0}")
    judged = run_ranks(one_step, 2, config(sd3_folder, tmp_path / "b", *both), timeout=200)
    for without, with_judge in zip(plain, judged, strict=True):
        assert with_judge["row"] == without["row"]
        for key in ("images", "latents", "log_prob", "reward"):
            assert torch.equal(with_judge[key], without[key]), key
        for key, weight in without["weights"].items():
            assert torch.equal(with_judge["weights"][key], weight), key


@pytest.mark.parametrize(("tp", "placement"), [(1, "colocate"), (2, "ranks 2-3")])
def test_scores_are_what_the_model_says(
    sd3_folder: Path, judge_model: Path, tmp_path: Path, tp: int, placement: str
) -> None:
    """The scores of a step on 4 ranks: asked after the sampling, or beside it."""
    judges = settings(judge_model, "{name: vlm_ocr, weight: 2}", "{name: jpeg_compressibility}")
    cfg = config(
        sd3_folder, tmp_path, *judges, f"reward.model.tensor_parallel_size={tp}", f"reward.model.placement={placement}"
    )
    got = run_ranks(step_and_terms, 4, cfg, timeout=250)
    images = torch.cat([rank["images"] for rank in got])
    batch = PromptStream(load_prompts(cfg.data.train_files, "data.train_files"), 4, cfg.data.seed).batch(0)
    wanted = [prompt.meta for prompt in batch for _ in range(4)]
    scores = torch.cat([rank["terms"]["vlm_ocr"] for rank in got])
    assert scores.tolist() == pytest.approx(
        [VlmOcr().parse(text, "", meta) for text, meta in zip(read(images), wanted, strict=True)]
    )
    assert len(set(scores.tolist())) >= 3
    rule = torch.cat([rank["terms"]["jpeg_compressibility"] for rank in got])
    assert torch.equal(got[0]["reward"], 2 * scores + rule)
    assert torch.cat([rank["terms"]["vlm_ocr_unparseable"] for rank in got]).sum() == 0


OWN = '''
from phalanx.rewards import Judge
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr


class Named(Judge):
    """Only red can be read."""

    template = VlmOcr.template

    def parse(self, answer, prompt, metadata):
        if metadata["ground_truth"] == "black" and self.fails:
            raise KeyError("no black")
        return 1.0 if answer == "red" else None

    def __init__(self, fails=False):
        self.fails = fails
'''


def test_a_judge_of_ones_own(sd3_folder: Path, judge_model: Path, tmp_path: Path) -> None:
    """Answers that it cannot read are counted, and scored as configured."""
    (tmp_path / "own.py").write_text(OWN)
    judges = settings(judge_model, f"{{path: '{tmp_path}/own.py:Named'}}")
    cfg = config(sd3_folder, tmp_path, *judges, "reward.model.unparseable_score=0.25")
    got = run_ranks(step_and_terms, 2, cfg, timeout=200)
    images = torch.cat([rank["images"] for rank in got])
    red = torch.tensor([text == "red" for text in read(images)])
    assert 0 < red.sum() < len(red)
    assert torch.equal(torch.cat([rank["terms"]["Named"] for rank in got]), torch.where(red, 1.0, 0.25))
    assert torch.equal(torch.cat([rank["terms"]["Named_unparseable"] for rank in got]), (~red).float())


def failing(cfg: Any) -> str:
    from phalanx.rewards import RewardError

    with pytest.raises(RewardError) as error:
        one_step(cfg)
    return str(error.value)


def test_a_judge_that_raises_ends_the_job_on_all_ranks(sd3_folder: Path, judge_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    judges = settings(judge_model, f"{{path: '{tmp_path}/own.py:Named', kwargs: {{fails: true}}}}")
    got = run_ranks(failing, 2, config(sd3_folder, tmp_path, *judges), timeout=200)
    assert got[0] == got[1]
    assert "reward 'Named' raised KeyError: 'no black' on the prompts " in got[0]
