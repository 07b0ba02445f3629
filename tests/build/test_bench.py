"""scripts/bench: every suite runs, on few figures. How fast anything is, is not asserted;
what must hold in any run is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from rigs import ROOT


def bench(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "scripts/bench.py", "--json", "--repeat", "1", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def test_calls_and_tokens() -> None:
    document = bench(
        *("--suites", "call", "decode", "prompt", "--call-rounds", "100", "--call-servers", "1", "3"),
        *("--servers", "2", "--decode-tokens", "4", "--prompt-tokens", "32"),
    )
    assert [(row["servers"], row["polling"]) for row in document["call"]] == [
        (1, "300 us"), (1, "off"), (3, "300 us"), (3, "off"),
    ]  # fmt: skip
    for row in document["call"]:
        assert (
            0 < row["compute_us"] <= row["wait_us"] * row["servers"]
            and row["least_us"] <= row["p50_us"] <= row["p99_us"]
        )
        # 12 KB of one row each way, and little else.
        assert 12288 < row["bytes_sent"] < 12288 + 200 and 12288 < row["bytes_received"] < 12288 + 200
    for suite in ("decode", "prompt"):
        ways = document["tokens"][suite]
        assert list(ways) == [
            "stock llama.cpp",
            "llama.cpp RPC, 1 server",
            "swarm, 2 servers, rows",
            "swarm, 2 servers, sum",
        ]
        assert all(way["least"] > 0 for way in ways.values())


def test_links_and_chats() -> None:
    document = bench(
        "--suites",
        "lan",
        "users",
        "--round-trips",
        "5",
        "--rates",
        "100",
        "--prompt-tokens",
        "8",
        "--users-servers",
        "2",
    )
    assert [(row["link"], row["way"].split(",")[0]) for row in document["lan"]] == [
        ("loopback", "stock llama.cpp"),
        ("loopback", "llama.cpp RPC"),
        ("loopback", "swarm"),
        ("5 ms, 100 Mbit/s", "llama.cpp RPC"),
        ("5 ms, 100 Mbit/s", "swarm"),
        ("5 ms, 100 Mbit/s", "swarm"),
    ]
    for row in document["lan"][3:]:
        # 30 layers, a round trip each: no way is faster than the link.
        assert row["measured_round_trip_ms"] > 4 and row["decode_tokens_per_s"] < 1000 / (30 * 4)
    assert [row["chats"] for row in document["users"]] == [1, 2, 4, 8] * 3  # stock, RPC, and the swarm of two
    assert all(row["tokens_per_s"] > 0 for row in document["users"])


def test_bytes_and_failover() -> None:
    document = bench("--suites", "wire", "failover", "--wire-servers", "2", "--wire-chunks", "1")
    for row in document["wire"]:
        together = row["sent"] + row["received"]
        if row["reduce"] == "sum":
            assert together <= row["limit"], row
        # Both ways carry at least the rows themselves, in the format's width.
        rows = 1 if row["reduce"] == "sum" else 4
        assert together > 2 * (1 + rows) * 576 * (4 if row["dtype"] == "f32" else 2)
        # Stock's own probabilities, but for last bits.
        assert row["same_top"] > 80 and abs(row["divergence"]) < 0.05
    by_mode = {(row["reduce"], row["dtype"]): row for row in document["wire"]}
    assert by_mode["rows", "f32"]["same_top"] == 100  # bit for bit
    assert [row["tokens_as_stock"] for row in document["failover"]] == [True, True]
