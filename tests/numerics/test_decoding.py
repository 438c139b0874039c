"""Stop texts and stop tokens, which end responses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.config.lm import LMRolloutConfig
from phalanx.functional.scores import BLOCK
from phalanx.models.lm.model import CausalLM
from phalanx.rollout.lm.decode import Decoding, draw
from phalanx.rollout.lm.in_policy import check_stops
from phalanx.rollout.lm.session import StopTexts
from tests.helpers.lm import one_step, tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.sessions import decode

PROMPTS, ROWS = [[5, 9, 11, 40], [7]], [0, 0, 0, 1, 1, 1]


@pytest.fixture(scope="module")
def tokenizer(lm_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(lm_folder)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("ab</a>cd", ["</a>"], "ab</a>"),
        ("ab</a>cd", ["</b>", "c", "</a>"], "ab</a>"),
        ("aab", ["ab"], "aab"),
        ("x\u20acy", ["\u20ac"], "x\u20ac"),
        ("Ann has", ["nn"], "Ann"),
        ("Ann has", ["An"], "Ann"),
        ("abc", ["abcd"], None),
    ],
)
def test_the_token_that_completes_a_text_is_the_last(
    tokenizer: Any, text: str, stops: list[str], expected: str | None
) -> None:
    """Also if a text spans several tokens, a token contains more than the text, or a character has several tokens."""
    stop_texts, tokens = StopTexts(tokenizer, stops, [5, 9]), tokenizer(text).input_ids
    complete = [stop_texts.complete(token) for token in tokens]
    assert (tokenizer.decode(tokens[: complete.index(True) + 1]) if any(complete) else None) == expected


def test_responses_end_with_a_text(lm_folder: Path, tokenizer: Any) -> None:
    """Each equals the response without stop texts up to the first one, whatever the others in the batch do."""
    model = CausalLM(AutoModelForCausalLM.from_pretrained(lm_folder, dtype=torch.float32).eval(), chunk=1024)
    uniform = torch.rand(6, 16, generator=torch.Generator().manual_seed(0))
    settings = PROMPTS, ROWS, uniform, Decoding(16, 1.0, [], 0)
    whole = decode(model, *settings)
    stop = tokenizer.decode(whole[0][1:3])
    ended = decode(model, *settings, [StopTexts(tokenizer, [stop], PROMPTS[row]) for row in ROWS])
    assert ended[0] == whole[0][:3]
    for response, longer in zip(ended, whole, strict=True):
        assert response == longer[: len(response)]
        assert (len(response) < 16) == (stop in tokenizer.decode(longer))


def test_a_step_with_stops(lm_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Responses that end with a stop text or token do not count as truncated, and are trained up to it."""
    (plain,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "plain", "rollout.mask_truncated=true"))
    letter = tokenizer.convert_tokens_to_ids("s")
    stops = ("rollout.stop=[e]", f"rollout.stop_token_ids=[{letter}]", "rollout.mask_truncated=true")
    (step,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "stops", *stops))
    shorter = 0
    for text, longer, mask in zip(step["texts"], plain["texts"], step["mask"], strict=True):
        assert longer.startswith(text) and "e" not in text[:-8]
        shorter += len(text) < len(longer)
        assert mask.any() or len(tokenizer(text).input_ids) >= 12
    assert shorter and step["mask"].any(1).sum() > plain["mask"].any(1).sum()
    assert step["row"]["actor/first_ratio_error"] == 0


def test_stops_that_end_nothing_are_refused(lm_folder: Path, tokenizer: Any) -> None:
    class Policy:
        rows = 512

        class config:
            path = "folder"

    Policy.tokenizer = tokenizer  # type: ignore[attr-defined]
    check_stops(Policy, LMRolloutConfig(stop=["x"], stop_token_ids=[511]))  # type: ignore[arg-type]
    problem = r"^rollout.stop_token_ids: 512 is not a token of 'folder'; expected ids below 512$"
    with pytest.raises(ValueError, match=problem):
        check_stops(Policy, LMRolloutConfig(stop_token_ids=[512]))  # type: ignore[arg-type]
    Policy.tokenizer = object()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^rollout.stop: the tokenizer of 'folder' is not backed by the tokenizers"):
        check_stops(Policy, LMRolloutConfig(stop=["x"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_that_are_read_in_parts_are_drawn_as_by_their_definition(temperature: float) -> None:
    """The distributions are inverted at a uniform number each, in float64; a CPU reads two of these five at a time."""
    logits = torch.randn(5, BLOCK // 2 - 3, generator=torch.Generator().manual_seed(0))
    uniform = torch.tensor([0.0, 0.3, 0.6, 0.9, 1 - 2**-24])
    drawn = draw(logits, uniform, Decoding(1, temperature, [], 0))
    ends = torch.softmax(logits / temperature, -1).double().cumsum(-1)
    expected = torch.searchsorted(ends, uniform.double()[:, None] * ends[:, -1:], right=True)
    assert torch.equal(drawn, expected.squeeze(1))
