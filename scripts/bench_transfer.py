"""How fast pieces of a model go from node to node on this machine, beside `curl` from a plain file response of aiohttp.

    python -m scripts.bench_transfer --help

Both are measured in one run, in turns, with the source in a process of its own: what fetching, hashing and writing cost
beyond what HTTP costs anyway. The source's event loop is watched for its lag meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from node.models.hashing import local_manifest
from node.models.index import read_model
from node.models.pieces import expert_numbers
from node.models.synthetic import SHAPES, write_synthetic_model
from node.paths import PYTHON_MODULE
from node.peers.http import PeerClient
from node.transfer.fetcher import ModelFetcher
from node.transfer.service import LocalCopy, ModelService
from node.transfer.store import ModelStore


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bench_transfer", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: one layer of the shape qwen3.5-122b, 1.6 GB)")
    parser.add_argument("--folder", type=Path, help="folder for files (default: a temporary one)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(_serve(options.serve))
        return
    with tempfile.TemporaryDirectory(prefix="bench-transfer-", dir=options.folder) as folder:
        path = options.model or _synthetic(Path(folder))
        print(json.dumps(_measure(path, Path(folder), options.repeat), indent=1))


def _synthetic(folder: Path) -> Path:
    path = folder / "layer.gguf"
    write_synthetic_model(SHAPES["qwen3.5-122b"], path, layers=1)
    return path


async def _serve(path: Path) -> None:
    """The source: prints its port, then, when stdin ends, the largest lag of its loop in ms."""
    index = read_model(path)
    copy = LocalCopy(index, local_manifest(index))

    async def find(model_id: str) -> LocalCopy | None:
        return copy if model_id == copy.manifest.model_id else None

    service = ModelService(find)

    async def plain(request: web.Request) -> web.FileResponse:
        return web.FileResponse(path)

    app = web.Application()
    app.add_routes([*service.routes(), web.get("/plain", plain)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.001)
            lags.append(time.monotonic() - before_s - 0.001)

    watching = asyncio.create_task(watch())
    print(json.dumps({"port": runner.addresses[0][1], "model": copy.manifest.model_id}), flush=True)
    while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if command == "lag":
            print(json.dumps(1000 * max(lags, default=0.0)), flush=True)
        lags.clear()
        if command == "reset":
            print("{}", flush=True)
    watching.cancel()
    await runner.cleanup()


def _measure(path: Path, folder: Path, repeat: int) -> dict[str, Any]:
    source = subprocess.Popen(
        [*PYTHON_MODULE, "scripts.bench_transfer", "--serve", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert source.stdin is not None
    assert source.stdout is not None
    head = json.loads(source.stdout.readline())
    url = f"http://127.0.0.1:{head['port']}"

    def ask(command: str) -> Any:
        assert source.stdin is not None
        assert source.stdout is not None
        source.stdin.write(command + "\n")
        source.stdin.flush()
        return json.loads(source.stdout.readline())

    rates: dict[str, list[float]] = {"curl_to_nowhere": [], "curl_to_file": [], "fetch": []}
    lags, stolen = [], []
    try:
        for number in range(repeat):
            for name, target in (("curl_to_nowhere", Path("/dev/null")), ("curl_to_file", folder / "copy")):
                os.sync()  # what was written before is not to be paid for by what is measured next
                started_s = time.monotonic()
                subprocess.run(["curl", "-sf", "-o", target, f"{url}/plain"], check=True)
                rates[name].append(path.stat().st_size / (time.monotonic() - started_s) / 1e6)
            (folder / "copy").unlink()
            os.sync()
            ask("reset")
            stolen_s = _stolen_s()
            rates["fetch"].append(asyncio.run(_fetch(url, head["model"], ModelStore(folder / f"store-{number}"))))
            lags.append(ask("lag"))
            stolen.append(_stolen_s() - stolen_s)
    finally:
        source.stdin.close()
        source.wait(10)
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    return {
        "model_bytes": path.stat().st_size,
        "mb_per_s": medians,
        "all_mb_per_s": {name: [round(value) for value in values] for name, values in rates.items()},
        "share_of_curl_to_nowhere": round(medians["fetch"] / medians["curl_to_nowhere"], 2),
        "share_of_curl_to_file": round(medians["fetch"] / medians["curl_to_file"], 2),
        "sender_lag_ms": [round(lag, 1) for lag in lags],
        "stolen_ms": [round(1000 * seconds) for seconds in stolen],
    }


def _stolen_s() -> float:
    """Time for which a hypervisor has had this machine's cores run something else, of all of
    them: lag that nobody here causes."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK")
    return 0.0


async def _fetch(url: str, model_id: str, store: ModelStore) -> float:
    async with aiohttp.ClientSession() as session:
        fetcher = ModelFetcher(PeerClient(session, None), lambda _: {url: "source"})
        stored = store.create(*await fetcher.describe(model_id), "bench")
        try:
            numbers = sorted(expert_numbers(stored.pieces).values())
            started_s = time.monotonic()
            await fetcher.fetch(stored, numbers)
            elapsed_s = time.monotonic() - started_s
            size = sum(stored.pieces[number].bytes for number in numbers)
        finally:
            stored.close()
    store.prune(0)
    return size / elapsed_s / 1e6


if __name__ == "__main__":
    main()
