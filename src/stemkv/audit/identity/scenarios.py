"""Pairs of requests that differ in one fact, beyond the sixteen contexts.

Owns the scenarios: what the writer and the reader are, whether sharing is right, and
who reported it. Knows nothing of tensors; identities of other settings come from the
engine's own `identify`, given a model description with those settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from stemkv.audit.identity.contexts import (
    ADAPTERS,
    TENANTS,
    Case,
    Context,
    Prompt,
    World,
    make_case,
)
from stemkv.core.prefix.identity import ComputeIdentity
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine.identity import identify
from stemkv.engine.load import LoadedModel
from stemkv.engine.numerics import EXACT, TOLERANT, Numerics

__all__ = [
    "HOME",
    "Expectation",
    "Scenario",
    "ScenarioPrompts",
    "make_scenarios",
]

# The context that scenarios start from.
HOME = Context(revision=1, adapter=ADAPTERS[0], tenant=TENANTS[0], start_position=0)


class Expectation(Enum):
    """Whether the reader may find the writer's prefix."""

    MISS = "miss"
    HIT = "hit"
    EITHER = "either"  # sharing would be right and is not required


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One writer, one reader."""

    name: str
    writer: Case
    reader: Case
    expectation: Expectation
    source: str  # "owner/project#number" of a public report, or ""
    why: str  # in half a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPrompts:
    """The prompts of scenarios; `media` and `masked` have two versions each."""

    main: Prompt
    media: tuple[Prompt, Prompt]
    masked: tuple[Prompt, Prompt]

    @property
    def other_end(self) -> Prompt:
        """`main` with another last token."""
        ids = list(self.main.tokens)
        ids[-1] = ids[0] if ids[0] != ids[-1] else ids[-1] ^ 1
        return replace(self.main, name="other end", tokens=TokenIds.from_ids(ids))

    @property
    def same_last_block(self) -> tuple[Prompt, Prompt]:
        """Two prompts of two blocks each, of which the second ones are equal."""
        ids = list(self.main.tokens)
        first, other, last = ids[:16], ids[16:32], ids[32:48]
        if first[0] == other[0]:  # a common first token would be shared, and rightly
            other[0] ^= 1
        one, another = (
            replace(self.main, name=name, tokens=TokenIds.from_ids(start + last))
            for name, start in (("one start", first), ("another start", other))
        )
        return one, another


def _with_other_positions(config: Any) -> Any:
    """Return a copy of a transformers config whose rope is scaled by two.

    The name of its parameters is the library's; a config without any is returned
    unchanged.
    """
    other = deepcopy(config)
    parameters = getattr(other, "rope_parameters", None)
    if isinstance(parameters, dict):
        factor = 2.0 * float(parameters.get("factor") or 1.0)
        other.rope_parameters = {**parameters, "rope_type": "linear", "factor": factor}
    return other


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    world: World
    loaded: LoadedModel  # on revision 1
    numerics: Numerics
    is_packed: bool
    prompt: Prompt

    @property
    def home(self) -> Case:
        return self.world.case(HOME, self.prompt)

    def like_home(self, *, prompt: Prompt | None = None, **facts: Any) -> Case:
        """Return the home case with other facts, all of which the base knows not."""
        prompt = self.prompt if prompt is None else prompt
        base = replace(self.world.bases[1], block_size=prompt.block_size)
        return make_case(base, replace(self.world.facts(HOME, prompt), **facts), prompt)

    def on(self, base: ComputeIdentity, **facts: Any) -> Case:
        """Return the home case on another identity of the model."""
        return make_case(base, replace(self.home.facts, **facts), self.prompt)

    def identified(
        self,
        *,
        numerics: Numerics | None = None,
        block_size: int | None = None,
        is_packed: bool | None = None,
        **changes: Any,
    ) -> ComputeIdentity:
        """Return what the engine would state for a model with other settings."""
        return identify(
            replace(self.loaded, **changes),
            self.numerics if numerics is None else numerics,
            block_size=self.prompt.block_size if block_size is None else block_size,
            is_packed=self.is_packed if is_packed is None else is_packed,
        )


def make_scenarios(
    world: World,
    prompts: ScenarioPrompts,
    *,
    loaded: LoadedModel,
    numerics: Numerics,
    is_packed: bool,
) -> tuple[Scenario, ...]:
    """Return all scenarios. `loaded` must be on revision 1."""
    maker = _Maker(
        world=world,
        loaded=loaded,
        numerics=numerics,
        is_packed=is_packed,
        prompt=prompts.main,
    )
    return (
        *_of_prompts(maker, prompts),
        *_of_adapters(maker),
        *_of_weights(maker),
        *_of_settings(maker),
        *_of_salts(maker),
    )


def _scenario(
    expectation: Expectation, source: str = ""
) -> Callable[[str, Case, Case, str], Scenario]:
    def make(name: str, writer: Case, reader: Case, why: str) -> Scenario:
        return Scenario(
            name=name,
            writer=writer,
            reader=reader,
            expectation=expectation,
            source=source,
            why=why,
        )

    return make


def _must_miss(source: str = "") -> Callable[[str, Case, Case, str], Scenario]:
    return _scenario(Expectation.MISS, source)


def _of_prompts(maker: _Maker, prompts: ScenarioPrompts) -> list[Scenario]:
    one, another = prompts.same_last_block
    media, other_media = prompts.media
    masked, other_masked = prompts.masked
    must_hit = _scenario(Expectation.HIT)
    return [
        must_hit("same request again", maker.home, maker.home, "nothing differs"),
        must_hit(
            "other last token",
            maker.home,
            maker.like_home(prompt=prompts.other_end),
            "all before it is shared",
        ),
        _must_miss("vllm-project/aibrix#2329")(
            "same last block",
            maker.like_home(prompt=one),
            maker.like_home(prompt=another),
            "KV depends on all tokens before",
        ),
        must_hit(
            "same media again",
            maker.like_home(prompt=media),
            maker.like_home(prompt=media),
            "media can be shared",
        ),
        _must_miss("kekzl/imp#1180, LMCache/LMCache#4086")(
            "media of another content",
            maker.like_home(prompt=media),
            maker.like_home(prompt=other_media),
            "equal length, other image",
        ),
        _must_miss("vllm-project/vllm#56655")(
            "only the mask differs",
            maker.like_home(prompt=masked),
            maker.like_home(prompt=other_masked),
            "same ids and embeddings, at other positions",
        ),
    ]


def _of_adapters(maker: _Maker) -> list[Scenario]:
    name, other_name = ADAPTERS
    digest = maker.world.adapter_digests[name].hex()
    other_digest = maker.world.adapter_digests[other_name].hex()
    no_adapter: dict[str, Any] = dict.fromkeys(
        ("name", "path", "digest", "scale", "generation")
    )
    no_adapter = {f"adapter_{key}": value for key, value in no_adapter.items()}
    return [
        _must_miss("vllm-project/vllm#42125, #48352")(
            "adapter reloaded",
            maker.home,
            maker.like_home(adapter_digest=other_digest, adapter_generation=1),
            "other weights under the same name and path",
        ),
        _must_miss("vllm-project/vllm#30931")(
            "adapter of another path",
            maker.home,
            maker.like_home(adapter_digest=other_digest, adapter_path="elsewhere"),
            "two adapters with one name",
        ),
        _must_miss("ggml-org/llama.cpp#26207")(
            "adapter at another scale",
            maker.home,
            maker.like_home(adapter_scale=0.5),
            "0.5 instead of 1",
        ),
        _must_miss("LMCache/LMCache#2961, vllm-project/vllm#44250")(
            "adapter or none",
            maker.home,
            maker.like_home(**no_adapter),
            "the base model reads what an adapter wrote",
        ),
        _must_miss("vllm-project/vllm#44701")(
            "salt equal to an adapter's name",
            maker.like_home(cache_salt=None),
            maker.like_home(**no_adapter, cache_salt=name),
            "a text in another field is another fact",
        ),
        _scenario(Expectation.EITHER)(
            "equal adapter of another name",
            maker.home,
            maker.like_home(
                adapter_name=other_name,
                adapter_path=f"adapters/{other_name}",
                adapter_digest=digest,
            ),
            "the same KV, so a hit is allowed and not required",
        ),
    ]


def _of_weights(maker: _Maker) -> list[Scenario]:
    world = maker.world
    other = world.weights_digests[2]
    restarted = replace(world.bases[1], weights_digest=other)
    again = replace(world.bases[1], weights_generation=2)
    return [
        _must_miss("NVIDIA-NeMo/RL#4018, vllm-project/vllm#46125")(
            "weights updated in place",
            maker.home,
            world.case(replace(HOME, revision=2), maker.prompt),
            "under the same name",
        ),
        _must_miss("antirez/ds4#805")(
            "restarted on other weights",
            maker.home,
            maker.on(
                replace(restarted, block_size=maker.prompt.block_size),
                weights_digest=other.hex(),
                model_revision="revision 2",
            ),
            "no generation tells, only content",
        ),
        _scenario(Expectation.EITHER)(
            "updated to the same weights",
            maker.home,
            maker.on(
                replace(again, block_size=maker.prompt.block_size),
                weights_generation=2,
            ),
            "there and back again: allowed and not required",
        ),
    ]


def _of_settings(maker: _Maker) -> list[Scenario]:
    loaded, home = maker.loaded, maker.home
    is_half = loaded.dtype == torch.bfloat16
    dtype = torch.float32 if is_half else torch.bfloat16
    numerics = TOLERANT if maker.numerics.name == EXACT.name else EXACT
    block_size = 2 * maker.prompt.block_size
    rope = maker.identified(config=_with_other_positions(loaded.config))
    build = maker.identified(is_packed=not maker.is_packed)
    tokenizer = hashlib.sha256(b"another tokenizer").digest()
    of_positions = _must_miss("vllm-project/vllm#56311")(
        "other rope parameters",
        home,
        maker.on(
            rope,
            position_scheme=str(rope.position_scheme),
            architecture=str(rope.model_architecture),
        ),
        "keys are rotated otherwise",
    )
    has_rope = rope.position_scheme != home.facts.position_scheme
    return [
        *([of_positions] if has_rope else []),
        _must_miss("vllm-project/vllm#49438, #54338")(
            "other KV dtype",
            home,
            maker.on(
                maker.identified(dtype=dtype),
                kv_dtype=str(dtype).removeprefix("torch."),
            ),
            "the bytes mean other numbers",
        ),
        _must_miss()(
            "other block size",
            home,
            maker.on(maker.identified(block_size=block_size), block_size=block_size),
            "a block holds other positions",
        ),
        _must_miss()(
            "other numerics class",
            home,
            maker.on(maker.identified(numerics=numerics), numerics_class=numerics.name),
            "other rounding: not the promised bits",
        ),
        _must_miss()(
            "other engine build",
            home,
            maker.on(build, engine_build=str(build.engine_build)),
            "other rounding: not the promised bits",
        ),
        _scenario(Expectation.EITHER)(
            "other tokenizer, equal ids",
            home,
            maker.on(
                maker.identified(tokenizer_digest=tokenizer),
                tokenizer_digest=tokenizer.hex(),
            ),
            "KV comes of ids: allowed and not required",
        ),
    ]


def _of_salts(maker: _Maker) -> list[Scenario]:
    writer, other = TENANTS
    return [
        _must_miss("vllm-project/vllm#53347")(
            "salt sent by another tenant",
            maker.home,
            maker.like_home(tenant=other, cache_salt=writer),
            "whoever asks is not who the request says",
        ),
        _scenario(Expectation.EITHER)(
            "same tenant, another salt",
            maker.home,
            maker.like_home(cache_salt="anything"),
            "a client may not widen what it sees, so it may be ignored",
        ),
    ]
