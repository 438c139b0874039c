"""The prompts of a painter, as a writer's responses say them."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from phalanx.config.joint import RewriteConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed.collectives import all_gather_object
from phalanx.exit import place
from phalanx.models.flow.family import FlowModel
from phalanx.rewards.text._process import Verifier, VerifierError
from phalanx.types import Prompt

log = logging.getLogger(__name__)

MATCH_S = 1.0  # seconds of the processor for a response: the pattern is the user's, but the text is the model's
ORIGINAL = "original_prompt"  # in a rewritten prompt's meta
GROUP = "original_group"  # its group_id


def as_original(prompt: Prompt) -> Prompt:
    """The prompt by which a picture is judged: the original one of a rewritten prompt."""
    if ORIGINAL not in prompt.meta:
        return prompt
    # Pictures of all rewritten prompts are one group: where they were compared only within one of these, all would be
    # equally good on average. Those that belong to no group (see without_filling) still do not.
    group_id = prompt.meta[GROUP] if prompt.group_id >= 0 else prompt.group_id
    return replace(prompt, text=prompt.meta[ORIGINAL], group_id=group_id)


def rewritten(response: str, config: RewriteConfig, last_group: Verifier) -> str | None:
    """The prompt that a response says, without think blocks, on one line; None if it says none. Raises VerifierError
    where the pattern takes too long.
    """
    # a chat template may have opened the block, and the limit may have cut it
    text = response.rpartition("</think>")[2].partition("<think>")[0]
    if config.pattern is not None:
        text = last_group.ask(config.pattern, text) or ""
    text = " ".join(text.split())
    return config.template.format(text) if text else None


class Rewriter:
    """Makes the painter's prompts of responses, and is the source of them (phalanx.training.collect.PromptSource):
    those of a step, which `write` has made.
    """

    ahead = False

    def __init__(self, config: RewriteConfig, originals: PromptStream, model: FlowModel, longest: int) -> None:
        """`longest`: tokens of a prompt that the painter's `model` may read."""
        self.config, self.originals, self.model, self.longest = config, originals, model, longest
        self._prompts: list[Prompt] = []
        self._last_group, self._told = Verifier("last_group", MATCH_S), False

    def write(self, step: int, responses: Sequence[str], each: int) -> dict[str, float]:
        """Make the prompts of a step of this rank's responses, `each` to each original prompt on all ranks together;
        returns rewrite/... metrics.
        """
        prompts = self.originals.batch(step)
        texts = self.texts(responses)
        self._prompts = []
        fallen, distinct, cut = 0, 0, 0
        for number, prompt in enumerate(prompts):
            group = texts[number * each : (number + 1) * each]
            fallen += sum(text is None for text, _ in group)
            cut += sum(is_cut for _, is_cut in group)
            distinct += len({text for text, _ in group})
            for text in [*(text for text, _ in group), *[None] * self.config.keep_originals]:
                self._prompts.append(self.prompt(prompt, text, len(self._prompts)))
        total = len(prompts) * each
        return {
            "rewrite/fallback_ratio": fallen / total,
            "rewrite/cut_ratio": cut / total,
            "rewrite/distinct_ratio": distinct / total,
        }

    def texts(self, responses: Sequence[str]) -> list[tuple[str | None, bool]]:
        """The rewritten prompts of all ranks' responses, None if there is none, and whether the painter reads only
        the first tokens of each.
        """
        texts = list(map(self._rewritten, responses))
        known = [text for text in texts if text is not None]
        lengths = iter(self._lengths(known))
        local = [(text, text is not None and next(lengths)) for text in texts]
        return [one for part in all_gather_object(local) for one in part]

    def _rewritten(self, response: str) -> str | None:
        """See `rewritten`; None if the pattern takes too long, which is said once."""
        try:
            return rewritten(response, self.config, self._last_group)
        except VerifierError as error:
            if not self._told:  # an error, since only this rank may see it: only rank 0 shows warnings
                log.error(
                    "%s: rewrite.pattern: %s on a response of %d characters, in whose place the painter gets the "
                    "original prompt; from here on see writer/rewrite/fallback_ratio",
                    place(),
                    error,
                    len(response),
                )
            self._told = True
            return None

    def _lengths(self, texts: list[str]) -> list[bool]:
        """Whether each text has more tokens than the painter reads."""
        if not texts:
            return []
        _, tokens, limit = self.model.text_tokens(texts, self.longest)
        return [len(one) > limit for one in tokens]

    def prompt(self, original: Prompt, text: str | None, number: int) -> Prompt:
        """The painter's prompt of that number: an original with another text, or as it is."""
        meta = original.meta | {ORIGINAL: original.text, GROUP: original.group_id}
        return replace(original, text=original.text if text is None else text, group_id=number, meta=meta)

    # -- the source of the painter's prompts --------------------------------------------------------------------------

    def numbers(self, step: int) -> list[int]:
        """The prompts of the step whose responses were given last."""
        return list(range(len(self._prompts)))

    def prompts(self, numbers: list[int], first: int = 0) -> list[Prompt]:
        """The prompts of these numbers."""
        return [self._prompts[number] for number in numbers]

    def renewed(self, numbers: list[int], places: list[int], draw: int) -> list[int]:
        """Joint runs draw nothing again."""
        raise AssertionError("the prompts of a joint run are not renewed")

    def steps(self, epochs: float) -> int:
        """Training steps for `epochs` passes over the original prompts."""
        return self.originals.steps(epochs)
