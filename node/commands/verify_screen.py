"""What ``swarm-node verify`` found, on a screen and as Markdown; both take the document of ``--json``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_matrix(result: dict[str, Any], console: Console) -> None:
    """The report for a screen of 80 columns."""
    for number, subject in enumerate(result["subjects"]):
        console.print(f"[bold]{escape(_title(subject))}[/]")
        table = Table(padding=(0, 0), pad_edge=False)
        for heading in ("a, b", "rows", "outputs", "cosine", "rel. L2", "max-abs", "gain off", "of"):
            table.add_column(heading, justify="left" if heading == "a, b" else "right", overflow="fold")
        for one in result["comparisons"]:
            if one["subject"] == number:
                cells = [f"{one['a']}, {one['b']}", str(one["rows"]), f"{one['outputs']:,}", *_figures(one)]
                table.add_row(*map(escape, cells), style="red" if one["problem"] else "")
        console.print(table)
        for one in result["comparisons"]:
            if one["subject"] == number and one["problem"]:
                console.print(
                    f"[red]beyond the limits[/]: {escape(one['a'])} and {escape(one['b'])}, {one['rows']} rows: "
                    f"{escape(one['problem'])}"
                )
    for name, backend in result["backends"].items():
        console.print(f"[dim]{escape(name)}: {escape(backend['description'])}[/]")
    for name, why in result["left_out"].items():
        console.print(f"[red]{escape(name)} is left out[/]: {escape(why)}")
    console.print("[green]all within the limits[/]" if result["well"] else "[red]not all is well[/]")


def markdown(result: dict[str, Any]) -> str:
    """One table for everything."""
    lines = [
        "| weights | a | b | rows | outputs | cosine | relative L2 | max-abs | gain off by | of expert | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in result["comparisons"]:
        cells = [", ".join(one["types"]), one["a"], one["b"], str(one["rows"]), f"{one['outputs']:,}", *_figures(one)]
        lines.append(f"| {' | '.join(cells)} | {one['problem'] or 'within the limits'} |")
    lines += ["", *(f"- {name}: {backend['description']}" for name, backend in result["backends"].items())]
    lines += [f"- {name} is left out: {why}" for name, why in result["left_out"].items()]
    return "\n".join(lines)


def _title(subject: dict[str, Any]) -> str:
    types = ", ".join(subject["types"])
    return f"{subject['label']}, layer {subject['layer']}, experts {subject['first']}-{subject['last']} ({types})"


def _figures(one: dict[str, Any]) -> list[str]:
    numbers = (f"{one[name]:.1e}" for name in ("relative_l2", "max_abs", "gain_deviation"))
    return [f"{one['cosine']:.10f}", *numbers, str(one["gain_expert"])]
