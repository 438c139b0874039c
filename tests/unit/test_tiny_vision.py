"""The tiny vision-language models of the tests: a folder's processor and model work together."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from phalanx.engines.transformers import load_processor
from tests.helpers.tiny_vision import FAMILIES, chat, picture, tiny_vision


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_about_one_and_two_images_of_any_size(family: str, tmp_path: Path) -> None:
    tiny_vision(tmp_path, family)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1e6
    processor = load_processor(str(tmp_path))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    placeholder = model.config.image_token_id

    def ask(*images):  # type: ignore[no-untyped-def]
        text = processor.apply_chat_template(chat("read", len(images)), add_generation_prompt=True)
        inputs = processor(text=[text], images=[list(images)], return_tensors="pt")
        logits = model(**inputs).logits[0, -1]
        out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        assert out.shape[1] > inputs["input_ids"].shape[1]
        return int((inputs["input_ids"] == placeholder).sum()), logits

    with torch.no_grad():
        tokens, first = ask(picture())
        assert tokens == FAMILIES[family].image_tokens
        _, other = ask(picture(seed=1))
        assert (first - other).abs().max() > 0.01
        larger, _ = ask(picture(64, 40))
        assert larger > 0
        two, _ = ask(picture(), picture(64, 40))
        assert two == tokens + larger
