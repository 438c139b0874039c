"""Turn the writer's responses into the painter's prompts, in a joint run."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from phalanx.config.joint import RewriteConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed.collectives import all_gather_object
from phalanx.exit import place
from phalanx.models.flow.family import FlowModel
from phalanx.rewards.verifier import Verifier, VerifierError
from phalanx.types import Prompt

log = logging.getLogger(__name__)

MATCH_S = 1.0  # CPU seconds to match the user's pattern against a response, which may be any text
ORIGINAL = "original_prompt"  # key of the original text in a rewritten prompt's meta
GROUP = "original_group"  # key of the original group_id


def as_original(prompt: Prompt) -> Prompt:
    """The prompt by which an image is judged: for a rewritten prompt, the original one."""
    if ORIGINAL not in prompt.meta:
        return prompt
    # Images of all rewrites of a prompt form one group; if rewards compared only images of the same rewrite, all
    # rewrites would be equally good on average. Fillers without a group (see without_filling) remain without.
    group_id = prompt.meta[GROUP] if prompt.group_id >= 0 else prompt.group_id
    return replace(prompt, text=prompt.meta[ORIGINAL], group_id=group_id)


def rewritten(response: str, config: RewriteConfig, last_group: Verifier) -> str | None:
    """The prompt in a response, without think blocks and on one line; None if there is none. Raises VerifierError if
    matching the pattern takes too long.
    """
    # the chat template may have opened the think block, and the token limit may have cut it
    text = response.rpartition("</think>")[2].partition("<think>")[0]
    if config.pattern is not None:
        text = last_group.ask(config.pattern, text) or ""
    text = " ".join(text.split())
    return config.template.format(text) if text else None


class Rewriter:
    """Makes the painter's prompts from responses, and provides them as a phalanx.training.collect.PromptSource: after
    `write`, the prompts of one step.
    """

    ahead = False

    def __init__(self, config: RewriteConfig, originals: PromptStream, model: FlowModel, longest: int) -> None:
        """longest: data.max_prompt_length of the painter `model`."""
        self.config, self.originals, self.model, self.longest = config, originals, model, longest
        self._prompts: list[Prompt] = []
        self._last_group, self._told = Verifier("last_group", MATCH_S), False

    def write(self, step: int, responses: Sequence[str], each: int) -> dict[str, float]:
        """Make the prompts of a step from this rank's responses, and return rewrite/... metrics. each: number of
        responses per original prompt, over all ranks.
        """
        prompts = self.originals.batch(step)
        texts = self.texts(responses)
        self._prompts = []
        fallbacks, distinct, cut = 0, 0, 0
        for number, prompt in enumerate(prompts):
            group = texts[number * each : (number + 1) * each]
            fallbacks += sum(text is None for text, _ in group)
            cut += sum(is_cut for _, is_cut in group)
            distinct += len({text for text, _ in group})
            for text in [*(text for text, _ in group), *[None] * self.config.keep_originals]:
                self._prompts.append(self.prompt(prompt, text, len(self._prompts)))
        total = len(prompts) * each
        return {
            "rewrite/fallback_ratio": fallbacks / total,
            "rewrite/cut_ratio": cut / total,
            "rewrite/distinct_ratio": distinct / total,
        }

    def texts(self, responses: Sequence[str]) -> list[tuple[str | None, bool]]:
        """The prompts in all ranks' responses (None if there is none), and whether each is too long for the painter,
        which then reads only its first tokens.
        """
        texts = list(map(self._rewrite_response, responses))
        known = [text for text in texts if text is not None]
        too_long = iter(self._too_long(known))
        local = [(text, text is not None and next(too_long)) for text in texts]
        return [one for part in all_gather_object(local) for one in part]

    def _rewrite_response(self, response: str) -> str | None:
        """See `rewritten`; None if matching the pattern takes too long, which is logged once."""
        try:
            return rewritten(response, self.config, self._last_group)
        except VerifierError as error:
            if not self._told:  # logged as an error, since this may be any rank and only rank 0 shows warnings
                log.error(
                    "%s: rewrite.pattern: %s on a response of %d characters; the painter gets the original prompt "
                    "instead, and writer/rewrite/fallback_ratio counts further cases",
                    place(),
                    error,
                    len(response),
                )
            self._told = True
            return None

    def _too_long(self, texts: list[str]) -> list[bool]:
        """Whether each text has more tokens than the painter reads."""
        if not texts:
            return []
        _, tokens, limit = self.model.text_tokens(texts, self.longest)
        return [len(ids) > limit for ids in tokens]

    def prompt(self, original: Prompt, text: str | None, number: int) -> Prompt:
        """The painter's prompt `number`: the original prompt with another text, or unchanged if `text` is None."""
        meta = original.meta | {ORIGINAL: original.text, GROUP: original.group_id}
        return replace(original, text=original.text if text is None else text, group_id=number, meta=meta)

    # -- the source of the painter's prompts --------------------------------------------------------------------------

    def numbers(self, step: int) -> list[int]:
        """The numbers of the prompts of the last `write`."""
        return list(range(len(self._prompts)))

    def prompts(self, numbers: list[int], first: int = 0) -> list[Prompt]:
        """The prompts with these numbers."""
        return [self._prompts[number] for number in numbers]

    def renewed(self, numbers: list[int], places: list[int], draw: int) -> list[int]:
        """Never called: joint runs do not resample."""
        raise AssertionError("the prompts of a joint run are not renewed")

    def steps(self, epochs: float) -> int:
        """Number of training steps in `epochs` epochs over the original prompts."""
        return self.originals.steps(epochs)
