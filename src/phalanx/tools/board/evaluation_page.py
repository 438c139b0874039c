"""evaluation.html: a self-contained page about an evaluation, in the style of the report."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import Any

from phalanx.config.inside import read_inside, write_inside
from phalanx.config.load import flat
from phalanx.config.messages import cut
from phalanx.tools.board.evaluation import CHANGED, groups_of, interval_text, shown_scores
from phalanx.tools.board.evaluation_files import PAGE, REWARD, Row
from phalanx.tools.board.report import _html_details, _html_table, _read_asset, _security_policy, _value_tile, document
from phalanx.tools.board.samples import LOST, Room, data_url, image_html, notes_html

EXTREMES = 8  # at most this many prompts of each set with the highest, and with the lowest, rewards
MOST_TEXT = 1500  # characters shown of a response
MOST_VIDEO_BYTES = 1 << 20  # larger videos are not embedded
INTERVALS = (
    "95 % intervals over prompts: Wilson's with an effective number of prompts for scores in 0..1, else Student's t."
)
PAIRED = "Differences are paired by prompt and seed; 95 % intervals: Tango's of scores in 0..1, else Student's t."


@dataclass(frozen=True)
class Side:
    """The records of one model, and the folder with their images and videos. `room`: see `Room`, of the whole page."""

    rows: Sequence[Row]
    folder: Path
    room: Room = field(default_factory=Room)

    def of(self, set_name: str) -> "Side":
        """The records of one set of prompts."""
        return Side([row for row in self.rows if row["set"] == set_name], self.folder, self.room)

    def by_place(self) -> dict[tuple[int, int], Row]:
        """The samples by (prompt number, sample number)."""
        return {(row["index"], row["sample"]): row for row in self.rows}


def write_page(folder: Path, result: Mapping[str, Any], now: Side, baseline: Side | None) -> Path:
    """Write the page of an evaluation into `folder`, from `result` (the content of evaluation.json), its records and
    those of the baseline. Raises OSError.
    """
    write_inside(folder, PAGE, _evaluation_page(result, now, baseline))
    return folder / PAGE


def _evaluation_page(result: Mapping[str, Any], now: Side, baseline: Side | None) -> bytes:
    name = Path(str(result["model"])).name
    facts = [str(result["model"]), None if result["baseline"] is None else f"against {result['baseline']}"]
    body = []
    for set_name, part in result["sets"].items():
        others = None if baseline is None else baseline.of(set_name)
        body.append(_set_section(set_name, part, now.of(set_name), others))
    arguments = [[key, value] for key, value in flat(result["arguments"]).items()]
    body.append(_html_details("Arguments", _html_table(["key", "value"], arguments)))
    footer = (
        "Made by <code>phalanx evaluate</code>; the numbers are also in evaluation.json, and the samples in "
        "records.jsonl."
    )
    return document(f"Evaluation of {name}", facts, body, footer, _security_policy([]), _read_asset("report.css"))


def _set_section(name: str, part: Mapping[str, Any], now: Side, baseline: Side | None) -> str:
    """The section of a set of prompts."""
    differences = part.get("baseline", {}).get("differences")
    html = f"<section><h2>{escape(name)}</h2>{_score_tiles(part)}"
    html += _score_table(part["scores"], part.get("baseline", {}).get("scores"), differences)
    html += notes_html([INTERVALS, PAIRED] if differences is not None else [INTERVALS])
    if "groups" in part:
        html += f"<h3>By group</h3>{_group_table(part)}"
    if baseline is not None and part["baseline"]["changed_most"]:
        html += f"<h3>Prompts that changed most (up to {CHANGED})</h3>{_changed_cards(part, now, baseline)}"
    return f"{html}{_extreme_cards(now)}</section>"


def _score_tiles(part: Mapping[str, Any]) -> str:
    scores, html = part["scores"], ""
    for name in shown_scores(scores):
        if "mean" not in scores[name]:  # no sample has this score
            continue
        mean = scores[name]["mean"]
        low, high = mean["low"], mean["high"]
        note = "one prompt" if low is None else f"{low:.4f} to {high:.4f}"
        html += _value_tile(f"Mean · {name}", f"{mean['value']:.4f}", note)
    html += _value_tile("Samples", str(part["prompts"] * part["n"]), f"{part['prompts']} prompts x {part['n']}")
    if "baseline" in part:
        better, equal, worse = part["baseline"]["better_equal_worse"][REWARD]["prompts"]
        html += _value_tile("Prompts", f"{better} / {equal} / {worse}", "better, equal and worse than the baseline")
    columns = min(html.count("</div></div>"), 4)
    return f'<div class="tiles" style="--columns:{columns}" aria-label="Headline figures">{html}</div>'


def _score_table(
    scores: Mapping[str, Any], before: Mapping[str, Any] | None, differences: Mapping[str, Any] | None
) -> str:
    columns, table = ["score", "statistic", "value", "prompts"], list[list[str]]()
    if differences is not None:
        columns += ["baseline", "difference"]
    for name in shown_scores(scores):
        for statistic, estimate in scores[name].items():
            row = [name, statistic, interval_text(estimate), str(estimate["count"])]
            for others in (before, differences) if differences is not None else ():
                other = (others or {}).get(name, {}).get(statistic)
                row.append("-" if other is None else interval_text(other))
            table.append(row)
    return _html_table(columns, table)


def _group_table(part: Mapping[str, Any]) -> str:
    columns, table = ["group", "score", "mean"], list[list[str]]()
    if "baseline" in part:
        columns.append("difference")
    for label, scores, inner in groups_of(part):
        for name in shown_scores(scores):
            if "mean" not in scores[name]:  # no sample of the group has this score
                continue
            row = [label, name, interval_text(scores[name]["mean"])]
            if inner is not None:
                other = inner.get(name, {}).get("mean")
                row.append("-" if other is None else interval_text(other))
            table.append(row)
    return _html_table(columns, table)


def _changed_cards(part: Mapping[str, Any], now: Side, baseline: Side) -> str:
    """Cards of the prompts that changed most; each shows the sample that changed most, before and now."""
    rows, others, html = now.by_place(), baseline.by_place(), ""
    for change in part["baseline"]["changed_most"]:
        changes = []
        for sample in range(part["n"]):
            row, other = rows[change["index"], sample], others[change["index"], sample]
            if row["reward"] is not None and other["reward"] is not None:
                changes.append((abs(row["reward"] - other["reward"]), -sample))
        place = change["index"], -max(changes, default=(0.0, 0))[1]
        html += f"<figure><figcaption>{escape(change['prompt'])}</figcaption><div class='pair'>"
        html += _sample_side("mean before", change["before"], others[place], baseline)
        html += f"{_sample_side('mean now', change['now'], rows[place], now)}</div></figure>"
    return f"<div class='cards {_kind(now.rows)}' style='--w:256px;--n:2'>{html}</div>"


def _extreme_cards(now: Side) -> str:
    """Cards of the prompts whose first samples have the highest and the lowest rewards."""
    scored = [row for row in now.rows if row["sample"] == 0 and row["reward"] is not None]
    scored.sort(key=itemgetter("reward"))
    count, html = min(EXTREMES, len(scored) // 2), ""
    for title, shown in (("Highest", scored[::-1][:count]), ("Lowest", scored[:count])):
        cards = ""
        for row in shown:
            side = _sample_side(f"reward {row['reward']:.4g}", None, row, now)
            cards += f"<figure><figcaption>{escape(row['prompt'])}</figcaption><div class='pair'>{side}</div></figure>"
        html += f"<h3>{title} rewards</h3><div class='cards {_kind(now.rows)}' style='--w:256px;--n:1'>{cards}</div>"
    return html if count else ""


def _kind(rows: Sequence[Row]) -> str:
    return "samples" if rows and "text" in rows[0] else ""


def _sample_side(label: str, mean: float | None, row: Row, side: Side) -> str:
    """A sample with its caption."""
    if "text" in row:
        text = str(row["text"])
        content = f"<pre>{escape(text if len(text) <= MOST_TEXT else f'{text[:MOST_TEXT]}…')}</pre>"
    else:
        content = _sample_media(cut(str(row.get("file"))), side)
    content = side.room.take(content)
    figure = "" if mean is None else f"<b>{mean:.4g}</b>"
    return f"<div class='side'>{content}<div class='cap'><span>{escape(label)}</span>{figure}</div></div>"


def _sample_media(file: str, side: Side) -> str:
    """An image or a small video of an evaluation, or the name of a file that cannot be shown."""
    if file.endswith(".png"):
        image = image_html(side.folder, file, "", side.room)
        if image != LOST:
            return image
    else:
        with suppress(OSError):
            data = data_url("video/mp4", read_inside(side.folder, file, MOST_VIDEO_BYTES))
            return f'<video controls loop muted src="{data}"></video>'
    return f"<p class='lost'>{escape(file)}</p>"
