"""What a node knows of its swarm: ``/status`` and ``/metrics`` of an agent, and ``swarm-node status`` for people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from node.metrics import CONTENT_TYPE, Page
from node.records import Record
from node.slices import Slice, count

if TYPE_CHECKING:
    from node.agent.agent import Agent
    from node.expert_server.process import ExpertProcess
    from node.router.engine_metrics import EngineMetrics


def status_routes(agent: Agent) -> list[web.RouteDef]:
    """``GET /status`` and ``GET /peers`` (JSON), and ``GET /metrics`` (Prometheus text)."""

    async def status(request: web.Request) -> web.Response:
        return web.json_response(status_document(agent))

    async def peers(request: web.Request) -> web.Response:
        return web.json_response(agent.peering.document())

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=metrics_text(agent).encode(), headers={"Content-Type": CONTENT_TYPE})

    return [web.get("/status", status), web.get("/metrics", metrics), web.get("/peers", peers)]


def status_document(agent: Agent) -> dict[str, Any]:
    """The swarm as this node sees it."""
    now_s = time.monotonic()
    found = agent.routing_node()
    router = found[0].router if found is not None else None
    wanted = dict(router.plan.slices) if router is not None and router.plan is not None else {}
    nodes = [_node(agent.record(), "this node", 0.0, True, wanted)]
    for peer in sorted(agent.membership.known(now_s).values(), key=lambda peer: peer.record.name):
        nodes.append(_node(peer.record, peer.url, peer.silent_s, peer.alive, wanted))
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
        else {
            "node": found[0].node,
            "name": found[0].name,
            "term": router.term,
            "state": router.state,
            "tokens_per_s": router.tokens_per_s,
        },
        "ready": router is not None and router.state == "ready",
        "waits_for": None
        if router is not None and router.state == "ready"
        else agent.waits_for(router)
        if router is not None
        else _activity(nodes) or "no node of the swarm serves a model yet; start one with --model FILE",
        "missing": [] if router is None or router.plan is None else [list(s) for s in router.plan.missing],
        "not_ready": {}
        if router is None
        else {node: [list(s) for s in slices] for node, slices in router.not_ready.items()},
        "nodes": nodes,
        "catalogue": [entry.to_json() for entry in agent.model.catalogue()],
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
        "expert_port": record.expert_port,
        "devices": [{"name": d.name, "type": d.type, "memory_bytes": d.memory_bytes} for d in record.devices],
        "memory_bytes": record.memory_bytes,
        "expert_bytes_per_s": record.expert_bytes_per_s,
        "can_route": record.can_route,
        "model": None if record.model is None else {"id": record.model.id, "file": record.model.file},
        "activity": record.activity,
        "planned": [list(s) for s in planned],
        "ready": [list(s) for s in record.ready],
        "problem": record.problem,
    }


def _activity(nodes: list[dict[str, Any]]) -> str:
    """What the live nodes are at, before there is a router."""
    return "; ".join(f"{node['name']} is {node['activity']}" for node in nodes if node["alive"] and node["activity"])


def metrics_text(agent: Agent) -> str:
    """Prometheus text format 0.0.4: docs/protocol.md, "Metrics"."""
    document = status_document(agent)
    page = Page()
    nodes = [({"node": n["name"]}, n) for n in document["nodes"]]
    page.add("swarm_ready", "gauge", "1 while queries can be answered", [({}, float(document["ready"]))])
    page.add("swarm_node_alive", "gauge", "1 for each node that answers", [(of, float(n["alive"])) for of, n in nodes])
    page.add(
        "swarm_node_memory_bytes",
        "gauge",
        "memory a node offers for experts",
        [(of, n["memory_bytes"]) for of, n in nodes],
    )
    page.add(
        "swarm_node_experts_ready",
        "gauge",
        "experts of all layers that a node has ready",
        [(of, count([Slice(*one) for one in n["ready"]])) for of, n in nodes],
    )
    page.add(
        "swarm_node_expert_bytes_per_second",
        "gauge",
        "expert weights that a node's device reads in a second, as measured at its start",
        [(of, n["expert_bytes_per_s"]) for of, n in nodes if n["expert_bytes_per_s"] > 0],
    )
    fetched = 0 if agent.shared.fetcher is None else agent.shared.fetcher.received_bytes
    page.add("swarm_model_fetched_bytes_total", "counter", "bytes of models fetched from other nodes", [({}, fetched)])
    sent = agent.shared.service.sent_bytes
    page.add("swarm_model_sent_bytes_total", "counter", "bytes of models given to other nodes", [({}, sent)])
    if agent.holder is not None:
        _add_expert_server(page, agent.holder.process)
    if agent.role is not None:
        _add_router(page, agent.engine_metrics, agent.door.waiting)
    return page.text()


def _add_expert_server(page: Page, process: ExpertProcess) -> None:
    """What this node's expert server holds and has done, for whatever router."""
    counters = process.counters
    page.add("swarm_slices_bytes", "gauge", "memory of the slices that are ready here", [({}, process.held_bytes)])
    for name, help_text in (
        ("calls", "expert calls answered by this node"),
        ("pairs", "(row, expert) pairs computed by this node"),
        ("bytes_received", "bytes of the answered expert calls"),
        ("bytes_sent", "bytes of the answers to expert calls"),
    ):
        page.add(f"swarm_served_{name}_total", "counter", help_text, [({}, counters[name])])
    for name, help_text in (
        ("compute", "time computing an expert call"),
        ("queue", "time that an expert call waited before that"),
    ):
        sample: tuple[dict[str, str], float, float] = ({}, counters[f"{name}_us"] / 1e6, counters["calls"])
        page.add_summary(f"swarm_served_{name}_seconds", help_text, [sample])
    refused = [({"kind": n.removeprefix("errors ")}, counters[n]) for n in sorted(counters) if n.startswith("errors ")]
    page.add("swarm_served_errors_total", "counter", "expert calls refused or failed on this node", refused)


def _add_router(page: Page, metrics: EngineMetrics, waiting: int) -> None:
    """What this node has done as the router. Counters go on when llama-server is started again."""
    metrics.follow()
    for name, help_text in (
        ("prompt_tokens", "prompt tokens computed"),
        ("prompt_tokens_cached", "prompt tokens that the prompt cache had"),
        ("generated_tokens", "tokens generated, counted when a request ends"),
    ):
        page.add(f"swarm_{name}_total", "counter", help_text, [({}, metrics.tokens[name])])
    for name, value, help_text in (
        ("prompt_tokens", metrics.prompt_tokens_per_s, "speed of the last prompts, of each alone"),
        ("generated_tokens", metrics.generated_tokens_per_s, "speed of the last answers, of each alone"),
    ):
        page.add(f"swarm_{name}_per_second", "gauge", help_text, [({}, value)])
    page.add("swarm_requests_processing", "gauge", "requests that llama-server works on", [({}, metrics.processing)])
    page.add(
        "swarm_requests_waiting", "gauge", "requests that wait for llama-server", [({}, waiting + metrics.deferred)]
    )
    calls, nodes = metrics.calls, metrics.nodes()
    page.add("swarm_expert_calls_total", "counter", "answered expert calls", [({}, calls["calls", ""])])
    page.add(
        "swarm_expert_failures_total", "counter", "layers that could not be computed", [({}, calls["failures", ""])]
    )
    for what, help_text in (
        ("calls", "answered calls"),
        ("pairs", "computed (row, expert) pairs"),
        ("bytes_sent", "bytes sent to the node"),
        ("bytes_received", "bytes received from the node"),
    ):
        samples = [({"node": node}, calls[what, node]) for node in nodes]
        page.add(f"swarm_expert_{what}_by_node_total", "counter", help_text, samples)
    page.add_summary(
        "swarm_expert_call_seconds",
        "time of a call to the node, until the last byte of the reply",
        [({"node": node}, calls["call_us", node] / 1e6, calls["calls", node]) for node in nodes],
    )
