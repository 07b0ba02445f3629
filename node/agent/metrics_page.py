"""``GET /metrics`` of an agent, in the text format 0.0.4 of Prometheus: docs/protocol.md, "Metrics"."""

from __future__ import annotations

from node.agent.measured import CountedExperts, Measured
from node.agent.status import Status
from node.metrics import Page
from node.router.engine_metrics import EngineMetrics
from node.slices import count


def metrics_text(status: Status, measured: Measured) -> str:
    """The page for one moment."""
    page = Page()
    nodes = [({"node": node.name}, node) for node in status.nodes]
    page.add("swarm_ready", "gauge", "1 while queries can be answered", [({}, float(status.ready))])
    page.add("swarm_node_alive", "gauge", "1 for each node that answers", [(of, float(n.alive)) for of, n in nodes])
    page.add(
        "swarm_node_memory_bytes",
        "gauge",
        "memory a node offers for experts",
        [(of, n.memory_bytes) for of, n in nodes],
    )
    page.add(
        "swarm_node_experts_ready",
        "gauge",
        "experts of all layers that a node has ready",
        [(of, count(n.ready)) for of, n in nodes],
    )
    page.add(
        "swarm_node_expert_bytes_per_second",
        "gauge",
        "expert weights that a node's device reads in a second, as measured at its start",
        [(of, n.expert_bytes_per_s) for of, n in nodes if n.expert_bytes_per_s > 0],
    )
    page.add(
        "swarm_model_fetched_bytes_total",
        "counter",
        "bytes of models fetched from other nodes",
        [({}, measured.fetched_bytes)],
    )
    page.add(
        "swarm_model_sent_bytes_total", "counter", "bytes of models given to other nodes", [({}, measured.sent_bytes)]
    )
    if measured.experts is not None:
        _add_expert_server(page, measured.experts)
    if measured.engine is not None:
        _add_router(page, measured.engine, measured.waiting)
    return page.text()


def _add_expert_server(page: Page, experts: CountedExperts) -> None:
    """What this node's expert server holds and has done, for whatever router."""
    counters = experts.counters
    page.add("swarm_slices_bytes", "gauge", "memory of the slices that are ready here", [({}, experts.held_bytes)])
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
