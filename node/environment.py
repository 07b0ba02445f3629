"""The environment variables that are no settings: who reads each, and what it does. In docs/environment.md too.

Settings have variables too, such as SWARM_NODE_PORT (node/settings/table.py). Two of them are read by other processes
than ``swarm-node``, which gives them on: SWARM_NODE_POLL_US (here) and SWARM_LOG_LEVEL (node/log_levels.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

CONFIG = "SWARM_CONFIG"
CACHE_DIR = "SWARM_CACHE_DIR"
PARENT_PID = "SWARM_PARENT_PID"
CALL_KEY = "SWARM_CALL_KEY"
CONTROL = "SWARM_CONTROL"
TABLE = "SWARM_TABLE"
STATS = "SWARM_STATS"
DEBUG_ABORT = "SWARM_DEBUG_ABORT"
DEBUG_SLEEP_S = "SWARM_DEBUG_SLEEP_S"
DEBUG_CALLS = "SWARM_DEBUG_CALLS"


@dataclass(frozen=True)
class Variable:
    """An environment variable: which programs read it, what it does, and what holds without it."""

    name: str
    readers: str
    purpose: str
    default: str


VARIABLES = (
    Variable(CONFIG, "swarm-node", "the file of settings, as `--config`", "swarm.toml here, or in the user's folder"),
    Variable(
        CACHE_DIR,
        "swarm-node, build, scripts",
        "folder for what can be made or fetched again",
        "`swarm-node` in the platform's folder for caches",
    ),
    Variable(PARENT_PID, "expert server, Swarm backend", "process that must not be outlived; set by it", "none"),
    Variable(
        CALL_KEY,
        "expert server, Swarm backend",
        "key for expert calls, 64 hexadecimal digits; set by the agent",
        "none: private addresses may call",
    ),
    Variable(CONTROL, "Swarm backend", "where its agent listens: `unix:/path` or `HOST:PORT`", "none"),
    Variable(TABLE, "Swarm backend", "file with a routing table, for a llama.cpp program without an agent", "none"),
    Variable(STATS, "Swarm backend", "file for its statistics, written when the program ends", "none"),
    Variable(DEBUG_ABORT, "expert server", "`1`: a call for the model id `abort` ends the process by abort()", "off"),
    Variable(DEBUG_SLEEP_S, "expert server", "seconds that every call sleeps before it computes", "0"),
    Variable(
        DEBUG_CALLS,
        "expert server",
        "folder for a file NAME.jsonl: layer and experts of every call, a line each; none is answered natively then",
        "none",
    ),
    Variable("SWARM_TEST_CACHE", "tests", "folder for test models", "a folder below the system's temporary one"),
    Variable("SWARM_NATIVE_DIR", "tests", "folder of llama.cpp's programs", "beside the installed extension"),
    Variable("SWARM_TEST_PROGRESS_FD", "tests", "descriptor on which `scripts/test` follows them; set by it", "none"),
    Variable("SWARM_BUILD_PYTHON", "scripts", "a Python that has what a build for others needs", "one is made"),
    Variable("SWARM_QEMU_CPU", "scripts", "processor that the emulator of `scripts/build-arm64` shows", "its `--cpu`"),
)

# Options of the build (CMakeLists.txt). They belong into CMAKE_ARGS, and do nothing as variables, but no harm either.
_BUILD_OPTIONS = re.compile(r"SWARM_(ROUTER|TOOLS|SANITIZE|CCACHE|UNITY|BUILD_ID|LLAMA_CPP_.*|SDIST_.*)")
_NAMES = frozenset(variable.name for variable in VARIABLES)


def is_known(name: str) -> bool:
    """Whether a variable of this name is one that is no setting, and can stand in the environment for some purpose."""
    return name in _NAMES or _BUILD_OPTIONS.fullmatch(name) is not None


#: For how long a thread of the expert call looks for the next message before it sleeps, in microseconds. A setting,
#: which the agent gives to the expert server and the Swarm backend.
POLL_US = "SWARM_NODE_POLL_US"
# Longer than a small call over a LAN takes, and than the trunk of a small model takes for a layer.
DEFAULT_POLL_US = 300
MAX_POLL_US = 10_000


def poll_us(environment: Mapping[str, str] = os.environ) -> int:
    """The limit in microseconds that the environment gives; the default where it gives none or no such number."""
    text = environment.get(POLL_US, "")
    return min(int(text), MAX_POLL_US) if text.isdecimal() and len(text) <= 6 else DEFAULT_POLL_US
