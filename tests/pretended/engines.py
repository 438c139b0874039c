"""Engines that sample in the policy's own modules and say that their log-probabilities are not the policy's, so that
ranks of another role take them again.
"""

from phalanx.config.engine_facts import EngineFacts
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.lm.in_policy import LMRollout


class Texts(LMRollout):
    facts = EngineFacts(exact=False)


class Images(PolicyRollout):
    facts = EngineFacts(exact=False)
