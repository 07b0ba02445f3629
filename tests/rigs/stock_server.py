"""A llama-server of this build that runs the demo model whole, without the swarm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp

import kernels
from node.models.demo import demo_model

SLOT_TOKENS = 8192

# The demo model's own, with the tool calls that it lacks.
TEMPLATE = """\
{%- if messages[0].role != 'system' or tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}
{%- else %}{{- 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' }}{%- endif %}
{%- if tools %}{{- '\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}' }}
{{- '\\n</tool_call>' }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system' and tools) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@contextmanager
def llama_server(
    folder: Path,
    api_key: str,
    *,
    slots: int = 2,
    slot_tokens: int = SLOT_TOKENS,
    threads: int = 0,
    extra: Sequence[str] = (),
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Its URL, and a check that it still runs.

    ``slots``: of ``slot_tokens`` each; ``threads``: 0 takes the CPU quota; ``extra``: further arguments.
    """
    template, log_path = folder / "template.jinja", folder / "log"
    template.write_text(TEMPLATE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--model", demo_model(), "--alias", "demo", "--host", "127.0.0.1", "--port", port]
    arguments += ["--ctx-size", slots * slot_tokens, "--parallel", slots]
    arguments += ["--threads", threads or kernels.default_threads(), "--poll", 0]
    # Small batches, as llama-server looks at nothing else while it computes one.
    arguments += ["--batch-size", 64, "--ubatch-size", 64, "--no-warmup", "--fit", "off", "--metrics"]
    arguments += ["--cache-ram", 0, "--ctx-checkpoints", 0, "--chat-template-file", template, *extra]
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(
            [str(kernels.native_path("llama-server")), *map(str, arguments)],
            env={**os.environ, "LLAMA_API_KEY": api_key},
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
        )

    def check() -> None:
        assert process.poll() is None, log_path.read_text()

    try:
        yield f"http://127.0.0.1:{port}", check
    finally:
        process.terminate()
        process.wait()


async def ready(session: aiohttp.ClientSession, url: str, check: Callable[[], None]) -> None:
    async with asyncio.timeout(60):
        while True:
            check()
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
