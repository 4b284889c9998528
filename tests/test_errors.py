"""The error tree: what derives from what, what each carries, and that all of it survives pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from pathlib import Path

import pytest

import memmap_buffer

TREE = {
    "SchemaError": (ValueError,),
    "SchemaMismatchError": (memmap_buffer.SchemaError, ValueError),
    "NotABufferError": (memmap_buffer.SchemaError, ValueError),
    "CorruptBufferError": (OSError,),
    "BufferFullError": (ValueError,),
    "BufferLockedError": (TimeoutError, OSError),
    "ReadOnlyError": (PermissionError, ValueError),
    "EpisodeIndexError": (IndexError, ValueError),
    "EpisodeStateError": (RuntimeError, ValueError),
    "WriterLostError": (RuntimeError,),
    "StaleEpisodeError": (RuntimeError, ValueError),
    "RemoteError": (OSError,),
    "NotEnoughDataError": (RuntimeError, ValueError),
}
NAMED = {"path": Path("buffer/data/a.npy"), "slot": 3, "differences": ["circular: stored True, given False"]}

every_error = pytest.mark.parametrize("name", TREE)


def make(name: str) -> memmap_buffer.MemmapBufferError:
    return getattr(memmap_buffer, name)("what happened; what to do", **NAMED)


@every_error
def test_each_error_can_be_caught_as_what_the_design_says(name: str) -> None:
    kind = getattr(memmap_buffer, name)
    assert issubclass(kind, memmap_buffer.MemmapBufferError)
    for parent in TREE[name]:
        assert issubclass(kind, parent)
        with pytest.raises(parent, match="what happened; what to do"):
            raise make(name)


def test_the_tree_is_complete_and_public() -> None:
    home = vars(sys.modules[memmap_buffer.MemmapBufferError.__module__])
    defined = {name for name, value in home.items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == {*TREE, "MemmapBufferError"}
    for name in defined:
        assert getattr(memmap_buffer, name) is home[name]
        assert name in memmap_buffer.__all__


@every_error
def test_each_error_carries_what_it_names_as_attributes(name: str) -> None:
    error = make(name)
    for key, value in NAMED.items():
        assert getattr(error, key) == value
    assert str(error) == "what happened; what to do"


@every_error
def test_an_attribute_that_was_not_named_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"{name} has no attribute 'nothing'"):
        _ = make(name).nothing


@every_error
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_each_error_survives_pickling(name: str, protocol: int) -> None:
    error = pickle.loads(pickle.dumps(make(name), protocol))
    assert type(error) is getattr(memmap_buffer, name)
    assert str(error) == "what happened; what to do"
    assert error.named == NAMED
    assert error.path == NAMED["path"]


@every_error
def test_each_error_survives_copying(name: str) -> None:
    for copied in (copy.copy(make(name)), copy.deepcopy(make(name))):
        assert type(copied) is getattr(memmap_buffer, name)
        assert (str(copied), copied.named) == ("what happened; what to do", NAMED)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="add_note is of Python 3.11")
def test_notes_survive_pickling() -> None:
    error = make("SchemaError")
    error.add_note("while reading the third shard")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while reading the third shard"]


def test_an_error_without_text_or_names_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(memmap_buffer.StaleEpisodeError()))
    assert (str(error), error.named) == ("", {})


def test_an_error_that_the_store_raised_names_the_file_and_survives_pickling(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("{")
    with pytest.raises(memmap_buffer.CorruptBufferError, match=r"schema\.json is no valid schema") as caught:
        memmap_buffer.ReplayBuffer.from_folder(tmp_path)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert Path(again.path) == tmp_path / "schema.json"
