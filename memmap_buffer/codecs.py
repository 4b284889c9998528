"""How the rows of a field are compressed: `Zstd`, lossless, and `Jpeg` for pictures.

A codec encodes each row as a blob of its own, so that any row can be read alone. There are no other codecs: a schema
that names one is refused. Other threads can run while a codec works.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array, check_count
from memmap_buffer.errors import SchemaError
from memmap_buffer.extras import extra

IntArray: TypeAlias = npt.NDArray[np.int64]

SEVERAL = 4  # from so many rows on, one call encodes all, which takes some 10 us more than a call for one row
MAX_WINDOW = 1 << 23  # bytes: a hostile blob can make its decoder allocate no larger window; level 19 needs no larger
HEADER = 18  # bytes of the longest header of a Zstandard frame
_local = threading.local()  # the compressors and decompressors of each thread: two threads must not share one


@dataclass(frozen=True)
class Zstd:
    """Zstandard: lossless, for numbers of any dtype.

    Pictures of few colours shrink to between a tenth and a fortieth of their size. Needs the extra `zstd`.

    Args:
        level: 1 … 19. A higher level takes longer to encode, but not to decode.
    """

    level: int = 3
    name: ClassVar[str] = "zstd"
    lossy: ClassVar[bool] = False
    takes_dictionary: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", check_count("Zstd: level", self.level, 1, 19))

    def require_fits(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Accept every field: numbers of any dtype and shape fit."""

    def load(self) -> None:
        """Raise ImportError where the package is missing."""
        _zstandard()

    def encode(self, rows: Array, dictionary: Array | None = None) -> list[bytes]:
        """Encode each row as a blob that can be decoded alone.

        Args:
            rows: (N, …), as stored.
            dictionary: (n,) uint8 that `train` made; `decode_into` needs the same one.

        Returns:
            N blobs.
        """
        compressor = _kept(("compress", self.level), dictionary, self._compressor)
        each = list(np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8))
        if len(each) < SEVERAL or "multi_compress_to_buffer" not in _zstandard().backend_features:
            return [compressor.compress(row) for row in each]
        return [blob.tobytes() for blob in compressor.multi_compress_to_buffer(each)]

    def _compressor(self, dictionary: Any) -> Any:
        if dictionary is not None:
            dictionary.precompute_compress(self.level)  # once; else each call that encodes several rows would do it
        options: dict[str, Any] = {"write_checksum": False, "write_dict_id": False}
        return _zstandard().ZstdCompressor(level=self.level, dict_data=dictionary, **options)

    def decode_into(
        self, blobs: bytes, ends: IntArray, out: Array, places: IntArray, dictionary: Array | None = None
    ) -> None:
        """Decode each blob into its row of `out`.

        Blobs whose rows follow each other in `out` are decoded by one call, straight into the memory of these rows.

        Args:
            blobs: N blobs, one after another without a gap.
            ends: (N,) int64, the end of each blob in `blobs`.
            out: (M, *field), C-contiguous.
            places: (N,) int64, the row of `out` into which each blob is decoded.
            dictionary: the one that `encode` was given.

        Raises:
            ValueError: a blob is damaged, or does not decode to the size of a row. Some rows may be written already.
        """
        zstandard, size = _zstandard(), out.itemsize * math.prod(out.shape[1:])
        flat = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        cuts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
        try:
            decompressor = _kept(("decompress",), dictionary, self._decompressor)
            self._require_sizes(blobs, ends, size)
            reader = decompressor.stream_reader(blobs, read_across_frames=True)
            for first, stop in pairwise(cuts):
                begin, count = int(places[first]) * size, (stop - first) * size
                if reader.readinto(flat[begin : begin + count]) != count:
                    raise ValueError("a blob ends before its row does")
            if reader.read(1):
                raise ValueError("a blob goes on behind its row")
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None

    def _decompressor(self, dictionary: Any) -> Any:
        return _zstandard().ZstdDecompressor(dict_data=dictionary, max_window_size=MAX_WINDOW)

    def _require_sizes(self, blobs: bytes, ends: IntArray, size: int) -> None:
        """Raise ValueError unless the header of each blob states `size` bytes. Equal headers are parsed only once."""
        zstandard, begins, data = _zstandard(), np.concatenate([[0], ends[:-1]]), np.frombuffer(blobs, np.uint8)
        length = zstandard.frame_header_size(blobs[:HEADER])
        heads = data.take(begins[:, None] + np.arange(length), mode="clip")
        if heads.tobytes() == heads[0].tobytes() * len(heads):
            begins = begins[:1]
        for begin in begins.tolist():
            content_size = zstandard.frame_content_size(blobs[begin : begin + HEADER])
            if content_size != size:
                raise ValueError(f"a blob says that it is of {content_size} bytes, a row has {size}")

    def train(self, rows: Array, size: int) -> Array | None:
        """A dictionary (n,) uint8 of at most `size` bytes for rows like these (N, …); None if they are too few."""
        samples = [row.tobytes() for row in rows]
        try:
            dictionary = _zstandard().train_dictionary(size, samples)
        except _zstandard().ZstdError:
            return None
        return np.frombuffer(dictionary.as_bytes(), np.uint8)


@dataclass(frozen=True)
class Jpeg:
    """JPEG: lossy, for pictures of cameras, which shrink to between a fifth and a tenth of their size.

    Fields are uint8 of shape (height, width, 3), (height, width, 1) or (height, width). Needs the extra `jpeg`.

    Args:
        quality: 1 … 100; a higher one is closer to the picture, and larger.
        subsampling: of the colours: "444" keeps all, "422" half of their columns, "420" half of their rows and columns.
    """

    quality: int = 95
    subsampling: str = "420"
    name: ClassVar[str] = "jpeg"
    lossy: ClassVar[bool] = True
    takes_dictionary: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "quality", check_count("Jpeg: quality", self.quality, 1, 100))
        if self.subsampling not in ("444", "422", "420"):
            raise SchemaError(f"Jpeg: subsampling: got {self.subsampling!r}, expected '444', '422' or '420'")

    def require_fits(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise SchemaError unless rows are pictures."""
        if dtype != "uint8" or len(shape) not in (2, 3) or shape[2:] not in ((), (1,), (3,)) or max(shape) > 65500:
            raise SchemaError(
                f"Jpeg: got a field of {dtype} {shape}, expected uint8 (height, width, 3), (height, width, 1) or "
                "(height, width); move the axis of the channels to the end, or use codec='zstd'"
            )

    def load(self) -> None:
        """Raise ImportError where the package is missing."""
        _simplejpeg()

    def encode(self, rows: Array, dictionary: Array | None = None) -> list[bytes]:
        """Encode each picture of `rows` (N, height, width, …) as a blob; `dictionary` has no effect."""
        encode, colours = _simplejpeg().encode_jpeg, _colours(rows.shape[1:])
        subsampling = self.subsampling if colours == "RGB" else "Gray"
        return [
            encode(row.reshape(*row.shape[:2], -1), self.quality, colours, subsampling)
            for row in np.ascontiguousarray(rows)
        ]

    def decode_into(
        self, blobs: bytes, ends: IntArray, out: Array, places: IntArray, dictionary: Array | None = None
    ) -> None:
        """Decode each blob into its row of `out`, see `Zstd.decode_into`; `dictionary` has no effect."""
        data, shape, colours = memoryview(blobs), out.shape[1:], _colours(out.shape[1:])
        header, decode = _simplejpeg().decode_jpeg_header, _simplejpeg().decode_jpeg
        for (begin, end), place in zip(pairwise([0, *ends.tolist()]), places.tolist(), strict=True):
            blob = data[begin:end]
            height, width, *_ = header(blob)
            _require_one_pass(blob)
            if (height, width) != shape[:2]:  # before `decode`, which allocates memory for the size that a blob states
                raise ValueError(f"a blob is a picture of {height} x {width}, a row of {shape[0]} x {shape[1]}")
            decode(blob, colours, buffer=out[place])


Codec: TypeAlias = Zstd | Jpeg
CODECS: dict[str, type[Zstd] | type[Jpeg]] = {"zstd": Zstd, "jpeg": Jpeg}


def parse_codec(spec: Any) -> Codec | None:
    """The codec that `spec` gives: a codec itself, its name, or None for none. Raises SchemaError for anything else."""
    if spec is None or isinstance(spec, (Zstd, Jpeg)):
        return spec
    if isinstance(spec, str) and spec in CODECS:
        return CODECS[spec]()
    raise SchemaError(f"codec: got {spec!r}, expected 'zstd', 'jpeg', Zstd(level=…), Jpeg(quality=…) or None")


def codec_to_json(codec: Codec) -> dict[str, Any]:
    """The JSON object of a codec in `schema.json`."""
    return {"name": codec.name, **asdict(codec)}


def codec_from_json(spec: Any) -> Codec:
    """The codec of a JSON object in `schema.json`. Raises SchemaError for a name, a key or a value that is unknown."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str) or spec["name"] not in CODECS:
        raise SchemaError(f"codec: got {spec!r}, this release knows {', '.join(CODECS)}; install a newer one")
    options = {key: value for key, value in spec.items() if key != "name"}
    try:
        codec = CODECS[spec["name"]](**options)
    except TypeError:
        raise SchemaError(f"codec: got {spec!r}, which has unknown keys; install a newer release") from None
    if codec_to_json(codec) != spec:
        raise SchemaError(f"codec: got {spec!r}, expected the keys {', '.join(codec_to_json(codec))}")
    return codec


def _colours(shape: tuple[int, ...]) -> str:
    return "RGB" if shape[2:] == (3,) else "GRAY"


def _require_one_pass(blob: bytes | memoryview) -> None:
    """Raise ValueError unless a JPEG is baseline: a progressive one can cost a pass over all rows for each 12 bytes."""
    at = 2
    while at + 4 <= len(blob) and blob[at] == 0xFF:
        marker = blob[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # all but these three begin a frame
            if marker == 0xC0:
                return
            break
        at += 2 + int.from_bytes(blob[at + 2 : at + 4], "big")
    raise ValueError("a blob is no baseline JPEG")


@cache
def _zstandard() -> Any:
    with extra("zstd"):
        import zstandard
    return zstandard


@cache
def _simplejpeg() -> Any:
    with extra("jpeg"):
        import simplejpeg
    return simplejpeg


def _kept(kind: tuple[Any, ...], dictionary: Array | None, make: Callable[[Any], Any]) -> Any:
    """This thread's coder of a kind, made on first use. Its dictionary is kept, too: the key has its address."""
    kept: dict[Any, Any] = _local.__dict__.setdefault("kept", {})
    key = (*kind, None if dictionary is None else dictionary.ctypes.data)
    entry = kept.get(key)
    if entry is None:
        if len(kept) > 64:
            kept.clear()
        content = None if dictionary is None else _zstandard().ZstdCompressionDict(dictionary.tobytes())
        entry = kept[key] = make(content), dictionary
    return entry[0]
