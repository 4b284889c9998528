"""The codecs: every row comes back, straight to its place, and nothing that is not exactly a row is taken for one."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from memmap_buffer import Field, Jpeg, SchemaError, Zstd
from memmap_buffer.format import blobs
from memmap_buffer.format.blobs import CodedRows, Dictionary, encode, encode_many, index_of, threads

Array = np.ndarray
SHAPE = (40, 30)


def pictures(count: int, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Array:
    """Smooth pictures, each another, which compress."""
    y, x = np.mgrid[: shape[0], : shape[1]]
    shift = np.random.default_rng(seed).integers(0, 200, (count, 1, 1))
    grey = ((x // 3 + y // 2)[None] + shift).astype(np.uint8)
    return np.repeat(grey[..., None], 3, -1)[..., : shape[2]] if len(shape) > 2 else grey


def stored(field: Field, rows: Array, dictionary: Dictionary | None = None) -> tuple[CodedRows, Array]:
    """The file of blobs of rows, and its index."""
    made = encode(field, rows, dictionary)
    return CodedRows(field, np.frombuffer(b"".join(made), np.uint8), dictionary), index_of(field, made, 0, dictionary)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs of these few bytes go through threads."""
    monkeypatch.setattr(type(threads), "count", 2)
    monkeypatch.setattr(blobs, "PART", 2 * 1200)
    monkeypatch.setattr(blobs, "BLOBS_PART", 100)


@pytest.mark.parametrize("dtype", ["uint8", "float", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), SHAPE])
def test_zstd_gives_back_what_it_got(dtype: str, shape: tuple[int, ...]) -> None:
    field = Field(dtype, shape, codec="zstd")
    rows = np.random.default_rng(0).integers(0, 2, (9, *shape)).astype(field.storage)
    coded, index = stored(field, rows)
    np.testing.assert_array_equal(coded.decode(index), rows)


@pytest.mark.usefixtures("two_threads")
def test_rows_go_to_their_places_in_any_order_and_the_same_one_to_several() -> None:
    field, rows = Field("uint8", SHAPE, codec=Zstd(5)), pictures(40)
    coded, index = stored(field, rows)
    rng = np.random.default_rng(1)
    which, places = rng.integers(0, 40, 64), rng.permutation(70)[:64]
    out = np.full((70, *SHAPE), 7, np.uint8)
    assert not len(coded.decode_into(index[which], out, places))
    expected = np.full((70, *SHAPE), 7, np.uint8)
    expected[places] = rows[which]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.usefixtures("two_threads")
def test_blobs_are_the_same_by_how_many_calls_they_are_made() -> None:
    field, rows = Field("uint8", SHAPE, codec="zstd"), pictures(30)
    assert encode_many(field, rows) == encode(field, rows) == [encode(field, row[None])[0] for row in rows]


def test_a_dictionary_makes_similar_pictures_smaller_and_decodes_them() -> None:
    field, rows = Field("uint8", (40, 40), codec="zstd"), pictures(300, (40, 40))
    rows[:, 20:] = np.random.default_rng(0).integers(0, 255, (20, 40))
    content = field.codec.train(rows[:200], 4000)
    assert content is not None
    dictionary = Dictionary.of(content)
    coded, index = stored(field, rows, dictionary)
    assert len(coded.data) < len(stored(field, rows)[0].data) / 5
    np.testing.assert_array_equal(coded.decode(index), rows)
    without = coded._replace(dictionary=None)
    with pytest.raises(ValueError, match="300 of 300 timesteps cannot be decoded"):
        without.decode(index)


@pytest.mark.parametrize("shape", [(24, 32, 3), (24, 32, 1), (24, 32)])
def test_jpeg_decodes_to_what_is_near_and_always_the_same(shape: tuple[int, ...]) -> None:
    field, rows = Field("uint8", shape, codec=Jpeg(95, "444")), pictures(6, shape)
    coded, index = stored(field, rows)
    found = coded.decode(index)
    assert np.abs(found.astype(int) - rows).max() <= 12
    np.testing.assert_array_equal(found[::-1], coded.decode(index[::-1]))


def longer(blob: bytes) -> bytes:
    return blob + b"\0"


def twice(blob: bytes) -> bytes:
    return blob + blob


def shorter(blob: bytes) -> bytes:
    return blob[:-1]


def of_another_size(blob: bytes) -> bytes:
    return encode(Field("uint8", (13, 10), codec="zstd"), pictures(1, (13, 10)))[0]


def a_bomb(blob: bytes) -> bytes:
    return encode(Field("uint8", (2**20,), codec="zstd"), np.zeros((1, 2**20), np.uint8))[0]


def noise(blob: bytes) -> bytes:
    return b"\xff" * len(blob)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("change", [longer, twice, shorter, of_another_size, a_bomb, noise])
def test_a_blob_that_is_no_row_is_told_and_the_others_are_decoded(change: object) -> None:
    field, rows = Field("uint8", SHAPE, codec="zstd"), pictures(12)
    made = encode(field, rows)
    made[5] = change(made[5])  # type: ignore[operator]
    coded, index = CodedRows(field, np.frombuffer(b"".join(made), np.uint8), None), index_of(field, made, 0)
    out = np.full((12, *SHAPE), 7, np.uint8)
    assert coded.decode_into(index, out, np.arange(12)).tolist() == [5]
    rows[5] = 0
    np.testing.assert_array_equal(out, rows)


def test_jpegs_of_another_size_and_such_as_end_early_are_told() -> None:
    field = Field("uint8", (24, 32), codec="jpeg")
    made = encode(field, pictures(4, (24, 32)))
    made[1] = encode(Field("uint8", (48, 32), codec="jpeg"), pictures(1, (48, 32)))[0]
    made[2] = made[2][: len(made[2]) // 2]
    coded = CodedRows(field, np.frombuffer(b"".join(made), np.uint8), None)
    out = np.zeros((4, 24, 32), np.uint8)
    assert coded.decode_into(index_of(field, made, 0), out, np.arange(4)).tolist() == [1, 2]


def test_an_index_that_points_beyond_the_file_is_told() -> None:
    coded, index = stored(Field("uint8", SHAPE, codec="zstd"), pictures(4))
    index[1, 0], index[2, 1] = 2**63, 2**31
    with pytest.raises(ValueError, match="2 of 4 timesteps cannot be decoded"):
        coded.decode(index)


def test_threads_take_parts_in_turns_and_give_the_results_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(threads), "count", 3)
    assert threads.map(lambda x: x * x, range(20)) == [x * x for x in range(20)]
    with pytest.raises(ZeroDivisionError, match="division"):
        threads.map(lambda x: 1 // x, [1, 0, 1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Zstd(0), "level: got 0"),
        (lambda: Jpeg(101), "quality: got 101"),
        (lambda: Jpeg(subsampling="411"), "subsampling: got '411'"),
        (lambda: Field("float", (4, 4), codec="jpeg"), "expected uint8"),
        (lambda: Field("uint8", (4, 4), codec="gzip"), "codec: got 'gzip'"),
    ],
)
def test_codecs_that_do_not_exist_or_do_not_fit_are_refused(make: object, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("codec", [Zstd(5), Jpeg(80)])
def test_a_codec_that_was_used_can_be_pickled_and_copied(codec: Zstd | Jpeg) -> None:
    field = Field("uint8", (8, 8), codec=codec)
    encode(field, np.zeros((2, 8, 8), np.uint8))
    assert pickle.loads(pickle.dumps(field)) == copy.deepcopy(field) == field
