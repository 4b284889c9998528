"""Keys of other libraries' data as names of fields, and back: every name is one that a schema takes, none is lost."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memmap_buffer import Schema
from memmap_buffer.adapters import Names
from memmap_buffer.names import parts_of

KEYS = (
    st.text(max_size=12) | st.integers() | st.sampled_from(["a b", "a_b", "A_B", "a_b_2", "con", "n1", "1", "reward"])
)
TREES = st.recursive(st.just(None), lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=5), max_leaves=12)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (["reward", "x_1"], ["reward", "x_1"]),
        (["bottom burner", "bottom_burner", "bottom-burner"], ["bottom_burner_2", "bottom_burner", "bottom_burner_3"]),
        (["Kettle", "kettle"], ["Kettle", "kettle_2"]),
        (["20_percent", "_x", "", "größe"], ["n20_percent", "n_x", "n", "gr__e"]),
        (["con", "keep_partial", "a.b", "a/b"], ["con_", "keep_partial_", "a_b", "a_b_2"]),
        ([3, "n3"], ["n3_2", "n3"]),
    ],
)
def test_identifiers_keep_their_names_and_others_become_some(keys, parts):
    assert list(parts_of(keys).values()) == parts


def leaves(tree, path=()):
    return [leaf for k, v in tree.items() for leaf in (leaves(v, (*path, k)) if v else [(*path, k)])]


@given(TREES.filter(bool), TREES.filter(bool))
def test_every_tree_of_keys_becomes_a_schema_and_comes_back_also_from_what_is_kept(tree, later):
    names = Names()
    ours = [names.ours(each) for each in (tree, later)]
    kept = Names(names.changed)
    assert [names.ours(each) for each in (tree, later)] == ours
    dotted = [".".join(path) for path in leaves(ours[0])]
    assume(max(map(len, dotted)) <= 64)  # longer ones a schema refuses
    assert set(Schema(dict.fromkeys(dotted, "bool")).fields) == set(dotted)
    assert [names.named(path) for path in leaves(tree)] == dotted
    assert [tuple(kept.path(name)) for name in dotted] == leaves(tree)


def test_names_that_a_format_has_for_its_keys_are_not_kept_and_are_never_given_to_others():
    names = Names(fixed={"action": "actions"})
    assert names.ours({"actions": 1, "action": 2, "rel-pos": 3}) == {"action": 1, "action_2": 2, "rel_pos": 3}
    assert names.changed == {"action_2": "action", "rel_pos": "rel-pos"}
    assert [names.key(name) for name in ("action", "action_2", "rel_pos")] == ["actions", "action", "rel-pos"]
