"""``swarm-node doctor``: this machine and this build. Changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from node.commands.doctor_check import Check
from node.expert_server.speed import SWIGLU_PROGRAM
from node.memory_limit import free_memory_bytes, memory_limit
from node.models.gguf import GGML_TYPES, TYPE_IDS
from node.paths import PYTHON_MODULE
from node.peers.identity import state_root
from node.settings.load import Config

# The first use of a GPU may compile its kernels.
_FFN_TIMEOUT_S = 90.0
_PROGRAMS = ("llama-server", "swarm-programs", "libggml-swarm.so")
_GIB = 2**30
# What a CPU does with an instruction it lacks: the compiler was told of another CPU, or the
# kernel hides what this one has.
_ILLEGAL = (
    "This build uses instructions that this CPU, or its kernel, does not have. Install again with "
    'CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install .; on an x86 CPU without AVX2 add '
    "-DGGML_AVX2=OFF -DGGML_FMA=OFF -DGGML_F16C=OFF -DGGML_BMI2=OFF, and without AVX -DGGML_AVX=OFF"
)
# ggml's libraries that are no backend for experts: its core, and one that hands calls to other machines.
_NO_BACKENDS = frozenset({"base", "rpc"})


def compiled_backends() -> list[str]:
    """The ggml backends that this build was made with, such as cpu, cuda and vulkan; whether they find
    a device is another matter."""
    from kernels import _kernels

    folder = Path(_kernels.ggml_library_path()).parent
    names = {path.stem.removeprefix("libswarm-ggml-") for path in folder.glob("libswarm-ggml-*")}
    return sorted(names - _NO_BACKENDS)


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
    found += f", backends {', '.join(compiled_backends())}"
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
    """Every ggml device, and the one that holds experts. A warning when a backend was built for which there is none."""
    import kernels

    devices = kernels.devices()
    parts = [
        f"{d.name} ({d.type}, {d.description}, {d.memory_free_bytes / _GIB:.1f} of {d.memory_total_bytes / _GIB:.1f} "
        "GiB free"
        f"{'' if d.computes_ffn else ', computes no expert'})"
        for d in devices
    ]
    found = "; ".join(parts) or "none"
    try:
        automatic = kernels.choose_device("auto")
        chosen = kernels.choose_device(config.experts.device)
    except kernels.NoDevice as error:
        return Check("devices", "failed", f"{found}. {error}", "Set [experts] device to one of these, or to auto")
    found += f"; auto is {automatic}" + (f", [experts] device is {chosen}" if chosen != automatic else "")
    others = [name for name in compiled_backends() if name not in ("cpu", "blas")]
    if others and not any(d.type in ("gpu", "igpu", "accel") and d.computes_ffn for d in devices):
        advice = (
            "Install or repair the GPU's driver, and see whether this user may use the GPU; or install without "
            "that backend"
        )
        return Check(
            "devices", "warning", f"{found}. This build has {', '.join(others)}, which found no device", advice
        )
    return Check("devices", "ok", found)


async def check_ffn(config: Config) -> Check:
    """An expert FFN with each type of weights gives, on the chosen device, what ggml's scalar code and NumPy give."""
    # In a process of its own: a driver that fails may take the process with it.
    process = await asyncio.create_subprocess_exec(
        *(*PYTHON_MODULE, "node.commands.doctor_machine", config.experts.device),
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
    if process.returncode == -signal.SIGILL:
        return Check("test FFN", "failed", "the process was ended by SIGILL, an illegal instruction", _ILLEGAL)
    if process.returncode != 0:
        last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        return Check("test FFN", "failed", f"the process ended with status {process.returncode}: {last[:300]}", advice)
    return ffn_check(json.loads(output), advice)


def ffn_check(result: Mapping[str, Any], advice: str) -> Check:
    """What a result of ``ffn_errors`` means."""
    errors: dict[str, float] = result["errors"]
    found = f"on {result['device']}, {len(errors)} types of weights"
    if errors:
        least, most = min(errors, key=errors.__getitem__), max(errors, key=errors.__getitem__)
        found += f" off the reference by {errors[least]:.1e} ({least.upper()}) to {errors[most]:.1e} ({most.upper()})"
    if result["unable"]:
        found += f"; it cannot compute {', '.join(result['unable']).upper()}"
    if result["wrong"]:
        why = "; ".join(f"{kind.upper()}: {reason}" for kind, reason in result["wrong"].items())
        return Check("test FFN", "failed", f"wrong numbers {found}. {why}", advice)
    return Check("test FFN", "ok", found) if errors else Check("test FFN", "failed", found, advice)


def ffn_errors(device: str) -> dict[str, Any]:
    """Computes a small made-up layer of each type of weights on a device, and as float64 from ggml's scalar code.

    `device`: its name. `errors`: the relative L2 by type. `wrong`: why, of the types whose results are beyond the
    limits of kernels/tolerances.py. `unable`: the types that the device does not compute.
    """
    import numpy as np

    import kernels
    from kernels.equivalence import compare
    from kernels.tolerances import family, problem, tolerance
    from node.models.random_blocks import BLOCK_TYPES, random_blocks

    width, n_expert, first, last, n_rows = 256, 4, 1, 3, 9
    name = kernels.choose_device(device)
    of = family(next(d.type for d in kernels.devices() if d.name == name))
    program = kernels.Program(SWIGLU_PROGRAM)
    generator = np.random.default_rng(1)
    h = generator.standard_normal((n_rows, width), np.float32)
    row, expert = np.divmod(np.arange(n_rows * 3, dtype=np.int32), 3)
    expert += first
    weight = generator.uniform(0.5, 1, len(row)).astype(np.float32)
    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    unable: list[str] = []
    for kind in BLOCK_TYPES:
        _, block_values, block_bytes = GGML_TYPES[TYPE_IDS[kind]]
        one = width * width // block_values * block_bytes
        with tempfile.NamedTemporaryFile(prefix="swarm-node-doctor-") as file:
            sources = {}
            for number, tensor in enumerate(sorted(program.tensors)):
                file.write(random_blocks(generator, kind, n_expert * one // block_bytes, width**-0.5).tobytes())
                place = (file.name, (number * n_expert + first) * one, (last - first + 1) * one)
                sources[tensor] = kernels.TensorSource(kind, [width, width], [place])
            file.flush()
            store = kernels.ExpertStore(name, threads=1)
            parts = {n: kernels.TensorParts(s.type, list(s.ne), list(s.parts)) for n, s in sources.items()}
            try:
                store.load(0, program, first, last, n_expert, parts)
            except kernels.LoadError:
                unable.append(kind)
                continue
            try:
                got = store.ffn(program.digest, 0, h, row, expert, weight, n_rows, "rows")
            except kernels.ComputeError as error:
                wrong[kind] = str(error)
                continue
            expected = np.empty(got.shape)
            for e in range(first, last + 1):
                own = expert == e
                expected[own] = kernels.expert_rows(
                    SWIGLU_PROGRAM, sources, e - first, last - first + 1, h[row[own]], weight[own]
                )
        tally = compare(got, expected, expert)
        errors[kind] = tally.result().relative_l2
        allowed = tolerance(of, "reference", [kind])
        problems = [why for one in tally.experts().values() if (why := problem(one, allowed, width))]
        if problems:
            wrong[kind] = problems[0]
    return {"device": name, "errors": errors, "wrong": wrong, "unable": unable}


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
