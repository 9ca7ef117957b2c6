"""What it costs to establish a model's identity: the first time, and from the record.

The model is the embedded one in its default dtype. Measured are the parts that identity
adds to a load: looking at files, hashing, the digest record, writing the identity down.
Reading the weights is not among them, nor is copying them off their file, which is a
row of its own: without that copy a load would serve from a file that can still change.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.report import Bar, finish, parser, pin_to_one_core
from stemkv.engine import LoadedModel, load_model
from stemkv.engine.digest import (
    DigestRecord,
    Digests,
    combine,
    conditions,
    digest_chat_template,
    digest_tensors,
    digest_tokenizer,
    see_file,
    see_folder,
)
from stemkv.engine.identity import identify
from stemkv.engine.linear import can_pack
from stemkv.engine.load import embedded_model
from stemkv.engine.numerics import EXACT

FIRST_LIMIT_S = 3.0
LATER_LIMIT_S = 0.050

T = TypeVar("T")


def main() -> int:
    """Measure both ways in turn, print the table, return the exit code."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    facts = {"machine": pin_to_one_core()}
    torch.set_num_threads(1)
    loaded = load_model()
    state = loaded.model.state_dict()
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    facts["model"] = f"{loaded.name}, {str(loaded.dtype).removeprefix('torch.')}"
    num_gguf_bytes = embedded_model().stat().st_size
    facts["hashed"] = (
        f"{num_bytes / 1e6:.0f} MB of tensors, {num_gguf_bytes / 1e6:.0f} MB of GGUF "
        f"file, tokenizer and chat template; one thread"
    )
    firsts, laters, copies = [], [], []
    for _ in range(3 if options.quick else 15):
        with tempfile.TemporaryDirectory() as place:
            bench = Bench(loaded, Path(place))
            firsts.append(bench.first())
            laters.append(bench.later())
        start = time.perf_counter()
        for tensor in loaded.model.parameters():
            tensor.data.clone()
        copies.append(time.perf_counter() - start)
    bars = table("the first time", firsts, FIRST_LIMIT_S)
    bars += table("later", laters, LATER_LIMIT_S)
    bars += [
        milliseconds("copying the weights off their file, at each load", copies),
        milliseconds("a whole load, hashing anew", loads(trusts_digest_record=False)),
        milliseconds("a whole load, from the record", loads(trusts_digest_record=True)),
    ]
    return finish("bench.identity: a model's identity", bars, options, facts=facts)


class Bench:
    """The parts of a load that identity adds, with a record of their own."""

    def __init__(self, loaded: LoadedModel, place: Path) -> None:
        self.loaded = loaded
        config: Any = loaded.model.config
        self.folder = Path(config._name_or_path)  # the converted GGUF
        self.gguf = embedded_model()
        self.record = DigestRecord([place / "model.json"])
        self.gguf_record = DigestRecord([place / "gguf.json"])
        self.key = conditions(loaded.dtype)
        self.is_packed = can_pack(loaded.dtype)
        self.seconds: dict[str, float] = {}

    def first(self) -> dict[str, float]:
        """Establish everything without a record, and keep one."""
        self.seconds = {}
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        seen_gguf = self.time("looking at files", lambda: see_file(self.gguf))
        seen = self.time("looking at files", lambda: see_folder(self.folder))
        assert seen is not None, "the files can be recorded"
        assert seen_gguf is not None, "that one, too"
        found = self.time(
            "reading the records",
            lambda: (
                self.gguf_record.find(seen_gguf, "sha256"),
                self.record.find(seen, self.key),
            ),
        )
        assert found == (None, None), "nothing is recorded yet"
        sha256 = self.time("hashing the GGUF file", self.hash_gguf)
        leaves = self.time(
            "hashing tensors", lambda: digest_tensors(model.state_dict())
        )
        digests = self.time(
            "hashing tokenizer and template",
            lambda: Digests(
                tensors=leaves,
                tokenizer=digest_tokenizer(tokenizer),
                chat_template=digest_chat_template(tokenizer),
            ),
        )
        self.time("looking at files", lambda: see_file(self.gguf))
        self.time("looking at files", lambda: see_folder(self.folder))

        def keep() -> None:
            self.gguf_record.keep(seen_gguf, "sha256", sha256)
            self.record.keep(seen, self.key, digests.to_json())

        self.time("writing the records", keep)
        self.identify(digests)
        return self.seconds

    def later(self) -> dict[str, float]:
        """Establish everything from the record."""
        self.seconds = {}
        seen_gguf = self.time("looking at files", lambda: see_file(self.gguf))
        before = self.time("looking at files", lambda: see_folder(self.folder))
        after = self.time("looking at files", lambda: see_folder(self.folder))
        assert before is not None, "the files can be recorded"
        assert before.is_same(after), "nothing has changed"
        assert seen_gguf is not None, "the file is there"
        sha256, digests = self.time(
            "reading the records",
            lambda: (
                self.gguf_record.find(seen_gguf, "sha256"),
                Digests.from_json(self.record.find(before, self.key)),
            ),
        )
        assert sha256 is not None, "the file is recorded"
        assert digests is not None, "the model is, too"
        self.time(
            "comparing names",
            lambda: digests.tensors.keys() == self.loaded.model.state_dict().keys(),
        )
        self.identify(digests)
        return self.seconds

    def identify(self, digests: Digests) -> None:
        """Write the identity down, as it was found when the model was loaded."""

        def namespace() -> bytes | None:
            weights = combine(digests.tensors)
            assert weights == self.loaded.weights_digest, "the same model"
            identity = identify(
                self.loaded, EXACT, block_size=16, is_packed=self.is_packed
            )
            return identity.namespace()

        self.time("identity and namespace", namespace)

    def hash_gguf(self) -> str:
        """Return the SHA-256 of the GGUF file."""
        with self.gguf.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def time(self, part: str, work: Callable[[], T]) -> T:
        """Do the work and add its seconds to a part."""
        start = time.perf_counter()
        result = work()
        elapsed = time.perf_counter() - start
        self.seconds[part] = self.seconds.get(part, 0.0) + elapsed
        return result


def loads(*, trusts_digest_record: bool) -> list[float]:
    """Return the seconds of three whole loads."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        load_model(trusts_digest_record=trusts_digest_record)
        seconds.append(time.perf_counter() - start)
    return seconds


def table(name: str, rounds: list[dict[str, float]], limit_s: float) -> list[Bar]:
    """Return a bar on the median total, its slowest round, and the parts."""
    totals = [sum(parts.values()) for parts in rounds]
    bars = [
        milliseconds(f"identity, {name}", totals, limit_s),
        Bar(name="  the slowest round", measured=1000 * max(totals), unit="ms"),
    ]
    for part in rounds[0]:
        bars.append(milliseconds(f"  {part}", [parts[part] for parts in rounds]))
    return bars


def milliseconds(name: str, seconds: list[float], limit_s: float | None = None) -> Bar:
    """Return the median of some seconds, in milliseconds."""
    limit = None if limit_s is None else 1000 * limit_s
    return Bar(
        name=name, measured=1000 * statistics.median(seconds), limit=limit, unit="ms"
    )


if __name__ == "__main__":
    sys.exit(main())
