"""What ``swarm-node trace`` shows of figures: some lines of at most 79 characters, for one screen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from node.commands.trace_figures import Figures, LayerFigures, NodeFigures, Parts, grouped

WIDTH = 79
#: Lines of the smallest terminal that all must fit into, with the prompt below it.
HEIGHT = 23

_COLUMNS = 3
_NODES_MAX = 6
_NAME_MAX = 11
# From these shares of the waiting on, the headline names a node.
_MOST, _NEARLY_ALL = 0.6, 0.9


@dataclass(frozen=True)
class _Part:
    """A part of the time, as it is drawn: without colour, its glyph says which it is."""

    field: str
    name: str
    glyph: str
    ascii: str
    style: str

    def of(self, parts: Parts) -> float:
        return float(getattr(parts, self.field))


_PARTS = (
    _Part("trunk_ms", "trunk", "░", ".", "blue"),
    _Part("ask_ms", "ask", "▒", ":", "magenta"),
    _Part("wait_ms", "wait", "█", "#", "yellow"),
    _Part("add_ms", "add", "▓", "+", "green"),
    _Part("between_ms", "between", "·", "-", "cyan"),
)


def trace_lines(
    shown: Figures, *, title: str, notes: Sequence[str] = (), height: int = HEIGHT, plain: bool = False
) -> list[Text]:
    """The screen, at most ``height`` lines, but always three of layers.

    ``title`` says what the figures are of, ``notes`` come last; both are cut to the width. ``plain``: ASCII alone, save
    for names.
    """
    lines = [Text(_cut(title, WIDTH), style="bold"), Text(headline(shown)), _bar_of_all(shown.parts, plain)]
    lines += [_legend(shown.parts, plain), Text()]
    lines += _nodes(shown.nodes)
    lines.append(Text("each layer: ms, and whom it waited for most", style="dim"))
    rows = max(3, height - len(lines) - len(notes))
    lines += _layers(shown.layers, rows, plain)
    lines += [Text(_cut(note, WIDTH), style="dim") for note in notes]
    return lines


def headline(shown: Figures) -> str:
    """What took most of the time, in one line: as ``62 % waiting for beta: compute 3.10, network 0.400 ms``."""
    parts, total_ms = shown.parts, shown.parts.total_ms
    if total_ms <= 0:
        return "no time was counted"
    waiting = (parts.wait_ms, _waiting(shown))
    others = [
        (parts.trunk_ms, "trunk"),
        (parts.ask_ms, "making requests"),
        (parts.add_ms, "adding up replies"),
        (parts.between_ms, "between tokens"),
    ]
    most = max(others)
    # Waiting is what the nodes are about, so it is always said.
    said = [f"{100 * ms / total_ms:.0f} % {text}" for ms, text in sorted([waiting, most], reverse=True)]
    if waiting > most and cell_len("; ".join(said)) > WIDTH:
        said.pop()
    return _cut("; ".join(said), WIDTH)


def _waiting(shown: Figures) -> str:
    if not shown.nodes:
        return "waiting"
    worst, share = shown.nodes[0], shown.nodes[0].wait_ms / (shown.parts.wait_ms or 1.0)
    whom = " for experts"
    if share >= _MOST:
        whom = f"{' for' if share >= _NEARLY_ALL else ', most for'} {_cut(worst.name, _NAME_MAX)}"
    causes = [
        ("compute", sum(node.wait_compute_ms for node in shown.nodes)),
        ("network", sum(node.wait_network_ms for node in shown.nodes)),
        ("queue", sum(node.wait_queue_ms for node in shown.nodes)),
    ]
    named = [f"{what} {ms_text(ms)}" for what, ms in causes if what != "queue" or ms >= 0.05 * shown.parts.wait_ms]
    return f"waiting{whom}: {', '.join(named)} ms"


def _bar_of_all(parts: Parts, plain: bool) -> Text:
    return _bar(parts, parts.total_ms, WIDTH, plain)


def _legend(parts: Parts, plain: bool) -> Text:
    line = Text()
    for part in _PARTS:
        if part.field == "between_ms" and part.of(parts) == 0:
            continue
        line.append(part.ascii if plain else part.glyph, style=part.style)
        line.append(f" {part.name} {ms_text(part.of(parts))}  ")
    return line.append("(ms)", style="dim")


def _bar(parts: Parts, full_ms: float, width: int, plain: bool) -> Text:
    """Each part as long as its share of ``full_ms``. Their ends are rounded, so that errors do not add up."""
    line, drawn, until_ms = Text(), 0, 0.0
    for part in _PARTS:
        until_ms += part.of(parts)
        end = min(width, round(width * until_ms / full_ms)) if full_ms > 0 else 0
        line.append((part.ascii if plain else part.glyph) * (end - drawn), style=part.style)
        drawn = end
    return line


_NODE_HEADING = (
    f"{'':{_NAME_MAX}} {'':5} {'last to':>7}  {'waited then, ms a pass':30}  {'one call, ms':20}",
    f"{'node':{_NAME_MAX}} {'calls':>5} {'answer':>7}  {'all':>5} {'compute':>7} {'net':>5} {'queue':>5} {'alone':>5}"
    f" {'all':>6} {'compute':>7} {'net':>5}",
)


def _nodes(nodes: Sequence[NodeFigures]) -> list[Text]:
    lines = [Text(heading.rstrip(), style="dim") for heading in _NODE_HEADING]
    last = sum(node.last for node in nodes) or 1.0
    shown = list(nodes) if len(nodes) <= _NODES_MAX else list(nodes[: _NODES_MAX - 1])
    for node in shown:
        lines.append(
            Text(
                f"{_fixed(node.name, _NAME_MAX)} {ms_text(node.calls):>5} {100 * node.last / last:5.0f} %"
                f"  {ms_text(node.wait_ms):>5} {ms_text(node.wait_compute_ms):>7} {ms_text(node.wait_network_ms):>5}"
                f" {ms_text(node.wait_queue_ms):>5} {ms_text(node.alone_ms):>5}"
                f" {ms_text(node.call_ms):>6} {ms_text(node.compute_ms):>7} {ms_text(node.network_ms):>5}"
            )
        )
    if len(shown) < len(nodes):
        rest = nodes[len(shown) :]
        lines.append(
            Text(
                f"{f'{len(rest)} others':{_NAME_MAX}} {'':5} {100 * sum(node.last for node in rest) / last:5.0f} %"
                f"  {ms_text(sum(node.wait_ms for node in rest)):>5}"
            )
        )
    return lines


def _layers(layers: Sequence[LayerFigures], rows: int, plain: bool) -> list[Text]:
    """Cells in columns, read downwards; the longest bar is that of the slowest layer."""
    groups = grouped(layers, _COLUMNS * rows)
    labels = [f"{g.first}" if g.first == g.last else f"{g.first}-{g.last}" for g in groups]
    label_width = max(len(label) for label in labels)
    name_width = max(min(max(cell_len(g.slowest) for g in groups), 7), 1)
    cell_width = WIDTH // _COLUMNS
    bar_width = max(2, cell_width - label_width - 1 - 5 - 1 - 1 - name_width - 1)
    full_ms = max(g.parts.total_ms for g in groups)
    n_rows = -(-len(groups) // _COLUMNS)
    lines = [Text() for _ in range(n_rows)]
    for number, (group, label) in enumerate(zip(groups, labels, strict=True)):
        line = lines[number % n_rows]
        cell = Text(f"{label:>{label_width}} {ms_text(group.parts.total_ms):>5} ")
        cell.append_text(_padded(_bar(group.parts, full_ms, bar_width, plain), bar_width))
        cell.append(f" {_cut(group.slowest, name_width)}")
        line.append_text(_padded(cell, cell_width))
    for line in lines:
        line.rstrip()
    return lines


def _padded(text: Text, width: int) -> Text:
    text.append(" " * max(0, width - text.cell_len))
    return text


def ms_text(number: float) -> str:
    """Three digits that say something, in at most 5 characters."""
    if number < 0.0005:
        return "0"
    if number < 9.995:
        return f"{number:.3f}" if number < 0.9995 else f"{number:.2f}"
    if number < 99.95:
        return f"{number:.1f}"
    return f"{number:.0f}" if number < 99999.5 else f"{number:.0e}"


def _cut(text: str, width: int) -> str:
    """At most ``width`` cells. What a terminal would obey is not shown: names come from other machines."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "~"


def _fixed(text: str, width: int) -> str:
    return set_cell_size(_cut(text, width), width)
