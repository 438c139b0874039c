"""The parts of which all pages are made: the document with its styles and scripts, tables, tiles and notes."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

Cell = str | tuple[str, str]  # a text, and a class of page/report.css


def document(
    title: str,
    facts: Sequence[str | None],
    body: Sequence[str],
    footer: str,
    contents: Mapping[str, str] | None = None,
    scripts: Sequence[str] = (),
    data: Mapping[str, object] | None = None,
    live: bool = False,
) -> tuple[bytes, str]:
    """A page in UTF-8 that loads nothing from elsewhere, and its Content-Security-Policy.

    facts: shown below the title, without those that are None. contents: titles of parts by the ids of their elements,
    for a list that stays in view. scripts: names in page/, which uPlot precedes; no others may run. data: what they
    read, by the ids of elements. live: the scripts may ask the page's server.
    """
    sources = [_read_asset(name) for name in ("uPlot.iife.min.js", *scripts)] if scripts else []
    policy, links, end = _security_policy(sources, live), "", ""
    for name, of_part in (contents or {}).items():
        links += f'<a href="#{escape(name)}">{escape(of_part)}</a>'
    for name, value in (data or {}).items():
        end += f'\n<script type="application/json" id="{name}">{_script_json(value)}</script>'
    if sources:
        end += f"\n<!-- uPlot: {_read_asset('uPlot.LICENSE')} -->\n<script>{'</script><script>'.join(sources)}</script>"
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)} · Phalanx</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_read_asset('uPlot.min.css')}{_read_asset('report.css')}</style></head>\n"
        f"<body><main><header><h1>{escape(title)}</h1><p>{escape(' · '.join(filter(None, facts)))}</p></header>\n"
        f'<nav aria-label="Contents">{links}</nav>\n'
    )
    end = f"<footer>{footer}</footer></main>{end}</body></html>\n"
    # each part by itself: with one wide character, a text of the whole page would take several times its size
    return b"\n".join(part.encode("utf-8", "replace") for part in (head, *body, end)), policy


def _read_asset(name: str) -> str:
    return (files("phalanx.tools.board") / "page" / name).read_text(encoding="utf-8")


def _security_policy(scripts: Sequence[str], live: bool) -> str:
    """The page's Content-Security-Policy: allow only resources inside the page, and no scripts other than these."""
    policy = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src"
    for script in scripts:
        policy += f" 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    return policy + ("; connect-src 'self'" if live else "")


def _script_json(value: object) -> str:
    """JSON for a <script> element, which only a `<` could end."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def value_tile(title: str, value: str, note: str, kind: str = "") -> str:
    """A headline figure. kind: a class of page/report.css, such as `better`."""
    return (
        f'<div class="tile {kind}"><div class="k">{escape(title)}</div><div class="v">{escape(value)}</div>'
        f'<div class="n">{escape(note)}</div></div>'
    )


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table whose first column names the rows; on a narrow screen, each cell is a line that names its column."""
    html = "<div class='scroll stack'><table><thead><tr>"
    for name in columns:
        html += f"<th scope=col>{escape(name)}</th>"
    html += "</tr></thead><tbody>"
    for row in rows:
        html += f"<tr><th scope=row>{escape(str(row[0]))}</th>"
        for name, cell in zip(columns[1:], row[1:], strict=True):
            text, kind = cell if isinstance(cell, tuple) else (cell, "")
            html += f'<td class="{kind}" data-name="{escape(name)}">{escape(text)}</td>'
        html += "</tr>"
    return html + "</tbody></table></div>"


def html_details(title: str, content: str, is_open: bool = False) -> str:
    """Content that can be folded."""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{content}</details>"


def notes_html(notes: Sequence[str]) -> str:
    """Paragraphs."""
    html = ""
    for note in notes:
        html += f'<p class="note">{escape(note)}</p>'
    return html
