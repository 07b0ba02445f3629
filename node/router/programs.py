"""The layer programs of a model: what its routed experts compute, as llama.cpp itself builds it.

Read once per model and build by the native program ``swarm-programs`` and kept in the cache folder.
Format: docs/protocol.md, "Layer program".
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels
from node.errors import ModelError
from node.models.index import ModelIndex
from node.paths import cache_dir

# Names of the tensors that leave the router, as llama.cpp's --override-tensor takes it. Look-alikes such as
# ffn_norm_exps, a norm of Arctic, and chunked experts (chexps), whose ids are another set, stay with the trunk.
EXPERT_TENSOR_PATTERN = r"blk\.[0-9]+\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)"

# llama.cpp's graph of a model of 128 layers takes seconds to build on a slow machine; a minute means it hangs.
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class LayerProgram:
    """One layer. ``n_in`` and ``n_out``: values of an input and an output row."""

    layer: int
    text: str
    digest: int
    n_expert: int
    n_used: int
    n_in: int
    n_out: int


@dataclass(frozen=True)
class ModelPrograms:
    """All layers with routed experts, by layer number. ``build``: id of the native build that read them."""

    model_id: str
    build: str
    layers: Mapping[int, LayerProgram]


async def read_programs(index: ModelIndex) -> ModelPrograms:
    """The programs of a model, from the cache or from llama.cpp.

    Raises ModelError when llama.cpp cannot load the model, when it has no routed experts, or when a layer computes
    something that the program language lacks; the message names it.
    """
    build = kernels.build_id()
    cached = cache_dir() / "programs" / f"{index.header_digest[:32]}-{build}.json"
    try:
        document = json.loads(cached.read_text())
    except (OSError, ValueError):
        document = await _run_swarm_programs(index)
        cached.parent.mkdir(parents=True, exist_ok=True)
        temporary = cached.with_name(f"{cached.name}.{os.getpid()}")
        temporary.write_text(json.dumps(document))
        temporary.replace(cached)
    return _check(index, build, document)


def router_environment() -> dict[str, str]:
    """This process's environment, with the Swarm backend for llama.cpp programs of this build."""
    return {**os.environ, "GGML_BACKEND_PATH": str(swarm_backend_path())}


def swarm_backend_path() -> Path:
    """The Swarm backend's library. Raises FileNotFoundError in an expert-only build."""
    return kernels.native_path("libggml-swarm.so")


async def _run_swarm_programs(index: ModelIndex) -> Any:
    process = await asyncio.create_subprocess_exec(
        str(kernels.native_path("swarm-programs")),
        index.paths[0],
        EXPERT_TENSOR_PATTERN,
        env=router_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        raise ModelError(
            f"{index.paths[0]}: llama.cpp did not build the model's graph within {_TIMEOUT_S:.0f} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return json.loads(output)
    except ValueError:
        tail = errors.decode(errors="replace").strip()[-1000:]
        raise ModelError(f"{index.paths[0]}: llama.cpp cannot use this model: {tail}") from None


def _check(index: ModelIndex, build: str, document: Any) -> ModelPrograms:
    for refused in document["refused"]:
        raise ModelError(
            f"{index.paths[0]} ({index.architecture}) cannot be served: its routed experts compute something that "
            f"swarm-node does not know: {refused['reason']}. llama.cpp alone can run it",
            layer=refused["layer"],
        )
    layers = {}
    for entry in document["layers"]:
        layer = entry["layer"]
        held = index.expert_tensors(layer)
        for name, tensor in entry["tensors"].items():
            info = held.get(name)
            if info is None or (info.type, list(info.ne)) != (tensor["type"], tensor["ne"]):
                raise ModelError(
                    f"{index.paths[0]}: llama.cpp reads tensor {name} as {tensor['type']} {tensor['ne']}, the file's "
                    f"index says {info and (info.type, info.ne)}",
                    layer=layer,
                )
        layers[layer] = LayerProgram(
            layer=layer,
            text=entry["program"],
            digest=int(entry["digest"], 16),
            n_expert=entry["n_expert"],
            n_used=entry["n_used"],
            n_in=entry["n_in"],
            n_out=entry["n_out"],
        )
    if not layers:
        raise ModelError(
            f"{index.paths[0]} ({index.architecture}) has no routed experts: a dense model gains nothing from a swarm"
        )
    return ModelPrograms(model_id=index.model_id, build=build, layers=layers)
