"""Reads a page of ``/metrics``, and knows which metrics who tells."""

from __future__ import annotations

import re

SAMPLE = re.compile(r'([a-z_]+)(\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})? (-?[0-9.e+-]+)')
# What only the router tells.
ROUTER = (
    "swarm_prompt_tokens_total",
    "swarm_prompt_tokens_cached_total",
    "swarm_generated_tokens_total",
    "swarm_prompt_tokens_per_second",
    "swarm_generated_tokens_per_second",
    "swarm_requests_processing",
    "swarm_requests_waiting",
    "swarm_expert_calls_total",
    "swarm_expert_failures_total",
)
# What the router tells of each node that it has sent expert calls.
BY_NODE = (
    "swarm_expert_calls_by_node_total",
    "swarm_expert_pairs_by_node_total",
    "swarm_expert_bytes_sent_by_node_total",
    "swarm_expert_bytes_received_by_node_total",
    "swarm_expert_call_seconds_sum",
    "swarm_expert_call_seconds_count",
)
# What an expert server tells of itself.
SERVED = (
    "swarm_slices_bytes",
    "swarm_served_calls_total",
    "swarm_served_pairs_total",
    "swarm_served_bytes_received_total",
    "swarm_served_bytes_sent_total",
    "swarm_served_compute_seconds_sum",
    "swarm_served_compute_seconds_count",
    "swarm_served_queue_seconds_sum",
)


def samples(text: str) -> dict[str, float]:
    """The values by name with labels; asserts that every line is in the format, every metric is declared before it, and
    nothing comes twice."""
    found: dict[str, float] = {}
    declared: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in declared
            declared[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            name = match[1]
            base = name if name in declared else re.sub("_(sum|count)$", "", name)
            assert declared[base] in ("gauge", "counter", "summary")
            assert (declared[base] == "counter") == name.endswith("_total")
            assert name + (match[2] or "") not in found
            found[name + (match[2] or "")] = float(match[3])
    assert text.endswith("\n")
    return found
