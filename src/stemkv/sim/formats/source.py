"""The bytes of a trace file as records.

Owns opening, decompression (by content, not by name), byte order marks, line ends, and
the three ways in which records stand in a file: a JSON value a line, one JSON document,
a CSV row. Knows no format of traces.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec
import zstandard

from ...errors import TraceError
from .line import Line

__all__ = ["Progress", "Source"]

# Bytes read of the file as it lies on disk, and its size; `None`: a pipe.
Progress = Callable[[int, int | None], None]

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
_MAX_WINDOW = 2**27  # bytes; `zstd --long` writes up to this without a flag to read it
_MAX_LINE = 2**28  # bytes; the longest agent sessions known have under 2**24
_CHUNK = 2**18  # bytes
_PACKED_CHUNK = 2**12  # bytes; a few of them can unpack to very many
_REPORT_EVERY = 128  # lines


class Source:
    """A trace file, opened when its lines are first asked for."""

    def __init__(self, path: str | Path, *, progress: Progress | None = None) -> None:
        self.file = "<stdin>" if str(path) == "-" else str(path)
        self.num_lines = 0
        self.is_document = False  # one JSON document: lines are its items' numbers
        self._path = path
        self._progress = progress

    @property
    def name(self) -> str:
        """The file's name without suffixes."""
        if self.file == "<stdin>":
            return "stdin"
        name = Path(self.file).name
        return name.partition(".")[0] or name

    def lines(self) -> Iterator[Line]:
        """Yield the records that are not blank."""
        raw = self._numbered()
        first = next(((number, text) for number, text in raw if text.strip()), None)
        if first is None:
            raise TraceError("the file is empty", file=self.file)
        raw = chain([first], raw)
        if first[1].lstrip()[:1] not in (b"{", b"["):
            yield from self._rows(raw)
            return
        if _is_start_of_document(first[1]):
            kept = list(raw)
            items = _document(b"".join(text for _, text in kept).strip())
            if items == []:
                raise TraceError(
                    "an empty list of records",
                    file=self.file,
                    line=first[0],
                )
            if items is not None:
                self.is_document = True
                yield from (Line(self.file, i, item) for i, item in enumerate(items, 1))
                return
            raw = iter(kept)
        for number, text in raw:
            if text := text.strip():
                yield Line(self.file, number, text)

    def _rows(self, raw: Iterator[tuple[int, bytes]]) -> Iterator[Line]:
        number = 0

        def texts() -> Iterator[str]:
            nonlocal number
            for at, text in raw:
                number = at
                try:
                    yield text.decode()
                except UnicodeDecodeError as error:
                    raise TraceError(
                        f"not UTF-8: {error.reason}", file=self.file, line=at
                    ) from None

        reader = csv.reader(texts(), strict=True)
        # Prompts are longer than the 128 KiB that the module allows a cell. Its limit
        # is the process's, so it is put back.
        limit = csv.field_size_limit(_MAX_LINE)
        try:
            header = [name.strip() for name in next(reader)]
            if len(header) < 2:
                raise TraceError(
                    "neither JSON nor CSV: the first line starts with no brace and "
                    "has no comma",
                    file=self.file,
                    line=number,
                )
            self._check_names(header, number)
            for row in reader:
                if len(row) > len(header):
                    fault = f"{len(row)} cells under {len(header)} names"
                    yield Line(self.file, number, fault=fault)
                elif row:
                    # A shorter row lacks its last cells, which tell so when read.
                    cells: dict[str, object] = dict(zip(header, row, strict=False))
                    yield Line(self.file, number, cells=cells)
        except csv.Error as error:
            raise TraceError(
                f"broken CSV: {error}", file=self.file, line=number
            ) from None
        finally:
            csv.field_size_limit(limit)

    def _check_names(self, header: list[str], number: int) -> None:
        twice = [name for name, count in Counter(header).items() if name and count > 1]
        if twice:
            raise TraceError(
                f"columns with one name, of which only one could be read: "
                f"{', '.join(f'{name:.40}' for name in twice[:8])}; rename them",
                file=self.file,
                line=number,
            )

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines as they are with their numbers, from 1."""
        if self.file == "<stdin>":
            yield from self._read(sys.stdin.buffer, None)
            return
        path = Path(self._path)
        try:
            with path.open("rb") as file:
                yield from self._read(file, path.stat().st_size)
        except OSError as error:
            raise TraceError(
                f"cannot be read: {error.strerror or error}", file=self.file
            ) from None

    def _read(self, file: IO[bytes], size: int | None) -> Iterator[tuple[int, bytes]]:
        stream = _unpacked(file)
        try:
            while text := stream.readline(_MAX_LINE + 1):
                self.num_lines += 1
                if len(text) > _MAX_LINE:
                    raise TraceError(
                        f"the line is longer than {_MAX_LINE:,} bytes",
                        file=self.file,
                        line=self.num_lines,
                    )
                if self.num_lines == 1:
                    text = self._without_mark(text)
                yield self.num_lines, text
                if self._progress is not None and self.num_lines % _REPORT_EVERY == 0:
                    self._progress(_position(file), size)
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise TraceError(
                f"the compressed data is damaged behind this line: {error}",
                file=self.file,
                line=self.num_lines,
            ) from None
        if self._progress is not None:
            self._progress(_position(file) if size is None else size, size)

    def _without_mark(self, text: bytes) -> bytes:
        if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise TraceError(
                "this is UTF-16; convert it to UTF-8", file=self.file, line=1
            )
        return text.removeprefix(_BOM)


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    # Standard input may be any stream; what is opened here is buffered already.
    stream = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
    start = stream.peek(4)[:4]
    if start.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=stream), _CHUNK)
    if start == _ZSTD:
        return io.BufferedReader(_Zstd(stream), _CHUNK)
    return stream


class _Zstd(io.RawIOBase):
    """The content of zstd frames.

    The package's own stream reader takes a file that is cut short for a whole one.
    """

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed = packed
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._frame = self._unpacker.decompressobj()
        self._is_in_frame = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # there is no wider name for a buffer in 3.11
        target = memoryview(buffer).cast("B")
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._unpacker.decompressobj()
                self._is_in_frame = False
            packed = packed or self._packed.read(_PACKED_CHUNK)
            if not packed:
                if self._is_in_frame:
                    raise EOFError("it ends within a frame")
                return 0
            self._is_in_frame = True
            self._ready = memoryview(self._frame.decompress(packed))
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _position(file: IO[bytes]) -> int:
    try:
        return file.tell()
    except OSError:
        return 0  # a pipe


def _is_start_of_document(first: bytes) -> bool:
    """Whether the first line cannot be a record of its own."""
    try:
        value = msgspec.json.decode(first)
    except (msgspec.MsgspecError, RecursionError):
        return True
    # A batch of events is an array, but not one of objects.
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _document(text: bytes) -> list[bytes] | None:
    try:
        if text[:1] == b"[":
            items = msgspec.json.decode(text, type=list[msgspec.Raw])
            return [bytes(item) for item in items]
        return [bytes(msgspec.json.decode(text, type=msgspec.Raw))]
    except (msgspec.MsgspecError, RecursionError):
        return None
