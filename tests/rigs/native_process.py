"""One process for test_install: does what its arguments say, in their order, and prints what it found as JSON.

    kernels            import kernels and compute an expert FFN: "ffn", a digest of its result
    llama MODEL        load this build's libllama by ctypes and evaluate TOKENS: "logits", the same of the last logits
    global LIBRARY     load a library with its symbols visible to all
    seen LIBRARY       load a library and call its seen(): "seen", the text that it returns
    no-deepbind        as on systems whose linker cannot look up a library's symbols in its own dependencies first

"ggml": the files of this process whose name has "ggml" in it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

TOKENS = (5, 200, 1, 77, 30, 2, 999, 1234)


def expert_ffn() -> str:
    import numpy as np

    from rigs.layers import Layer, Pairs, hidden
    from rigs.program_texts import SWIGLU
    from rigs.random_models import random_layer

    with tempfile.TemporaryDirectory() as folder:
        layer = Layer(SWIGLU, random_layer("q4_K", 8, 256, 256), 8, Path(folder) / "layer")
        result = layer.call(layer.held((2, 6)), hidden(5, 256), Pairs.random(5, range(2, 7), 3), "sum")
    assert np.abs(result).max() > 0.1
    return hashlib.sha256(result.tobytes()).hexdigest()


class Opaque(ctypes.Structure):
    """Stands for llama.cpp's parameter structures, which are passed as they were got: larger than any of them."""

    _fields_ = (("bytes", ctypes.c_uint64 * 128),)


def llama_logits(native: Path, model: str) -> str:
    llama = ctypes.CDLL(str(native / "libswarm-llama.so"))
    signatures: dict[str, tuple[object, list[object]]] = {
        "llama_backend_init": (None, []),
        "llama_model_default_params": (Opaque, []),
        "llama_model_load_from_file": (ctypes.c_void_p, [ctypes.c_char_p, Opaque]),
        "llama_model_get_vocab": (ctypes.c_void_p, [ctypes.c_void_p]),
        "llama_vocab_n_tokens": (ctypes.c_int32, [ctypes.c_void_p]),
        "llama_context_default_params": (Opaque, []),
        "llama_init_from_model": (ctypes.c_void_p, [ctypes.c_void_p, Opaque]),
        "llama_set_n_threads": (None, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]),
        "llama_batch_get_one": (Opaque, [ctypes.c_void_p, ctypes.c_int32]),
        "llama_decode": (ctypes.c_int32, [ctypes.c_void_p, Opaque]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int32]),
        "llama_free": (None, [ctypes.c_void_p]),
        "llama_model_free": (None, [ctypes.c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    llama.llama_backend_init()
    loaded = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    context = llama.llama_init_from_model(loaded, llama.llama_context_default_params())
    assert context, "no context"
    llama.llama_set_n_threads(context, 1, 1)
    tokens = (ctypes.c_int32 * len(TOKENS))(*TOKENS)
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(TOKENS))) == 0
    width = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))
    row = ctypes.string_at(llama.llama_get_logits_ith(context, -1), 4 * width)
    llama.llama_free(context)
    llama.llama_model_free(loaded)
    return hashlib.sha256(row).hexdigest()


def native_folder() -> Path:
    """Where this build's libraries are, found without loading them."""
    import importlib.util

    spec = importlib.util.find_spec("kernels")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        if (Path(folder) / "_native").is_dir():
            return Path(folder) / "_native"
    raise FileNotFoundError("kernels has no _native")


def main() -> None:
    found: dict[str, object] = {}
    arguments = sys.argv[1:]
    while arguments:
        action = arguments.pop(0)
        if action == "kernels":
            found["ffn"] = expert_ffn()
        elif action == "llama":
            found["logits"] = llama_logits(native_folder(), arguments.pop(0))
        elif action == "global":
            ctypes.CDLL(arguments.pop(0), mode=ctypes.RTLD_GLOBAL)
        elif action == "seen":
            seen = ctypes.CDLL(arguments.pop(0)).seen
            seen.restype = ctypes.c_char_p
            found["seen"] = seen().decode()
        elif action == "no-deepbind":
            del os.RTLD_DEEPBIND
        else:
            raise ValueError(action)
    mapped = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "ggml" in line}
    print(json.dumps(found | {"ggml": sorted(name.strip() for name in mapped)}))


if __name__ == "__main__":
    # In place of this file's folder: `rigs` is a package beside the tests.
    sys.path[0] = str(Path(__file__).parent.parent)
    main()
