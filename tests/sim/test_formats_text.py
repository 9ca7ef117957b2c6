"""Formats that come with text, token ids or lengths."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.errors import ConfigError, TraceError
from stemkv.sim.formats import read_trace
from stemkv.sim.formats.prompt import render_chat
from stemkv.sim.settings import trace_facts
from stemkv.sim.trace import Trace

from .trace_files import shape, write_jsonl

# A rendered chat

# Pieces that could forge structure, if anything could.
TEXTS = st.lists(
    st.sampled_from(
        ["\x02", "\x10", "m", " ", "role:", "part:", "key:", "a", "content"]
    ),
    max_size=4,
).map("".join)
PARTS = st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
    min_size=1,
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": TEXTS, "content": TEXTS | PARTS},
        optional={"name": TEXTS, "tool_call_id": TEXTS, "tool_calls": PARTS},
    ),
    max_size=4,
)


def parsed(text: str) -> list[dict[str, Any]]:
    """Read a rendered chat back."""
    pieces = text.split("\x02")
    assert pieces.pop(0) == ""
    messages: list[dict[str, Any]] = []
    for head, body in zip(pieces[::2], pieces[1::2], strict=True):
        kind, _, name = unescaped(head).partition(":")
        value = unescaped(body)
        if kind == "role":
            if messages:
                close(messages[-1])
            messages.append({"role": name, "content": value, "last": "content"})
            continue
        message = messages[-1]
        if kind == "part":
            if message["last"] != "part":
                message["content"] = []
            message["content"].append({"type": name, "text": value})
        else:
            key = name if kind == "key" else kind
            message[key] = value
        message["last"] = kind if kind == "part" else key
    if messages:
        close(messages[-1])
    return messages


def close(message: dict[str, Any]) -> None:
    """Take away the space behind a message; read what is JSON."""
    last = message.pop("last")
    if last == "part":
        assert message["content"][-1]["text"].endswith(" ")
        message["content"][-1]["text"] = message["content"][-1]["text"][:-1]
    else:
        assert message[last].endswith(" ")
        message[last] = message[last][:-1]
    for key in message.keys() - {"role", "name", "content"}:
        message[key] = json.loads(message[key])


def unescaped(text: str) -> str:
    return re.sub("\x10(.)", lambda m: {"m": "\x02"}.get(m[1], m[1]), text, flags=re.S)


@given(MESSAGES)
def test_a_rendered_chat_can_be_read_back_so_no_two_chats_are_equal(
    messages: list[dict[str, Any]],
) -> None:
    assert parsed(render_chat(messages)[0]) == messages


@given(MESSAGES, MESSAGES)
def test_a_chat_that_goes_on_keeps_its_beginning(
    messages: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    tools = [{"name": "f"}]
    before, after = (
        render_chat(m, tools=tools)[0] for m in (messages, messages + more)
    )

    assert after.startswith(before)


def test_tools_stand_in_front_and_the_order_of_their_keys_does_not_matter() -> None:
    chat = [{"role": "user", "content": "hi"}]
    one, other = ({"a": 1, "b": [2]}, {"b": [2], "a": 1})

    with_tools = render_chat(chat, tools=[one])[0]

    assert with_tools == render_chat(chat, tools=[other])[0]
    assert with_tools.endswith(render_chat(chat)[0])
    assert with_tools != render_chat(chat, tools=[{"a": 1, "b": [3]}])[0]


def test_an_image_is_its_digest() -> None:
    def chat(data: str) -> list[dict[str, Any]]:
        url = {"url": f"data:image/png;base64,{data}"}
        return [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]

    (one, count), (other, _) = (
        render_chat(chat("A" * 9000)),
        render_chat(chat("B" * 9000)),
    )

    assert one != other
    assert (count, len(one) < 100) == (1, True)


# Chats


def chat(*words: str, **others: Any) -> dict[str, Any]:
    roles = ("developer", "user", "assistant", "tool")
    messages = [
        {"role": role, "content": content}
        for role, content in zip(roles, words, strict=False)
    ]
    return {"messages": messages, **others}


def words(first: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(first, first + count))


def num_shared(trace: Trace, one: int, other: int) -> int:
    """Leading units that two requests share."""
    pairs = zip(trace.requests[one].units, trace.requests[other].units, strict=False)
    count = 0
    for a, b in pairs:
        if a != b:
            break
        count += 1
    return count


def test_words_of_a_chat_are_counted_exactly(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path,
        chat(words(0, 100), words(500, 7)),
        chat(words(0, 100), words(900, 21)),
    )

    trace = read_trace(path, tokens="words", unit_size=16)

    assert trace.format == "openai"
    assert [r.input_length for r in trace.requests] == [107, 121]
    assert num_shared(trace, 0, 1) == 6  # 100 words make 6 whole units
    assert trace.is_exact


def test_tokens_of_text_are_an_estimate_that_is_labelled(tmp_path: Path) -> None:
    trace = read_trace(write_jsonl(tmp_path, {"prompt": "x" * 130, "max_tokens": 9}))

    (request,) = trace.requests
    assert (request.input_length, len(request.units)) == (33, 3)  # 4 characters each
    assert (request.output_length, trace.is_exact) == (9, False)
    assert any("4 characters each" in note for note in trace.notes)
    assert any("limit (max_tokens)" in note for note in trace.notes)


def test_nothing_of_a_text_is_in_the_trace(tmp_path: Path) -> None:
    secret = "the launch code is 0000"
    path = write_jsonl(tmp_path, chat(secret, secret, cache_salt="pepper"))

    trace = repr(read_trace(path, tokens="words"))

    assert not any(word in trace for word in ("launch", "0000", "pepper"))


def test_a_batch_line_is_its_body(tmp_path: Path) -> None:
    body = chat("a b c", "d", model="m", user="u", max_completion_tokens=3)
    line = {"custom_id": "job-1", "method": "POST", "url": "/v1/chat", "body": body}

    trace = read_trace(write_jsonl(tmp_path, line), tokens="words")

    (request,) = trace.requests
    assert (request.request_id, request.tenant) == ("job-1", "u")
    assert (request.identity, request.output_length) == ("model=m", 3)


def test_salts_separate_identities_and_a_routing_key_does_not(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path,
        chat("a", model="m", cache_salt="red", prompt_cache_key="x"),
        chat("a", model="m", cache_salt="blue"),
        chat("a", model="m", cache_salt="red", prompt_cache_key="y"),
        chat("a", model="m"),
        chat("a", model="m&salt=1"),
    )

    trace = read_trace(path)

    first, second, third, fourth, forged = (r.identity for r in trace.requests)
    assert first == third
    assert len({first, second, fourth, forged}) == 4
    assert any("2 routing keys" in note for note in trace.notes)


def test_the_logs_token_count_is_told_beside_ours(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, chat("a b c", usage={"prompt_tokens": 11}))

    trace = read_trace(path, tokens="words")

    assert trace.requests[0].input_length == 3
    assert any("11 prompt tokens by the log and 3 by our" in n for n in trace.notes)


def test_failed_requests_are_counted_and_kept_out(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path,
        chat("a", id="1", status=500),
        chat("a", id="1", status=200),  # the retry
        chat("a", id="2", error={"message": "no"}),
        chat("a", id="3", status="failure"),
        chat("a", id="4", response={"status_code": 429}),
        chat("a", id="5", error=None),
    )

    trace = read_trace(path)

    assert [r.request_id for r in trace.requests] == ["1", "5"]
    assert any(
        "failed requests, left out (lines: 4; first: 1)" in n for n in trace.notes
    )
    assert trace.problems == []


@pytest.mark.parametrize(
    "messages",
    [[], ["hi"], [{"content": "hi"}], {"role": "user"}, [{"role": 1, "content": ""}]],
    ids=["none", "text", "no role", "object", "role no text"],
)
def test_messages_of_another_form_are_a_bad_line(tmp_path: Path, messages: Any) -> None:
    path = write_jsonl(tmp_path, chat("a"), {"messages": messages})

    trace = read_trace(path)

    assert len(trace.requests) == 1
    assert [p.line for p in trace.problems] == [2]
    assert trace.problems[0].field.startswith("messages")


def test_a_csv_column_may_hold_the_request(tmp_path: Path) -> None:
    path = tmp_path / "gateway.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["timestamp", "team", "request_json"])
        for second, content in enumerate(
            ["long " * 40_000, "two\n\nlines", "two\nlines"]
        ):
            when = f"2026-01-01T00:00:0{second}.5Z"
            writer.writerow([when, "blue", json.dumps(chat(content))])

    trace = read_trace(path, tokens="words", fields={"tenant": "team"})

    assert [(r.tenant, r.arrival_s) for r in trace.requests] == [
        ("blue", 0.0),
        ("blue", 1.0),
        ("blue", 2.0),
    ]
    assert [r.input_length for r in trace.requests] == [40_000, 2, 2]


def test_a_tokenizer_file_counts_its_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = write_jsonl(tmp_path, {"prompt": "a b a b a"})
    messages = write_jsonl(tmp_path, chat("a b"), name="chat.jsonl")

    trace = read_trace(prompt, tokens=str(tmp_path / "tokenizer.json"), unit_size=2)
    estimate = read_trace(messages, tokens=str(tmp_path / "tokenizer.json"))

    assert (trace.requests[0].input_length, len(trace.requests[0].units)) == (5, 3)
    assert trace.is_exact
    assert not estimate.is_exact  # nobody applied its chat template
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(prompt, tokens=str(prompt))


# Token ids


@pytest.mark.parametrize("name", ["token_ids", "prompt_token_ids", "input_ids"])
def test_token_ids_are_exact_under_every_name(tmp_path: Path, name: str) -> None:
    path = write_jsonl(
        tmp_path,
        {name: list(range(40)), "tenant": "x", "timestamp": 1_700_000_000_000},
        {name: [*range(32), 7, 7], "tenant": "y", "timestamp": 1_700_000_002_500},
    )

    trace = read_trace(path)

    assert (trace.format, trace.is_exact, trace.unit_size) == ("token-ids", True, 16)
    assert [r.input_length for r in trace.requests] == [40, 34]
    assert num_shared(trace, 0, 1) == 2
    assert trace.duration_s == 2.5
    assert trace.tenants() == ["x", "y"]
    assert any("timestamp names no unit, read as ms" in n for n in trace.notes)


@pytest.mark.parametrize("ids", [[], [-1], [2**31], [1.0], [True], "1 2"], ids=str)
def test_token_ids_that_are_none_are_a_bad_line(tmp_path: Path, ids: Any) -> None:
    trace = read_trace(write_jsonl(tmp_path, {"token_ids": [1]}, {"token_ids": ids}))

    assert [p.line for p in trace.problems] == [2]


# Gateways and other logs


def litellm(**others: Any) -> dict[str, Any]:
    return {
        "id": "r",
        "call_type": "acompletion",
        "status": "success",
        "startTime": 1_700_000_000.25,
        "endTime": 1_700_000_001.25,
        "prompt_tokens": 50,
        "completion_tokens": 9,
        "model": "m",
        "metadata": {"user_api_key_team_id": None, "user_api_key_team_alias": "blue"},
        "messages": None,
        "error_str": None,
        "cache_hit": None,
        **others,
    }


def test_litellm_without_prompts_tells_lengths_and_tenants(tmp_path: Path) -> None:
    hidden = [{"role": "user", "content": "redacted-by-litellm"}]
    path = write_jsonl(
        tmp_path,
        litellm(),
        litellm(messages=hidden, startTime=1_700_000_003.25),
        litellm(messages="redacted-by-litellm", startTime=1_700_000_004.25),
        litellm(status="failure", error_str="overloaded"),
        litellm(cache_hit=True),
    )

    trace = read_trace(path)

    assert trace.format == "litellm"
    assert [(r.input_length, r.output_length) for r in trace.requests] == [(50, 9)] * 3
    assert [r.arrival_s for r in trace.requests] == [0.0, 3.0, 4.0]
    assert trace.tenants() == ["blue"]
    # A text that stands for one left out makes no two prompts equal.
    assert num_shared(trace, 0, 1) == num_shared(trace, 1, 2) == 0
    assert all(request.is_opaque for request in trace.requests)
    assert any("cache of answers" in note for note in trace.notes)


def test_litellm_with_prompts_shares_what_is_equal(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path,
        litellm(messages=chat(words(0, 60), "a")["messages"]),
        litellm(messages=chat(words(0, 60), "b")["messages"]),
    )

    trace = read_trace(path, tokens="words")

    assert num_shared(trace, 0, 1) == 3
    assert not any(request.is_opaque for request in trace.requests)


def test_lmcache_records_are_text_with_microseconds(tmp_path: Path) -> None:
    record = {"timestamp": 1_700_000_000_000_000, "input": "a b", "output": "c d e"}
    path = write_jsonl(
        tmp_path,
        {**record, "session_id": "s"},
        {**record, "session_id": "s", "timestamp": 1_700_000_000_250_000},
    )

    trace = read_trace(path, tokens="words")

    assert (trace.format, trace.duration_s) == ("lmcache", 0.25)
    assert [(r.input_length, r.output_length) for r in trace.requests] == [(2, 3)] * 2
    assert {r.session for r in trace.requests} == {"s"}


def test_azure_times_keep_their_seventh_digit(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,40,10\n"
        "2023-11-16 18:17:03.9799607,40,8\n"
        "2023-11-16 18:17:04,nan,8\n"
        "2023-11-16 18:17:04,40\n"
        "2023-11-16 18:17:04,40,8,9\n"
    )

    trace = read_trace(path)

    assert [r.arrival_s for r in trace.requests] == [0.0, 7e-7, 0.02004]
    assert len({unit for r in trace.requests for unit in r.units}) == 6  # none shared
    assert [p.line for p in trace.problems] == [4, 6]
    assert any("hit rates are lower bounds" in note for note in trace.notes)
    assert trace_facts(trace).num_opaque == 3


def test_burstgpt_is_read_with_its_models(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n"
        "5,ChatGPT,472,18,490,Conversation log\r\n"
        "45,GPT-4,1087,230,1317,API log\r\n"
    )

    trace = read_trace(path)

    assert (trace.format, trace.duration_s) == ("burstgpt", 40.0)
    assert [r.identity for r in trace.requests] == ["model=ChatGPT", "model=GPT-4"]
    assert all(request.is_opaque for request in trace.requests)


# Fields that the user names


def test_any_log_can_be_read_by_naming_its_fields(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path,
        {"who": {"team": 7}, "at": {"ms": 1500}, "q": {"text": "a b"}, "n": 4},
        {"who": {"team": 8}, "at": {"ms": 500}, "q": {"text": "a b c"}, "n": 5},
    )
    fields = {
        "tenant": "who.team",
        "arrival": "at.ms:ms",
        "prompt": "q.text",
        "output_length": "n",
    }

    trace = read_trace(path, fields=fields, tokens="words")

    assert trace.format == "mapped"
    assert [
        (r.tenant, r.arrival_s, r.input_length, r.output_length) for r in trace.requests
    ] == [("8", 0.0, 3, 5), ("7", 1.0, 2, 4)]


def test_a_named_field_overrides_the_formats_own(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, chat("a", user="u", metadata={"team": "t"}))

    trace = read_trace(path, fields={"tenant": "metadata.team"})

    assert (trace.format, trace.tenants()) == ("openai", ["t"])


@pytest.mark.parametrize(
    "unit, value",
    [
        ("s", 1.5),
        ("ms", 1500),
        ("us", 1_500_000),
        ("ns", 1_500_000_000),
        ("iso", "1970-01-01T00:00:01.5"),
        ("iso", "1970-01-01T01:00:01.500+01:00"),
    ],
)
def test_times_are_equal_in_every_unit(tmp_path: Path, unit: str, value: Any) -> None:
    path = write_jsonl(tmp_path, {"at": 0, "n": 3}, {"at": value, "n": 3})
    fields = {"arrival": f"at:{unit}", "input_length": "n"}
    if unit == "iso":
        path = write_jsonl(
            tmp_path, {"at": "1970-01-01", "n": 3}, {"at": value, "n": 3}
        )

    assert read_trace(path, fields=fields).duration_s == 1.5


def test_the_same_file_gives_the_same_trace(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path,
        *(chat(words(0, 50), words(i, 30), user=f"u{i % 3}") for i in range(20)),
    )

    one, other = (read_trace(path) for _ in range(2))

    assert shape(one) == shape(other)
    assert one == other


def test_a_file_of_no_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("just some words\n")

    with pytest.raises(TraceError, match="neither JSON nor CSV"):
        read_trace(path)
