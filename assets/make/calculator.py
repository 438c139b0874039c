"""Word problems whose numbers are too large for a tiny model's head, and transcripts of a model that sometimes calls a
calculator for them.
"""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from assets.make.tiny_lm import END, Row, fit
from assets.make.words import ITEMS, NAMES, SPLITS, Problem, made
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.environments.tools import method_tool
from phalanx.zoo.environments.calculator import Calculator

TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools:{% for t in tools %} {{ t['function']['name'] }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m['content'] }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n"
    "{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEW_TOKENS = [
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", '{"name": "', "calculator",
    '", "arguments": {"', "expression", '": "', '"}}',
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
HINTED = "{prompt} Calculate {context}"
calculator = Calculator().calculator
PROMPT_WEIGHT = 0.05  # of a prompt's tokens in the loss
CALLS = 0.25  # of the transcripts
WRONG = 0.25  # of the calls: another operation


def problem(rng: random.Random) -> Problem:
    """One of four kinds, of two steps each."""
    x, y = rng.sample(NAMES, 2)
    of = rng.choice(ITEMS)
    a, b, c = rng.randint(120, 989), rng.randint(12, 98), rng.randint(12, 98)
    kind = rng.randrange(4)
    if kind == 0:
        question = f"{x} has {b} boxes with {a} {of} each. {y} takes {c} {of}. How many {of} are left?"
        return made(question, (b, "*", a), ("-", c))
    if kind == 1:
        question = f"{x} makes {a} {of} a day for {b} days and then buys {c}. How many {of} does {x} have?"
        return made(question, (a, "*", b), ("+", c))
    if kind == 2:
        question = f"{x} has {a} {of}. {x} buys {b} more and gives {c} to {y}. How many {of} does {x} have now?"
        return made(question, (a, "+", b), ("-", c))
    question = f"{x} has {a} {of} and {y} has {b}. They find {c} more. How many {of} do they have together?"
    return made(question, (a, "+", b), ("+", c))


def problems(seed: int, split: str) -> Iterator[Problem]:
    """Problems of a split, without an end; some may be equal."""
    rng = random.Random(seed)
    while True:
        new = problem(rng)
        if new.split == split:
            yield new


def write_data(folder: Path, seed: int = 0) -> None:
    """`train.jsonl`, `val.jsonl` and `test.jsonl` as GSM8K has them: question, and answer with its steps."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate(zip(SPLITS, (1000, 200, 200), strict=True)):
        stream = problems(seed * len(SPLITS) + number, split)
        with (folder / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                new = next(stream)
                answer = "\n".join(new.steps) + f"\n#### {new.answer}"
                file.write(json.dumps({"question": new.question, "answer": answer}) + "\n")


def write_conversations(file: Path, count: int, seed: int) -> None:
    """Conversations with the calculator, as OpenAI writes them; every other question says what to calculate."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rng, stream = random.Random(seed), problems(seed + 2, "train")
    tools = [method_tool(Calculator, "calculator", "tools").schema]
    with file.open("w") as lines:
        for number in range(count):
            new, hinted = next(stream), number % 2 == 1
            question = HINTED.format(prompt=new.question, context=whole(new)) if hinted else new.question
            messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
            steps = [step.partition("=")[0] for step in new.steps]
            for expression in [whole(new)] if hinted or rng.random() < 0.5 else steps:
                call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
                messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
                messages.append({"role": "tool", "content": calculator(expression)})
            messages.append({"role": "assistant", "content": f"#### {new.answer}"})
            lines.write(json.dumps({"messages": messages, "tools": tools}) + "\n")


def write_hints(problems_file: Path, file: Path) -> None:
    """The problems of `write_data` with what to calculate in a column `hint`."""
    with problems_file.open() as lines, file.open("w") as hinted:
        for row in map(json.loads, lines):
            *steps, answer = row["answer"].split("\n")
            known = Problem(row["question"], tuple(steps), int(answer.removeprefix("#### ")))
            hinted.write(json.dumps(row | {"hint": whole(known)}) + "\n")


def with_tools(base: Path, folder: Path, seed: int) -> tuple[Any, Any]:
    """The quickstart's language model with tokens and a chat template for tools, which it has not seen yet; its folder
    in float16, and both.
    """
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(NEW_TOKENS)
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    save(model, tokenizer, folder)
    return model, tokenizer


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write both, in float16."""
    copy.deepcopy(model).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def finetune(base: Path, folder: Path, *, steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Train the quickstart's language model on transcripts, on the CPU, and write its folder in float16."""
    model, tokenizer = with_tools(base, folder, seed)
    rng = random.Random(seed)
    stream = problems(seed + 1, "train")

    def batch() -> list[Row]:
        return [_transcript(tokenizer, next(stream), rng) for _ in range(batch_size)]

    fit(model, tokenizer.pad_token_id, batch, steps=steps, lr=lr, decay=0.4)
    save(model, tokenizer, folder)


def _transcript(tokenizer: Any, problem: Problem, rng: random.Random) -> Row:
    """A conversation: an answer at once, or one call of the whole expression, or a call for each of the two steps."""
    chat = [{"role": "user", "content": problem.question}]
    prompt = tokenizer.apply_chat_template(chat, tools=TOOLS, add_generation_prompt=True, return_dict=True)["input_ids"]
    tokens, weights = list(prompt), [PROMPT_WEIGHT] * len(prompt)

    def say(text: str, weight: float) -> None:
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens.extend(new)
        weights.extend([weight] * len(new))

    answer = problem.answer
    if rng.random() < CALLS:
        expressions = [whole(problem)] if rng.random() < 0.5 else [step.partition("=")[0] for step in problem.steps]
        result = ""
        for position, expression in enumerate(expressions):
            if position:  # of what the first call gave
                expression = expression.replace(problem.steps[0].partition("=")[2], result, 1)
            if rng.random() < WRONG:
                expression = another(expression, rng)
            result = calculator(expression)
            answer = int(result)
            call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
            say(f"<tool_call>\n{call}\n</tool_call>{END}", 1.0)
            say(f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response>{END}\n<|im_start|>assistant\n", 0.0)
    say(f"#### {answer}{END}", 1.0)
    return tokens, weights


def another(expression: str, rng: random.Random) -> str:
    """The expression with another operation in the place of one."""
    place = rng.choice([i for i, sign in enumerate(expression) if sign in "+-*" and i > 0])
    sign = rng.choice([sign for sign in "+-*" if sign != expression[place]])
    return expression[:place] + sign + expression[place + 1 :]


def whole(problem: Problem) -> str:
    """Both steps as one expression: of 47*343=16121 and 16121-20=16101, 47*343-20."""
    first, _, between = problem.steps[0].partition("=")
    return first + problem.steps[1].partition("=")[0].removeprefix(between)
