"""Errors of calls that look right: each says where, what was got, what was expected, and the remedy that helps."""

from __future__ import annotations

import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NotABufferError,
    NotEnoughDataError,
    ReplayBuffer,
    SchemaError,
    Window,
)

FIELDS = {
    "image": ("uint8", (8, 8, 3)),
    "state": ("float", (4,)),
    "reward": "float",
    "ids": Field("int", (None,)),
    "text": "U4",
    "wave": "complex64",
}
META = {"task": "int", "goal": ("float", (2,))}


@pytest.fixture
def buffer(tmp_path):
    """Two episodes of 3 and 5 steps."""
    with ReplayBuffer(tmp_path / "b", 5, 10, FIELDS, META) as buffer:
        for length in (3, 5):
            buffer.store_episode(**{name: [step()[name]] * length for name in FIELDS}, task=1, goal=[0, 0])
        yield buffer


def step(**other):
    """A step of zeros, but for some fields."""
    zeros = {"image": np.zeros((8, 8, 3), np.uint8), "state": np.zeros(4), "reward": 0.0}
    return {**zeros, "ids": [1], "text": "a", "wave": 1j, **other}


def text_of(kind, call, *given, **options):
    with pytest.raises(kind, match=r"\w") as caught:
        call(*given, **options)
    return str(caught.value)


class TestShapes:
    @pytest.mark.parametrize(
        ("name", "shape", "text"),
        [
            (
                "image",
                (3, 8, 8),
                "got shape (3, 8, 8), declared (8, 8, 3); its axes are in another order, transpose it",
            ),
            (
                "image",
                (8, 3, 8),
                "got shape (8, 3, 8), declared (8, 8, 3); its axes are in another order, transpose it",
            ),
            ("image", (8, 8), "got shape (8, 8), declared (8, 8, 3); give that shape, or declare the other"),
            ("state", (5,), "got shape (5,), declared (4,); give that shape, or declare the other"),
            ("state", (), "got shape (), declared (4,); give that shape, or declare the other"),
            ("state", (2, 5), "got shape (2, 5), declared (4,); give that shape, or declare the other"),
            ("state", (2, 4), "got shape (2, 4), declared (4,); store one entry, not a batch"),
            ("image", (1, 8, 8, 3), "got shape (1, 8, 8, 3), declared (8, 8, 3); store one entry, not a batch"),
            ("reward", (7,), "got shape (7,), declared (); store one entry, not a batch"),
        ],
    )
    def test_a_step_of_another_shape_is_called_a_batch_only_where_it_is_one(self, buffer, name, shape, text):
        with buffer.one_episode(task=0, goal=[0, 0]):
            got = text_of(SchemaError, buffer.store, **step(**{name: np.zeros(shape, np.uint8)}))
            buffer.store(**step())
        assert got == f"field {name!r}, timestep 0: {text}"

    @pytest.mark.parametrize(
        ("shape", "text"),
        [
            (
                (5, 3, 8, 8),
                "got shape (5, 3, 8, 8), expected (*, 8, 8, 3); its axes are in another order, transpose it",
            ),
            ((5, 8, 8, 4), "got shape (5, 8, 8, 4), expected (*, 8, 8, 3); give that shape, or declare the other"),
        ],
    )
    def test_whole_episodes_of_another_shape_too(self, buffer, shape, text):
        whole = {name: [step()[name]] * 5 for name in FIELDS} | {"image": np.zeros(shape, np.uint8)}
        assert text in text_of(SchemaError, buffer.store_episode, **whole, task=0, goal=[0, 0])

    def test_a_meta_field_is_a_value_and_no_step(self, buffer):
        def record():
            with buffer.one_episode(task=0, goal=np.zeros((3, 2))):
                buffer.store(**step())

        assert text_of(SchemaError, record) == (
            "meta field 'goal': got shape (3, 2), declared (2,); store one entry, not a batch"
        )

    def test_what_is_wrong_but_the_shape_is_told_alone(self, buffer):
        with buffer.one_episode(task=0, goal=[0, 0]):
            assert text_of(SchemaError, buffer.store, **step(image=np.full((8, 8, 3), 300))).endswith(
                "out of range 0 … 255; declare a wider field"
            )
            buffer.store(**step())

    def test_an_update_tells_the_axes_by_name(self, buffer):
        got = text_of(SchemaError, buffer.update, [0, 1], task=np.zeros((2, 3), int))
        assert got.endswith("expected (episodes)") and got.startswith("update, field 'task': got shape (2, 3)")
        assert text_of(SchemaError, buffer.update, [0, 1], goal=np.zeros((2, 3))).endswith("expected (episodes, 2)")
        assert text_of(SchemaError, buffer.update, [0, 1], state=np.zeros((2, 3))).endswith(
            "expected (episodes, time, 4)"
        )


class TestOptions:
    @pytest.mark.parametrize("call", ["dataloader", "sample", "batch", "dataset", "batch_spec"])
    def test_an_unknown_one_names_few_and_each_of_these_is_one(self, buffer, call):
        given = () if call in ("dataset", "batch", "batch_spec") else (2,)
        for name, close in (("batchsize", "batch_"), ("frobnicate", ""), ("filter_metas", "filter_meta")):
            got = text_of(SchemaError, getattr(buffer, call), *given, **{name: 1})
            assert got.startswith(f"option {name!r} is unknown; ")
            told = re.findall(r"'(\w+)'", got)[1:]
            assert len(told) == len({*told}) <= 5 and len(got) < 200
            assert not {"self", "options"} & {*told}
            if call == "dataloader":
                assert told[0].startswith(close)

    def test_a_field_in_the_filter_of_the_other_kind_names_the_right_one(self, buffer):
        got = text_of(SchemaError, buffer.dataset, filter_meta={"reward": 1})
        assert got.startswith("filter_meta: got 'reward', which is a per-timestep field; filter_fields takes it")
        got = text_of(SchemaError, buffer.dataset, timestep_level=True, filter_fields={"task": 1})
        assert got.startswith("filter_fields: got 'task', which is a meta field; filter_meta takes it")


class TestDeclarations:
    @pytest.mark.parametrize(
        ("dtype", "meant"),
        [("flaot", "float"), ("integer", "int"), ("flaot32", "float32"), ("unit8", "uint8"), ("boolean", "bool")],
    )
    def test_a_dtype_that_is_misspelt_names_the_closest(self, tmp_path, dtype, meant):
        got = text_of(SchemaError, ReplayBuffer, tmp_path / "new", 1, 1, {"x": dtype})
        assert (
            f"field 'x': dtype: got {dtype!r}; did you mean {meant!r}?, expected one of float, int, bool, int8" in got
        )
        assert not (tmp_path / "new").exists()

    def test_a_dtype_that_is_like_none_lists_them(self):
        for spec in ("qqq", object, np.dtype("M8[s]"), b"float", 3):
            got = text_of(SchemaError, Field, spec)
            assert "did you mean" not in got and "expected one of float, int, bool, int8" in got

    @pytest.mark.parametrize("fields", [lambda box: {"obs": box}, lambda box: {"group": {"obs": box}}])
    def test_a_space_of_gymnasium_names_for_env(self, tmp_path, fields):
        box = gymnasium.spaces.Box(-1, 1, (3,))
        for given in (box, gymnasium.spaces.Discrete(3)):
            got = text_of(SchemaError, ReplayBuffer, tmp_path / "new", 1, 1, fields(given))
            assert "(space.dtype, space.shape)" in got
        got = text_of(SchemaError, ReplayBuffer, tmp_path / "new", 1, 1, box)
        assert "fields: got Box" in got and "ReplayBuffer.for_env(env" in got


class TestReading:
    @pytest.mark.parametrize(("name", "holds"), [("ids", "lists"), ("text", "text"), ("wave", "complex numbers")])
    def test_statistics_of_what_has_none_tell_why(self, buffer, name, holds):
        assert text_of(SchemaError, buffer.statistics, [name]) == (
            f"statistics: field {name!r} holds {holds}, and only fields of real numbers of one shape have statistics; "
            "leave it out"
        )
        assert {"image", "state", "reward"} <= buffer.statistics().fields.keys()

    def test_a_view_without_items_tells_its_length_and_the_longest_episode(self, buffer):
        got = text_of(NotEnoughDataError, buffer.dataset, view=Window(50, boundary="drop"))
        assert "none of 2 episodes has an item for view Window(length=50, boundary='drop')" in got
        assert got.endswith("; the longest has 5 timesteps")
        got = text_of(NotEnoughDataError, buffer.sample, 3, n_steps=2, terminated=None, min_episode_len=9)
        assert "view NStep(n=2, terminated=None), min_episode_len=9" in got

    @pytest.mark.parametrize("call", ["delete", "episodes", "batch"])
    def test_a_mask_of_episodes_names_its_remedy(self, buffer, call):
        for mask in (buffer.episode_lens > 3, [True, False]):
            got = text_of(SchemaError, getattr(buffer, call), mask)
            assert "; of a mask give np.flatnonzero(mask)" in got
        assert len(buffer) == 2


class TestFolders:
    @pytest.mark.parametrize("given", ["s3:/bucket/run", Path("s3://bucket/run"), "gs:/bucket"])
    def test_a_url_that_lost_a_slash_is_called_one(self, given, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for call in (
            ReplayBuffer.from_folder,
            ConcatBuffer.from_root,
            lambda folder: ReplayBuffer(folder, 1, 1, FIELDS),
        ):
            got = text_of(SchemaError, call, given)
            assert "expected two slashes, as in" in got and "a Path keeps only one" in got
        assert not list(tmp_path.iterdir())

    def test_a_file_is_called_a_file(self, buffer, tmp_path):
        file = buffer.folder / "schema.json"
        got = text_of(NotABufferError, ReplayBuffer.from_folder, file)
        assert got == f"{file} is a file, and a buffer is a folder; give {file.parent}"
        other = tmp_path / "notes.txt"
        other.write_text("x")
        assert text_of(NotABufferError, ReplayBuffer.from_folder, other) == (
            f"{other} is a file, and a buffer is a folder; check the path"
        )
        for place in (other, other / "run7"):
            for make in (lambda place: ReplayBuffer(place, 1, 1, FIELDS), buffer.snapshot):
                assert text_of(NotABufferError, make, place) == (
                    f"{other} is a file, and a buffer is a folder; check the path"
                )
        got = text_of(NotABufferError, ReplayBuffer.from_folder, tmp_path / "none")
        assert "there is no such folder; check the path" in got


@pytest.mark.parametrize("options", [{}, {"read_only": True}])
def test_who_opens_a_folder_without_fields_is_told_by_what_call(buffer, options):
    call = f"; to open a folder as it is, call ReplayBuffer.from_folder({str(buffer.folder)!r})"
    with pytest.raises(SchemaError, match=r"fields: got None.*" + re.escape(call)):
        ReplayBuffer(buffer.folder, **options)
    assert ReplayBuffer.from_folder(buffer.folder, **options).num_episodes == 2
