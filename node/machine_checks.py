"""``swarm-node doctor``: this machine and this build. Changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from typing import Any

import psutil

from node.checks import Check
from node.config import Config
from node.identity import state_root
from node.memory_limit import free_memory_bytes, memory_limit
from node.paths import PYTHON_MODULE
from node.swiglu import SWIGLU_PROGRAM

# The first use of a GPU may compile its kernels.
_FFN_TIMEOUT_S = 90.0
_PROGRAMS = ("llama-server", "swarm-programs", "libggml-swarm.so")
_GIB = 2**30
# Relative error of an expert's output. A wrong expert or tensor gives about 1, an F16 or Q8 activation far less than this.
_TOLERANCE = {"f32": 0.01, "q8_0": 0.05}


def check_build(config: Config) -> Check:
    """The native parts are there, and llama-server starts."""
    import kernels
    from kernels import _kernels

    missing = []
    for program in _PROGRAMS:
        try:
            kernels.native_path(program)
        except FileNotFoundError:
            missing.append(program)
    found = f"build {kernels.build_id()}, Python {platform.python_version()}, ggml {_kernels.ggml_library_path()}"
    if len(missing) == len(_PROGRAMS):
        found += "; expert-only: holds experts, cannot be the router"
        if config.model.path and config.router.enabled:
            return Check("build", "warning", found, "To serve --model from here, install without SWARM_ROUTER=OFF")
        return Check("build", "ok", found)
    if missing:
        return Check("build", "failed", f"{found}; lacks {', '.join(missing)}", "Install swarm-node again")
    server = [str(kernels.native_path("llama-server")), "--version"]
    done = subprocess.run(
        server, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=30
    )
    if done.returncode != 0:
        why = (done.stderr or done.stdout).strip()[-200:]
        return Check(
            "build", "failed", f"llama-server ends with status {done.returncode}: {why}", "Install swarm-node again"
        )
    return Check("build", "ok", f"{found}; with {', '.join(_PROGRAMS)}")


def check_devices(config: Config) -> Check:
    """Every ggml device, and the one that holds experts."""
    import kernels

    parts = [
        f"{d.name} ({d.type}, {d.description}, {d.memory_free_bytes / _GIB:.1f} of {d.memory_total_bytes / _GIB:.1f} GiB free"
        f"{'' if d.computes_ffn else ', computes no expert'})"
        for d in kernels.devices()
    ]
    found = "; ".join(parts) or "none"
    try:
        automatic = kernels.choose_device("auto")
        chosen = kernels.choose_device(config.experts.device)
    except kernels.NoDevice as error:
        return Check("devices", "failed", f"{found}. {error}", "Set [experts] device to one of these, or to auto")
    found += f"; auto is {automatic}" + (f", [experts] device is {chosen}" if chosen != automatic else "")
    return Check("devices", "ok", found)


async def check_ffn(config: Config) -> Check:
    """An expert FFN on the chosen device gives the numbers of the NumPy reference."""
    # In a process of its own: a driver that fails may take the process with it.
    process = await asyncio.create_subprocess_exec(
        *(*PYTHON_MODULE, "node.machine_checks", config.experts.device),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    advice = "Try another device: [experts] device, or --experts-device CPU; update the GPU's driver"
    try:
        async with asyncio.timeout(_FFN_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError:
        return Check("test FFN", "failed", f"no result within {_FFN_TIMEOUT_S:.0f} s", advice)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        return Check("test FFN", "failed", f"the process ended with status {process.returncode}: {last[:300]}", advice)
    result = json.loads(output)
    found = f"on {result['device']}, off the reference by " + ", ".join(
        f"{error:.1e} ({kind.upper()})" for kind, error in result["errors"].items()
    )
    # Also false for NaN.
    right = all(result["errors"][kind] <= limit for kind, limit in _TOLERANCE.items())
    return Check("test FFN", "ok", found) if right else Check("test FFN", "failed", f"wrong numbers {found}", advice)


def ffn_errors(device: str) -> dict[str, Any]:
    """Computes small made-up layers on a device and in NumPy: the device's name, and relative errors by tensor type."""
    import gguf
    import numpy as np

    import kernels
    from kernels import reference

    n_embd, n_ff, n_expert, first, last, n_rows = 64, 96, 4, 1, 3, 5
    shapes = {"up": (n_ff, n_embd), "gate": (n_ff, n_embd), "down": (n_embd, n_ff)}
    errors, used = {}, ""
    for kind in _TOLERANCE:
        generator = np.random.default_rng(1)
        program, tensors, parts = kernels.Program(SWIGLU_PROGRAM), {}, {}
        with tempfile.NamedTemporaryFile(prefix="swarm-node-doctor-") as file:
            for name, (n_out, n_in) in shapes.items():
                values = generator.standard_normal((n_expert, n_out, n_in), np.float32) * np.float32(n_in**-0.5)
                data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()]).tobytes()
                one = len(data) // n_expert
                place = (file.name, file.tell() + first * one, (last - first + 1) * one)
                tensors[f"ffn_{name}_exps.weight"] = (kind, (n_in, n_out), data)
                parts[f"ffn_{name}_exps.weight"] = kernels.TensorParts(kind, (n_in, n_out), [place])
                file.write(data)
            file.flush()
            store = kernels.ExpertStore(device, threads=1)
            store.load(0, program, first, last, n_expert, parts)
        row = np.repeat(np.arange(n_rows, dtype=np.int32), 2)
        expert = np.array([first + (r + k) % 3 for r in range(n_rows) for k in range(2)], np.int32)
        weight = generator.uniform(0.1, 1, len(row)).astype(np.float32)
        h = generator.standard_normal((n_rows, n_embd), np.float32)
        got = store.ffn(program.digest, 0, h, row, expert, weight, n_rows, "sum")
        expected = reference.ffn(SWIGLU_PROGRAM, tensors, h, row, expert, weight, n_rows, "sum")
        errors[kind] = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
        used = store.device
    return {"device": used, "errors": errors}


def check_cpu(config: Config) -> Check:
    """What the CPU quota allows, and the threads that are set."""
    import kernels

    quota, threads = kernels.cpu_quota(), kernels.default_threads()
    experts, router = config.experts.threads or threads, config.router.threads or threads
    found = f"{quota:g} of {os.cpu_count()} cores may be used; threads: experts {experts}, router {router}"
    if max(experts, router) > max(1.0, quota):
        return Check("CPU", "warning", found, "More threads than cores slow each other down: set threads = 0")
    return Check("CPU", "ok", found)


def check_memory(config: Config) -> Check:
    """What is offered for experts, against what is free."""
    import kernels
    from node.memory_limit import MEMORY_SHARE

    if not config.experts.enabled:
        return Check("memory", "ok", "none is offered: [experts] enabled is false")
    name = kernels.choose_device(config.experts.device)
    device = next(d for d in kernels.devices() if d.name == name)
    limit = memory_limit() if device.type == "cpu" else None
    free = free_memory_bytes() if device.type == "cpu" else device.memory_free_bytes
    offered = config.experts.memory_mib << 20 or int(free * MEMORY_SHARE)
    found = f"{offered / _GIB:.1f} GiB of {device.name} are offered for experts; {free / _GIB:.1f} GiB are free"
    if limit is not None and limit.limit_bytes < psutil.virtual_memory().total:
        found += f", by the control group's limit of {limit.limit_bytes / _GIB:.1f} GiB ({limit.file})"
    if offered > free:
        advice = f"Set [experts] memory_mib to at most {int(free * MEMORY_SHARE) >> 20}, or end other programs"
        return Check("memory", "warning", found, advice)
    if offered < 64 << 20:
        return Check("memory", "warning", found, "Few experts fit: end other programs")
    return Check("memory", "ok", found)


def check_state_folder(config: Config) -> Check:
    """The node's state folder can be written."""
    folder = state_root(config.node.state_folder, os.environ) / config.node.name
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    advice = f"Make it writable, or set [node] state_folder (--node-state-folder PATH); its user is {os.geteuid()}"
    try:
        # A full disk shows only when something is written.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return Check("state folder", "failed", f"{folder}: {existing} cannot be written: {error.strerror}", advice)
    return Check("state folder", "ok", f"{folder}" + ("" if existing == folder else " (will be made)"))


if __name__ == "__main__":
    print(json.dumps(ffn_errors(sys.argv[1])))
