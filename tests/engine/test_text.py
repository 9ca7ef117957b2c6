"""Text comes out token by token and is the text of all tokens, cut at a stop string."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stemkv.core import FinishReason
from stemkv.engine import Completion, LoadedModel, SamplingParams
from stemkv.engine.text import OutputText
from stemkv.errors import ConfigError, EmptyPrompt, StopInPrompt
from tests.engine.models import ByteTokenizer, build_engine, tiny, tokens

BYTES = ByteTokenizer()
HALF = "\N{EURO SIGN}".encode()  # three bytes


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True) if ids else ""


def streamed(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text after `finish`; on the way it may only grow."""
    text = OutputText(tokenizer, ())
    for token in ids:
        before = text.text
        assert not text.append(token)
        assert text.text.startswith(before), "text that was shown is taken back"
    before = text.text
    text.finish()
    assert text.text.startswith(before)
    return text.text


def assert_stops_like_a_search_of_the_whole_text(
    tokenizer: Any, ids: Sequence[int], stop: tuple[str, ...]
) -> None:
    text = OutputText(tokenizer, stop)
    num_taken = next((i for i, t in enumerate(ids, 1) if text.append(t)), None)
    if num_taken is None:
        text.finish()
    expected = whole(tokenizer, ids[:num_taken])
    found = [at for each in stop if (at := expected.find(each)) >= 0]
    assert (num_taken is not None) == bool(found)
    assert text.text == (expected[: min(found)] if found else expected)


# Incremental decoding


@given(st.lists(st.integers(0, 306), max_size=30))
@example([*HALF])
@example([*HALF[:2], 65])
@example([65, *HALF[:2], 300, HALF[2], 66])
@example([300, 301])
@example([*"\N{REPLACEMENT CHARACTER}".encode(), 65])
@example([0x80, 0x80, 65, 0xF0, 0x9F])
def test_text_is_that_of_all_tokens(ids: list[int]) -> None:
    assert streamed(BYTES, ids) == whole(BYTES, ids)


def test_half_a_character_waits_for_the_other_half() -> None:
    text = OutputText(BYTES, ())
    for token in HALF[:2]:
        text.append(token)
        assert text.text == ""
    text.append(HALF[2])
    assert text.text == "\N{EURO SIGN}"


def test_half_a_character_is_shown_as_such_when_no_more_comes() -> None:
    assert streamed(BYTES, [65, *HALF[:2]]) == "A\N{REPLACEMENT CHARACTER}"


def test_a_token_is_decoded_with_few_others() -> None:
    """Else the cost of a text grows with the square of its length."""
    longest = 0

    class Counting(ByteTokenizer):
        def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    streamed(Counting(), list(("abc \N{EURO SIGN}" * 50).encode()))
    assert longest <= 8


@pytest.mark.model
def test_text_of_the_real_tokenizer_is_that_of_all_tokens(smol: LoadedModel) -> None:
    tokenizer = smol.tokenizer
    halves = [
        token
        for token in range(smol.vocab_size)
        if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])
    ]
    assert len(halves) > 100
    special = tokenizer.all_special_ids
    for seed in range(400):
        draw = random.Random(seed)
        pools = draw.choices([halves, special, range(smol.vocab_size)], [4, 1, 4], k=25)
        ids = [draw.choice(pool) for pool in pools]
        assert streamed(tokenizer, ids) == whole(tokenizer, ids), f"{seed=}"


@pytest.mark.model
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40))
def test_unicode_comes_back_from_the_real_tokenizer(
    smol: LoadedModel, text: str
) -> None:
    ids = smol.tokenizer(text)["input_ids"]
    assert streamed(smol.tokenizer, ids) == whole(smol.tokenizer, ids)


# Stop strings


@given(
    st.lists(st.sampled_from([*b"abc", *HALF, 256, 300]), max_size=14),
    st.lists(
        st.text(st.sampled_from("abc\N{EURO SIGN}"), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
)
@example([97, 98, 99], ["bc", "ab"])
@example([98, *HALF[:2]], ["b"])
def test_text_ends_before_the_first_stop_string(
    ids: list[int], stop: list[str]
) -> None:
    assert_stops_like_a_search_of_the_whole_text(BYTES, ids, tuple(stop))


@given(
    st.lists(st.sampled_from([*b"abc", *HALF, 256, 300]), max_size=14),
    st.lists(
        st.text(st.sampled_from("abc\N{EURO SIGN}"), min_size=1, max_size=4),
        max_size=3,
    ),
)
@example([97, 98, 97, 98, 99], ["abc"])
@example([97, 97, 97, 98], ["aab", "ab"])
def test_what_is_final_is_never_taken_away_and_all_else_might_be(
    ids: list[int], stop: list[str]
) -> None:
    text = OutputText(BYTES, tuple(stop))
    final = ""
    for token in ids:
        has_stopped = text.append(token)
        assert text.text.startswith(final)
        final = text.text[: text.num_final]
        if has_stopped:
            break
        held = text.text[text.num_final :]
        assert not held or any(each.startswith(held) for each in stop)
    else:
        text.finish()
    assert text.text.startswith(final)


@pytest.mark.parametrize(
    "pieces, stop, expected",
    [
        (["one", " END", " two"], ("END",), "one "),
        (["one", " E", "N", "D two"], ("END",), "one "),
        (["one E", "ND two"], ("END",), "one "),
        (["END"], ("END",), ""),
        (["E", "E", "E", "ND"], ("EEND",), "E"),
        (["a b c"], ("c", "b"), "a "),
        (["ab", "cd"], ("bcd", "abcd"), ""),
        (["a\N{EURO SIGN}b"], ("\N{EURO SIGN}",), "a"),
        (["nothing"], ("END",), None),
        (["EN", "d"], ("END",), None),
    ],
)
def test_a_stop_string_is_found_across_token_borders(
    pieces: list[str], stop: tuple[str, ...], expected: str | None
) -> None:
    class Pieces:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
            return "".join(pieces[i] for i in ids)

    text = OutputText(Pieces(), stop)
    has_stopped = any(text.append(index) for index in range(len(pieces)))
    assert has_stopped == (expected is not None)
    assert text.text == ("".join(pieces) if expected is None else expected)


def test_text_never_holds_a_stop_string_not_even_when_the_output_is_cut_short() -> None:
    """A token may hold the end of a stop string and half of the next character."""

    class Mixed:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
            return b"".join([b"on", b"e\xe2"][i] for i in ids).decode(errors="replace")

    text = OutputText(Mixed(), ("one",))
    has_stopped = text.append(0) or text.append(1)
    text.finish()
    assert "one" not in text.text, f"{has_stopped=}"


@pytest.mark.model
def test_stop_strings_are_found_in_text_of_the_real_tokenizer(
    smol: LoadedModel,
) -> None:
    text = "Der Fluß, naïve café, \N{EURO SIGN}5, 日本語 text, \U0001f600 end."
    ids = smol.tokenizer(text)["input_ids"]
    for start in range(0, len(text) - 3):
        for size in (1, 3):
            stop = text[start : start + size]
            assert_stops_like_a_search_of_the_whole_text(smol.tokenizer, ids, (stop,))


# In the engine


def bytewise() -> LoadedModel:
    return replace(tiny("llama-group1", torch.float32), tokenizer=BYTES)


PROMPT = tokens([*b"a prompt of bytes"])


def generate(loaded: LoadedModel, **params: Any) -> Completion:
    params = dict(max_new_tokens=40, temperature=1.0) | params
    (completion,) = build_engine(loaded).generate([PROMPT], SamplingParams(**params))
    return completion


def test_the_text_of_a_completion_is_that_of_its_tokens() -> None:
    completion = generate(bytewise())
    assert len(completion.text) > 20
    assert completion.text == whole(BYTES, completion.token_ids)


def test_generation_ends_at_a_stop_string_and_the_text_before_it() -> None:
    loaded = bytewise()
    free = generate(loaded)
    for start in range(2, len(free.text) - 3, 5):
        stop = free.text[start : start + 3]
        if "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        completion = generate(loaded, stop=("never in there", stop))
        assert completion.finish_reason is FinishReason.STOP_STRING
        assert completion.text == free.text[: free.text.find(stop)]
        num_tokens = len(completion.token_ids)
        assert completion.token_ids == free.token_ids[:num_tokens]
        assert stop in whole(BYTES, completion.token_ids)


def test_a_stop_string_ends_one_sample_and_not_the_others() -> None:
    loaded = bytewise()
    params = dict(max_new_tokens=12, temperature=3.0, num_samples=3)
    free = build_engine(loaded).generate([PROMPT], SamplingParams(**params))
    stop = free[1].text[3:5]
    assert all(stop not in free[k].text for k in (0, 2))
    engine = build_engine(loaded)
    completions = engine.generate([PROMPT], SamplingParams(**params, stop=(stop,)))
    assert completions[0].token_ids == free[0].token_ids
    assert completions[1].finish_reason is FinishReason.STOP_STRING
    assert completions[1].text == free[1].text[: free[1].text.find(stop)]
    assert completions[2].token_ids == free[2].token_ids


def test_a_stop_string_in_the_prompt_is_refused() -> None:
    engine = build_engine(bytewise())
    with pytest.raises(StopInPrompt, match="'of' occurs in the prompt") as refusal:
        engine.add(PROMPT, SamplingParams(stop=("no", "of")))
    assert refusal.value.field == "stop"
    assert not engine.has_work


def test_a_stop_string_in_the_prompt_can_be_meant() -> None:
    loaded = bytewise()
    free = generate(loaded)
    stop = free.text[4]
    prompt = tokens([*PROMPT, *stop.encode()])
    params = SamplingParams(max_new_tokens=3, stop=(stop,), allows_stop_in_prompt=True)
    (completion,) = build_engine(loaded).generate([prompt], params)
    assert completion.finish_reason in (FinishReason.LENGTH, FinishReason.STOP_STRING)


@pytest.mark.parametrize("num_tokens", [10, 255, 256, 257, 5000])
@pytest.mark.parametrize("size", [1, 3, 200])
def test_looking_for_stop_strings_takes_no_longer_for_a_longer_prompt(
    num_tokens: int, size: int
) -> None:
    decoded = 0

    class Counting(ByteTokenizer):
        def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
            nonlocal decoded
            ids = list(ids)
            decoded += len(ids)
            return super().decode(ids, skip_special_tokens)

    loaded = replace(bytewise(), tokenizer=Counting())
    engine = build_engine(loaded, num_blocks=700)
    filler = tokens([1] * num_tokens)
    prompt = tokens([*filler, *b"x" * size])
    stop = ("never", "x" * size)
    with pytest.raises(StopInPrompt, match="xxx"[:size]):
        engine.add(prompt, SamplingParams(max_new_tokens=1, stop=stop))
    assert 0 < decoded <= max(256, 4 * size)


def test_a_stop_string_that_only_output_and_prompt_form_together_is_not_one() -> None:
    loaded = bytewise()
    free = generate(loaded)
    stop = "s" + free.text[0]  # the prompt ends with an s
    assert stop not in free.text
    completion = generate(loaded, stop=(stop,))
    assert completion.token_ids == free.token_ids


def test_stop_strings_need_a_tokenizer() -> None:
    engine = build_engine(tiny())
    with pytest.raises(StopInPrompt, match="tokenizer") as refusal:
        engine.add(PROMPT, SamplingParams(stop=("x",)))
    assert refusal.value.field == "stop"


def test_without_a_tokenizer_there_is_no_text() -> None:
    completion = generate(tiny())
    assert completion.text == ""
    assert len(completion.token_ids) == 40


def test_text_prompts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="no tokenizer; pass TokenIds"):
        build_engine(tiny()).encode("text")


def test_text_prompts_are_encoded_by_the_tokenizer() -> None:
    engine = build_engine(bytewise())
    assert engine.encode("abc") == tokens([97, 98, 99])
    by_text = engine.generate(["a prompt of bytes"], SamplingParams(max_new_tokens=5))
    by_ids = engine.generate([PROMPT], SamplingParams(max_new_tokens=5))
    assert by_text[0].token_ids == by_ids[0].token_ids


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(EmptyPrompt) as refusal:
        build_engine(bytewise()).encode("")
    assert refusal.value.field == "prompt"


def test_an_end_of_sequence_token_is_not_part_of_the_text() -> None:
    loaded = bytewise()
    free = generate(loaded)
    end = free.token_ids[7]
    index = free.token_ids.index(end)
    ended = generate(replace(loaded, eos_token_ids=frozenset({end})))
    assert ended.finish_reason is FinishReason.STOP_TOKEN
    assert ended.token_ids == free.token_ids[: index + 1]
    assert ended.text == whole(BYTES, free.token_ids[:index])


@pytest.mark.model
def test_chat_messages_go_through_the_chat_template(smol: LoadedModel) -> None:
    engine = build_engine(smol)
    messages = [{"role": "user", "content": "Say hi."}]
    text = smol.tokenizer.decode(list(engine.encode(messages)))
    assert "<|im_start|>user\nSay hi.<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.model
def test_the_real_model_ends_at_its_end_of_turn(smol: LoadedModel) -> None:
    engine = build_engine(smol)
    prompt = engine.encode([{"role": "user", "content": "Reply with one word: yes"}])
    engine.add(prompt, SamplingParams(max_new_tokens=24))
    (completion,) = engine.drain()
    assert completion.finish_reason is FinishReason.STOP_TOKEN
    assert completion.token_ids[-1] in smol.eos_token_ids
    assert "<|im_end|>" not in completion.text
