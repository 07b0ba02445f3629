"""Whole nodes on a LAN of network namespaces: they find each other, share the experts, and any of them answers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.models.demo import demo_model
from node.swarm_key import SwarmKey
from rigs import random_models
from rigs.lan import Host, cpu_seconds, lan, needs_namespaces
from rigs.network import network
from rigs.stock_answer import ANSWER, CHAT, QUESTION, stock_answer

pytestmark = needs_namespaces


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Host]]:
    with lan(tmp_path, ["one", "two", "three"]) as hosts:
        yield hosts


def _start_all(hosts: list[Host], model: Path, env: dict[str, str] | None = None) -> None:
    """The model's file is in a folder that all see, and in which they are started; only one is told to serve it."""
    hosts[0].start("--model", str(model), cwd=model.parent, env=env)
    for host in hosts[1:]:
        host.start(cwd=model.parent, env=env)


@pytest.mark.parametrize("case", ["demo", "8 of 3"])
def test_three_nodes_answer_as_stock_does(case: str, three: list[Host], tmp_path: Path) -> None:
    model = (
        demo_model()
        if case == "demo"
        else random_models.moe_model(random_models.Shape("qwen3moe", n_expert=8, n_used=3))
    )
    expected = stock_answer(model, tmp_path)
    _start_all(three, model)
    started_s = time.monotonic()
    for host in three:
        host.wait_ready(3)
    print(f"{case}: ready {time.monotonic() - started_s:.1f} s after the last start")
    for host in three:
        done = host.run("ask", "--max-tokens", "64", QUESTION)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip("\n") == expected.rstrip("\n")
    holders = [node for node in three[1].status()["nodes"] if node["ready"]]
    assert len(holders) == 3


def test_a_node_comes_back_and_another_joins_without_touching_the_rest(three: list[Host]) -> None:
    one, two, three_ = three
    model = demo_model()
    one.start("--model", str(model), cwd=model.parent)
    second = two.start(cwd=model.parent)
    one.wait_ready(2)
    router_pids = set(one.pids())
    (first, last) = next((n["ready"][0][1], n["ready"][0][2]) for n in one.status()["nodes"] if n["name"] == "two")
    missing = f"experts {first}-{last} on two"

    second.send_signal(signal.SIGKILL)
    second.wait()
    deadline_s = time.monotonic() + 20
    while one.status()["ready"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    status = one.status()
    assert missing in status["waits_for"]
    code, body = one.curl("/v1/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(CHAT))
    assert code == 503
    assert missing in json.loads(body)["error"]["message"]
    assert two.pids() == []

    two.start(cwd=model.parent)
    one.wait_ready(2)
    assert one.run("ask", QUESTION).stdout.strip() == ANSWER
    assert set(one.pids()) == router_pids

    three_.start(cwd=model.parent)
    deadline_s = time.monotonic() + 20
    while True:
        status = three_.wait_ready(3)
        # Ready at first without the newcomer, until the router has planned for it.
        if all(node["planned"] and node["ready"] for node in status["nodes"]):
            break
        assert time.monotonic() < deadline_s, status
        time.sleep(0.2)
    assert three_.run("ask", QUESTION).stdout.strip() == ANSWER
    assert set(one.pids()) == router_pids


@pytest.mark.parametrize(
    "addresses", [("fd00:77::1/64", "fd00:77::2/64"), ("", "")], ids=["of a network", "link-local"]
)
def test_a_lan_without_ipv4(addresses: tuple[str, str], tmp_path: Path) -> None:
    """A node may be reached by IPv6 on any LAN: where it answered first, and where it still does when it comes back."""
    model = demo_model()
    key = {"SWARM_SWARM_KEY": SwarmKey.generate().text()}
    with network(tmp_path) as net:
        one, two = net.add("one", addresses[0]), net.add("two", addresses[1])
        for host in (one, two):
            host.ip("link", "set", "eth0", "up")
        one.start("--model", str(model), cwd=model.parent, env=key)
        two.start(cwd=model.parent, env=key)
        one.wait_ready(2)
        done = two.run("ask", "--max-tokens", "6", QUESTION)
        assert done.stdout.strip() == ANSWER.removesuffix("."), done.stderr


def test_a_node_that_says_goodbye_is_done_without_at_once(three: list[Host]) -> None:
    model = demo_model()
    _start_all(three, model)
    three[0].wait_ready(3)
    three[1].processes[0].send_signal(signal.SIGTERM)
    assert three[1].processes[0].wait(5) == 143
    # Long before anybody would take it for dead.
    three[2].wait_ready(2, within_s=4)
    assert three[2].run("ask", QUESTION).stdout.strip() == ANSWER


def test_idle_costs_little_and_ctrl_c_leaves_nothing(three: list[Host]) -> None:
    model = demo_model()
    temporary = three[0].folder / "tmp"
    temporary.mkdir()
    _start_all(three, model, {"TMPDIR": str(temporary)})
    three[0].wait_ready(3)
    assert three[2].run("ask", QUESTION).stdout.strip() == ANSWER
    pids = [pid for host in three for pid in host.pids()]
    before, seconds = cpu_seconds(pids), 15.0
    time.sleep(seconds)
    share = (cpu_seconds(pids) - before) / seconds
    print(f"idle swarm of 3: {100 * share:.2f} % of a core")
    assert share < 0.02
    for host in three:
        (process,) = host.processes
        process.send_signal(signal.SIGINT)
    for host in three:
        (process,) = host.processes
        assert process.wait(5) in (0, 130)
        assert host.pids() == []
    assert list(temporary.iterdir()) == []


def test_a_key_keeps_others_out(three: list[Host]) -> None:
    one, two, three_ = three
    model = demo_model()
    key = {"SWARM_SWARM_KEY": SwarmKey.generate().text()}
    one.start("--model", str(model), cwd=model.parent, env=key)
    two.start(cwd=model.parent, env=key)
    one.wait_ready(2)
    assert two.run("ask", QUESTION).stdout.strip() == ANSWER
    three_.start(cwd=model.parent)  # without the key
    deadline_s = time.monotonic() + 15
    while "10.77.0.1" not in three_.log() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert [node["name"] for node in three_.status()["nodes"]] == ["three"]
    assert {node["name"] for node in one.status()["nodes"]} == {"one", "two"}
    for path in ("/swarm/v1/heartbeat", "/swarm/v1/goodbye", "/swarm/v1/programs", "/swarm/v1/relay/v1/completions"):
        code, _ = three_.curl(path, "-H", "Content-Type: application/json", "-d", "{}", host=one.address)
        assert code == 401
    for path in ("/v1/ffn", "/v1/stats"):
        assert three_.curl(path, "-d", "", host=one.address, port=4101)[0] == 401
    assert two.run("ask", QUESTION).stdout.strip() == ANSWER


def test_web_pages_and_other_names_are_refused(three: list[Host]) -> None:
    one = three[0]
    one.start(cwd=one.folder)
    deadline_s = time.monotonic() + 15
    while time.monotonic() < deadline_s:
        try:
            one.status()
            break
        except AssertionError:
            time.sleep(0.2)
    body = ("-d", json.dumps(CHAT))
    json_type = ("-H", "Content-Type: application/json")
    assert one.curl("/v1/chat/completions", *json_type, *body)[0] == 503
    assert one.curl("/v1/chat/completions", "-H", "Content-Type: text/plain", *body)[0] == 415
    assert one.curl("/v1/chat/completions", *json_type, *body, "-H", "Origin: http://evil.example")[0] == 403
    assert one.curl("/v1/chat/completions", *json_type, *body, "-H", "Host: evil.example")[0] == 403
    assert one.curl("/status", "-H", "Host: evil.example:4100")[0] == 403


# Run by Python in the namespace of a node that does not route.
_OPENAI_CLIENT = """
import openai
client = openai.OpenAI(base_url="http://127.0.0.1:4100/v1", api_key="none")
(model,) = [one.id for one in client.models.list()]
chat = dict(model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=64, temperature=0)
whole = client.chat.completions.create(**chat, logprobs=True)
assert whole.choices[0].message.content == ANSWER and whole.choices[0].finish_reason == "stop"
assert whole.choices[0].logprobs.content
text, usage = "", None
for event in client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}):
    text += "".join(choice.delta.content or "" for choice in event.choices)
    usage = event.usage or usage
assert text == ANSWER and usage.completion_tokens == whole.usage.completion_tokens
stopped = client.chat.completions.create(**chat, stop=[" is"])
assert stopped.choices[0].message.content == "The capital of France"
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
import json
formed = client.chat.completions.create(**chat, response_format=form).choices[0].message.content
assert set(json.loads(formed)) == {"city"}
for change, error in (
    ({"model": "nothing"}, openai.NotFoundError),
    ({"messages": [{"role": "user", "content": "word " * 20000}]}, openai.BadRequestError),
):
    try:
        client.chat.completions.create(**{**chat, **change})
    except error as caught:
        print(type(caught).__name__, caught)
    else:
        raise AssertionError(error)
try:
    client.embeddings.create(model=model, input="x")
except openai.APIStatusError as caught:
    print(type(caught).__name__, caught)
else:
    raise AssertionError("embeddings")
"""


def test_the_openai_client_on_a_node_that_does_not_route(three: list[Host]) -> None:
    model = demo_model()
    _start_all(three, model)
    for host in three:
        host.wait_ready(3)
    program = f"QUESTION, ANSWER = {QUESTION!r}, {ANSWER!r}\n{_OPENAI_CLIENT}"
    done = subprocess.run(three[2].command(sys.executable, "-c", program), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
