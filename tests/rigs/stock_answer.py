"""What stock llama.cpp answers: what a swarm has to answer, word for word."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from rigs.expert_servers import native

QUESTION = "What is the capital of France? Tell me one fact about it."
ANSWER = "The capital of France is Paris."
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "temperature": 0}


def stock_answer(model: Path, folder: Path) -> str:
    """What stock llama-server of this build says: 64 greedy tokens."""
    server = subprocess.Popen(
        [
            *(native("llama-server"), "-m", model, "--host", "127.0.0.1", "--port", "18111", "-c", "4096"),
            *("--fit", "off", "--poll", "0", "-np", "1", "--cache-ram", "0"),
        ],
        stdout=(folder / "stock.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        for _ in range(100):
            if subprocess.run(["curl", "-sf", "http://127.0.0.1:18111/health"], capture_output=True).returncode == 0:
                break
            time.sleep(0.2)
        done = subprocess.run(
            [
                *("curl", "-sS", "http://127.0.0.1:18111/v1/chat/completions"),
                *("-H", "Content-Type: application/json", "-d", json.dumps(CHAT)),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        return str(json.loads(done.stdout)["choices"][0]["message"]["content"])
    finally:
        server.terminate()
        server.wait(10)
