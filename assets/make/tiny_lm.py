"""The tiny language model of the quickstart: a Qwen3 of 0.5 M weights, trained on solutions of word problems until it
has the right ideas and many wrong answers.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from assets.make.words import fact, problems
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 512
PROMPT_WEIGHT = 0.1  # of a prompt's tokens in the loss
FACT_TOKENS = 56  # of a row of bare arithmetic
Row = tuple[list[int], list[float]]  # tokens, and their weights in the loss


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, in which each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = []
    for found in problems(4000, 0, "train"):
        texts.append(f"user\n{found.question}\nassistant\n{found.solution(rng, shown=0.5, marked=0.5)}")
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: Any, *, hidden: int = 128, layers: int = 3, mlp: int = 256) -> Qwen3ForCausalLM:
    """An untrained one."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(hidden // 64, 1),
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
    )
    return Qwen3ForCausalLM(config)


def pretrain(folder: Path, *, steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Train the model on the CPU and write its folder, in float16."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    rng, half = random.Random(seed), batch_size // 2
    stories = iter(problems(steps * half, seed + 1, "train"))

    def batch() -> list[Row]:
        rows = [_story(tokenizer, next(stories), rng) for _ in range(half)]
        return rows + [_facts(tokenizer, rng) for _ in range(batch_size - half)]

    fit(model, tokenizer.pad_token_id, batch, steps=steps, lr=lr)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fit(model: Any, pad: int, batch: Callable[[], list[Row]], *, steps: int, lr: float, decay: float = 0.0) -> None:
    """Cross-entropy by Muon and AdamW; the learning rate falls to a twentieth in the last `decay` of the steps."""

    def loss() -> Tensor:
        ids, weight = _padded(batch(), pad)
        logits = model(input_ids=ids[:, :-1]).logits
        losses = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        return (losses * weight[:, 1:].flatten()).sum() / weight[:, 1:].sum()

    minimize(loss, model, [p for p in model.model.layers.parameters() if p.dim() == 2], steps=steps, lr=lr, decay=decay)


def minimize(
    loss: Callable[[], Tensor], model: Any, hidden: list[Tensor], *, steps: int, lr: float, decay: float = 0.0
) -> None:
    """Minimize a loss by Muon, for the `hidden` matrices of the model, and AdamW."""
    others = [p for p in model.parameters() if all(p is not q for q in hidden)]
    optimizers = [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for step in range(steps):
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(1.0, (step + 1) / 20)
        if decay and step >= (1 - decay) * steps:
            factor = min(factor, max(0.05, (steps - step) / (decay * steps)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {steps}: loss {value.item():.3f}", flush=True)


def _story(tokenizer: Any, found: Any, rng: random.Random) -> Row:
    chat = [{"role": "user", "content": found.question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = tokenizer(found.solution(rng, shown=0.5, marked=0.7) + END)["input_ids"]
    return prompt + answer, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answer)


def _facts(tokenizer: Any, rng: random.Random) -> Row:
    tokens, weights = [tokenizer.convert_tokens_to_ids(START)], [0.0]
    while len(tokens) < FACT_TOKENS:
        question, result = fact(rng).split("=")
        for text, weight in ((f"{question}=", PROMPT_WEIGHT), (f"{result}. ", 1.0)):
            new = tokenizer(text)["input_ids"]
            tokens, weights = tokens + new, weights + [weight] * len(new)
    return tokens, weights


def _padded(rows: list[Row], pad: int) -> tuple[Tensor, Tensor]:
    longest = max(len(tokens) for tokens, _ in rows)
    ids, weight = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest)
    for i, (tokens, weights) in enumerate(rows):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        weight[i, : len(tokens)] = torch.tensor(weights)
    return ids, weight
