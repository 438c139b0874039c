"""Reward: BLIP-VQA of T2I-CompBench (arXiv 2307.06350): whether the image shows each part of the prompt.

For each of the row's phrases, such as "a green bench", BLIP is asked `a green bench?`. The score is the product of the
probabilities of yes, relative to no. The model is transformers' BlipForQuestionAnswering.
"""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, BlipForQuestionAnswering

from phalanx.rewards.base import DifferentiableReward
from phalanx.zoo.rewards.image._clip import Pixels, load_model, load_part, openai_colours

_IGNORED = re.compile(r'[.!"()*#:;~]')  # characters that BLIP's questions do not have
_MAX_TOKENS = 35
_KIND = "a BLIP that answers questions"
_ANSWERS = ("yes", "no")


class BlipVqa(DifferentiableReward):
    """`model`: folder or hub id of a BlipForQuestionAnswering with its tokenizer; `column`: that of the phrases."""

    def __init__(
        self, model: str = "Salesforce/blip-vqa-capfilt-large", column: str = "phrases", device: str = "cpu"
    ) -> None:
        blip = load_model(BlipForQuestionAnswering, model, "model", _KIND)
        self._blip: Any = blip.to(device)
        self._tokenizer = load_part(AutoTokenizer, model, "model")
        text = blip.config.text_config
        self._answers = self._tokenizer.convert_tokens_to_ids(list(_ANSWERS))
        unknown = self._tokenizer.unk_token_id
        if unknown in self._answers or max(self._answers) >= text.vocab_size:
            raise ValueError(f"model={model!r} has a tokenizer without the words yes and no; expected BERT's")
        # after BERT's vocabulary come the token that opens an answer and, last, the one that opens a question
        self._opens_answer, self._opens_question = text.bos_token_id, text.vocab_size - 1
        self._column, self._device = column, torch.device(device)
        edge = blip.config.vision_config.image_size
        self._pixels = Pixels(None, (edge, edge), (edge, edge), *openai_colours(device))

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without phrases."""
        phrases = metadata.get(self._column)
        if not isinstance(phrases, list) or not phrases or not all(isinstance(each, str) for each in phrases):
            raise ValueError(f"{self._column} {phrases!r}; expected a list of parts of the prompt, such as [a red cat]")

    def with_gradient(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores [B] in 0..1 of images [B, 3, H, W] in 0..1."""
        questions, image_of = [], []
        for i, (prompt, row) in enumerate(zip(prompts, metadata, strict=True)):
            self.check_row(prompt, row)
            for phrase in row[self._column]:
                questions.append(_IGNORED.sub("", f"{phrase}?".lower()).rstrip())
                image_of.append(i)
        patches = self._blip.vision_model(self._pixels(images.to(self._device))).last_hidden_state
        probabilities = self._yes_probabilities(patches[image_of], questions)
        counts = [len(row[self._column]) for row in metadata]
        return torch.stack([part.prod() for part in probabilities.split(counts)])

    def _yes_probabilities(self, patches: Tensor, questions: list[str]) -> Tensor:
        """The probabilities [Q] of yes, relative to no, for Q questions about images with patches [Q, N, D]."""
        ids = self._tokenizer(questions, truncation=True, max_length=_MAX_TOKENS).input_ids
        probabilities: list[Tensor] = [patches.new_empty(())] * len(ids)
        for length in sorted(set(map(len, ids))):  # batches of one length, since the model would attend to padding
            places = [i for i, tokens in enumerate(ids) if len(tokens) == length]
            tokens = torch.tensor([ids[i] for i in places], device=self._device)
            tokens[:, 0] = self._opens_question
            states = self._blip.text_encoder(tokens, encoder_hidden_states=patches[places]).last_hidden_state
            first = torch.full_like(tokens[:, :1], self._opens_answer)
            logits = self._blip.text_decoder(first, encoder_hidden_states=states).logits[:, 0, self._answers]
            for i, probability in zip(places, logits.softmax(-1)[:, 0], strict=True):
                probabilities[i] = probability
        return torch.stack(probabilities)
