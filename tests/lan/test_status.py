"""`/status` and `/metrics` of whole nodes, and what `swarm-node status` shows of them."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil

from node.models.demo import demo_model
from rigs.lan import Host, lan, needs_namespaces
from rigs.metrics_page import BY_NODE, ROUTER, SERVED, samples


def metrics(host: Host) -> dict[str, float]:
    code, text = host.curl("/metrics")
    assert code == 200
    return samples(text + "\n" * (not text.endswith("\n")))


def wait_for(host: Host, name: str, at_least: float, within_s: float = 30) -> dict[str, float]:
    deadline_s = time.monotonic() + within_s
    while (found := metrics(host)).get(name, 0.0) < at_least:
        assert time.monotonic() < deadline_s, (name, at_least, found.get(name))
        time.sleep(0.2)
    return found


@needs_namespaces
def test_a_swarm_of_two(tmp_path: Path) -> None:
    model = demo_model()
    question = ("ask", "--max-tokens", "8", "What is the capital of France? Tell me one fact about it.")
    with lan(tmp_path, ["one", "two"]) as (one, two):
        one.start("--model", str(model), cwd=model.parent)
        two.start(cwd=model.parent)
        for host in (one, two):
            host.wait_ready(2)
        for name in ("one", "two"):
            wait_for(two, f'swarm_node_expert_bytes_per_second{{node="{name}"}}', 1e6)
        assert two.run(*question).stdout.strip()
        before = wait_for(one, "swarm_generated_tokens_total", 7)
        assert before["swarm_prompt_tokens_total"] >= 10
        assert before["swarm_generated_tokens_per_second"] > 0
        assert before["swarm_prompt_tokens_per_second"] > 0
        assert before["swarm_requests_waiting"] == 0
        for name in BY_NODE:
            for node in ("one", "two"):
                assert before[f'{name}{{node="{node}"}}'] > 0, name
        assert before["swarm_expert_calls_total"] >= 60
        served = wait_for(two, "swarm_served_calls_total", 60)
        for name in SERVED:
            assert served[name] > 0, name
        assert not any(name.startswith((*ROUTER, *BY_NODE)) for name in served)

        # Every node knows the router's speed.
        deadline_s = time.monotonic() + 10
        while not (status := two.status())["router"]["tokens_per_s"]:
            assert time.monotonic() < deadline_s, status
            time.sleep(0.2)
        assert all(node["expert_bytes_per_s"] > 1e6 for node in status["nodes"])
        people = two.run("status").stdout
        assert re.search(r"ready, router one, term \d+, [\d.e+]+ tokens/s", people)
        assert len(re.findall(r" \d+\.\d[ \N{NO-BREAK SPACE}][MG]B/s ", people)) == 2
        print(people)

        # llama-server starts again, counting from 0.
        (llama,) = [pid for pid in one.pids() if "llama-server" in psutil.Process(pid).name()]
        psutil.Process(llama).send_signal(signal.SIGKILL)
        deadline_s = time.monotonic() + 10
        while one.status()["ready"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        for _ in range(200):
            now = metrics(one)
            for name in before:
                if name.endswith("_total"):
                    assert now[name] >= before[name], name
            before = now
            if one.status()["ready"]:
                break
            time.sleep(0.2)
        one.wait_ready(2)
        assert one.run(*question).stdout.strip()
        after = wait_for(one, "swarm_generated_tokens_total", before["swarm_generated_tokens_total"] + 7)
        for name in before:
            if name.endswith("_total"):
                assert after[name] >= before[name], name
        assert after["swarm_expert_calls_total"] > before["swarm_expert_calls_total"]
