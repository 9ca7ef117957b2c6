"""Everything that needs the model: facts, damage, and a real engine's answers.

Owns the phases: revision 1, a roll-out to revision 2, and back, so that one model in
memory is enough and the roll-out itself is under attack. Judges nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stemkv.audit.identity.contexts import ADAPTERS, CONTEXTS, Context, Prompt, World
from stemkv.audit.identity.damage import (
    Damage,
    StateKey,
    States,
    scaled_positions,
    state_of,
)
from stemkv.audit.identity.engine import EngineTrial, Round
from stemkv.audit.identity.scenarios import HOME, ScenarioPrompts
from stemkv.audit.identity.variants import (
    Revision,
    load_revision,
    make_lora,
    make_revision,
    place_adapters,
)
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identity import ComputeIdentity
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine.config import EngineConfig
from stemkv.engine.digest import combine
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.engine import Engine
from stemkv.engine.linear import linear_places
from stemkv.engine.load import LoadedModel
from stemkv.engine.numerics import EXACT, TOLERANT, Numerics, numerics_named
from stemkv.errors import NumericsError

__all__ = ["Evidence", "Pair", "gather_evidence"]

_BLOCK_SIZE = 16
_KV_TOKENS = 2048  # of the engine
_ENGINE_PROMPT = 40  # tokens that the engine serves: two whole blocks and a rest
_HALF = f"{ADAPTERS[0]} at half its scale"
_SPAN = 16  # positions of made-up media

Pair = tuple[StateKey, StateKey]  # writer, reader
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the model and the engine said."""

    world: World
    prompts: tuple[Prompt, Prompt]
    scenario_prompts: ScenarioPrompts
    numerics: Numerics
    is_packed: bool
    revision: str  # what the second one is
    pairs: Mapping[Pair, Damage]  # every two states of the sixteen contexts
    scenarios: Mapping[str, Damage]  # by name, those that can be computed
    rounds: tuple[Round, ...]
    num_equal_bits: int  # reuses of the engine whose logits are those of the cold run
    num_compared: int
    num_equal_tenants: int  # cold runs of two tenants with equal logits
    num_tenant_pairs: int
    num_own_namespaces: int  # of the sixteen that are the engine's own


def gather_evidence(
    loaded: LoadedModel,
    prompts: tuple[Prompt, Prompt],
    *,
    revision: Path | None,
    adapters: tuple[Path, ...],
    seed: int,
    progress: Progress,
) -> Evidence:
    """Run the phases; the model's weights are what they were when this returns."""
    progress("making an engine")
    engine = _make_engine(loaded)
    with tempfile.TemporaryDirectory(prefix="stemkv-audit-") as folder:
        session = _Session(
            loaded,
            engine,
            prompts,
            Path(folder),
            adapters=adapters,
            seed=seed,
            progress=progress,
        )
        progress("making the second revision")
        if revision is None:
            second = make_revision(loaded, seed=seed)
        else:
            second = load_revision(loaded, revision)
        return session.run(second)


def _make_engine(loaded: LoadedModel) -> Engine:
    """Return an engine in class `exact`, or `tolerant` where the build lacks it."""
    config = EngineConfig(
        core=CoreConfig(cache=CacheConfig(block_size=_BLOCK_SIZE)),
        kv_memory_bytes=_KV_TOKENS * loaded.kv_bytes_per_token,
        num_threads=torch.get_num_threads(),
        # `audit exact` proves the class; nothing here hangs on equal bits.
        runs_self_test=False,
    )
    try:
        return Engine(loaded, config)
    except NumericsError:
        return Engine(loaded, replace(config, numerics=TOLERANT.name))


class _Session:
    """One engine and one set of states over one model."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: Engine,
        prompts: tuple[Prompt, Prompt],
        folder: Path,
        *,
        adapters: tuple[Path, ...],
        seed: int,
        progress: Progress,
    ) -> None:
        self._loaded = loaded
        self._engine = engine
        self._prompts = prompts
        self._folder = folder
        self._seed = seed
        self._progress = progress
        self._numerics = numerics_named(engine.config.numerics)
        progress("making adapters")
        weights = place_adapters(adapters, loaded, folder, seed=seed)
        self._adapter_digests = {name: w.digest for name, w in weights.items()}
        for name in ADAPTERS:
            engine.load_adapter(name, folder / name)
        loras = {
            name: make_lora(weights[of], loaded, scale=scale, numerics=self._numerics)
            for name, of, scale in (
                (ADAPTERS[0], ADAPTERS[0], 1.0),
                (ADAPTERS[1], ADAPTERS[1], 1.0),
                (_HALF, ADAPTERS[0], 0.5),
            )
        }
        longest = len(prompts[1].tokens) + _BLOCK_SIZE
        self._states = States(
            loaded, self._numerics, loras, num_tokens=longest * (len(CONTEXTS) + 8)
        )
        self._trial = EngineTrial(
            engine,
            TokenIds.from_ids(list(prompts[1].tokens)[:_ENGINE_PROMPT]),
            progress,
        )
        self._bases: dict[int, ComputeIdentity] = {}
        self._weights_digests: dict[int, bytes] = {}
        self._namespaces: dict[Context, bytes | None] = {}
        self._pairs: dict[Pair, Damage] = {}
        self._scenarios: dict[str, Damage] = {}

    def run(self, second: Revision) -> Evidence:
        """Revision 1, 2, and 1 again."""
        first_contexts = [c for c in CONTEXTS if c.revision == 1]
        second_contexts = [c for c in CONTEXTS if c.revision == 2]
        self._look_up(first_contexts)
        places = linear_places(self._loaded.model).values()
        is_packed = all(place.linear.is_packed for place in places)
        scenario_prompts = self._compute_scenarios()
        self._compute(first_contexts)
        self._trial.serve_twice("revision 1", first_contexts)
        self._progress("rolling out revision 2")
        self._engine.update_weights(second.tensors)
        try:
            self._look_up(second_contexts)
            self._compute(second_contexts)
            self._read(second_contexts)
            self._trial.serve_twice("revision 2", second_contexts)
        finally:
            self._progress("rolling back to revision 1")
            self._engine.update_weights(second.original)
        self._read(first_contexts)
        self._trial.serve_once("revision 1 again, first", first_contexts)
        self._trial.reload_adapters(self._folder)
        return self._evidence(second, scenario_prompts, is_packed)

    # Private

    def _look_up(self, contexts: list[Context]) -> None:
        """Note the facts of the revision in place, and the engine's namespaces."""
        revision = contexts[0].revision
        self._bases[revision] = self._engine.identity
        self._weights_digests[revision] = combine(self._loaded.tensor_digests)
        for context in contexts:
            self._namespaces[context] = self._engine.namespace_of(
                context.adapter, start_position=context.start_position
            )

    def _compute(self, contexts: list[Context]) -> None:
        """Prefill the states of a revision that are not there yet."""
        for prompt in self._prompts:
            keys = dict.fromkeys(state_of(c, prompt) for c in contexts)
            for index, key in enumerate(keys):
                self._progress(
                    f"{prompt.name}: revision {key.revision}, state {index + 1} of "
                    f"{len(keys)}"
                )
                if key != self._home:
                    self._states.compute(key, prompt)

    @property
    def _home(self) -> StateKey:
        """The state of `HOME`, which scenarios compute first."""
        return state_of(HOME, self._prompts[1])

    def _read(self, contexts: list[Context]) -> None:
        """Let readers of the revision in place go on from every writer's KV."""
        for prompt in self._prompts:
            writers = dict.fromkeys(state_of(c, prompt) for c in CONTEXTS)
            readers = dict.fromkeys(state_of(c, prompt) for c in contexts)
            self._progress(f"{prompt.name}: reading what others wrote")
            self._pairs |= self._states.damage(
                list(itertools.product(writers, readers))
            )

    def _compute_scenarios(self) -> ScenarioPrompts:
        """Compute what scenarios need beyond the contexts; all on revision 1."""
        main, home = self._prompts[1], self._home
        self._states.compute(home, main)
        pairs: dict[str, Pair] = {}
        others = {
            "adapter at another scale": replace(home, adapter=_HALF),
            "adapter or none": replace(home, adapter=None),
            "other numerics class": replace(home, variant="numerics"),
        }
        other_class = TOLERANT if self._numerics.pads_context else EXACT
        for name, key in others.items():
            self._progress(f"scenario: {name}")
            numerics = other_class if key.variant else None
            self._states.compute(key, main, numerics=numerics)
            # The other class reads with the runner's own kernels, so it must write.
            pairs[name] = (key, home) if key.variant else (home, key)
        pairs["salt equal to an adapter's name"] = pairs["adapter or none"]
        self._progress("scenario: other rope parameters")
        with scaled_positions(self._loaded.model) as has_rope:
            if has_rope:
                rope = replace(home, variant="rope")
                self._states.compute(rope, main)
                pairs["other rope parameters"] = (rope, home)
        made = self._make_scenario_prompts()
        prompts = ScenarioPrompts(
            main=main,
            media=(made["one image"][0], made["another image"][0]),
            masked=(made["mask first"][0], made["mask second"][0]),
        )
        for prompt in prompts.same_last_block:
            made[prompt.name] = (prompt, None)
        for prompt, embedded in made.values():
            self._progress(f"scenario: {prompt.name}")
            key = replace(home, prompt=prompt.name)
            self._states.compute(key, prompt, embedded=embedded)
        for name, writer, reader in (
            ("media of another content", "one image", "another image"),
            ("only the mask differs", "mask first", "mask second"),
            ("same last block", "one start", "another start"),
        ):
            pairs[name] = (replace(home, prompt=writer), replace(home, prompt=reader))
        pairs["salt sent by another tenant"] = (home, home)
        damage = self._states.damage(list(dict.fromkeys(pairs.values())))
        self._scenarios = {name: damage[pair] for name, pair in pairs.items()}
        return prompts

    def _make_scenario_prompts(self) -> dict[str, tuple[Prompt, EmbeddedPrompt | None]]:
        """Return prompts with spans: two images, and one embedding in two places."""
        ids = list(self._prompts[1].tokens)
        after = TokenIds.from_ids(ids[:_BLOCK_SIZE])
        zeros = TokenIds.from_ids([0] * _SPAN)
        one, other = (self._image(seed=self._seed + index) for index in range(2))
        parts: dict[str, list[TokenIds | torch.Tensor]] = {
            # Nothing before it: what is before an image may be shared.
            "one image": [one, after],
            "another image": [other, after],
            # The same ids and vectors; a position is one or the other.
            "mask first": [one, zeros, after],
            "mask second": [zeros, one, after],
        }
        made: dict[str, tuple[Prompt, EmbeddedPrompt | None]] = {}
        for name, each in parts.items():
            embedded = self._engine.embed(each)
            made[name] = (_spanned(name, each, embedded), embedded)
        return made

    def _image(self, *, seed: int) -> torch.Tensor:
        """Return vectors as the model might get for an image: mixed embeddings."""
        model: Any = self._loaded.model  # transformers' class is not typed
        table: torch.Tensor = model.get_input_embeddings().weight.detach()
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(len(table), (_SPAN, 2), generator=generator)
        return table[rows].float().mean(dim=1)

    def _evidence(
        self, second: Revision, scenario_prompts: ScenarioPrompts, is_packed: bool
    ) -> Evidence:
        world = World(
            model_name=self._loaded.name,
            bases=self._bases,
            weights_digests=self._weights_digests,
            adapter_digests=self._adapter_digests,
        )
        main = self._prompts[1]
        own = sum(
            world.case(context, main).namespace == self._namespaces[context]
            for context in CONTEXTS
        )
        return Evidence(
            world=world,
            prompts=self._prompts,
            scenario_prompts=scenario_prompts,
            numerics=self._numerics,
            is_packed=is_packed,
            revision=second.label,
            pairs=self._pairs,
            scenarios=self._scenarios | self._from_pairs(),
            rounds=tuple(self._trial.rounds),
            num_equal_bits=self._trial.num_equal_bits,
            num_compared=self._trial.num_compared,
            num_equal_tenants=self._trial.num_equal_across_tenants,
            num_tenant_pairs=self._trial.num_tenant_pairs,
            num_own_namespaces=own,
        )

    def _from_pairs(self) -> dict[str, Damage]:
        """Return scenarios whose states are among those of the contexts."""
        home = self._home
        reloaded = self._pairs[home, replace(home, adapter=ADAPTERS[1])]
        updated = self._pairs[home, replace(home, revision=2)]
        return {
            "adapter reloaded": reloaded,
            "adapter of another path": reloaded,
            "weights updated in place": updated,
            "restarted on other weights": updated,
        }


def _spanned(
    name: str, parts: list[TokenIds | torch.Tensor], embedded: EmbeddedPrompt
) -> Prompt:
    """Describe an embedded prompt; its spans are where the ids are negative."""
    media, positions, end = [], [], 0
    for part in parts:
        start, end = end, end + len(part)
        if isinstance(part, torch.Tensor):
            content = part.float().contiguous().numpy().tobytes()
            media.append(hashlib.sha256(content).hexdigest())
            positions.append((start, end))
    return Prompt(
        name=name,
        tokens=embedded.tokens,
        block_size=_BLOCK_SIZE,
        media=tuple(media),
        media_positions=tuple(positions),
    )
