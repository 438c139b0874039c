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
from phalanx.run.telemetry.curves import Points
from phalanx.tools.board.charts import Chart, Series
from phalanx.tools.board.comparison import Bounds, verdict
from phalanx.tools.board.evaluation import CHANGED, groups_of, interval_text, shown_scores
from phalanx.tools.board.evaluation_files import PAGE, REWARD, Row
from phalanx.tools.board.kept_samples import sample_of
from phalanx.tools.board.markup import Cell, document, html_details, html_table, notes_html, value_tile
from phalanx.tools.board.samples import (
    DAMAGED,
    LOST,
    MAX_CARDS,
    MAX_TEXT_CARDS,
    SEARCH,
    Room,
    data_url,
    folded_cards,
    image_html,
    sample_text,
)

EXTREMES = 8  # at most this many prompts of each set with the highest, and with the lowest, rewards
BESIDE = 4  # texts of a prompt that stand beside each other
MOST_VIDEO_BYTES = 1 << 20  # larger videos are not embedded
INTERVALS = (
    "95 % intervals over prompts: Wilson's with an effective number of prompts for scores in 0..1, else Student's t."
)
PAIRED = (
    "Differences are paired by prompt and seed; 95 % intervals: Tango's of scores in 0..1, else Student's t. They are "
    "coloured beyond their interval, and a tie within."
)
Estimates = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by score and statistic: the fields of an Estimate


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
    body, contents, charts = list[str](), dict[str, str](), list[Chart]()
    for number, (set_name, part) in enumerate(result["sets"].items()):
        others = None if baseline is None else baseline.of(set_name)
        drawn = _curves(part)
        body.append(_set_section(f"set-{number}", set_name, part, now.of(set_name), others, drawn))
        contents[f"set-{number}"] = set_name
        charts += drawn
    arguments = [[key, value] for key, value in flat(result["arguments"]).items()]
    about = notes_html([INTERVALS] if baseline is None else [INTERVALS, PAIRED])
    body.append(
        f'<div id="arguments">{about}{html_details("Arguments", html_table(["key", "value"], arguments))}</div>'
    )
    contents["arguments"] = "Arguments"
    footer = (
        "Made by <code>phalanx evaluate</code>; the numbers are also in evaluation.json, and the samples in "
        "records.jsonl."
    )
    data = {"charts": [chart.data() for chart in charts]}
    return document(f"Evaluation of {name}", facts, body, footer, contents, ["report.js"], data)[0]


def _set_section(
    ident: str, name: str, part: Mapping[str, Any], now: Side, baseline: Side | None, charts: list[Chart]
) -> str:
    """The section of a set of prompts."""
    compared = part.get("baseline", {})
    html = f'<section id="{ident}"><h2>{escape(name)}</h2>{_score_tiles(part)}'
    if charts:
        html += f'<div class="charts">{"".join(map(Chart.html, charts))}</div>'
    html += _score_tables(part["scores"], compared.get("scores"), compared.get("differences"))
    if "groups" in part:
        html += f"<h3>By group</h3>{_group_table(part)}"
    html += SEARCH
    if baseline is not None and compared["changed_most"]:
        html += f"<h3>Prompts that changed most (up to {CHANGED})</h3>{_changed_cards(part, now, baseline)}"
    return f"{html}{_extreme_cards(now)}{_prompt_cards(now)}</section>"


# --- figures ------------------------------------------------------------------------------------------------------


def _bounds(estimate: Mapping[str, Any]) -> Bounds | None:
    """An estimate with its interval; None if it has none."""
    return None if estimate["low"] is None else Bounds(estimate["value"], estimate["low"], estimate["high"])


def _difference_cell(estimate: Mapping[str, Any] | None) -> Cell:
    """A difference, with its verdict as its class."""
    if estimate is None:
        return "-"
    bounds = _bounds(estimate)
    kind = "" if bounds is None else verdict(bounds)
    return interval_text(estimate) + (" tie" if kind == "tie" else ""), kind


def _score_tiles(part: Mapping[str, Any]) -> str:
    scores, tiles = part["scores"], list[str]()
    differences = part.get("baseline", {}).get("differences", {})
    for name in shown_scores(scores):
        if "mean" not in scores[name]:  # no sample has this score
            continue
        mean = scores[name]["mean"]
        low, high = mean["low"], mean["high"]
        note = "one prompt" if low is None else f"{low:.4f} to {high:.4f}"
        tiles.append(value_tile(f"Mean · {name}", f"{mean['value']:.4f}", note))
        change = differences.get(name, {}).get("mean")
        bounds = None if change is None else _bounds(change)
        if bounds is not None:
            kind = verdict(bounds)
            note = f"{bounds.low:+.4f} to {bounds.high:+.4f}{': a tie' if kind == 'tie' else ''}"
            tiles.append(value_tile(f"Against the baseline · {name}", f"{bounds.value:+.4f}", note, kind))
    tiles.append(value_tile("Samples", str(part["prompts"] * part["n"]), f"{part['prompts']} prompts x {part['n']}"))
    if "baseline" in part:
        better, equal, worse = part["baseline"]["better_equal_worse"][REWARD]["prompts"]
        tiles.append(
            value_tile("Prompts", f"{better} / {equal} / {worse}", "better, equal and worse than the baseline")
        )
    columns = min(len(tiles), 4)
    return f'<div class="tiles" style="--columns:{columns}" aria-label="Headline figures">{"".join(tiles)}</div>'


def _curves(part: Mapping[str, Any]) -> list[Chart]:
    """The charts of the statistics that have several k, such as pass@k, of the model and its baseline."""
    charts, before = [], part.get("baseline", {}).get("scores")
    for name in shown_scores(part["scores"]):
        for kind in ("pass", "best", "majority"):
            series = list[Series]()
            for label, scores in (("this model", part["scores"]), ("baseline", before)):
                curve = _curve_at_k(label, (scores or {}).get(name, {}), kind, len(series))
                if len(curve.points) > 1:
                    series.append(curve)
            if series:
                spread = "a 95 % interval over prompts"
                charts.append(Chart(f"{kind}@k · {name}", "", spread=spread, plain=True, axis="k", series=series))
    return charts


def _curve_at_k(label: str, statistics: Mapping[str, Mapping[str, Any]], kind: str, colour: int) -> Series:
    ks, values, halves, lows = list[int](), list[float](), list[float](), list[float]()
    for statistic, estimate in statistics.items():
        name, _, k = statistic.partition("@")
        if name == kind:
            bounds = _bounds(estimate) or Bounds(estimate["value"], estimate["value"], estimate["value"])
            ks.append(int(k))
            values.append(bounds.value)
            halves.append((bounds.high - bounds.low) / 2)
            lows.append(bounds.low)
    return Series(label, Points(ks, values), Points(ks, halves), Points(ks, lows), colour)


def _score_tables(scores: Estimates, before: Estimates | None, differences: Estimates | None) -> str:
    """A table for each score, with a row for each number: statistics that are the same number share one, as the mean
    and pass@1 of marks do.
    """
    columns, html = ["statistic", "value", "prompts"], ""
    if differences is not None:
        columns[2:2] = ["baseline", "difference"]
    for name in shown_scores(scores):
        rows: dict[str, tuple[list[str], list[Cell]]] = {}
        for statistic, estimate in scores[name].items():
            row: list[Cell] = [interval_text(estimate)]
            if differences is not None:
                other = (before or {}).get(name, {}).get(statistic)
                row.append("-" if other is None else interval_text(other))
                row.append(_difference_cell(differences.get(name, {}).get(statistic)))
            row.append(str(estimate["count"]))
            rows.setdefault(str(row), ([], row))[0].append(statistic)
        table = [[" = ".join(names), *row] for names, row in rows.values()]
        html += f"<h3>{escape(name)}</h3>{html_table(columns, table)}"
    return html


def _group_table(part: Mapping[str, Any]) -> str:
    columns, table = ["group", "score", "mean"], list[list[Cell]]()
    if "baseline" in part:
        columns.append("difference")
    for label, scores, inner in groups_of(part):
        for name in shown_scores(scores):
            if "mean" not in scores[name]:  # no sample of the group has this score
                continue
            row: list[Cell] = [label, name, interval_text(scores[name]["mean"])]
            if inner is not None:
                row.append(_difference_cell(inner.get(name, {}).get("mean")))
            table.append(row)
    return html_table(columns, table)


# --- samples ------------------------------------------------------------------------------------------------------


def _changed_cards(part: Mapping[str, Any], now: Side, baseline: Side) -> str:
    """Cards of the prompts that changed most; each shows the sample that changed most, before and now."""
    rows, others, cards = now.by_place(), baseline.by_place(), list[str]()
    for change in part["baseline"]["changed_most"]:
        changes = []
        for sample in range(part["n"]):
            row, other = rows[change["index"], sample], others[change["index"], sample]
            if row["reward"] is not None and other["reward"] is not None:
                changes.append((abs(row["reward"] - other["reward"]), -sample))
        place = change["index"], -max(changes, default=(0.0, 0))[1]
        sides = _sample_side("mean before", change["before"], others[place], baseline)
        cards.append(_sample_card(rows[place], sides + _sample_side("mean now", change["now"], rows[place], now)))
    return folded_cards(cards, _cards_look(now.rows, 2))


def _extreme_cards(now: Side) -> str:
    """Cards of the prompts whose first samples have the highest and the lowest rewards."""
    scored = [row for row in now.rows if row["sample"] == 0 and row["reward"] is not None]
    scored.sort(key=itemgetter("reward"))
    count, html = min(EXTREMES, len(scored) // 2), ""
    for title, shown in (("Highest", scored[::-1][:count]), ("Lowest", scored[:count])):
        cards = []
        for row in shown:
            cards.append(_sample_card(row, _sample_side("reward", row["reward"], row, now)))
        html += f"<h3>{title} rewards</h3>{folded_cards(cards, _cards_look(now.rows, 1))}"
    return html if count else ""


def _prompt_cards(now: Side) -> str:
    """The first samples of each prompt, folded; of long sets the first prompts."""
    most, beside = (MAX_TEXT_CARDS, BESIDE) if _is_text(now.rows) else (MAX_CARDS, 1)
    prompts: dict[int, list[Row]] = {}
    for row in sorted(now.rows, key=itemgetter("index", "sample")):
        prompts.setdefault(row["index"], []).append(row)
    cards = ""
    for rows in list(prompts.values())[:most]:
        sides = ""
        for row in rows[:beside]:
            sides += _sample_side("reward", row["reward"], row, now)
        cards += _sample_card(rows[0], sides)
    shown, number = min(most, len(prompts)), max(map(len, prompts.values()), default=0)
    title = f"{'All' if shown == len(prompts) else f'{shown} of'} {len(prompts)} prompts"
    title += f", {min(beside, number)} of {number} samples each" if number > beside else ""
    return html_details(title, f"<div {_cards_look(now.rows, min(beside, number))}>{cards}</div>")


def _is_text(rows: Sequence[Row]) -> bool:
    return bool(rows) and "text" in rows[0]


def _cards_look(rows: Sequence[Row], beside: int) -> str:
    """The attributes of the element around cards with this many samples beside each other."""
    return f'class="cards {"samples" if _is_text(rows) else ""}" style="--w:256px;--n:{beside}"'


def _sample_card(row: Row, sides: str) -> str:
    truth = row.get("columns", {}).get("ground_truth")
    below = "" if truth is None else f"<p class=n>ground truth: {escape(cut(str(truth), 2000))}</p>"
    return f'<figure><figcaption>{escape(row["prompt"])}{below}</figcaption><div class="pair">{sides}</div></figure>'


def _sample_side(label: str, figure: float | None, row: Row, side: Side) -> str:
    """A sample with its caption; of a conversation, all messages."""
    if "text" in row:
        sample = sample_of(row, 0, "text")
        content = DAMAGED if sample.damaged else sample_text(sample)
    else:
        content = _sample_media(cut(str(row.get("file"))), side)
    content = side.room.take(content)
    shown = "" if figure is None else f"<b>{figure:.4g}</b>"
    caption = f'<div class="cap"><span>{escape(label)}</span>{shown}</div>'
    return f'<div class="side"><div class="frame">{content}{caption}</div></div>'


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
