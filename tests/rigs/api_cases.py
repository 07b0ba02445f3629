"""What clients of the OpenAI and Anthropic APIs ask the demo model, and what they must get:
over doors, over whole nodes."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import openai
import pytest

from rigs.stock_server import SLOT_TOKENS

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
QUESTION = "What is the capital of France? Tell me one fact about it."
ANSWER = "The capital of France is Paris."
ASK: dict[str, Any] = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}
# An example of a call, which so small a model needs.
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
WEATHER: list[Any] = [
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "user", "content": "Weather in Paris?"},
]
ASK_TOOL = ASK | {"messages": WEATHER, "tools": [TOOL], "max_tokens": 60}
PERSON: dict[str, Any] = {"type": "object", "properties": {"age": {"enum": [3, 4]}, "name": {"enum": ["Ann"]}}}
PERSON |= {"required": ["age", "name"], "additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
# Its client has no field for the temperature.
ASK_ANTHROPIC: dict[str, Any] = {"model": "demo", "messages": ASK["messages"], "extra_body": {"temperature": 0}}
# The same question and example of a call, in the other API's form.
_USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
ANTHROPIC_TOOLS: dict[str, Any] = {
    "messages": [WEATHER[0], {"role": "assistant", "content": [_USE]}, WEATHER[2]],
    "tools": [{"name": "weather", "description": "The weather", "input_schema": CITY}],
}


def normalised(body: bytes) -> bytes:
    """`body` without what differs between two requests by nature: ids and times."""
    body = re.sub(rb'"(id|item_id|call_id)":"[^"]*"', rb'"\1":"id"', body)
    body = re.sub(rb'"(created|created_at|completed_at)":[0-9]+', rb'"\1":0', body)
    return re.sub(rb'"(\w+_ms|\w+_per_second)":[-+.0-9e]+', rb'"\1":0', body)


# Another name of the demo model, at the doors of door_rig.
ALIAS = "demo-moe"
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * (SLOT_TOKENS + 500)}]}

# A path, a body, the status that must come back, and a part of what comes with it.
CASES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "chat": (CHAT, ASK, 200, ANSWER),
    "chat stream": (CHAT, ASK | {"stream": True, "stream_options": {"include_usage": True}}, 200, "[DONE]"),
    "chat alias": (CHAT, ASK | {"model": ALIAS, "max_tokens": 3}, 200, "The capital of"),
    "chat stop": (CHAT, ASK | {"stop": [" is Pa"]}, 200, '"The capital of France"'),
    "chat stop stream": (CHAT, ASK | {"stop": [" is Pa"], "stream": True}, 200, '"finish_reason":"stop"'),
    "chat logprobs": (CHAT, ASK | {"logprobs": True, "top_logprobs": 3, "max_tokens": 4}, 200, '"top_logprobs"'),
    "chat logprobs stream": (
        CHAT,
        ASK | {"logprobs": True, "top_logprobs": 2, "max_tokens": 4, "stream": True},
        200,
        '"top_logprobs"',
    ),
    "chat tools": (CHAT, ASK_TOOL, 200, '"tool_calls":['),
    "chat tools stream": (CHAT, ASK_TOOL | {"stream": True}, 200, '"finish_reason":"tool_calls"'),
    "chat schema": (CHAT, ASK | {"response_format": FORMAT, "max_tokens": 60}, 200, '\\"Ann\\"'),
    "chat n": (CHAT, ASK | {"n": 2, "max_tokens": 3}, 200, '"index":1'),
    "completions": (COMPLETIONS, {"prompt": "Once upon", "max_tokens": 4, "temperature": 0}, 200, '"text":'),
    "completions stream": (
        COMPLETIONS,
        {"prompt": "Once upon", "max_tokens": 4, "temperature": 0, "stream": True, "logprobs": 2},
        200,
        "[DONE]",
    ),
    "responses": (RESPONSES, {"model": "demo", "input": QUESTION, "temperature": 0}, 200, ANSWER),
    "responses stream": (
        RESPONSES,
        {"model": "demo", "input": QUESTION, "temperature": 0, "stream": True},
        200,
        "event: response.completed",
    ),
    "messages": (MESSAGES, ASK | {"max_tokens": 20}, 200, ANSWER),
    "messages stream": (MESSAGES, ASK | {"max_tokens": 20, "stream": True}, 200, "event: message_stop"),
    "messages tools stream": (
        MESSAGES,
        ASK | ANTHROPIC_TOOLS | {"max_tokens": 60, "stream": True},
        200,
        '"stop_reason":"tool_use"',
    ),
    "count tokens": ("/v1/messages/count_tokens", ASK, 200, '"input_tokens"'),
    "embeddings": ("/v1/embeddings", {"input": "x"}, 501, "--embeddings"),
    "too long": (CHAT, LONG, 400, "exceed_context_size_error"),
    "too long stream": (MESSAGES, LONG | {"max_tokens": 5, "stream": True}, 400, "exceed_context_size_error"),
    "no messages": (CHAT, {"model": ""}, 400, "'messages' is required"),
    "bad schema": (CHAT, ASK | {"response_format": {"type": "nonsense"}}, 400, "invalid_request_error"),
}


MULTIBYTE = 'root ::= "aé😀b\\nUser: ok"'

# stop, further fields, text, finish_reason
STOPS: dict[str, tuple[list[str], dict[str, Any], str, str]] = {
    "across tokens": ([" is Pa"], {}, "The capital of France", "stop"),
    "near miss, then the end": (["Paris.X"], {}, ANSWER, "stop"),
    "inside a chunk": (["ital"], {}, "The cap", "stop"),
    "overlapping": (["l of", " of"], {}, "The capita", "stop"),
    "the limit": ([" is"], {"max_tokens": 5}, "The capital of France", "stop"),
    "across a character of many bytes": (["é😀"], {"grammar": MULTIBYTE}, "a", "stop"),
    "across lines": (["\nUser:"], {"grammar": MULTIBYTE}, "aé😀b", "stop"),
    "near miss across lines": (["\nUser;"], {"grammar": MULTIBYTE}, "aé😀b\nUser: ok", "stop"),
    "near miss at the limit": ([" is Paris"], {"max_tokens": 5}, "The capital of France is", "length"),
}

STORY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a long story."}],
    "ignore_eos": True,
    "max_tokens": 6000,
}
# Some 6,000 tokens to read, and then many to write.
NOVEL = {"messages": [{"role": "user", "content": "A cat sat. " * 1500}], "ignore_eos": True, "max_tokens": 1500}


# ---- what the clients check; all of them take a client, and a swarm that serves "demo"


async def check_stop(client: openai.AsyncOpenAI, case: str, stream: bool) -> None:
    """A case of STOPS."""
    stop, fields, expected, finish_reason = STOPS[case]
    grammar = {"grammar": fields["grammar"]} if "grammar" in fields else None
    limit = fields.get("max_tokens", openai.omit if hasattr(openai, "omit") else openai.NOT_GIVEN)
    if not stream:
        answer = await client.chat.completions.create(**ASK, stop=stop, max_tokens=limit, extra_body=grammar)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, finish_reason)
        return
    text, reasons = "", []
    events = await client.chat.completions.create(**ASK, stop=stop, max_tokens=limit, extra_body=grammar, stream=True)
    async for event in events:
        text += event.choices[0].delta.content or ""
        reasons += [event.choices[0].finish_reason] if event.choices[0].finish_reason else []
    assert (text, reasons) == (expected, [finish_reason])


async def openai_empty_stop(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="empty string") as refused:
        await client.chat.completions.create(**ASK, stop=[""])
    assert refused.value.param == "stop"


async def openai_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    events = await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    chunks = [event async for event in events]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert not chunks[-1].choices and usage is not None
    assert usage.completion_tokens == 8 and usage.total_tokens == usage.prompt_tokens + 8


async def openai_tools(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASK_TOOL)
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    arguments = ""
    async for event in await client.chat.completions.create(**ASK_TOOL, stream=True):
        for part in event.choices[0].delta.tool_calls or []:
            arguments += part.function.arguments or ""
    assert json.loads(arguments) == {"city": "Paris"}
    messages = [*WEATHER, answer.choices[0].message.model_dump(exclude_none=True)]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny"})
    answer = await client.chat.completions.create(**ASK_TOOL | {"messages": messages, "max_tokens": 2})
    assert answer.usage is not None and answer.usage.completion_tokens > 0


async def openai_schema_and_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASK, response_format=FORMAT, max_tokens=60)
    person = json.loads(answer.choices[0].message.content or "")
    assert person["name"] == "Ann" and person["age"] in (3, 4)
    answer = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, max_tokens=4)
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert "".join(token.token for token in tokens) == "The capital of France"
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)


async def openai_responses(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="demo", input=QUESTION, temperature=0)
    assert answer.output_text == ANSWER
    text = ""
    async for event in await client.responses.create(model="demo", input=QUESTION, temperature=0, stream=True):
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == ANSWER and event.type == "response.completed"


def _served_names(error: Any, message: str) -> list[str]:
    """The names that a 404 lists, for programs and for people."""
    names: list[str] = error["models"]
    assert names[0] == "demo" and len(names) > 1 and ", ".join(names) in message
    return names


async def openai_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(**ASK | {"model": "gpt-5"})
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    names = _served_names(unknown.value.body, str(unknown.value))
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        await client.chat.completions.create(model="demo", **LONG)
    with pytest.raises(openai.InternalServerError, match="--embeddings") as unsupported:
        await client.embeddings.create(model="demo", input="x")
    assert unsupported.value.status_code == 501
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-5")
    assert [model.id async for model in await client.models.list()] == ["demo"]
    assert [(await client.models.retrieve(name)).id for name in names] == ["demo"] * len(names)


async def anthropic_messages(client: anthropic.AsyncAnthropic) -> None:
    ask = ASK_ANTHROPIC | {"max_tokens": 20}
    answer = await client.messages.create(**ask)
    assert answer.content[0].text == ANSWER and answer.stop_reason == "end_turn"
    async with client.messages.stream(**ask) as stream:
        assert "".join([text async for text in stream.text_stream]) == ANSWER
        final = await stream.get_final_message()
    assert final.usage.output_tokens == 8 and final.stop_reason == "end_turn"
    answer = await client.messages.create(**ask, stop_sequences=[" is Pa"])
    assert answer.content[0].text == "The capital of France"
    assert answer.stop_sequence == " is Pa"
    count = await client.messages.count_tokens(model="demo", messages=ASK_ANTHROPIC["messages"])
    assert count.input_tokens > 20


async def anthropic_tools(client: anthropic.AsyncAnthropic) -> None:
    ask = {"model": "demo", "max_tokens": 60, "extra_body": {"temperature": 0}, **ANTHROPIC_TOOLS}
    answer = await client.messages.create(**ask)
    async with client.messages.stream(**ask) as stream:
        streamed = await stream.get_final_message()
    message: Any
    for message in (answer, streamed):
        (block,) = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use" and (block.name, block.input) == ("weather", {"city": "Paris"})


async def anthropic_errors(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(**ASK_ANTHROPIC | {"model": "claude"}, max_tokens=5)
    body: Any = unknown.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    _served_names(body["error"], str(unknown.value))
    with pytest.raises(anthropic.BadRequestError, match="exceeds the available context size"):
        await client.messages.create(model="demo", max_tokens=5, **LONG)
    with pytest.raises(anthropic.BadRequestError, match="empty string"):
        await client.messages.create(**ASK_ANTHROPIC, max_tokens=5, stop_sequences=[""])


OPENAI_CHECKS = (
    openai_empty_stop,
    openai_stream_with_usage,
    openai_tools,
    openai_schema_and_logprobs,
    openai_responses,
    openai_errors,
)
ANTHROPIC_CHECKS = (anthropic_messages, anthropic_tools, anthropic_errors)
