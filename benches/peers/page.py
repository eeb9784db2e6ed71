"""Draws a page of measurements for run.py: one HTML file with its plots in it, and nothing from elsewhere."""

import statistics
import xml.etree.ElementTree
from html import escape
from math import ceil, floor, log10

COLOURS = ["#1f5fa8", "#c8472b", "#2f8f4e", "#8a5fb5"]
LEFT, WIDTH, RATIOS, GAP, STEP, TOP = 300, 420, 260, 60, 30, 46
STYLE = """
body { font: 15px/1.45 sans-serif; color: #222; max-width: 1120px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: 3px 10px; border-bottom: 1px solid #ddd; }
td { text-align: right; } td:first-child, th:first-child { text-align: left; } svg { width: 100%; height: auto; }
small { color: #666; }
"""


def text(x, y, words, anchor="middle", colour="#333"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="{colour}">{escape(words)}</text>'


def line(x1, y1, x2, y2, colour, width=1.0, dash=""):
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"{dashes}/>'


class Axis:
    """A logarithmic axis over whole decades."""

    def __init__(self, values, left, width):
        self.least, self.most = floor(log10(min(values))), ceil(log10(max(values)))
        self.most += self.least == self.most
        self.left, self.width = left, width

    def x(self, value):
        return self.left + (log10(value) - self.least) / (self.most - self.least) * self.width

    def grid(self, bottom, unit):
        for decade in range(self.least, self.most + 1):
            x = self.x(10.0**decade)
            yield line(x, TOP - 8, x, bottom, "#e4e4e4")
            yield text(x, TOP - 14, f"{10.0**decade:g}{unit}")


def measured(row):
    """The libraries that have figures."""
    return {name: values for name, values in row.figures.items() if isinstance(values, list)}


def plot(rows, libraries):
    """Times of each library, and beside them the ratio of the best other library to ours, both with all rounds."""
    bottom = TOP + STEP * len(rows)
    times = [value for row in rows for values in measured(row).values() for value in values]
    ratios = [ratio for row in rows for ratio in row.ratios]
    out = []
    if times:
        axis = Axis(times, LEFT, WIDTH)
        out += axis.grid(bottom, " µs")
    if ratios:
        beside = Axis([*ratios, 1], LEFT + WIDTH + GAP, RATIOS)
        out += beside.grid(bottom, "x")
        out.append(line(beside.x(1), TOP - 8, beside.x(1), bottom, "#111", 1.2, "4 3"))
        out.append(text(LEFT + WIDTH + GAP + RATIOS / 2, 14, "best other / multirail: right of 1, multirail is faster"))
    for number, row in enumerate(rows):
        y = TOP + STEP * (number + 0.5)
        out.append(text(LEFT - 14, y + 4, row.load, "end"))
        for name, values in measured(row).items():
            # Side by side, so that no library hides another.
            place, colour = libraries.index(name), COLOURS[libraries.index(name)]
            at = y + (place - (len(libraries) - 1) / 2) * 5
            out.append(line(axis.x(min(values)), at, axis.x(max(values)), at, colour, 2))
            out.append(f'<circle cx="{axis.x(statistics.median(values)):.1f}" cy="{at:.1f}" r="3.6" fill="{colour}"/>')
        if row.ratios:
            middle = statistics.median(row.ratios)
            out.append(line(beside.x(1), y, beside.x(middle), y, "#9db8d9" if middle >= 1 else "#e0a99b", 9))
            out.append(line(beside.x(min(row.ratios)), y, beside.x(max(row.ratios)), y, "#333", 1.4))
    for place, name in enumerate(libraries):
        x = LEFT + place * 105
        out.append(f'<circle cx="{x}" cy="10" r="4" fill="{COLOURS[place]}"/>')
        out.append(text(x + 9, 14, name, "start"))
    size = f'viewBox="0 0 {LEFT + WIDTH + GAP + RATIOS + 40} {bottom + 12}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">' + "\n".join(out) + "</svg>"


def of(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def cell(figure):
    if not isinstance(figure, list):
        return f"<td><small>{escape(figure)}</small></td>"
    return f"<td>{of(statistics.median(figure))} <small>{of(min(figure))} to {of(max(figure))}</small></td>"


def table(rows, libraries):
    head = "".join(f"<th>{escape(name)}</th>" for name in ["µs", *libraries, "best other / multirail"])
    lines = []
    for row in rows:
        ratio = f"{of(statistics.median(row.ratios))} <small>{escape(row.best)}</small>" if row.ratios else "none"
        cells = "".join(cell(row.figures[name]) for name in libraries)
        lines.append(f"<tr><td>{escape(row.load)}</td>{cells}<td>{ratio}</td></tr>")
    return f"<table><tr>{head}</tr>" + "\n".join(lines) + "</table>"


def html(sections, described, notes, libraries):
    """The page."""
    body = ["<h1>multirail beside UCX, NIXL and Mooncake</h1>", "<ul>", *(f"<li>{escape(each)}</li>" for each in described), "</ul>"]
    for title, rows in sections:
        body += [f"<h2>{escape(title)}</h2>", plot(rows, libraries), table(rows, libraries)]
    body += ["<h2>What was measured</h2>", "<ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"]
    head = f'<meta charset="utf-8"/><title>multirail beside other libraries</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def check(drawn):
    """Raises an error unless the page is well formed and refers to nothing outside of it."""
    root = xml.etree.ElementTree.fromstring(drawn.split("\n", 1)[1])
    assert len(root.findall(".//{http://www.w3.org/2000/svg}svg")) > 0, "a plot"
    references = [name for each in root.iter() for name in each.attrib if name.split("}")[-1] in ("src", "href")]
    assert not references and "url(" not in drawn and "@import" not in drawn, "nothing from elsewhere"
