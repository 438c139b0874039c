"""Draws docs/images/block_attention.svg from the mask of phalanx.functional.block_states itself."""

from pathlib import Path

import torch

from phalanx.functional.block_states import BlockTrace, States, replayed, states_of

FILE = Path(__file__).parents[1] / "docs" / "images" / "block_attention.svg"
SIZE, PROMPT, MASK = 4, 6, -1
# the step of its block in which each token of a response was unmasked; the prompt ends within block 1
STEPS = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0]
CELL, LEFT, TOP = 13, 150, 110
COLORS = {"prompt": "#3f51b5", "response": "#7986cb", "own": "#ef6c00", "known": "#ffb74d", "not": "#eceff1"}


def states() -> States:
    """The rows of one sample: 12 clean tokens, and five states of four."""
    length = PROMPT + len(STEPS)
    counts = [torch.tensor([n]) for n in (PROMPT, len(STEPS), 0)]
    ids, step = torch.arange(length)[None], torch.tensor(STEPS)[None]
    trace = BlockTrace(ids, counts[0], counts[1], len(STEPS), step=step, seeds=counts[2], states=5, size=SIZE)
    return states_of(ids, replayed(trace), mask_id=MASK, count=5)


def clean_tokens(rows: States) -> int:
    """How many there are, before the states."""
    return int((rows.chunk == 0).sum())


def names(rows: States) -> list[str]:
    """What each position is called."""
    found = []
    tokens, clean = rows.tokens[0].tolist(), clean_tokens(rows)
    for i, token in enumerate(tokens):
        place = int(rows.positions[0, i])
        found.append("M" if i >= clean and token == MASK else f"{'p' if place < PROMPT else 'r'}{place}")
    return found


def color(rows: States, i: int, j: int) -> str:
    """Of what position i sees of position j."""
    if not rows.allowed()[0, 0, i, j]:
        return COLORS["not"]
    if j >= clean_tokens(rows):
        return COLORS["own"]
    if i >= clean_tokens(rows):
        return COLORS["known"]
    return COLORS["prompt" if j < PROMPT else "response"]


def draw() -> str:
    """The picture."""
    rows = states()
    called, clean, total = names(rows), clean_tokens(rows), rows.tokens.shape[1]
    side = total * CELL
    width, height = LEFT + side + 30, TOP + side + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]

    def text(x: float, y: float, words: str, *, anchor: str = "end", turn: bool = False, size: int = 9) -> None:
        turned = f' transform="rotate(-90 {x} {y})"' if turn else ""
        style = f'font-size="{size}" text-anchor="{anchor}"'
        parts.append(f'<text x="{x}" y="{y}" {style} fill="#263238"{turned}>{words}</text>')

    for i in range(total):
        for j in range(total):
            x, y = LEFT + j * CELL, TOP + i * CELL
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{color(rows, i, j)}"/>')
        text(LEFT - 4, TOP + i * CELL + 10, called[i])
        text(LEFT + i * CELL + 10, TOP - 4, called[i], anchor="start", turn=True)
    step = [0] * (total // SIZE)
    groups = ["clean"] + [f"block {int(rows.block[0, i])}" for i in range(clean, total, SIZE)]
    for number in range(2, len(groups)):  # the states of a block are its steps, one after the other
        step[number] = step[number - 1] + 1 if groups[number] == groups[number - 1] else 0
    for number, name in enumerate(groups):
        first = 0 if number == 0 else clean + (number - 1) * SIZE
        count = clean if number == 0 else SIZE
        label = "clean tokens" if number == 0 else f"{name}, step {step[number]}"
        text(LEFT - 44, TOP + (first + count / 2) * CELL + 3, label, size=11)
        middle = LEFT + (first + count / 2) * CELL + 3
        text(middle, TOP - 44, label if number == 0 else f"{name}.{step[number]}", anchor="start", turn=True, size=11)
        for edge in (first, first + count):
            for line in (
                f"M{LEFT - 40} {TOP + edge * CELL - 0.5}h{side + 40}",
                f"M{LEFT + edge * CELL - 0.5} {TOP - 40}v{side + 40}",
            ):
                parts.append(f'<path d="{line}" stroke="#263238" stroke-width="0.6"/>')
    legend = {"prompt": "clean sees the prompt", "response": "clean sees the response"}
    legend |= {"known": "a state sees clean blocks", "own": "a state sees itself"}
    for number, (kind, words) in enumerate(legend.items()):
        x, y = LEFT - 130 + number * 150, TOP + side + 24
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLORS[kind]}"/>')
        text(x + 18, y + 10, words, anchor="start", size=11)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(draw())
