"""What a node knows of its swarm: ``/status`` and ``/metrics`` of an agent, and ``swarm-node status`` for people."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from node.records import Record
from node.slice_ranges import count, describe

if TYPE_CHECKING:
    from node.agent import Agent


def status_routes(agent: Agent) -> list[web.RouteDef]:
    """``GET /status`` (JSON) and ``GET /metrics`` (Prometheus text)."""

    async def status(request: web.Request) -> web.Response:
        return web.json_response(status_document(agent))

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=metrics_text(agent), content_type="text/plain", charset="utf-8")

    return [web.get("/status", status), web.get("/metrics", metrics)]


def status_document(agent: Agent) -> dict[str, Any]:
    """The swarm as this node sees it."""
    now_s = time.monotonic()
    alive = agent.membership.alive(now_s)
    found = agent.routing_node()
    router = found[0].router if found is not None else None
    wanted = dict(router.plan.slices) if router is not None and router.plan is not None else {}
    nodes = [_node(agent.record(), "this node", 0.0, True, wanted)]
    for node_id, peer in sorted(agent.membership.known().items(), key=lambda item: item[1].record.name):
        nodes.append(_node(peer.record, peer.url, now_s - peer.heard_s, node_id in alive, wanted))
    model = found[0].model if found is not None else None
    return {
        "swarm": agent.config.swarm.name,
        "node": agent.identity.node_id,
        "name": agent.config.node.name,
        "model": None
        if model is None
        else {
            "id": model.id,
            "file": model.file,
            "architecture": model.architecture,
            "layers": model.n_layer,
            "experts": model.n_expert,
            "trunk_bytes": model.trunk_bytes,
            "expert_bytes": model.expert_bytes,
        },
        "router": None
        if found is None or router is None
        else {"node": found[0].node, "name": found[0].name, "term": router.term, "state": router.state},
        "ready": router is not None and router.state == "ready",
        "waits_for": None
        if router is not None and router.state == "ready"
        else agent.waits_for(router)
        if router is not None
        else "no node of the swarm serves a model yet; start one with --model FILE",
        "missing": [] if router is None or router.plan is None else [list(s) for s in router.plan.missing],
        "not_ready": {}
        if router is None
        else {node: [list(s) for s in slices] for node, slices in router.not_ready.items()},
        "nodes": nodes,
        "failures": [str(failure) for failure in list(agent.failures)[-8:]],
        "statistics": {} if agent.role is None or agent.role.engine is None else agent.role.engine.statistics,
    }


def _node(record: Record, url: str, silent_s: float, alive: bool, wanted: dict[str, Any]) -> dict[str, Any]:
    planned = wanted.get(record.node, ())
    return {
        "node": record.node,
        "name": record.name,
        "url": url,
        "alive": alive,
        "silent_s": round(silent_s, 1),
        "platform": record.platform,
        "devices": [{"name": d.name, "type": d.type, "memory_bytes": d.memory_bytes} for d in record.devices],
        "memory_bytes": record.memory_bytes,
        "can_route": record.can_route,
        "planned": [list(s) for s in planned],
        "ready": [list(s) for s in record.ready],
        "problem": record.problem,
    }


def metrics_text(agent: Agent) -> str:
    """Prometheus text format 0.0.4."""
    document = status_document(agent)
    lines = []

    def metric(name: str, kind: str, help_text: str, samples: list[tuple[dict[str, str], float]]) -> None:
        lines.extend([f"# HELP swarm_{name} {help_text}", f"# TYPE swarm_{name} {kind}"])
        for labels, value in samples:
            shown = ",".join(f"{key}={json.dumps(text)}" for key, text in labels.items())
            lines.append(f"swarm_{name}{{{shown}}} {value:g}" if shown else f"swarm_{name} {value:g}")

    metric("ready", "gauge", "1 while queries can be answered", [({}, float(document["ready"]))])
    metric(
        "node_alive",
        "gauge",
        "1 for each node that answers",
        [({"node": n["name"]}, float(n["alive"])) for n in document["nodes"]],
    )
    metric(
        "node_memory_bytes",
        "gauge",
        "memory a node offers for experts",
        [({"node": n["name"]}, n["memory_bytes"]) for n in document["nodes"]],
    )
    metric(
        "node_experts_ready",
        "gauge",
        "experts of all layers that a node has ready",
        [({"node": n["name"]}, count([tuple(s) for s in n["ready"]])) for n in document["nodes"]],
    )
    statistics = document["statistics"]
    if statistics:
        metric("expert_calls_total", "counter", "answered expert calls", [({}, statistics["calls"])])
        metric("expert_failures_total", "counter", "layers that could not be computed", [({}, statistics["failures"])])
        for key, help_text in (
            ("calls", "answered calls"),
            ("pairs", "computed (row, expert) pairs"),
            ("bytes_sent", "bytes sent to the node"),
            ("bytes_received", "bytes received from the node"),
        ):
            samples = [({"node": n["name"]}, n[key]) for n in statistics["nodes"]]
            metric(f"expert_{key}_by_node_total", "counter", help_text, samples)
        samples = [({"node": n["name"]}, n["call_us_mean"] / 1e6) for n in statistics["nodes"]]
        metric("expert_call_seconds_mean", "gauge", "mean time of a call to the node", samples)
    return "\n".join(lines) + "\n"


def print_status(document: dict[str, Any], console: Console) -> None:
    """The document of ``/status`` for people."""
    model = document["model"]
    if model is not None:
        size = (model["trunk_bytes"] + model["expert_bytes"]) / 2**30
        console.print(
            f"[bold]{escape(model['file'])}[/] ({escape(model['architecture'])}, {model['layers']} layers, {model['experts']} experts, "
            f"{size:.1f} GiB) in swarm {document['swarm']!r}"
        )
    else:
        console.print(f"swarm {document['swarm']!r}: no model yet")
    if document["ready"]:
        console.print(f"[green]ready[/], router {document['router']['name']}, term {document['router']['term']}")
    else:
        console.print(f"[yellow]not ready[/]: {escape(document['waits_for'])}")
    table = Table()
    for heading in ("node", "", "platform", "device", "offers", "holds", "address"):
        table.add_column(heading)
    for node in document["nodes"]:
        state = "alive" if node["alive"] else f"silent for {node['silent_s']:.0f} s"
        role = ", router" if document["router"] and node["node"] == document["router"]["node"] else ""
        planned, ready = count([tuple(s) for s in node["planned"]]), [tuple(s) for s in node["ready"]]
        holds = describe(ready, 2) or "nothing"
        if planned > count(ready):
            holds += f" ({count(ready)} of {planned} experts ready)"
        table.add_row(
            escape(node["name"]),
            state + role,
            escape(node["platform"]),
            escape(", ".join(f"{d['name']} ({d['type']})" for d in node["devices"]) or "-"),
            f"{node['memory_bytes'] / 2**30:.1f} GiB",
            holds + (f"\n[red]{escape(node['problem'])}[/]" if node["problem"] else ""),
            node["url"],
        )
    console.print(table)
    for failure in document["failures"]:
        console.print(f"[red]failed[/]: {escape(failure)}")
