"""Rules across keys: each row of the tables is broken by a small configuration, with one line that names a key of it."""

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from phalanx import algorithms
from phalanx.config import ConfigError
from phalanx.config.flow import FlowRLConfig
from phalanx.config.joint import JointConfig
from phalanx.config.load import build
from phalanx.config.tasks import CheckClusterConfig, GenerateConfig, PrepareDataConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.run import rules
from phalanx.run.rules import Ranks, Rule, load_config
from tests.helpers.broken_rules import LAUNCHED, LOADED, MODELS, STARTED
from tests.helpers.refused_keys import REFUSED, REFUSED_AT_START

ROOT = Path(__file__).parents[2]


def configuration(schema: type, overrides: tuple[str, ...]) -> Any:
    """A configuration whose rules are not checked."""
    return build(schema, OmegaConf.from_dotlist([*models(schema), *overrides]))


def models(schema: type) -> list[str]:
    """The overrides that a configuration needs."""
    if schema is JointConfig:
        return ["writer.model.path=x", "painter.model.path=x"]
    return [] if schema is PrepareDataConfig else ["model.path=x"]


def broken_by(table: tuple[Rule, ...], cfg: Any, message: str, **given: Any) -> Rule:
    """The rule whose message begins with `message`. The message must be one line and name one of the rule's keys."""
    results = {text: rule for rule, text in rules.broken(table, cfg, **given) if text.startswith(message)}
    ((text, rule),) = results.items()
    plain = text.replace("{name: ocr}", "").replace("{rollout: 0, actor: 1}", "").replace("{} once", "")
    assert "\n" not in text and "{" not in plain
    assert any(re.search(key.replace("*.", "").replace(".*", ""), text) for key in rule.keys.split())
    return rule


def algorithm(cfg: Any) -> Any:
    return algorithms.build(cfg.algorithm) if "algorithm" in vars(cfg) else None


@pytest.mark.parametrize(("schema", "overrides", "message"), LOADED, ids=[message[:50] for *_, message in LOADED])
def test_a_rule_of_a_configuration(schema: type, overrides: tuple[str, ...], message: str) -> None:
    broken_by(rules.RULES, configuration(schema, overrides), message)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load_config(schema, None, [*models(schema), *overrides])


@pytest.mark.parametrize(("schema", "overrides", "message"), REFUSED, ids=[message[:50] for *_, message in REFUSED])
def test_a_key_without_its_choice_and_a_value_out_of_range(
    schema: type, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_config(schema, None, [*models(schema), *overrides])


@pytest.mark.parametrize(("schema", "overrides", "message"), REFUSED_AT_START)
def test_a_key_without_an_algorithm_of_its_kind(schema: type, overrides: tuple[str, ...], message: str) -> None:
    cfg = load_config(schema, None, [*models(schema), *overrides])
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        rules.check_start(cfg, algorithm(cfg))


@pytest.mark.parametrize(("schema", "overrides", "message"), STARTED, ids=[message[:50] for *_, message in STARTED])
def test_a_rule_of_a_job(schema: type, overrides: tuple[str, ...], message: str) -> None:
    cfg = load_config(schema, None, [*models(schema), *overrides])
    broken_by(rules.START_RULES, cfg, message, a=algorithm(cfg))
    with pytest.raises(ConfigError):
        rules.check_start(cfg, algorithm(cfg))


@pytest.mark.parametrize(("schema", "overrides", "ranks", "message"), LAUNCHED)
def test_a_rule_of_a_launch(schema: type, overrides: tuple[str, ...], ranks: Ranks, message: str) -> None:
    cfg = load_config(schema, None, [*models(schema), *overrides])
    broken_by(rules.LAUNCH_RULES, cfg, message, w=ranks)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        rules.check_launch(cfg, ranks)


@pytest.mark.parametrize(
    "keys", [("trainer.peer_copy=true",), ("model.lora_rank=4", "parallel.lora_sharding=replicate")]
)
def test_nodes_may_share_a_copy_of_the_weights_that_is_not_the_only_one(keys: tuple[str, ...]) -> None:
    ranks = Ranks(8, 4, 4, apart=False, restarts=True, in_place=True)
    assert list(rules.broken(rules.LAUNCH_RULES, configuration(FlowRLConfig, keys), w=ranks)) == []


@pytest.mark.parametrize(("overrides", "model", "message"), MODELS)
def test_a_rule_of_a_model(overrides: tuple[str, ...], model: dict[str, Any], message: str) -> None:
    cfg = load_config(GenerateConfig, None, ["model.path=x", "prompts=[a]", *overrides])
    broken_by(rules.MODEL_RULES, cfg, message, m=LMModelConfig(**model))
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        rules.check_model(cfg, LMModelConfig(**model))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("writer.rollout.n=1",), "writer.rollout.n: 1 leaves writer.algorithm.name=grpo nothing"),
        (("painter.optim.betas=[1]",), "painter.optim.betas: expected two numbers in 0 .. 1"),
        (("trainer.critic_warmup=3",), "trainer.critic_warmup: 3 configures a critic"),
        (("environment.path=a:B",), "unknown key environment.path; the writer of a joint run answers once, without"),
        (("writer.environment.path=a:B",), "unknown key writer.environment.path; the writer of a joint run answers"),
        (("placement={rollout: 1}",), "unknown key placement.rollout; a joint run has no ranks of other roles"),
        (("critic.optim.lr=1",), "unknown key critic.optim.lr; no policy of a joint run has a critic"),
        (("algorithm.filter_groups.enable=true",), "unknown key algorithm.filter_groups.enable; a joint run draws no"),
        (("rollout.n=2",), "unknown key rollout.n; here it is writer.rollout.n or painter.rollout.n"),
        (("painter.data.seed=2",), "unknown key painter.data.seed; both policies have one data.seed"),
        (("actor_rollout_ref.rollout.n=2",), "unknown key actor_rollout_ref.rollout.n; here it is rollout.n, which a"),
        (("writer.algorithm.clip_ratio=a",), "writer.algorithm.clip_ratio: expected a number, got 'a'"),
        (
            ("rewrite.pattern='(a{99999999999})'",),
            "rewrite.pattern: expected a pattern such as '<prompt>(.*?)</prompt>' (the repetition",
        ),
        (("writer=3",), "writer: expected a section, got 3"),
    ],
)
def test_a_policy_of_a_joint_run_keeps_the_rules_of_its_kind(overrides: tuple[str, ...], message: str) -> None:
    """Messages name the joint run's keys."""
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load_config(JointConfig, None, [*models(JointConfig), *overrides])


@pytest.mark.full
def test_no_rule_is_dead() -> None:
    """Each row of the tables is broken by an example above."""
    loaded = [broken_by(rules.RULES, configuration(schema, keys), message) for schema, keys, message in LOADED]
    assert set(loaded) == set(rules.RULES)
    configurations = [(configuration(schema, keys), message) for schema, keys, message in STARTED]
    started = [broken_by(rules.START_RULES, cfg, message, a=algorithm(cfg)) for cfg, message in configurations]
    assert set(started) == set(rules.START_RULES)
    launched = [
        broken_by(rules.LAUNCH_RULES, configuration(schema, keys), message, w=ranks)
        for schema, keys, ranks, message in LAUNCHED
    ]
    assert set(launched) == set(rules.LAUNCH_RULES)
    modelled = [
        broken_by(rules.MODEL_RULES, configuration(GenerateConfig, keys), message, m=LMModelConfig(**model))
        for keys, model, message in MODELS
    ]
    assert set(modelled) == set(rules.MODEL_RULES)


def test_a_rule_stands_in_one_place() -> None:
    """No module outside the rules raises the message of a rule."""
    folder = ROOT / "src" / "phalanx" / "run" / "rules"
    files = [path for path in (ROOT / "src").rglob("*.py") if not path.is_relative_to(folder)]
    sources = without_fields("".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in files))
    for rule in (*rules.RULES, *rules.START_RULES, *rules.LAUNCH_RULES, *rules.MODEL_RULES):
        text = without_fields(rule.message).removeprefix("{}: ")
        assert len(text) > 15 and text not in sources, rule.message


def without_fields(text: str) -> str:
    """The text with {} for each field of a format string."""
    return re.sub(r"\{[^{}\n]*(\{[^{}\n]*\}[^{}\n]*)?\}", "{}", text)


def test_a_file_for_the_cluster_check_is_of_any_job() -> None:
    """The cluster check reads files of any job, so rules of flow matching must not apply to reinforcement learning."""
    assert load_config(CheckClusterConfig, None, ["rollout.num_frames=5"]).rollout.num_frames == 5
