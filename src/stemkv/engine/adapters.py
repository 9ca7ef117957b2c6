"""The adapters an engine holds: made from files, kept while anybody needs them.

Owns the matrices of every version in use and where a name's files are. Knows nothing
of identities or requests: who needs which version, the engine says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stemkv.engine.adapter import read_adapter
from stemkv.engine.linear import LinearPlace, linear_places
from stemkv.engine.load import LoadedModel
from stemkv.engine.lora import Lora, Verdicts, check_scale
from stemkv.errors import NumericsError

__all__ = ["Adapters"]


class Adapters:
    """`loras` has the matrices by version; a runner reads it with every step."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loras: dict[str, Lora] = {}
        self._loaded = loaded
        self._sources: dict[str, Path] = {}
        self._verdicts: Verdicts = {}

    def source(self, name: str) -> Path:
        """Return the folder that a loaded name was last read from."""
        return self._sources[name]

    def read(
        self, path: Path | str, *, scale: float, needs_stable_rows: bool
    ) -> tuple[bytes, Lora]:
        """Return the digest and the matrices of an adapter; nothing is kept yet."""
        scale = check_scale(scale)
        weights = read_adapter(path)
        lora = Lora(
            weights,
            self._places(),
            scale=scale,
            dtype=self._loaded.dtype,
            verdicts=self._verdicts,
            needs_stable_rows=needs_stable_rows,
        )
        return weights.digest, lora

    def keep(self, name: str, version: str, path: Path, lora: Lora) -> None:
        """Serve these matrices as `version`; `name` means them from now on."""
        self.loras[version] = lora
        self._sources[name] = path

    def forget(self, name: str) -> None:
        """Let the name mean nothing; its versions stay until `drop_unused`."""
        del self._sources[name]

    def drop_unused(self, used: set[str]) -> None:
        """Free all versions but those in use."""
        for version in self.loras.keys() - used:
            del self.loras[version]

    def check_stable(self) -> None:
        """Raise `NumericsError` if one does not keep class `exact` on this build."""
        for version, lora in self.loras.items():
            if not lora.is_stable:
                raise NumericsError(
                    f"adapter {version} does not keep numerics class 'exact' on this "
                    f"build; unload it first"
                )

    def _places(self) -> dict[str, LinearPlace]:
        """Return the linears that see every row of a step: all but the output one."""
        model: Any = self._loaded.model
        output = model.get_output_embeddings()
        places = linear_places(self._loaded.model)
        return {n: place for n, place in places.items() if place.linear is not output}
