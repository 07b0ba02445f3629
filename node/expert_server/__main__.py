"""The expert server: a process that holds expert slices and answers expert calls. docs/protocol.md is its contract.

    python -m node.expert_server --host 127.0.0.1 --port 0 --device auto --threads 0 --max-rows 512 --name alpha

Calls come over HTTP, orders from the parent over stdin; answers to those go to stdout, logs to stderr. Variables with
which tests make it fail on purpose, and measurements look into it, are in docs/environment.md.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import TextIO

from node import environment, parent_death
from node.expert_server import wire
from node.expert_server.calls import ExpertCalls
from node.expert_server.compute_queue import ComputeQueue
from node.expert_server.guard import CallGuard
from node.expert_server.held_slices import SliceHolder
from node.expert_server.native_calls import NativeCalls
from node.expert_server.orders import Orders, Parent, report_speed, report_statistics
from node.expert_server.proof import Prover
from node.expert_server.server import ExpertServer
from node.expert_server.speed import DeviceSpeed
from node.log_levels import apply_levels, levels_from_environment

# Run as a module, this one is called __main__.
log = logging.getLogger("node.expert_server")


async def serve(kernels: ModuleType, options: argparse.Namespace, out: TextIO) -> None:
    """Runs the server until the parent, a signal or end-of-file ends it. `kernels` computes."""
    parent = Parent(out)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, parent.stop)
    delay_s = float(os.environ.get(environment.DEBUG_SLEEP_S, "0"))
    calls_folder = os.environ.get(environment.DEBUG_CALLS, "")
    native = None
    if not calls_folder and NativeCalls.possible(kernels):
        native = NativeCalls(
            kernels,
            options.device,
            options.max_rows,
            max_waiting=wire.MAX_WAITING_CALLS,
            poll_us=environment.poll_us(),
            delay_s=delay_s,
        )
    compute = ComputeQueue(
        "compute", wire.MAX_WAITING_CALLS, delay_s, others_waiting=None if native is None else native.waiting
    )
    slices = SliceHolder(
        kernels,
        options.device,
        options.threads,
        options.max_rows,
        compute,
        Prover(kernels, compute, options.threads, enabled=not options.unproved),
        on_change=None if native is None else native.publish,
        on_withdrawn=parent.say,
    )
    recording = _recording(Path(calls_folder, f"{options.name}.jsonl")) if calls_folder else None
    calls = ExpertCalls(kernels, slices, compute, native=native, recording=recording)
    speed = DeviceSpeed(kernels, options.device, options.threads, compute)
    server = ExpertServer(options.name, slices, calls, compute, native, speed, CallGuard.from_environment())
    port = await server.listen(options.host, options.port)
    parent.say(_listening(kernels, options, port))
    Orders(parent, slices, on_answer=server.renew_sockets).start()
    asides = [asyncio.create_task(report_statistics(parent, calls))]
    if options.measure:
        asides.append(asyncio.create_task(report_speed(parent, speed)))
    await parent.stopped.wait()
    for aside in asides:
        aside.cancel()
    await server.close()


def _recording(path: Path) -> TextIO:
    return path.open("a", buffering=1)


def _listening(kernels: ModuleType, options: argparse.Namespace, port: int) -> dict[str, object]:
    fields = ("name", "description", "type", "memory_free_bytes", "memory_total_bytes")
    return {
        "type": "listening",
        "version": wire.VERSION,
        "build": kernels.build_id(),
        "host": options.host,
        "port": port,
        "device": options.device,
        "devices": [{field: getattr(device, field) for field in fields} for device in kernels.devices()],
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m node.expert_server", description="Serves expert FFN calls.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on, * for all (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port; 0: one that is free, reported on stdout")
    parser.add_argument("--device", default="auto", help="device to compute on (default: the best that can)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: from the CPU quota")
    parser.add_argument("--max-rows", type=int, default=512, help="rows of one call at most (default: %(default)s)")
    parser.add_argument("--name", default="node", help="name of the node, for logs and status")
    parser.add_argument(
        "--measure", action="store_true", help="measure how fast the device reads experts, at the start"
    )
    parser.add_argument(
        "--unproved",
        action="store_true",
        help="slices are ready without having proved themselves: to measure a device, right or wrong, and never in a "
        "swarm",
    )
    options = parser.parse_args(arguments)
    if options.max_rows < 1 or options.threads < 0 or not 0 <= options.port < 65536:
        parser.error("--max-rows must be at least 1, --threads at least 0, --port a port")
    return options


def main(arguments: list[str] | None = None, kernels: ModuleType | None = None) -> None:
    """Runs the process and ends it; `kernels` is given by tests that compute without the extension."""
    parent_death.tie_to_parent()
    options = parse_arguments(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {options.name} %(levelname)s %(name)s: %(message)s"
    )
    apply_levels(levels_from_environment())
    # stdout belongs to the protocol: what a library prints there goes to stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if kernels is None:
        import kernels as imported  # type: ignore[import-not-found,unused-ignore]

        kernels = imported
    try:
        options.device = kernels.choose_device(options.device)
        _new_loop().run_until_complete(serve(kernels, options, out))
        code = 0
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        log.error("the expert server cannot run: %s", error)
        code = 1
    # Without waiting for the worker threads: a kernel in mid-call would hold the process for as long as it runs.
    out.flush()
    sys.stderr.flush()
    os._exit(code)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


if __name__ == "__main__":
    main()
