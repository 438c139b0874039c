"""Which engine samples, and what is refused before anything is built."""

import re

import pytest

from phalanx.config import ConfigError, load
from phalanx.config.flow import FlowRLConfig, FlowRolloutConfig
from phalanx.rollout.flow import check_engine


def test_the_engines_are_known() -> None:
    message = "rollout.engine: expected one of policy, vllm_omni, dataset, got 'vllm'"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load(FlowRLConfig, None, ["model.path=x", "rollout.engine=vllm"])


@pytest.mark.parametrize("correction", ["none", "truncated_is", "rejection"])
def test_the_policy_needs_no_correction(correction: str) -> None:
    message = f"rollout.correction: {correction} has nothing to correct where rollout.engine is policy; its log-probs are exact"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_engine(FlowRolloutConfig(correction=correction))


def test_an_engine_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_engine(FlowRolloutConfig())
    monkeypatch.setattr("phalanx.rollout.flow.find_spec", lambda name: None)
    message = "rollout.engine: vllm_omni is not installed; pip install 'phalanx[vllm-omni]', or set policy"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_engine(FlowRolloutConfig(engine="vllm_omni"))
