"""A page of sentences and tables: no network, light and dark, readable on a phone.

Owns escaping and style. Every text that gets here is data and is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Page", "Section"]

Cell = str | int | float | None

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fdfdfc; --line: #d8d8d4;
  --soft: #f3f3f0; --good: #1a7f37; --bad: #b3261e; --unsure: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e3; --paper: #161614;
  --line: #3a3a36; --soft: #21211e; --good: #56c271; --bad: #ff8a80; --unsure: #e0b252; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0.5rem 0 0; }
h2 { font-size: 1.05rem; margin: 2rem 0 0.25rem; }
p.headline { font-size: 1.1rem; margin: 0.25rem 0 1rem; }
p.note { margin: 0.25rem 0 0.5rem; opacity: 0.85; }
.label { font-size: 0.75rem; border: 1px solid var(--line); border-radius: 0.5rem;
  padding: 0 0.4rem; margin-left: 0.4rem; font-weight: normal; white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.6rem; text-align: left;
  vertical-align: top; }
th { background: var(--soft); }
td.number { text-align: right; }
.holds { color: var(--good); } .broken { color: var(--bad); }
.inconclusive { color: var(--unsure); }
.holds, .broken, .inconclusive { font-weight: 600; }
"""

_TONES = {"holds", "broken", "inconclusive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with a table below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    label: str = ""  # "exact", "measured", "estimated", or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One document. A cell that reads holds, broken or inconclusive is coloured."""

    title: str
    headline: str
    sections: Sequence[Section]

    def render(self) -> str:
        """Return the whole HTML document."""
        sections = "\n".join(map(_section, self.sections))
        title = html.escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f'<h1>{title}</h1>\n<p class="headline">{html.escape(self.headline)}</p>\n'
            f"{sections}\n</body>\n</html>\n"
        )


def _section(section: Section) -> str:
    label = html.escape(section.label)
    label = f'<span class="label">{label}</span>' if label else ""
    note = f'<p class="note">{html.escape(section.note)}</p>' if section.note else ""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in section.columns)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in section.rows)
    return (
        f"<h2>{html.escape(section.title)}{label}</h2>{note}\n"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if cell is None:
        return "<td></td>"
    if isinstance(cell, str):
        tone = f' class="{cell}"' if cell in _TONES else ""
        return f"<td{tone}>{html.escape(cell)}</td>"
    return f'<td class="number">{_number(cell)}</td>'


def _number(value: int | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"
