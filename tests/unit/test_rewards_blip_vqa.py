"""BLIP-VQA at tiny size with random weights: the product of BLIP's answers to single phrases."""

from pathlib import Path

import pytest
import torch

from phalanx.types import Prompt
from tests.helpers.rewards import entry, rewards, scored, told
from tests.unit.test_rewards_clip import clip_folder, random_images  # noqa: F401

WIDTH, EDGE = 32, 48
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes", "no", "?", "a", "red", "green", "cat", "bench"]
VOCABULARY = len(WORDS) + 2  # the tokens that open an answer and a question


@pytest.fixture(scope="module")
def blip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertTokenizer, BlipConfig, BlipForQuestionAnswering

    folder = tmp_path_factory.mktemp("blip")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": VOCABULARY - 2, "pad_token_id": 0, "sep_token_id": 3, "eos_token_id": 3}
    text = {**sizes, **ids, "vocab_size": VOCABULARY, "encoder_hidden_size": WIDTH, "max_position_embeddings": 48}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BlipConfig(text_config=text, vision_config={**sizes, "image_size": EDGE, "patch_size": 16})
        model = BlipForQuestionAnswering(config)
        for name, parameter in model.named_parameters():
            mean = float("norm" in name.lower() and name.endswith("weight"))
            torch.nn.init.normal_(parameter, mean=mean, std=0.3)
        model.tie_weights()
    model.save_pretrained(folder)
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


def test_the_product_of_the_answers(blip_folder: Path) -> None:
    from transformers import BlipForQuestionAnswering

    images = random_images(EDGE, EDGE, 2)
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixels = ((images * 255).round() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    blip = BlipForQuestionAnswering.from_pretrained(blip_folder).eval()

    def chance(image: int, *words: str) -> float:
        """The probability of yes, relative to no. The last token opens the question, the one before it the answer."""
        ids = torch.tensor([[VOCABULARY - 1, *map(WORDS.index, words), WORDS.index("?"), WORDS.index("[SEP]")]])
        with torch.no_grad():
            patches = blip.vision_model(pixels[image : image + 1]).last_hidden_state
            states = blip.text_encoder(input_ids=ids, encoder_hidden_states=patches).last_hidden_state
            first = torch.tensor([[VOCABULARY - 2]])
            logits = blip.text_decoder(input_ids=first, encoder_hidden_states=states).logits[0, 0]
        yes, no = logits[5].exp(), logits[6].exp()
        return float(yes / (yes + no))

    phrases = [["a red cat", "A green (bench)."], ["cat"]]
    expected = [chance(0, "a", "red", "cat") * chance(0, "a", "green", "bench"), chance(1, "cat")]
    prompts = [Prompt("p", i, {"phrases": each}) for i, each in enumerate(phrases)]
    reward = rewards(entry("blip_vqa", model=str(blip_folder)))
    assert scored(reward, (images, prompts))["blip_vqa"] == pytest.approx(expected, abs=1e-5)
    assert chance(0, "a", "red", "cat") != pytest.approx(chance(0, "a", "green", "bench"), abs=1e-5)
    images.requires_grad_()
    reward.with_gradient(images, prompts=prompts, step=0).sum().backward()
    assert images.grad is not None and bool(images.grad.flatten(1).any(1).all())


def test_mistakes(blip_folder: Path, clip_folder: Path) -> None:  # noqa: F811
    objection = rewards(entry("blip_vqa", model=str(blip_folder), column="parts")).terms[0].objection
    expected = "expected a list of parts of the prompt, such as [a red cat]"
    assert objection("p", {}) == f"parts None; {expected}"
    assert objection("p", {"parts": [3]}) == f"parts [3]; {expected}"
    assert objection("p", {"parts": []}) == f"parts []; {expected}"
    message = told(ValueError, rewards, entry("blip_vqa", model=str(clip_folder)))
    assert message.startswith(f"reward.functions[0] (blip_vqa): model={str(clip_folder)!r} ")
