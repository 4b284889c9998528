"""OGBench's files in and out: what its own loader makes of a file is what the n-step level serves."""

from zipfile import ZipFile

import numpy as np
import pytest

from memmap_buffer import ReplayBuffer, SchemaError
from memmap_buffer.interop.ogbench import export_ogbench, import_ogbench

LENGTHS = (4, 2, 7)  # rows: one more than there are steps


def write(path, **more):
    rng, rows = np.random.default_rng(1), sum(LENGTHS)
    arrays = {
        "observations": rng.normal(size=(rows, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "qpos": rng.normal(size=(rows, 4)),
        "button_states": rng.integers(2, size=(rows, 2)),
        "terminals": np.isin(np.arange(rows), np.cumsum(LENGTHS) - 1).astype(np.float32),
    }
    np.savez_compressed(path, **(arrays | more))
    return arrays | more


def regular(arrays):
    """Transitions as OGBench's `load_dataset` gives them: rows that are no last state, and what follows them."""
    kept = np.flatnonzero(arrays["terminals"] == 0)
    return {
        "observation": arrays["observations"][kept],
        "action": arrays["actions"][kept],
        "next_observation": arrays["observations"][kept + 1],
        "last": np.append(arrays["terminals"][1:], 1)[kept],
    }


def test_every_transition_is_that_of_its_own_loader(tmp_path):
    arrays = write(tmp_path / "o.npz")
    buffer = import_ogbench(tmp_path / "o.npz", tmp_path / "b")
    expected = regular(arrays)
    batch = next(iter(buffer.dataloader(len(expected["action"]), n_steps=1)))
    for name in ("observation", "action", "next_observation"):
        np.testing.assert_array_equal(batch[name], expected[name])
    np.testing.assert_array_equal(batch["truncated"], expected["last"] == 1)
    assert buffer.episode_lens.tolist() == [length - 1 for length in LENGTHS]
    np.testing.assert_array_equal(buffer.episode(1)["qpos"], arrays["qpos"][4:6])
    buffer.close()


def test_a_file_comes_back_but_for_the_actions_that_were_never_carried_out(tmp_path):
    arrays = write(tmp_path / "o.npz")
    with import_ogbench(tmp_path / "o.npz", tmp_path / "b") as buffer:
        export_ogbench(buffer, tmp_path / "p.npz")
    arrays["actions"][arrays["terminals"] == 1] = 0
    with np.load(tmp_path / "p.npz") as back:
        assert set(back) == set(arrays)
        for name, array in arrays.items():
            assert (back[name].dtype, back[name].tobytes()) == (array.dtype, array.tobytes()), name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"qpos": np.zeros((2, 4))}, r"qpos has shape \(2, 4\), expected 13 rows"),
        ({"terminals": np.zeros(13)}, "expected terminals at the last of 13 rows"),
        ({"terminals": np.ones(13)}, "two rows or more an episode"),
        ({"observations": np.array([{}] * 13)}, "no npz file of plain arrays"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, more, message):
    write(tmp_path / "o.npz", **more)
    with pytest.raises(SchemaError, match=message):
        import_ogbench(tmp_path / "o.npz", tmp_path / "b")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no zip")
    with pytest.raises(SchemaError, match="no npz file of plain arrays"):
        import_ogbench(tmp_path / "text.npz", tmp_path / "b")
    write(tmp_path / "more.npz")
    with ZipFile(tmp_path / "more.npz", "a") as archive:
        archive.writestr("notes.txt", "no array")
    with pytest.raises(SchemaError, match=r"notes.txt has shape \(\), expected 13 rows"):
        import_ogbench(tmp_path / "more.npz", tmp_path / "b")
    np.savez(tmp_path / "some.npz", actions=np.zeros(3))
    with pytest.raises(SchemaError, match="it has no observations, terminals; it has actions"):
        import_ogbench(tmp_path / "some.npz", tmp_path / "b")


def test_what_cannot_be_exported_is_refused(tmp_path):
    short = ReplayBuffer(tmp_path / "b", 3, 5, {"observation": "float", "action": "int"})
    with short, pytest.raises(SchemaError, match="expected `observation` with final=True, and `action`"):
        export_ogbench(short, tmp_path / "p.npz")
    write(tmp_path / "o.npz")
    with import_ogbench(tmp_path / "o.npz", tmp_path / "c", max_episodes=9) as buffer:
        columns = {name: np.zeros((1, n)) for name, n in {"observation": 3, "action": 2, "qpos": 4}.items()}
        buffer.store_episode(**columns, button_states=np.zeros((1, 2), int), truncated=[True])
        with pytest.raises(SchemaError, match="episode 3: it has no final observation"):
            export_ogbench(buffer, tmp_path / "p.npz")
