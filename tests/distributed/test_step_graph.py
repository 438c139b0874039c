"""Decoding steps as CUDA graphs, on a pretended device: their tokens, memory and waits beside those without graphs."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from phalanx.models.lm.model import CausalLM
from phalanx.rollout.lm.policy_session import PolicySession
from phalanx.rollout.lm.session import Request, converse
from phalanx.rollout.lm.step_graph import LEAST, rounded
from tests.helpers.ranks import run_ranks
from tests.helpers.sessions import asked
from tests.numerics.test_converse import HOW, LIMIT, PROMPTS, ROOM, ROWS, Answers
from tests.pretended import install
from tests.pretended.record import Record


def drawn(model: Any, talks: bool, eager: bool, record: Record) -> dict[str, Any]:
    """The tokens of conversations or of single turns, and the number of steps, of the model's calls and of waits."""
    uniform = torch.rand(len(ROWS), LIMIT, generator=torch.Generator().manual_seed(0))
    requests = asked(PROMPTS, ROWS, uniform, HOW, ROOM if talks else ())
    session = PolicySession(model, model.lm.config, torch.device("cuda"), 7, scores=True, eager=eager)
    places, calls, step, forward = list[set[int]](), list[int](), session.step, model.lm.forward

    def watched() -> list[Request]:
        over = step()
        places.append({buffer.data_ptr() for layer in session._kept.cache.layers for buffer in layer.buffers})
        return over

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    session.step, model.lm.forward = watched, counted  # type: ignore[method-assign]
    record.syncs.clear()
    converse(session, requests, Answers() if talks else None, 8)
    del model.lm.forward
    assert all(place == places[0] for place in places)  # allocated once
    found = {"tokens": [request.tokens for request in requests], "steps": len(places), "calls": len(calls)}
    return found | {"waits": {place: count for (_, _, place), count in record.syncs.items()}}


def compare(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    record = install()
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = CausalLM(lm.to("cuda"), chunk=1024)
    return [drawn(model, True, eager, record) for eager in (False, True)], record.faults


def test_graphs_draw_the_tokens_of_steps_without_graphs(lm_folder: Path) -> None:
    """Rows end, are filled again and wait for answers; the host waits once per step."""
    [((graphs, eager), faults)] = run_ranks(compare, 1, lm_folder, init=False)
    assert not faults and graphs["tokens"] == eager["tokens"]
    assert graphs["calls"] < 0.3 * eager["calls"]  # the others run no Python of the model
    assert graphs["waits"] == eager["waits"]
    assert graphs["waits"].pop("rollout/lm/policy_session.py:PolicySession.step") == graphs["steps"]
    assert sum(graphs["waits"].values()) < 20  # transformers' masks of the prompts, and the check at the end


def not_captured(folder: Path) -> tuple[list[list[list[int]]], list[str]]:
    """Tokens of a model that looks at its values, as experts do, and what was logged."""
    install()
    lm, lines = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), list[str]()
    model = CausalLM(lm.to("cuda"), chunk=1024)
    forward, log = model.lm.forward, logging.getLogger("phalanx.rollout.lm.step_graph")
    log.setLevel(logging.INFO)
    log.addFilter(lambda line: lines.append(line.getMessage()) is None)

    def looking(*args: Any, **kwargs: Any) -> Any:
        kwargs["input_ids"].nonzero()
        return forward(*args, **kwargs)

    model.lm.forward = looking
    tokens = []
    for eager in (False, True):
        tokens.append(drawn(model, False, eager, Record())["tokens"])
        model.lm.forward = looking
    return tokens, lines


@pytest.mark.full
def test_a_model_that_looks_at_its_values_decodes_without_graphs(lm_folder: Path) -> None:
    [(tokens, lines)] = run_ranks(not_captured, 1, lm_folder, init=False)
    assert tokens[0] == tokens[1]
    assert lines == ["decoding steps are not captured as CUDA graphs, and are slower: nonzero waits for the host"]


def test_widths_of_graphs() -> None:
    """Few, and at most a quarter wider than what they serve."""
    assert [rounded(width) for width in (1, LEAST, LEAST + 1, 1025, 2049)] == [256, 256, 512, 1280, 2560]
    widths = {rounded(width) for width in range(1, 32769)}
    assert len(widths) == 24
    assert all(rounded(width) < width + max(LEAST, width // 4 + 1) for width in range(1, 32769, 7))
