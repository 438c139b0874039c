"""Draws docs/images/loop.svg: the ranks of Phalanx beside a controller with workers.

python scripts/draw_loop.py
"""

from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "images" / "loop.svg"
WIDTH, HEIGHT = 960, 400
INK, GREY = "#263238", "#78909c"
COLORS = {"sample": "#c5cae9", "score": "#b2dfdb", "advantage": "#fff3c4", "update": "#ffcdb2", "control": "#eceff1"}
ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker></defs>'
)


def text(x: float, y: float, words: str, size: int = 13, weight: str = "normal", color: str = INK) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="middle" fill="{color}"'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


def box(x: float, y: float, width: float, height: float, color: str, *lines: str) -> list[str]:
    """A box with its first line in bold, and the others small below it."""
    middle = y + height / 2 + 5 - 8 * (len(lines) - 1)
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{color}" stroke="{GREY}"/>']
    for number, line in enumerate(lines):
        weight, size = ("bold", 13) if number == 0 else ("normal", 11)
        parts.append(text(x + width / 2, middle + 16 * number, line, size, weight))
    return parts


def arrow(path: str, both: bool = False) -> str:
    start = ' marker-start="url(#arrow)"' if both else ""
    return f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.6" marker-end="url(#arrow)"{start}/>'


def controller() -> list[str]:
    """The left half: workers of three kinds, and the process that tells them what to do."""
    parts = [text(225, 34, "A controller with workers", 16, "bold")]
    parts += box(125, 60, 200, 50, COLORS["control"], "controller", "runs the loop, moves the data")
    parts += box(30, 190, 120, 70, COLORS["sample"], "rollout engine", "second copy", "of the weights")
    parts += box(165, 190, 120, 70, COLORS["score"], "rewards", "workers or servers")
    parts += box(300, 190, 120, 70, COLORS["update"], "trainer", "log-probs again,", "then the update")
    parts += [arrow("M180 110 L100 188", both=True), arrow("M225 110 L225 188", both=True)]
    parts += [arrow("M270 110 L350 188", both=True), text(68, 150, "prompts, samples", 11)]
    parts += [text(263, 150, "scores", 11), text(372, 150, "samples, metrics", 11)]
    parts += [arrow("M360 262 C360 320 90 320 90 264"), text(225, 326, "weights, after every step", 11)]
    return parts


def ranks() -> list[str]:
    """The right half: the phases of one loop, the same on every rank, and what travels between them."""
    parts = [text(710, 34, "Phalanx: one program on every rank", 16, "bold")]
    phases = (("sample", 70), ("score", 126), ("advantage", 222), ("update", 278))
    for number in range(4):
        x = 508 + number * 108
        parts.append(text(x + 46, 60, f"rank {number}", 11, color=GREY))
        for name, y in phases:
            parts += box(x, y, 92, 34, COLORS[name], name)
        down = ((104, 125), (160, 177), (201, 221), (256, 277))
        parts += [arrow(f"M{x + 46} {start} V{end}") for start, end in down]
        parts += [arrow(f"M{x + 46} 313 L{x + 46} 338", both=True), arrow(f"M{x} 295 H{x - 9} V87 H{x - 1}")]
    for y, words in ((178, "rewards: one number per sample"), (339, "gradients")):
        parts.append(f'<rect x="508" y="{y}" width="416" height="22" rx="6" fill="{COLORS["control"]}"/>')
        parts.append(text(716, y + 15, words, 11))
    parts.append(
        text(716, 381, "one copy of the weights, sharded; samples stay on the rank that drew them", 11, color=GREY)
    )
    return parts


def draw() -> str:
    """The picture."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
            ARROW,
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="white"/>',
            *controller(),
            f'<path d="M465 30 V370" stroke="{COLORS["control"]}" stroke-width="2"/>',
            *ranks(),
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(draw())
