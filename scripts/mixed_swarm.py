"""The same greedy answer by stock llama.cpp, a swarm of this build, and a swarm of different
hardware: what is decided otherwise.

Started by scripts/mixed-swarm, which makes the builds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from equivalence_servers import Backend

from node.commands.local_swarm import ServerBuild
from node.commands.verify_decisions import N_TOKENS, decisions, describe, document
from node.errors import SwarmError
from node.models.demo import demo_model
from node.models.index import read_model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mixed-swarm", description="Options after the backends and --.")
    parser.add_argument("--server", type=Backend.parse, action="append", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the built-in demo model)")
    parser.add_argument("--tokens", type=int, default=N_TOKENS, help=f"of the answer (default: {N_TOKENS})")
    parser.add_argument("--json", type=Path, help="write everything to this file too")
    return parser.parse_args()


async def run(options: argparse.Namespace) -> None:
    builds = [
        ServerBuild(one.name, (str(one.python), "-P", "-m", "node.expert_server"), one.device) for one in options.server
    ]
    index = read_model(options.model or demo_model())
    print(f"{Path(index.paths[0]).name}, {options.tokens} tokens; mixed: {', '.join(one.name for one in builds)}")
    found = document(
        await decisions(
            index, n_tokens=options.tokens, builds=builds, on_progress=lambda text: print(text, file=sys.stderr)
        )
    )
    print(*describe(found), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        asyncio.run(run(arguments()))
    except SwarmError as error:
        sys.exit(str(error))
