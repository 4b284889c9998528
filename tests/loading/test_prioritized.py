"""Draws by priority, against the slow definition: P = p / Σ p over the items that a view serves, w = (N · P)^-β."""

import json
import math
import pickle
import shutil
import threading
import time
from functools import partial

import damage
import numpy as np
import pytest
import torch
from damage import packed
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from inside import (
    after_a_change_of_columns,
    after_the_look_at_folders,
    anchor_priorities_of,
    before_a_folder_is_followed,
    before_anchors_enter,
    before_errors_are_taken_in,
    before_the_draw,
    count_cuts,
    followed_items,
    get_inside,
    leaves_of_anchors,
    priorities_named,
    priorities_of,
    samplers_of,
    set_inside,
    storage_of,
    store_leaves_alone,
)
from profiles import examples

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NotEnoughDataError,
    NStep,
    Offsets,
    Prioritized,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    SumTree,
    Timestep,
    Trajectory,
    Window,
    compute_importance_weights,
    pack,
)

pytestmark = pytest.mark.usefixtures("both_ways")
EPSILON = 1e-6
FIELDS = {"number": "int", "t": "int", "reward": "float", "terminated": "bool", "o": Field("float", (2,), final=True)}
META = {"task": "int", "score": "float"}
STEP = {"timestep_level": True}


def make(folder, lengths=(), max_timesteps=9, **options):
    options = {"max_episodes": 6, "max_timesteps": max_timesteps, "circular": True, **options}
    buffer = ReplayBuffer(folder, fields=FIELDS, meta_fields=META, **options)
    for length in lengths:
        publish(buffer, length)
    return buffer


def publish(buffer, length):
    """Every third episode ends by `terminated`, every third has its final observation, every third neither."""
    number = int(buffer.serials[-1]) + 1 if len(buffer) else 0
    with buffer.one_episode(task=number % 2, score=number + 0.5) as episode:
        for t in range(length):
            ends = t == length - 1 and number % 3 == 0
            episode.store(number=number, t=t, reward=1, terminated=ends, o=[number, t])
        if number % 3 == 1:
            episode.final(o=[number, length])


class Slow:
    """The priorities of one folder as a dictionary, and what they say of draws; `every`: those of all folders."""

    def __init__(self, how, every=None):
        self.how, self.raw, self.highest, self.every = how, {}, 1.0, [self] if every is None else every

    def follow(self, buffer):
        steps = [
            (serial, t)
            for serial, length in zip(buffer.serials.tolist(), buffer.episode_lens.tolist(), strict=True)
            for t in range(length)
        ]
        highest = max(one.highest for one in self.every)
        self.raw = {step: self.raw.get(step, highest) for step in steps}

    def update(self, indices, errors):
        for step, error in zip(map(tuple, indices), errors, strict=True):
            if step in self.raw:
                self.raw[step] = abs(error) + EPSILON
                self.highest = max(self.highest, self.raw[step])

    def priorities_of(self, anchors, length):
        """The mass of each anchor; `length` of its items, 0 for a whole episode."""
        ways = {"first": lambda v: v[0], "max": max, "mean": lambda v: math.fsum(v) / len(v)}
        reduced = ways[self.how.reduce or ("first" if length else "mean")]
        return [reduced(self._powered(anchor, length)) for anchor in anchors]

    def _powered(self, anchor, length):
        serial, t = anchor if length else (anchor, 0)
        steps = range(max(t, 0), t + length) if length else range(10**6)
        found = []
        for k in steps:
            if (serial, k) not in self.raw:
                break
            found.append(self.raw[serial, k] ** self.how.alpha)
        return found


def anchors_of(buffer, options):
    """Every item that the options serve, as the other samplers list them."""
    found = []
    for batch in buffer.dataloader(7, return_indices=True, **options):
        found += [tuple(x) for x in batch["_indices"].tolist()] if "_indices" in batch else batch["_index"].tolist()
    return found


def drawn(batch):
    return [tuple(x) for x in batch["_indices"].tolist()] if "_indices" in batch else batch["_index"].tolist()


def improbable(counts, expected):
    """How many standard deviations (Σ (o - e)² / e - d) / √(2 d) is from what chance gives."""
    chi = sum((counts.get(key, 0) - e) ** 2 / e for key, e in expected.items())
    freedom = max(len(expected) - 1, 1)
    return (chi - freedom) / math.sqrt(2 * freedom)


UNITS = [
    (STEP, 1),
    ({"n_steps": 3, "gamma": 0.9}, 1),
    ({"view": NStep(2)}, 1),
    ({"view": Window(4)}, 4),
    ({"view": Window(4, stride=2, boundary="shift")}, 4),
    ({"view": Window(4, stride=3, boundary="drop")}, 4),
    ({"view": Window(4, boundary="repeat")}, 4),
    ({"view": Window(4, pad_before=3)}, 4),
    ({"view": Offsets(reward=(-1, 0, 1), boundary="drop")}, 1),
    ({"view": Trajectory()}, 0),
    ({"window_length": 3}, 0),
]
FILTERS = [
    {},
    {"filter_meta": {"task": 1}},
    {"min_episode_len": 4},
    {"filter_fields": {"t": lambda t: t % 3 != 1}},
    {"filter_fields": {"t": (1, 5)}, "split": {"a": 0.7, "b": 0.3}, "part": "a", "split_seed": 3},
]
CASES = [(*unit, choice) for unit in UNITS for choice in FILTERS if unit[1] or "filter_fields" not in choice]
HOWS = [
    Prioritized(alpha=0.7, beta=0.5, normalize=None),
    Prioritized(alpha=1.0, reduce="max", normalize="batch", stratified=False),
    Prioritized(alpha=0.4, beta=1.0, reduce="mean", normalize="buffer"),
]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize(("options", "length", "choice"), CASES)
def test_draws_are_those_of_the_definition_after_wrap_around_and_updates(tmp_path, options, length, choice, how):
    """Every unit, with every filter, weights included; the items drawn are exactly those that can be served."""
    options, rng = {**options, **choice}, np.random.default_rng(1)
    buffer, slow = make(tmp_path, (5, 9, 1, 4, 7)), Slow(how)
    for published in ((), (8, 2), (6, 9, 3), (2,)):
        for n in published:
            publish(buffer, n)
        slow.follow(buffer)
        check_batch(buffer, options, slow, length)
        steps = [step for step in slow.raw if rng.random() < 0.6]
        errors = rng.normal(size=len(steps)) * rng.choice([0.01, 1, 30], len(steps))
        assert buffer.update_priorities(np.array(steps), errors) == 0
        slow.update(steps, errors)
    check_batch(buffer, options, slow, length, frequencies=True)


def check_batch(buffer, options, slow, length, frequencies=False):
    try:
        anchors = anchors_of(buffer, options)
    except NotEnoughDataError:
        with pytest.raises(NotEnoughDataError, match="nothing to read from this replay buffer"):
            buffer.sample(64, prioritized=slow.how, **options)
        return
    found = slow.priorities_of(anchors, length)
    expected = dict(zip(anchors, np.array(found) / math.fsum(found), strict=True))
    counts, batches = {}, 80 if frequencies else 1
    for seed in range(batches):
        batch = buffer.sample(64, prioritized=slow.how, seed=seed, **options)
        items = drawn(batch)
        for item in items:
            counts[item] = counts.get(item, 0) + 1
        if seed == 0:
            check_weights(batch, np.array([expected[item] for item in items]), expected, slow.how, len(anchors))
    assert counts.keys() <= expected.keys()
    if frequencies:
        assert improbable(counts, {item: p * anchors.count(item) * 64 * batches for item, p in expected.items()}) < 5


def check_weights(batch, probabilities, expected, how, num_items=None):
    np.testing.assert_allclose(batch["_probabilities"], probabilities, rtol=1e-12)
    num_items = num_items or len(expected)
    weights = (num_items * probabilities) ** -how.beta
    if how.normalize == "batch":
        weights /= weights.max()
    if how.normalize == "buffer":
        weights /= max((num_items * p) ** -how.beta for p in expected.values())
    np.testing.assert_allclose(batch["_weights"], weights, rtol=1e-6)
    assert batch["_weights"].dtype == torch.float32


BOUNDARIES = ("pad", "shift", "repeat", "drop", "continue")
WINDOWS = st.builds(
    lambda boundary, length, stride, short: Window(
        length, stride, boundary=boundary, allow_short=short or boundary not in ("shift", "repeat")
    ),
    *(st.sampled_from(BOUNDARIES), st.integers(1, 6), st.integers(1, 4), st.booleans()),
)
VIEWS = WINDOWS | st.sampled_from(
    [
        *[Timestep(), Trajectory(), NStep(1), NStep(3), Window(4, pad_before=3), Window(4, pad_after=1)],
        *[Window(3, pad_in_front=True), *(Offsets(reward=(-2, 0, 1), boundary=b) for b in ("pad", "shift", "drop"))],
    ]
)


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    view=VIEWS,
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    inner_end=st.integers(0, 9),
    several=st.booleans(),
)
def test_without_errors_each_item_is_drawn_as_often_by_priority_as_it_is_given_without(
    tmp_path_factory, view, lengths, inner_end, several
):
    """One draw in each segment of as many equal ones as there are items."""
    folders = [ReplayBuffer(tmp_path_factory.mktemp("f"), 4, 9, FIELDS, circular=True) for _ in range(1 + several)]
    for buffer in folders:
        for length in lengths:
            step = np.arange(length)
            ends = {"terminated": (step == inner_end) | (step == length - 1), "reward": step}
            buffer.store_episode(number=step, t=step, o=np.zeros((length, 2)), **ends)
    buffer = ConcatBuffer(folders) if several else folders[0]
    how = {"view": view, "prioritized": Prioritized(), "seed": 0}
    try:
        items = sorted(anchors_of(buffer, {"view": view}))
    except NotEnoughDataError as error:
        with pytest.raises(NotEnoughDataError, match=r"nothing to read|fewer than the"):
            buffer.sample(72, **how)  # more than there are items, so that each is drawn
        assert "nothing to read" in str(error) or not view.allow_short
    else:
        assert sorted(drawn(buffer.sample(len(items), **how))) == items


# What the batch holds, and what an update takes


def test_a_prioritised_batch_holds_what_the_same_options_give_and_three_keys_more(tmp_path):
    buffer = make(tmp_path, (5, 6))
    plain = buffer.sample(4, n_steps=2, return_indices=True)
    batch = buffer.sample(4, n_steps=2, prioritized=True)
    assert [*batch] == [*plain, "_weights", "_probabilities"]
    assert [(n, t) for n, t in zip(batch["number"].tolist(), batch["t"].tolist(), strict=True)] == drawn(batch)
    named = buffer.sample(4, timestep_level=True, prioritized=True, to_named_tuple=["t", "_weights"])
    assert named.weights.tolist() == [1, 1, 1, 1]
    renamed = buffer.sample(4, timestep_level=True, prioritized=True, fieldname_map={"_weights": "w"})
    assert "w" in renamed and "_weights" not in renamed


def test_errors_may_be_tensors_on_a_graph_and_stale_ones_are_dropped_and_counted(tmp_path):
    buffer = make(tmp_path, (2, 3))
    batch = buffer.sample(8, prioritized=True, **STEP)
    for _ in range(6):
        publish(buffer, 2)
    errors = torch.ones(8, requires_grad=True) * 50
    assert buffer.update_priorities(batch["_indices"], errors) == 8
    assert set(buffer.sample(8, prioritized=True, **STEP)["_probabilities"].tolist()) == {1 / 12}


def test_errors_of_several_steps_and_of_whole_episodes_reach_every_step_that_there_is(tmp_path):
    buffer = make(tmp_path, (3, 5, 4))
    how = Prioritized(alpha=1.0)
    buffer.sample(1, prioritized=how, **STEP)
    assert buffer.update_priorities([[0, 1], [9, 0], [1, -1]], np.arange(1, 13).reshape(3, 4)) == 1
    assert buffer.update_priorities([[2], [77]], [20.0, 3]) == 1
    wanted = {(0, 0): 1, (0, 1): 1, (0, 2): 2, (1, 0): 10, (1, 1): 11, (1, 2): 12, (1, 3): 1, (1, 4): 1}
    wanted |= {(2, t): 20 for t in range(4)}
    batch = buffer.sample(512, prioritized=how, **STEP)
    for item, p in zip(drawn(batch), batch["_probabilities"].tolist(), strict=True):
        assert p * sum(wanted.values()) == pytest.approx(wanted[item], rel=1e-5)
    assert set(drawn(batch)) == set(wanted)


def test_numbers_of_one_axis_are_no_serials_where_only_steps_were_drawn(tmp_path):
    buffer, errors = make(tmp_path, (3, 5)), [20.0, 3.0]
    for options in (STEP, {"n_steps": 2}, {"view": Window(3)}):
        buffer.sample(4, prioritized=True, **options)
        with pytest.raises(
            SchemaError, match=r"got indices \(2,\), the serials of whole .* `_indices` \(B, 2\) of the batch"
        ):
            buffer.update_priorities([0, 1], errors)
    assert set(buffer.priorities(serials_and_steps(buffer))) == {1}
    assert buffer.update_priorities(np.array([0, 1])[:, None], errors) == 0
    np.testing.assert_allclose(buffer.priorities([[0, 2], [1, 0]]), [20**0.6, 3**0.6], rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"window_length": 2}], ids=["episodes", "crops"])
@pytest.mark.parametrize("steps_too", [False, True])
def test_serials_are_taken_where_nothing_or_whole_episodes_were_drawn_by_that_name(tmp_path, options, steps_too):
    buffer = make(tmp_path, (3, 5))
    assert buffer.update_priorities([0], [7.0]) == 0
    buffer.sample(4, prioritized=Prioritized(name="other"), **STEP)
    assert buffer.update_priorities([1], [9.0]) == 0
    batch = buffer.sample(4, prioritized=True, **options)
    if steps_too:  # another reader, or another thread
        buffer.sample(4, prioritized=True, **STEP)
    assert buffer.update_priorities(batch["_index"], np.full(4, 5.0)) == 0
    assert set(buffer.priorities([(serial, 0) for serial in batch["_index"].tolist()]).round(3)) == {round(5**0.6, 3)}


@pytest.mark.parametrize(
    ("indices", "errors"),
    [
        (np.zeros((2, 3), int), np.zeros(2)),
        (np.zeros((2, 2)), np.zeros(2)),
        (np.zeros((2, 2), int), np.zeros(3)),
        (np.zeros((2, 2), int), np.zeros((2, 2, 2))),
        (np.zeros((2, 2), int), np.array(["a", "b"])),
        (3, 4.0),
    ],
)
def test_shapes_that_do_not_fit_are_refused_and_shown(tmp_path, indices, errors):
    buffer = make(tmp_path, (3,))
    buffer.sample(1, prioritized=True, **STEP)
    with pytest.raises(SchemaError, match="update_priorities: got "):
        buffer.update_priorities(indices, errors)


def test_priorities_are_given_and_read_before_anything_was_drawn(tmp_path):
    buffer = make(tmp_path, (3, 2))
    steps = np.array([[0, 0], [1, 1], [9, 0]])
    assert buffer.update_priorities(steps, [3.0, -2.0, 1.0]) == 1
    want = [(3 + EPSILON) ** 0.6, (2 + EPSILON) ** 0.6, 0]
    np.testing.assert_allclose(buffer.priorities(steps), want)
    np.testing.assert_allclose(buffer.priorities([[0, 1], [0, 0]], name="other"), [1, 1])
    batch = buffer.sample(64, prioritized=True, **STEP)
    total = want[0] + want[1] + 3 * 1
    np.testing.assert_allclose(batch["_probabilities"], buffer.priorities(batch["_indices"]) / total)
    with pytest.raises(SchemaError, match="episode 0 has steps 0 … 2, got 3"):
        buffer.priorities([[0, 3]])
    with pytest.raises(SchemaError, match=r"priorities: got indices of shape \(2,\), expected `_indices`"):
        buffer.priorities([0, 1])


def test_what_was_chosen_before_holds_for_updates_before_a_draw(tmp_path):
    with make(tmp_path, (3,)) as buffer:
        buffer.sample(1, prioritized=Prioritized(alpha=1.0, epsilon=0.5), **STEP)
    with ReplayBuffer.from_folder(tmp_path) as buffer:
        buffer.update_priorities([[0, 0]], [3.0])
        assert buffer.priorities([[0, 0], [0, 1]]).tolist() == [3.5, 1]


def test_another_alpha_rescales_and_another_epsilon_is_that_of_errors_to_come(tmp_path):
    buffer = make(tmp_path, (4,))
    steps = [[0, t] for t in range(3)]
    one, two = Prioritized(alpha=1.0, epsilon=0.25), Prioritized(alpha=2.0, epsilon=0)
    buffer.sample(1, prioritized=one, **STEP)
    buffer.update_priorities(steps, [1.0, 2.0, 0.0])
    for options in (STEP, {"view": Window(2, 2)}):
        probabilities = buffer.sample(8, prioritized=two, **options)["_probabilities"]
        np.testing.assert_allclose(buffer.priorities(steps), [1.25**2, 2.25**2, 0.25**2])
        assert buffer.sample(8, prioritized=one, **options)["_probabilities"].max() < probabilities.max()
        np.testing.assert_allclose(buffer.priorities(steps), [1.25, 2.25, 0.25])
    buffer.sample(1, prioritized=two, **STEP)
    buffer.update_priorities(steps[:1], [3.0])
    np.testing.assert_allclose(buffer.priorities(steps), [9, 2.25**2, 0.25**2])


@pytest.mark.parametrize("options", [STEP, {"view": Window(2, 2)}, {"n_steps": 1}, {"view": Trajectory()}])
def test_without_epsilon_an_error_of_zero_is_never_drawn_until_it_has_another(tmp_path, options):
    buffer, how = make(tmp_path, (4, 3, 2)), Prioritized(epsilon=0, normalize="buffer")
    items = set(anchors_of(buffer, options))
    before = buffer.sample(1, prioritized=how, **options)
    buffer.update_priorities([[0, t] for t in range(4)], [0.0] * 4)
    mine = {item for item in items if (item if isinstance(item, int) else item[0]) == 0}
    assert set(drawn(buffer.sample(512, prioritized=how, **options))) == items - mine
    buffer.close()
    buffer = ReplayBuffer.from_folder(tmp_path)
    batch = buffer.sample(512, prioritized=how, **options)
    assert set(drawn(batch)) == items - mine and batch["_weights"].min() > 0 and [*batch] == [*before]
    buffer.update_priorities([[0, t] for t in range(4)], [1.0] * 4)
    assert set(drawn(buffer.sample(512, prioritized=how, **options))) == items
    buffer.update_priorities(serials_and_steps(buffer), np.zeros(9))
    with pytest.raises(NotEnoughDataError, match="nothing to draw: every item has priority 0"):
        buffer.sample(1, prioritized=how, **options)


def serials_and_steps(buffer):
    return [
        (serial, t)
        for serial, length in zip(buffer.serials.tolist(), buffer.episode_lens.tolist(), strict=True)
        for t in range(length)
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"alpha": -1},
        {"alpha": float("nan")},
        {"beta": 2},
        {"epsilon": -1},
        {"normalize": "max"},
        {"variant": "ranked"},
        {"reduce": "sum"},
        {"beta_steps": 0},
        {"sort_interval": 1.5},
    ],
)
def test_a_value_that_is_none_of_those_allowed_is_refused_by_its_name(bad):
    with pytest.raises(SchemaError, match=f"{next(iter(bad))}: got .*, expected"):
        Prioritized(**bad)


def test_what_is_no_option_and_what_is_no_number_is_refused(tmp_path):
    buffer = make(tmp_path, (3,))
    with pytest.raises(SchemaError, match=r"prioritized: got 0\.6, expected Prioritized"):
        buffer.sample(1, prioritized=0.6)
    with pytest.raises(SchemaError, match="prioritized"):
        buffer.sample(1, prioritized=Prioritized(weight_field="none"))


def test_nothing_to_draw_is_said(tmp_path):
    buffer = make(tmp_path)
    with pytest.raises(NotEnoughDataError, match="it is empty"):
        buffer.sample(1, prioritized=True, **STEP)
    buffer.store_episode(number=[0], t=[0], reward=[0], terminated=[True], o=[[0, 0]], task=0, score=0.0)
    with pytest.raises(NotEnoughDataError, match="nothing to draw: every item has priority 0"):
        buffer.sample(1, prioritized=Prioritized(weight_field="score"))


@pytest.mark.parametrize("score", [-1.0, 1e3])
def test_a_meta_field_that_is_no_weight_is_refused(tmp_path, score):
    buffer = make(tmp_path)
    buffer.store_episode(number=[0], t=[0], reward=[0], terminated=[True], o=[[0, 0]], task=0, score=score)
    with pytest.raises(
        SchemaError, match=rf"'score' is {score} in an episode, and a weight is a number from 0 to 316;"
    ):
        buffer.sample(1, prioritized=Prioritized(weight_field="score", alpha=100))


# β, weights


def test_beta_rises_linearly_from_batch_to_batch(tmp_path):
    buffer = make(tmp_path, (5,))
    how = Prioritized(beta=0.2, beta_steps=4, normalize=None)
    buffer.sample(1, prioritized=how, **STEP)
    buffer.update_priorities([[0, t] for t in range(5)], [1, 2, 3, 4, 5])
    for k in range(1, 7):
        batch = buffer.sample(4, prioritized=how, **STEP)
        beta = min(1.0, 0.2 + 0.8 * k / 4)
        want = compute_importance_weights(batch["_probabilities"], 5, beta, normalize=False)
        torch.testing.assert_close(batch["_weights"], want.float())


def between(seed, epoch, num_drawn):
    """The state of a loader between two epochs."""
    return {"seed": seed, "epoch": epoch, "delivered": 0, "items": 0, "num_drawn": num_drawn}


def test_a_loader_goes_on_with_the_beta_of_the_state_it_was_given(tmp_path):
    buffer = make(tmp_path, (5, 4))
    how = Prioritized(beta=0.2, beta_steps=30, normalize=None)
    buffer.sample(1, prioritized=how, **STEP)
    buffer.update_priorities([[0, t] for t in range(5)], [1, 2, 3, 4, 5])
    loader = buffer.dataloader(3, prioritized=how, seed=1, **STEP)
    before = len([*loader, *loader])
    again = buffer.dataloader(3, prioritized=how, **STEP)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert again.state_dict() == loader.state_dict() == between(1, 2, before)
    for k, batch in enumerate(again, start=before):
        want = compute_importance_weights(batch["_probabilities"], 9, how.beta_at(k), normalize=False)
        torch.testing.assert_close(batch["_weights"], want.float())


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_importance_weights_are_the_paper_s_formula_of_arrays_and_tensors(kind, dtype):
    """Schaul et al. 2016, section 3.4: w = (1/N · 1/P)^β, divided by the highest of the batch."""
    p = np.array([0.5, 0.25, 1e-9], dtype)
    want = np.array([(1 / 8 * 1 / float(x)) ** 0.4 for x in p])
    got = compute_importance_weights(kind(p), 8, 0.4)
    assert type(got) is type(kind(p)) and got.dtype == kind(p).dtype
    np.testing.assert_allclose(got, want / want.max(), rtol=1e-6)
    np.testing.assert_allclose(compute_importance_weights(kind(p), 8, 0.4, normalize=False), want, rtol=1e-6)
    np.testing.assert_array_equal(compute_importance_weights(kind(p), buffer_size=8), got)


@pytest.mark.parametrize("kind", [np.array, torch.DoubleTensor])
def test_a_probability_of_zero_has_weight_zero_and_none_is_infinite(kind):
    weights = compute_importance_weights(kind([0.5, 0.0, 1e-300]), 10, 1.0)
    np.testing.assert_allclose(weights, [2e-10, 0, 1], rtol=1e-12)  # below 1e-10 they count as that
    assert compute_importance_weights(kind([0.0, 0.0]), 10).tolist() == [0, 0]
    assert compute_importance_weights(kind([0.0, 0.5]), 10, normalize=False).tolist() == [0, 5**-0.4]
    assert compute_importance_weights(kind([]), 10).tolist() == []


def test_the_weights_of_a_batch_are_those_of_its_probabilities_where_items_were_drawn_again_too(tmp_path):
    buffer = make(tmp_path, (5, 4, 6), max_episodes=3)
    how = Prioritized(beta=0.7)
    buffer.sample(1, prioritized=how, **STEP)
    buffer.update_priorities([[0, t] for t in range(5)], [1, 2, 3, 4, 5])
    dataset = buffer.dataset(prioritized=how, **STEP)
    for anchors in buffer.dataloader(64, dataset=dataset, seed=1).batch_sampler:
        for _ in range(2):  # one of the three that were drawn from is overwritten, one may still be read
            publish(buffer, 5)
        batch = dataset.__getitems__(anchors).data
        gone = batch["_probabilities"] == 0
        assert gone.any()
        want = compute_importance_weights(batch["_probabilities"], 15, 0.7)
        np.testing.assert_allclose(batch["_weights"] / batch["_weights"].max(), want, rtol=1e-6)


# Which tree is drawn from


def test_the_tree_on_the_disk_is_drawn_from_as_it_is_where_every_step_can_be(tmp_path):
    buffer = make(tmp_path, (5, 6), max_episodes=3)
    for options, in_memory in [(STEP, False), ({"view": Window(3)}, False), ({"view": Window(3, 2)}, True)]:
        buffer.sample(1, prioritized=True, **options)
        one = anchor_priorities_of(samplers_of(buffer)[-1])[-1]
        assert (one.tree is priorities_of(buffer).tree) is not in_memory


def test_an_n_step_draw_turns_to_a_tree_of_its_own_when_a_step_has_no_successor(tmp_path):
    buffer, slow = make(tmp_path, (5, 6), max_episodes=9), Slow(Prioritized(alpha=1.0))
    options = {"n_steps": 2}
    for length in (3, 4, 2):  # 0 and 1 end or have their final observation, 2 does not
        slow.follow(buffer)
        check_batch(buffer, options, slow, 1, frequencies=length == 2)
        publish(buffer, length)
        buffer.update_priorities([[0, 1], [1, 2]], [length, 2.0])
        slow.follow(buffer)
        slow.update([[0, 1], [1, 2]], [length, 2.0])
    check_batch(buffer, options, slow, 1, frequencies=True)


def test_a_tree_of_its_own_follows_an_episode_that_grows(tmp_path):
    buffer, slow = make(tmp_path, publish="step"), Slow(HOWS[2])
    episode = buffer.begin_episode(task=0, score=1)
    options = {"view": Window(3, pad_before=2)}
    for t in range(6):
        episode.store(number=0, t=t, reward=0, terminated=False, o=[0, t])
        slow.follow(buffer)
        check_batch(buffer, options, slow, 3)
        buffer.update_priorities([[0, t]], [t * t + 1])
        slow.update([(0, t)], [t * t + 1])


def test_a_tree_of_its_own_that_is_far_behind_looks_at_everything_again(tmp_path, monkeypatch):
    buffer, slow = make(tmp_path, (5, 9)), Slow(Prioritized())
    options = {"n_steps": 2}
    slow.follow(buffer)
    check_batch(buffer, options, slow, 1)
    for k in range(5000):
        buffer.update_priorities([[k % 2, k % 5]], [k])
        slow.update([(k % 2, k % 5)], [k])
    check_batch(buffer, options, slow, 1)


def test_blocks_of_any_size_weigh_the_same(tmp_path, monkeypatch):
    set_inside(monkeypatch, anchor_block=3)
    buffer, slow = make(tmp_path, (5, 9, 4)), Slow(HOWS[1])
    slow.follow(buffer)
    buffer.sample(1, prioritized=slow.how, **STEP)
    buffer.update_priorities([[1, 2], [1, 3], [0, 4]], [9, 4, 2])
    slow.update([(1, 2), (1, 3), (0, 4)], [9, 4, 2])
    check_batch(buffer, {"view": Window(4)}, slow, 4)
    check_batch(buffer, {}, slow, 0)


# Ranks


def ranked(slow, anchors):
    """(1 / rank)^α, equal priorities sharing the best rank of theirs."""
    found = slow.priorities_of(anchors, 1)
    return [(1 + sum(other > p for other in found)) ** -slow.how.alpha for p in found]


@pytest.mark.parametrize("options", [STEP, {"n_steps": 2}])
def test_ranks_give_the_probabilities_of_the_paper(tmp_path, options):
    """Schaul et al. 2016, section 3.3: P ∝ (1/rank)^α."""
    buffer, slow = make(tmp_path, (5, 9, 4)), Slow(Prioritized(alpha=0.8, variant="rank", sort_interval=1))
    rng = np.random.default_rng(0)
    buffer.sample(1, prioritized=slow.how, **options)
    for _ in range(4):
        slow.follow(buffer)
        steps = list(slow.raw)
        errors = rng.normal(size=len(steps))
        buffer.update_priorities(steps, errors)
        slow.update(steps, errors)
        publish(buffer, 3)
        slow.follow(buffer)
    anchors = anchors_of(buffer, options)
    found = ranked(slow, anchors)
    expected = dict(zip(anchors, np.array(found) / sum(found), strict=True))
    counts = {}
    for seed in range(100):
        batch = buffer.sample(64, prioritized=slow.how, seed=seed, **options)
        np.testing.assert_allclose(batch["_probabilities"], [expected[item] for item in drawn(batch)], rtol=1e-12)
        for item in drawn(batch):
            counts[item] = counts.get(item, 0) + 1
    assert improbable(counts, {item: p * 6400 for item, p in expected.items()}) < 5


@pytest.mark.parametrize("options", [STEP, {"n_steps": 2}, {"view": Window(2)}, {}])
def test_ranks_of_their_own_are_by_age_whatever_slots_the_episodes_are_in(tmp_path, monkeypatch, options):
    """The same of a ring that went round, of a copy that is packed, and of a learner that opens it anew."""
    set_inside(monkeypatch, anchor_block=7)
    how = Prioritized(alpha=0.8, variant="rank", sort_interval=1, ties="own", epsilon=0)
    buffer = make(tmp_path / "ring", (5, 9, 4, 6, 3), max_episodes=3)
    anchors = anchors_of(buffer, options)
    assert anchors == sorted(anchors)
    places = np.arange(1.0, len(anchors) + 1) ** -0.8
    expected = dict(zip(anchors, places / places.sum(), strict=True))
    pack(buffer.folder, tmp_path / "packed")
    for path in (tmp_path / "ring", tmp_path / "packed"):
        with ReplayBuffer.from_folder(path, read_only=True) as reader:
            batch = reader.sample(300, prioritized=how, seed=1, **options)
            np.testing.assert_allclose(batch["_probabilities"], [expected[item] for item in drawn(batch)], rtol=1e-12)
    buffer.sample(1, prioritized=how, **STEP)
    serial = int(buffer.serials[1])
    buffer.update_priorities([(serial, 0)], [0.0])  # no rank at all
    if options is STEP:
        batch = buffer.sample(300, prioritized=how, seed=1, **options)
        left = [item for item in anchors if item != (serial, 0)]
        assert set(drawn(batch)) <= set(left)
        expected = dict(zip(left, places[:-1] / places[:-1].sum(), strict=True))
        np.testing.assert_allclose(batch["_probabilities"], [expected[item] for item in drawn(batch)], rtol=1e-12)


def test_between_two_sorts_a_rank_is_found_in_the_last_order(tmp_path):
    buffer = make(tmp_path, (4,))
    how = Prioritized(alpha=1.0, variant="rank", sort_interval=100)
    buffer.sample(1, prioritized=how, **STEP)
    buffer.update_priorities([[0, t] for t in range(4)], [4, 3, 2, 1])
    # In the last order all four were equal, of priority 1: three are above it now, and one just so.
    batch = buffer.sample(64, prioritized=how, **STEP)
    assert set(batch["_probabilities"].tolist()) == {1 / 4}
    for _ in range(40):
        buffer.update_priorities([[0, t] for t in range(4)], [4, 3, 2, 1])
        buffer.sample(1, prioritized=how, **STEP)
    batch = buffer.sample(512, prioritized=how, **STEP)
    want = np.array([1, 1 / 2, 1 / 3, 1 / 4]) / (25 / 12)
    np.testing.assert_allclose(batch["_probabilities"], want[batch["t"]], rtol=1e-12)


@pytest.mark.parametrize("interval", [1, None])
@pytest.mark.parametrize("kind", [STEP, {"n_steps": 2}])
def test_items_that_went_have_no_rank(tmp_path, interval, kind):
    """With the default interval, once as many went as there still are."""
    buffer = make(tmp_path, (9, 4), max_episodes=3)
    how = Prioritized(alpha=1.0, variant="rank", sort_interval=interval)
    errors = {(i, t): 10.0 - 4 * i + t / 10 for i, length in enumerate((9, 4)) for t in range(length)}
    buffer.sample(1, prioritized=how, **kind)
    buffer.update_priorities(list(errors), [*errors.values()])
    buffer.sample(1, prioritized=how, **kind)  # all are sorted
    buffer.delete(0)  # the highest
    left = anchors_of(buffer, kind)
    order = sorted(left, key=errors.__getitem__, reverse=True)
    want = {item: 1 / (1 + rank) / sum(1 / (1 + r) for r in range(len(left))) for rank, item in enumerate(order)}
    batch = buffer.sample(64, prioritized=how, **kind)
    np.testing.assert_allclose(batch["_probabilities"], [want[item] for item in drawn(batch)], rtol=1e-12)


# By a meta field


def test_episodes_are_drawn_by_a_meta_field_and_follow_its_changes(tmp_path):
    buffer = make(tmp_path, (5, 2, 3))
    by_score = {"prioritized": Prioritized(weight_field="score", alpha=1.0)}
    batch = buffer.sample(512, **by_score)
    np.testing.assert_allclose(batch["_probabilities"], (batch["_index"].numpy() + 0.5) / 4.5, rtol=1e-12)
    buffer.update(0, score=10.0)
    publish(buffer, 2)
    scores = np.array([10, 1.5, 2.5, 3.5])
    batch = buffer.sample(512, **by_score)
    np.testing.assert_allclose(batch["_probabilities"], scores[batch["_index"]] / scores.sum(), rtol=1e-12)
    assert not (tmp_path / "priority").exists()
    buffer.update(1, score=-1.0)
    with pytest.raises(SchemaError, match=r"meta field 'score' is -1\.0 in an episode"):
        buffer.sample(4, **by_score)


# Loaders, processes, folders


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_draws_by_priority_in_this_process_and_workers_gather(tmp_path, workers):
    buffer = make(tmp_path, (9, 9, 9))
    how = Prioritized(alpha=1.0, normalize=None, beta=1.0)
    loader = buffer.dataloader(8, prioritized=how, seed=1, num_workers=workers, **STEP)
    buffer.update_priorities([[0, t] for t in range(9)], [0.0] * 9)
    assert len(loader) == 4
    batches = list(loader)
    assert [len(batch["t"]) for batch in batches] == [8] * 4
    for batch in batches:
        assert (batch["number"] > 0).all()
        np.testing.assert_allclose(batch["_weights"], 1 / (27 * batch["_probabilities"]), rtol=1e-6)
        assert drawn(batch) == list(zip(batch["number"].tolist(), batch["t"].tolist(), strict=True))
    again = buffer.dataloader(8, prioritized=how, seed=1, **STEP)
    assert [drawn(batch) for batch in again] == [drawn(batch) for batch in batches]
    assert len(buffer.dataloader(8, prioritized=how, drop_last=True, **STEP)) == 3
    loader.batch_sampler.set_epoch(0)
    assert drawn(next(iter(loader))) == drawn(batches[0])


def test_a_dataset_with_priorities_pickles_without_them_and_can_be_given_to_a_loader(tmp_path):
    buffer = make(tmp_path, (9, 9))
    dataset = buffer.dataset(prioritized=True, **STEP)
    copy = pickle.loads(pickle.dumps(dataset))
    with pytest.raises(SchemaError, match="asked for by position"):
        copy[3]
    batch = next(iter(buffer.dataloader(4, dataset=copy)))
    assert batch["_weights"].tolist() == [1, 1, 1, 1]


def test_an_item_that_was_overwritten_before_it_was_read_is_replaced_and_weighs_nothing(tmp_path, in_the_middle):
    buffer = make(tmp_path, (4,), max_episodes=1, spare_slots=1)

    def overwrite():
        publish(buffer, 3)
        publish(buffer, 3)

    buffer.sample(4, prioritized=True, **STEP)
    in_the_middle(overwrite)
    batch = buffer.sample(4, prioritized=True, **STEP)
    assert batch["_weights"].tolist() == batch["_probabilities"].tolist() == [0, 0, 0, 0]
    assert set(batch["number"].tolist()) == {2}


@pytest.mark.parametrize("options", [{"n_steps": 1}, {"n_steps": 3, "gamma": 0.9}, {"view": Window(3)}], ids=str)
@pytest.mark.parametrize("before", [True, False], ids=["from the begin", "later"])
def test_items_drawn_from_an_episode_with_ends_in_its_middle_end_there(tmp_path, options, before):
    fields = {"number": "int", "reward": "float", "terminated": "bool"}
    buffer = ReplayBuffer(tmp_path, 8, 12, fields, circular=True)

    def record(ends):
        told = {"number": np.arange(12), "reward": np.ones(12), "terminated": np.isin(np.arange(12), ends)}
        buffer.store_episode(**told)

    record([3, 7, 11] if before else [11])
    buffer.sample(2, prioritized=True, **options)
    for _ in range(6):
        record([4, 11])
    drawn = buffer.sample(400, prioritized=True, **options)
    again = buffer.batch(drawn["_indices"], **options)
    assert (again["number"] == 4).any()
    for key, column in again.items():
        np.testing.assert_array_equal(drawn[key], column)


def test_a_buffer_that_is_closed_and_opened_goes_on_with_its_priorities(tmp_path):
    how = Prioritized(alpha=1.0)
    with make(tmp_path, (4, 3)) as buffer:
        buffer.sample(1, prioritized=how, **STEP)
        buffer.update_priorities([[0, 0], [1, 2]], [7, 3])
        buffer.flush()
    buffer = ReplayBuffer.from_folder(tmp_path)
    publish(buffer, 2)  # with the maximum so far
    batch = buffer.sample(512, prioritized=how, **STEP)
    wanted = {(0, 0): 7, (1, 2): 3, (2, 0): 7, (2, 1): 7}
    for item, p in zip(drawn(batch), batch["_probabilities"].tolist(), strict=True):
        assert p * (24 + 5) == pytest.approx(wanted.get(item, 1), rel=1e-5)


@pytest.mark.parametrize(("options", "length"), UNITS, ids=[f"{i}" for i in range(len(UNITS))])
def test_a_packed_folder_is_drawn_from_as_a_grid_is(tmp_path, options, length):
    grid = make(tmp_path / "grid", (5, 3, 1, 4), max_timesteps=damage.MAX_TIMESTEPS)
    grid.close()
    buffer, slow = ReplayBuffer.from_folder(packed(tmp_path / "grid")), Slow(HOWS[2])
    slow.follow(buffer)
    steps, errors = [(0, 2), (1, 2), (3, 0)], [9, 4, 0.5]
    for _ in range(2):
        check_batch(buffer, options, slow, length, frequencies=True)
        assert buffer.update_priorities([*steps, (9, 9)], [*errors, 1]) == 1
        slow.update(steps, errors)
    check_batch(buffer, options, slow, length)


def test_a_folder_that_is_only_read_is_drawn_from_without_a_trace(tmp_path):
    make(tmp_path, (4, 3)).close()
    buffer = ReplayBuffer.from_folder(tmp_path, read_only=True)
    buffer.sample(1, prioritized=True, **STEP)
    buffer.update_priorities([[0, 0]], [1e6])
    assert buffer.sample(8, prioritized=True, **STEP)["_probabilities"].max() > 0.9
    buffer.close()
    assert not (tmp_path / "priority").exists()


def test_errors_of_a_batch_drawn_before_columns_changed_are_taken(tmp_path):
    with ReplayBuffer(tmp_path, 2, 10, {"x": "int"}) as buffer:
        buffer.store_episode(x=range(10))
        batch = buffer.sample(8, seed=0, prioritized=True, timestep_level=True)
        buffer.add_field("y", ("int", (), 1))
        assert buffer.update_priorities(batch["_indices"], np.full(8, 1e6)) == 0
        drawn = buffer.sample(64, seed=0, prioritized=True, timestep_level=True)
        assert {*drawn["_indices"][:, 1].tolist()} <= {*batch["_indices"][:, 1].tolist()}
        assert set(drawn["y"].tolist()) == {1}


# Several folders


@pytest.mark.parametrize("weights", [None, [1, 3]])
@pytest.mark.parametrize(
    "how", [*HOWS, Prioritized(weight_field="score", alpha=1.0, normalize="buffer", beta=1.0)], ids=str
)
@pytest.mark.parametrize(("options", "length"), [(STEP, 1), ({"view": Window(3, 2)}, 3), ({}, 0)], ids=["t", "w", "e"])
def test_several_folders_are_drawn_from_as_one_or_in_their_shares(tmp_path, options, length, how, weights):
    parts = [make(tmp_path / "a", (5, 2)), make(tmp_path / "b", (7, 9, 3))]
    both, slows = ConcatBuffer(parts, weights), [Slow(how), Slow(how)]
    both.sample(1, prioritized=how, **options)
    for number, (part, slow) in enumerate(zip(parts, slows, strict=True)):
        slow.follow(part)
        if how.weight_field is None:
            both.update_priorities([[number, 0, 1], [number, 1, 0], [number, 50, 0]], [4, 0.25, 9])
            slow.update([(0, 1), (1, 0)], [4, 0.25])
    expected, found = {}, []
    for part, slow in zip(parts, slows, strict=True):
        anchors = anchors_of(part, options)
        by_score = [(item[0] if length else item) + 0.5 for item in anchors]
        found.append(
            dict(
                zip(anchors, slow.priorities_of(anchors, length) if how.weight_field is None else by_score, strict=True)
            )
        )
    total = sum(sum(one.values()) for one in found)
    for number, one in enumerate(found):
        share = 1 / total if weights is None else weights[number] / 4 / sum(one.values())
        expected |= {(number, *(item if length else (item,))): mass * share for item, mass in one.items()}
    counts = {}
    for seed in range(60):
        batch = both.sample(64, prioritized=how, seed=seed, **options)
        items = [tuple(item) for item in batch["_indices" if length else "_index"].tolist()]
        for item in items:
            counts[item] = counts.get(item, 0) + 1
        check_weights(batch, np.array([expected[item] for item in items]), expected, how)
        if weights is not None:
            assert sum(item[0] == 0 for item in items) == 16
    assert improbable(counts, {item: p * 64 * 60 for item, p in expected.items()}) < 5


def test_an_update_of_several_folders_counts_what_is_gone_in_each(tmp_path):
    both = ConcatBuffer([make(tmp_path / "a", (5,)), make(tmp_path / "b", (7,))])
    both.sample(1, prioritized=True, **STEP)
    assert both.update_priorities([[0, 0, 0], [1, 3, 0], [0, 9, 1], [1, 0, 6]], [1, 2, 3, 4]) == 2
    assert both.update_priorities([[0, 0], [1, 3]], [1, 2]) == 1
    with pytest.raises(SchemaError, match="got folder 2, expected one from 0 to 1"):
        both.update_priorities([[2, 0, 0]], [1])
    both.flush()


@pytest.fixture
def together(monkeypatch):
    """Several folders have to be drawn from and updated by one call; the values that were drawn, batch by batch."""

    def refuse(*_, **__):
        raise AssertionError("a folder was looked at by itself")

    values, spread_values = [], get_inside("spread")

    def spread(*arguments, **options):
        values.append(spread_values(*arguments, **options))
        return values[-1].copy()

    find = SumTree.find
    monkeypatch.setattr(
        SumTree, "find", lambda tree, values, of=None: (refuse if of is None else find)(tree, values, of)
    )
    set_inside(monkeypatch, by_tree=refuse, spread=spread)
    return values


def turn_by_turn(source, picks, items, masses):
    """The items that were picked in each folder, and their shares of its mass, in the order of the folders' turns."""
    chosen = np.empty(len(source), np.int64)
    for number, pick in enumerate(picks):
        chosen[source == number] = pick
    pairs = list(zip(source.tolist(), chosen.tolist(), strict=True))
    return [items[n][i] for n, i in pairs], np.array([masses[n][i] / masses[n].sum() for n, i in pairs])


@pytest.mark.parametrize("weights", [None, [1, 2, 3, 4]], ids=["one", "shares"])
@pytest.mark.parametrize(
    "options", [STEP, {"n_steps": 3}, {"view": Window(3, pad_before=2)}, {"view": Window(3, boundary="drop")}], ids=str
)
@pytest.mark.parametrize("room", [(5, 5, 5, 5), (2, 5, 60, 400)], ids=str)
def test_draws_and_updates_of_several_folders_are_those_of_arrays(tmp_path, options, weights, room, together):
    """Rings, gaps of deleted episodes, steps that are gone: every batch is found in the plain sums of an array."""
    rng, how = np.random.default_rng(0), Prioritized(alpha=0.7, stratified=False)
    parts = [make(tmp_path / str(i), (5, 4), max_episodes=n) for i, n in enumerate(room)]
    both, slows, known = ConcatBuffer(parts, weights), [], []
    slows += [Slow(how, slows) for _ in parts]
    both.sample(1, prioritized=how, **options)
    for turn in range(8):
        for part, slow in zip(parts, slows, strict=True):
            for _ in range(rng.integers(0, 3)):
                publish(part, int(rng.integers(3, 10)))
            if turn > 1 and len(part) > 2 and rng.random() < 0.4:
                part.delete(int(rng.integers(1, len(part) - 1)))
            slow.follow(part)
        items, masses = [], []
        for number, (part, slow) in enumerate(zip(parts, slows, strict=True)):
            table = storage_of(part).refresh()
            slots = dict(zip(table.serial[table.visible].tolist(), table.visible.tolist(), strict=True))
            anchors = sorted(anchors_of(part, options), key=lambda item: (slots[item[0]], item[1]))
            items.append([(number, *anchor) for anchor in anchors])
            masses.append(np.array(slow.priorities_of(anchors, 3)))
        together.clear()
        batch = both.sample(48, prioritized=how, seed=turn, **options)
        if weights is None:
            chosen = np.searchsorted(np.cumsum(np.concatenate(masses)), together[0], side="right")
            each = [item for one in items for item in one]
            want, mass = [each[i] for i in chosen], np.concatenate(masses)[chosen]
            mass = mass / sum(one.sum() for one in masses)
        else:
            picks = [np.searchsorted(np.cumsum(m), v, side="right") for m, v in zip(masses, together, strict=True)]
            assert np.abs([len(pick) - 4.8 * share for pick, share in zip(picks, weights, strict=True)]).max() < 2
            want, mass = turn_by_turn(batch["_indices"][:, 0].numpy(), picks, items, masses)
            mass = mass * np.array(weights)[batch["_indices"][:, 0]] / sum(weights)
        assert drawn(batch) == want
        np.testing.assert_allclose(batch["_probabilities"], mass, rtol=1e-12)
        known += want
        told = [known[i] for i in rng.integers(0, len(known), 60)]  # some are gone, some stand there twice
        errors = rng.normal(0, 3, 60)
        gone = 0
        for (number, serial, t), error in zip(told, errors, strict=True):
            gone += (serial, max(t, 0)) not in slows[number].raw
            slows[number].update([(serial, max(t, 0))], [error])
        assert both.update_priorities(told, errors) == gone
        for number, slow in enumerate(slows):
            steps = [(number, *step) for step in slow.raw]
            expected = [raw**0.7 for raw in slow.raw.values()]
            np.testing.assert_allclose(both.priorities(steps), expected, rtol=1e-15)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"view": Window(3)}, Prioritized(alpha=0.7, reduce="max")),
        ({"view": Window(3, pad_before=2)}, Prioritized(alpha=0.7)),
        ({"view": Window(3)}, Prioritized(alpha=0.7)),
        ({"view": Window(3, boundary="drop")}, Prioritized(alpha=0.7, reduce="mean")),
        ({}, Prioritized(alpha=0.7)),
    ],
    ids=["max", "before", "first", "mean", "episodes"],
)
def test_what_a_thread_stores_between_the_look_at_folders_and_the_draw_is_that_of_steps(
    tmp_path, monkeypatch, options, how
):
    parts, slows = [make(tmp_path / name, (5, 4, 6)) for name in "ab"], [Slow(how), Slow(how)]
    both, stored = ConcatBuffer(parts), []
    for part, slow in zip(parts, slows, strict=True):
        slow.follow(part)

    def update():
        if not stored:
            stored.append(both.update_priorities([[0, 0, 2], [1, 1, 1], [1, 2, 0]], [50, 60, 0.1]))

    both.sample(1, prioritized=how, **options)
    after_the_look_at_folders(monkeypatch, update)
    both.sample(1, prioritized=how, **options)
    assert stored == [0]
    slows[0].update([(0, 2)], [50])
    slows[1].update([(1, 1), (2, 0)], [60, 0.1])
    length = 3 if options else 0
    expected = {}
    for number, (part, slow) in enumerate(zip(parts, slows, strict=True)):
        anchors = anchors_of(part, options)
        items = [(number, *(item if length else (item,))) for item in anchors]
        expected |= dict(zip(items, slow.priorities_of(anchors, length), strict=True))
    total = math.fsum(expected.values())
    for seed in range(4):
        batch = both.sample(64, prioritized=how, seed=seed, **options)
        mass = [expected[item] / total for item in map(tuple, batch["_indices" if length else "_index"].tolist())]
        np.testing.assert_allclose(batch["_probabilities"], mass, rtol=1e-12)


ODD = {"empty": (), "none": (4, 5), "one": (1,), "many": (9, 8, 9, 7), "few": (5, 3), "tiny": (3,)}


@pytest.mark.parametrize("normalize", [None, "batch", "buffer"])
@pytest.mark.parametrize("tiny", [False, True], ids=["eight leaves", "six leaves"])
@pytest.mark.parametrize("options", [STEP, {"view": Window(3, boundary="drop")}], ids=["steps", "windows"])
@pytest.mark.parametrize("stratified", [False, True])
def test_folders_of_any_size_without_episodes_and_without_priorities_are_drawn_from_as_one_array(
    tmp_path, options, tiny, normalize, stratified
):
    """Against flat probabilities and the weights of the definition; folders that have nothing are never drawn from."""
    how = Prioritized(alpha=0.6, beta=0.7, epsilon=0, normalize=normalize, stratified=stratified)
    names = [name for name in ODD if tiny or name != "tiny"]
    sizes = {"tiny": {"max_episodes": 1, "max_timesteps": 3}, "many": {"max_episodes": 60, "max_timesteps": 90}}
    parts = [make(tmp_path / name, ODD[name], **sizes.get(name, {})) for name in names]
    both, rng, expected, told, errors = ConcatBuffer(parts), np.random.default_rng(0), {}, [], []
    with pytest.raises(NotEnoughDataError, match="folder 0 has nothing to give its share"):
        ConcatBuffer(parts, [1] * len(parts)).sample(4, prioritized=how, **options)
    assert [(one.max_episodes + one.spare_slots) * one.max_timesteps < 8 for one in parts] == [
        n == "tiny" for n in names
    ]
    both.sample(1, prioritized=how, **options)
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        if len(part):
            anchors = anchors_of(part, STEP)
            given = rng.choice([0.1, 1, 30], len(anchors)) * (name != "none") * (rng.random(len(anchors)) < 0.8)
            given[0] = 2 * (name != "none")
            errors += given.tolist()
            told += [(number, *anchor) for anchor in anchors]
            raw = dict(zip(anchors, given.tolist(), strict=True))
            try:
                served = anchors_of(part, options)
            except NotEnoughDataError:
                served = []
            expected |= {(number, *anchor): raw[anchor] ** 0.6 for anchor in served}
    assert both.update_priorities(told, errors) == 0
    total, counts = math.fsum(expected.values()), {}
    positive = {item: mass / total for item, mass in expected.items() if mass}
    for seed in range(60):
        batch = both.sample(64, prioritized=how, seed=seed, **options)
        items = drawn(batch)
        probabilities = np.array([positive[item] for item in items])
        np.testing.assert_allclose(batch["_probabilities"], probabilities, rtol=1e-12)
        lowest = min(positive.values()) if normalize == "buffer" else probabilities.min()
        wanted = (probabilities * len(expected)) ** -0.7 if normalize is None else (probabilities / lowest) ** -0.7
        np.testing.assert_allclose(batch["_weights"], wanted, rtol=1e-6)
        for item in items:
            counts[item] = counts.get(item, 0) + 1
    assert improbable(counts, {item: p * 64 * 60 for item, p in positive.items()}) < 5
    both.update_priorities(told, np.zeros(len(told)))
    with pytest.raises(NotEnoughDataError, match="nothing to draw: every item has priority 0"):
        both.sample(4, prioritized=how, **options)


def test_only_folders_whose_locks_are_held_are_looked_at(tmp_path, monkeypatch, together):
    both, row = ConcatBuffer([make(tmp_path / name, (5,)) for name in "abc"]), get_inside("row_of_priorities")

    def looked_at(self):
        assert self.lock._is_owned()
        return row(self)

    both.sample(1, prioritized=True, **STEP)
    set_inside(monkeypatch, row_of_priorities=looked_at)
    assert both.update_priorities([[0, 0, 1]], [3]) == both.update_priorities([[2, 0, 1], [0, 0, 2]], [3, 4]) == 0
    np.testing.assert_allclose(both.priorities([[0, 0, 1], [2, 0, 1], [1, 0, 0]]), [3**0.6, 3**0.6, 1], rtol=1e-5)


@pytest.mark.parametrize("several", [False, True])
def test_priorities_that_all_become_zero_in_the_middle_of_a_draw_do_so_after_it(tmp_path, monkeypatch, several):
    buffer, how = make(tmp_path / "a", (2,)), Prioritized(epsilon=0)
    if several:
        buffer = ConcatBuffer([buffer, make(tmp_path / "b")])
    buffer.sample(1, prioritized=how, **STEP)
    indices = [[*[0] * several, 0, t] for t in range(2)]
    thread = threading.Thread(target=buffer.update_priorities, args=[indices, [0, 0]])

    spread_values = get_inside("spread")

    def spread(*arguments, **options):
        thread.start()
        thread.join(0.3)  # it waits for the draw
        return spread_values(*arguments, **options)

    set_inside(monkeypatch, spread=spread)
    assert len(buffer.sample(8, prioritized=how, **STEP)["t"]) == 8
    thread.join()
    monkeypatch.undo()
    with pytest.raises(NotEnoughDataError, match="every item has priority 0"):
        buffer.sample(8, prioritized=how, **STEP)


def test_folders_of_which_somebody_rescaled_one_are_given_errors_by_the_alpha_of_each(tmp_path):
    parts = [make(tmp_path / name, (5,)) for name in "ab"]
    both, steps = ConcatBuffer(parts), [[0, 0, 1], [1, 0, 1], [0, 0, 2], [0, 9, 0]]
    both.sample(1, prioritized=Prioritized(alpha=1.0), **STEP)
    parts[0].sample(1, prioritized=Prioritized(alpha=0.5), **STEP)
    assert both.update_priorities(steps, [4.0, 5.0, 9.0, 1.0]) == 1
    np.testing.assert_allclose(both.priorities(steps), [2, 5, 3, 0], rtol=1e-5)


def test_a_minimum_that_is_wanted_later_is_kept_by_updates_of_several_folders(tmp_path):
    both = ConcatBuffer([make(tmp_path / name, (5,), max_timesteps=900) for name in "ab"])
    both.sample(1, prioritized=Prioritized(alpha=1.0), **STEP)
    assert both.update_priorities([[0, 0, 1], [1, 0, 1]], [4.0, 5.0]) == 0
    how = Prioritized(alpha=1.0, beta=1.0, normalize="buffer")
    for least in (0.5, 0.25):
        both.sample(1, prioritized=how, **STEP)
        assert both.update_priorities([[0, 0, 1], [1, 0, 2]], [least, 3.0]) == 0
    batch = both.sample(64, prioritized=how, **STEP)
    mass = batch["_probabilities"] * (0.25 + 4 + 3 + 5 + 3)
    np.testing.assert_allclose(batch["_weights"], 0.25 / mass, rtol=1e-4)


def test_an_update_of_several_folders_that_is_wrong_changes_none(tmp_path, together):
    both = ConcatBuffer([make(tmp_path / "a", (5,)), make(tmp_path / "b", (7,))])
    both.sample(1, prioritized=True, **STEP)
    steps = [[0, 0, 1], [1, 0, 1]]
    for wrong, error, match in (
        ([1, 0, 7], 3.0, "episode 0 has steps 0 … 6, got 7"),
        ([1, 0, 2], math.nan, r"td_errors\[2\]: got nan"),
    ):
        with pytest.raises(SchemaError, match=match):
            both.update_priorities([*steps, wrong], [4.0, 5.0, error])
    assert both.priorities(steps).tolist() == [1, 1]


def test_an_update_that_is_wrong_changes_no_folder_of_another_alpha_either(tmp_path):
    parts = [make(tmp_path / name, (5,)) for name in "ab"]
    both, steps = ConcatBuffer(parts), [[0, 0, 1], [1, 0, 1]]
    both.sample(1, prioritized=Prioritized(alpha=1.0), **STEP)
    parts[0].sample(1, prioritized=Prioritized(alpha=0.5), **STEP)
    with pytest.raises(SchemaError, match=r"td_errors\[1\]: got nan"):
        both.update_priorities(steps, [4.0, math.nan])
    assert both.priorities(steps).tolist() == [1, 1]


def test_a_wrong_error_is_told_by_its_place_whatever_else_is_left_out(tmp_path):
    buffer = make(tmp_path, (5,))
    buffer.sample(1, prioritized=True, **STEP)
    with pytest.raises(SchemaError, match=r"td_errors\[2\]: got nan"):
        buffer.update_priorities([[7, 0], [0, 1], [0, 2]], [1.0, 1.0, math.nan])
    errors = np.ones((2, 4))
    errors[0, 2:] = math.nan  # beyond the episode
    errors[1, 1] = math.inf
    with pytest.raises(SchemaError, match=r"td_errors\[1, 1\]: got inf"):
        buffer.update_priorities([[0, 3], [0, 1]], errors)
    assert buffer.priorities(np.stack([np.zeros(5, np.int64), np.arange(5)], axis=1)).tolist() == [1] * 5


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("ends", ["terminated", "o"])
def test_of_a_window_that_ends_in_the_middle_of_its_episode_no_later_step_counts(tmp_path, reduce, ends):
    """Ends by the field that was declared, which records tell, and by another, which only the rows do."""
    rng, view = np.random.default_rng(0), Window(4) if ends == "terminated" else Window(4, terminated=ends)
    fields = {"terminated": "bool", "o": "bool"}
    how = Prioritized(alpha=1.0, epsilon=0, beta=1.0, normalize=None, reduce=reduce)
    with ReplayBuffer(tmp_path, 3, 12, fields) as buffer:
        for inner in ([4, 5], [], [0]):
            buffer.store_episode(**{name: np.isin(np.arange(12), inner) & (name == ends) for name in fields})
        buffer.sample(1, view=view, prioritized=how)
        steps = [(serial, t) for serial in range(3) for t in range(12)]
        errors = dict(zip(steps, rng.integers(1, 9, len(steps)).tolist(), strict=True))
        buffer.update_priorities(np.array(steps), list(errors.values()))
        batch = buffer.sample(512, view=view, prioritized=how, format="numpy")
        masses, stops = {}, {0: [5, 6, 12], 1: [12], 2: [1, 12]}
        for serial, t in steps:
            stop = next(end for end in stops[serial] if end > t)
            of_window = [errors[serial, k] for k in range(t, min(t + 4, stop))]
            masses[serial, t] = max(of_window) if reduce == "max" else sum(of_window) / len(of_window)
    expected = [masses[step] / sum(masses.values()) for step in map(tuple, batch["_indices"].tolist())]
    np.testing.assert_allclose(batch["_probabilities"], expected)
    assert len({*map(tuple, batch["_indices"].tolist())}) > 30


@pytest.mark.parametrize("unit", [{"view": Trajectory()}, {"view": Window(7)}], ids=["episodes", "windows"])
def test_items_whose_steps_all_have_one_priority_share_a_rank_however_many_they_are(tmp_path, unit):
    """Sums of the same number are rounded, and a mean that is made of them alone would be another for each length."""
    buffer, how = make(tmp_path, (1,)), Prioritized(variant="rank", sort_interval=1, reduce="mean")
    buffer.sample(1, prioritized=how, **unit)
    buffer.update_priorities([[0, 0]], [1.8])
    for length in (3, 5, 6, 7, 9):
        publish(buffer, length)
    assert len({*buffer.sample(256, prioritized=how, **unit)["_probabilities"].tolist()}) == 1


def test_a_priority_that_is_rounded_to_0_is_that_of_a_step_that_is_there(tmp_path):
    buffer = make(tmp_path, (5,))
    buffer.sample(1, prioritized=Prioritized(alpha=100.0), **STEP)
    buffer.update_priorities([[0, 1]], [0.0])
    batch = buffer.sample(64, prioritized=Prioritized(alpha=1.0), **STEP)  # rescales all of them
    assert buffer.priorities([[0, 0], [0, 1]]).tolist() == [1, 0]
    assert 1 not in batch["t"].tolist()


def test_an_interrupted_update_of_several_folders_leaves_trees_of_their_leaves(tmp_path, monkeypatch):
    both = ConcatBuffer([make(tmp_path / name, (5, 4)) for name in "abc"])
    both.sample(1, prioritized=Prioritized(alpha=1.0), **STEP)
    steps, put = [[number, 0, 2] for number in range(3)], SumTree.put

    def interrupted(tree, leaves, priorities, of):
        store_leaves_alone(tree, leaves, priorities, of)
        raise KeyboardInterrupt("while they are stored")

    monkeypatch.setattr(SumTree, "put", interrupted)
    with pytest.raises(KeyboardInterrupt, match="while they are stored"):
        both.update_priorities(steps, [8.0, 9.0, 10.0])
    monkeypatch.setattr(SumTree, "put", put)
    counts = np.zeros(3)
    for seed in range(20):
        batch = both.sample(64, prioritized=Prioritized(alpha=1.0), seed=seed, **STEP)
        for number, serial, t in batch["_indices"].tolist():
            counts[number] += (serial, t) == (0, 2)
    np.testing.assert_allclose(both.priorities(steps), [8, 9, 10], rtol=1e-6)
    np.testing.assert_allclose(counts / counts.sum(), np.array([8, 9, 10]) / 27, atol=0.06)
    both.flush()


def test_an_interruption_between_the_ends_of_an_update_leaves_no_item_behind(tmp_path, monkeypatch):
    how, end, options = Prioritized(alpha=1.0), get_inside("end_of_tree"), {"view": Window(3, boundary="drop")}
    both = ConcatBuffer([make(tmp_path / name, (5, 4)) for name in "abc"])
    both.sample(1, prioritized=how, **options)

    def interrupted(self):
        end(self)
        raise KeyboardInterrupt("after the first of them")

    set_inside(monkeypatch, end_of_tree=interrupted)
    with pytest.raises(KeyboardInterrupt, match="after the first of them"):
        both.update_priorities([[number, 0, 1] for number in range(3)], [8.0, 9.0, 10.0])
    set_inside(monkeypatch, end_of_tree=end)
    batch = both.sample(256, prioritized=how, seed=0, **options)
    mass = {(number, 0, 1): 8.0 + number for number in range(3)}
    expected = np.array([mass.get(item, 1.0) for item in drawn(batch)]) / (3 * 5 - 3 + 27)
    np.testing.assert_allclose(batch["_probabilities"], expected, rtol=1e-5)


def test_a_draw_after_one_that_was_interrupted_is_of_all_anchors(tmp_path, monkeypatch):
    """Also where nothing has changed since: what the tree of anchors was about to take in is known to nobody else."""
    buffer, options = make(tmp_path, (5, 4)), {"view": Window(3, boundary="drop")}
    buffer.sample(1, prioritized=True, **options)
    publish(buffer, 6)

    def interrupted():
        raise KeyboardInterrupt("before they are taken in")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="before they are taken in"):
        before_anchors_enter(patch, interrupted)
        buffer.sample(1, prioritized=True, **options)
    batch = buffer.sample(64, prioritized=True, **options)
    np.testing.assert_allclose(batch["_probabilities"], 1 / (3 + 2 + 4), rtol=1e-6)


def test_a_step_that_comes_between_the_look_at_the_folder_and_the_draw_is_not_drawn_where_it_is_no_item(
    tmp_path, monkeypatch
):
    """Another thread records it, and another sampler by the same priorities has entered it, at the highest of all."""
    buffer = make(tmp_path, publish="step", spare_slots=3)
    buffer.store_episode(
        number=np.zeros(4), t=np.arange(4), reward=np.ones(4), terminated=[0, 0, 0, 1], o=np.zeros((4, 2))
    )
    options = {"n_steps": 1, "prioritized": Prioritized(alpha=1.0, epsilon=0.0)}
    buffer.sample(1, **options)
    buffer.update_priorities([[0, t] for t in range(4)], [1e-9] * 4)
    threads = []

    def record():
        buffer.add(number=1, t=0, reward=1, terminated=False, o=[1, 0])
        priorities_of(buffer).follow()

    def meanwhile():
        threads.append(threading.Thread(target=record))
        threads[-1].start()
        threads[-1].join(0.3)

    before_the_draw(monkeypatch, meanwhile)
    assert set(buffer.sample(64, **options)["number"].tolist()) == {0}
    threads[0].join()
    assert buffer.priorities([[1, 0]]).tolist() == [1.0]


def test_a_first_draw_beside_a_change_of_the_columns_waits_for_no_one_who_waits_for_it(tmp_path, monkeypatch):
    buffer, threads = make(tmp_path, (5, 6)), []
    buffer.update_priorities([[0, 0]], [2.0])

    def meanwhile():
        if not threads:
            threads.append(threading.Thread(target=buffer.add_field, args=["more", ("int", (), 7)], daemon=True))
            threads[0].start()
            threads[0].join(0.5)

    before_a_folder_is_followed(monkeypatch, meanwhile)
    draw = threading.Thread(target=buffer.sample, args=[8], kwargs={"prioritized": True, **STEP}, daemon=True)
    draw.start()
    draw.join(60)
    threads[0].join(60)
    assert not draw.is_alive() and not threads[0].is_alive()
    assert (buffer.sample(8, prioritized=True, **STEP)["more"] == 7).all()


def test_threads_draw_from_the_same_folders_in_another_order_beside_updates(tmp_path):
    parts = [make(tmp_path / name, (9, 8, 7)) for name in "abcdef"]
    errors, views = [], [ConcatBuffer(parts), ConcatBuffer(parts[::-1])]
    for view in views:
        view.sample(1, prioritized=True, **STEP)

    def work(view, seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                batch = view.sample(32, prioritized=True, **STEP)
                assert (batch["number"] == batch["_indices"][:, 1]).all() and batch["_probabilities"].min() > 0
                assert view.update_priorities(batch["_indices"], rng.random(32)) == 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[views[i % 2], i], daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for number, part in enumerate(parts):
        tree = priorities_of(views[0], part).tree
        np.testing.assert_allclose(tree.total, tree.get(np.arange(tree.leaves)).sum(), rtol=1e-12, err_msg=str(number))


def test_locks_of_several_are_let_go_of_where_one_of_them_is_interrupted(tmp_path):
    parts = [make(tmp_path / name, (5,)) for name in "abc"]
    each = [get_inside("open_priorities")(storage_of(part), "td") for part in parts]

    class Interrupted:
        def acquire(self):
            raise KeyboardInterrupt("while one waits")

        def release(self):
            raise RuntimeError("cannot release un-acquired lock")

    order, lock = get_inside("in_turn")(reversed(each)), each[1].lock
    assert order == each
    each[1].lock = Interrupted()
    with pytest.raises(KeyboardInterrupt, match="while one waits"):
        get_inside("while_locked")(order, int)
    each[1].lock = lock
    free = []

    def take():
        free.extend(one.lock.acquire(timeout=10) for one in each)

    other = threading.Thread(target=take)
    other.start()
    other.join()
    assert free == [True] * 3


class Told(get_inside("ranks")):
    """Rank 0 of two, of which the other gives what is told here."""

    connected = True

    def __init__(self, other=None):
        super().__init__(0, 2)
        object.__setattr__(self, "other", other)
        object.__setattr__(self, "gathered", [])

    def gather(self, value):
        self.gathered.append(value)
        return [value, (self.other or value[0], "")]


def shared(buffer, ranks):
    """A buffer whose priorities ranks share."""
    buffer.sample(1, prioritized=True, **STEP)
    priorities_named(buffer).ranks = ranks
    return buffer


@pytest.mark.parametrize("indices", [[[0, 0], [0]], "nothing", [[9, 0, 0]], [[-1, 0, 0]]])
def test_a_rank_whose_indices_are_none_lets_no_other_wait(tmp_path, indices):
    for name in ("a", "b"):
        make(tmp_path / name, (5,)).close()
    buffer = shared(ConcatBuffer([tmp_path / "a", tmp_path / "b"]), Told())
    with pytest.raises(SchemaError, match="nothing was changed on any rank: rank 0: "):
        buffer.update_priorities(indices, [1.0])
    assert len(priorities_named(buffer).ranks.gathered) == 1
    buffer.flush()


def test_ranks_that_are_told_of_a_shard_that_came_since_take_in_its_errors(tmp_path):
    for number in range(2):
        make(tmp_path / f"shard-{number:05}", (5,)).close()
    ranks = Told((np.array([[2, 0, 3], [5, 0, 0]]), np.array([7.0, 1.0])))
    buffer = shared(ConcatBuffer.from_root(tmp_path), ranks)
    make(tmp_path / "shard-00002", (5,)).close()
    assert buffer.update_priorities([[0, 0, 0]], [3.0]) == 0  # shard 5 is not there yet
    assert buffer.update_priorities([[2, 0, 1]], [5.0]) == 0
    found = buffer.priorities([[0, 0, 0], [2, 0, 1], [2, 0, 3]])
    np.testing.assert_allclose(found, (np.array([3.0, 5.0, 7.0]) + 1e-6) ** 0.6, rtol=1e-6)
    buffer.flush()


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("work", ["draw", "draw first", "update"])
def test_a_shard_that_goes_before_its_priorities_are_opened_is_gone_or_the_new_one(tmp_path, monkeypatch, anew, work):
    for number in range(3):
        make(tmp_path / f"shard-{number:05}", (5,)).close()
    if work == "draw first":
        make(tmp_path / "shard-00003", (5,)).close()
    buffer = ConcatBuffer.from_root(tmp_path)
    if work != "draw first":
        buffer.sample(1, prioritized=True, **STEP)
        make(tmp_path / "shard-00003", (5,)).close()
        buffer.refresh()
    opened, gone = get_inside("open_priorities"), [tmp_path / "shard-00003"]

    def late(storage, *args, **how):
        if storage.path in gone:
            shutil.rmtree(gone.pop())
            if anew:
                make(storage.path, (2,)).close()
        return opened(storage, *args, **how)

    set_inside(monkeypatch, open_priorities=late)
    if work != "update":
        drawn = buffer.sample(500, prioritized=True, return_indices=True, seed=0, **STEP)["_indices"]
        assert {tuple(item) for item in drawn[drawn[:, 0] == 3].tolist()} == ({(3, 0, 0), (3, 0, 1)} if anew else set())
    else:
        assert buffer.update_priorities([[3, 0, 1], [3, 4, 0], [0, 0, 0]], [1, 1, 1]) == (1 if anew else 2)
    assert not gone
    buffer.flush()


def test_errors_are_gathered_once_though_columns_change_before_they_are_taken_in(tmp_path, monkeypatch):
    buffer = shared(make(tmp_path, (5,)), Told())
    failures = iter([SchemaMismatchError("columns changed")])

    def fail_once():
        for failure in failures:
            raise failure

    before_errors_are_taken_in(monkeypatch, fail_once)
    after_a_change_of_columns(monkeypatch, buffer)
    assert buffer.update_priorities([[0, 2]], [4.0]) == 0
    assert len(priorities_named(buffer).ranks.gathered) == 1, "the other rank does not gather again"
    np.testing.assert_allclose(buffer.priorities([[0, 2]]), (4.0 + 1e-6) ** 0.6, rtol=1e-6)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({}, r"load_state_dict: got \{\}, expected what state_dict gave"),
        (None, "load_state_dict: got None, expected what state_dict gave"),
        ({"seed": "x", "epoch": 0, "num_drawn": 0}, "load_state_dict: seed: got 'x', expected a whole number"),
        ({"seed": 1, "epoch": 0, "num_drawn": -1}, "load_state_dict: num_drawn: got -1"),
        ({"seed": 1, "epoch": 0, "num_drawn": 0, "delivered": 1.5}, "load_state_dict: delivered: got 1.5"),
    ],
)
def test_what_is_no_state_of_a_loader_is_refused(tmp_path, state, match):
    loader = make(tmp_path, (5, 4)).dataloader(3, prioritized=True, seed=1, **STEP)
    before = loader.state_dict()
    with pytest.raises(SchemaError, match=match):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_a_state_from_before_beta_was_kept_begins_with_it_anew(tmp_path):
    loader = make(tmp_path, (5, 4)).dataloader(3, prioritized=True, seed=1, **STEP)
    loader.load_state_dict({"seed": 2, "epoch": 3})
    assert loader.state_dict() == between(2, 3, 0)


# Loaders

AHEAD = [
    {},
    {"prefetch": 2},
    {"num_workers": 1, "prefetch_factor": 1},
    {"num_workers": 2},
    {"num_workers": 2, "prefetch_factor": 3, "prefetch": 1},
]
processes_warn = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def waiting(ahead):
    """How many batches docs/prioritized.md promises to wait at most."""
    return ahead.get("num_workers", 0) * ahead.get("prefetch_factor", 2) + ahead.get("prefetch", 0)


def long(folder):
    buffer = make(folder, max_timesteps=500)
    for _ in range(4):
        publish(buffer, 500)
    return buffer


@processes_warn
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("view", [STEP, {"n_steps": 1, "gamma": 0.9}])
def test_a_loader_draws_by_new_priorities_after_the_batches_that_wait(tmp_path, ahead, view):
    buffer = long(tmp_path)
    loader = buffer.dataloader(4, prioritized=Prioritized(alpha=1.0), seed=1, **view, **ahead)
    updated_at = 60  # by now small batches of another loader would cross many at a time
    for number, batch in enumerate(loader):
        hits = (batch["_indices"] == torch.tensor([2, 7])).all(1)
        if number == updated_at:
            buffer.update_priorities([[2, 7]], [1e9])
        if number > updated_at + waiting(ahead):
            assert hits.all()
        if number == updated_at + waiting(ahead) + 3:
            break


@processes_warn
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("stop", [1, 40])
def test_a_loader_goes_on_where_its_last_batch_was_handed_out(tmp_path, ahead, stop):
    buffer = long(tmp_path)
    how = Prioritized(beta=0.2, beta_steps=2000, normalize=None)
    buffer.sample(1, prioritized=how, **STEP)
    buffer.update_priorities([[0, t] for t in range(5)], [1, 2, 3, 4, 5])

    def betas(batches, first):
        count = 0
        for count, batch in enumerate(batches, start=1):
            beta = how.beta_at(first + count - 1)
            want = compute_importance_weights(batch["_probabilities"], 2000, beta, normalize=False)
            torch.testing.assert_close(batch["_weights"], want.float())
        return count

    loader = buffer.dataloader(4, prioritized=how, seed=1, **STEP, **ahead)
    whole = len([*loader])
    assert (whole, loader.state_dict()["num_drawn"], loader.state_dict()["epoch"]) == (500, 500, 1)
    for number, _ in enumerate(loader, start=1):
        assert loader.state_dict()["num_drawn"] == whole + number
        if number == stop:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["num_drawn"], state["delivered"]) == (1, whole + stop, 4 * stop)
    publish(buffer, 200)
    resumed = buffer.dataloader(4, prioritized=how, **STEP, **ahead)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert len(resumed) == whole, "of an epoch that is gone on with all are counted"
    buffer.delete([4])
    assert betas(resumed, whole + stop) == whole - stop, "the rest of the epoch"
    assert resumed.state_dict()["epoch"] == 2
    assert resumed.state_dict()["num_drawn"] == 2 * whole
    assert betas(loader, whole + stop) == whole, "without a state the stopped one begins a new epoch, β goes on"


def test_an_epoch_that_is_gone_on_with_draws_other_items_than_its_beginning(tmp_path):
    loader = long(tmp_path).dataloader(64, prioritized=True, seed=1, **STEP)
    first = next(iter(loader))["_indices"]
    state = loader.state_dict()
    loader.load_state_dict({**state, "delivered": 0})
    assert torch.equal(next(iter(loader))["_indices"], first)
    loader.load_state_dict(state)
    assert not torch.equal(next(iter(loader))["_indices"], first)


@pytest.mark.parametrize("given", [0, 3])
def test_a_number_of_another_epoch_begins_that_epoch(tmp_path, given):
    loader = long(tmp_path).dataloader(64, prioritized=True, seed=1, **STEP)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    loader.sampler.set_epoch(given)
    assert len([*loader]) == (32 if given else 31)
    assert loader.state_dict()["epoch"] == given + 1


def test_threads_draw_and_update_beside_each_other(tmp_path):
    buffer, errors, seen = make(tmp_path, [9, 8, 7, 9, 9], max_timesteps=500), [], []
    until = time.monotonic() + 1.5

    def work(call):
        rng = np.random.default_rng(0)
        try:
            while time.monotonic() < until:
                call(rng)
        except BaseException as error:
            errors.append(error)

    def draw(view):
        batch = buffer.sample(32, prioritized=Prioritized(), view=view)
        seen.append(float(batch["_probabilities"].max()))
        assert batch["_probabilities"].min() > 0 and batch["_probabilities"].max() < 1
        assert (batch["t"] == batch["_indices"][:, 1]).all() and (batch["number"] == batch["_indices"][:, 0]).all()

    def update(rng):
        serials = rng.integers(0, 5, 16)
        buffer.update_priorities(np.stack([serials, rng.integers(0, 7, 16)], axis=1), rng.random(16))

    draw(Timestep())
    views = Timestep(), Timestep(("number", "t"))
    calls = [*(partial(lambda view, rng: draw(view), view) for view in views), update, update]
    threads = [threading.Thread(target=work, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(seen) > 50
    buffer.close()


@pytest.mark.parametrize("options", [STEP, {"n_steps": 2}, {"view": Window(3, 2)}])
def test_a_draw_after_an_appended_step_looks_at_the_slots_that_changed_and_at_no_table(tmp_path, options, monkeypatch):
    """What it costs depends on no number of episodes."""
    buffer = make(tmp_path, (5, 9, 4), max_episodes=50, publish="step", spare_slots=2)
    fields = {"number": [0, 0], "reward": [0, 0], "o": np.zeros((2, 2))}
    buffer.add(**fields, t=[0, 0], terminated=[False, False])
    buffer.sample(8, prioritized=True, **options)
    (sampler,) = samplers_of(buffer)
    for t in range(1, 8):
        buffer.add(**fields, t=[t, t], terminated=[False, False])
        with monkeypatch.context() as patch:
            set_inside(patch, refresh_storage=None, columns_of=None)
            count = followed_items(sampler)
        assert count == len(anchors_of(buffer, options))


# Errors that are given with the steps


ENVS = {"reward": "float", "terminated": "bool"}


def of_envs(folder, **options):
    return ReplayBuffer(folder, **{"max_episodes": 9, "max_timesteps": 4, "fields": ENVS, "circular": True, **options})


@pytest.mark.parametrize("publish", ["episode", "step"])
@pytest.mark.parametrize("at_once", [False, True])
def test_steps_of_environments_have_the_priorities_of_their_errors_once_they_are_published(tmp_path, publish, at_once):
    rng = np.random.default_rng(0)
    ends, errors = rng.random((12, 3)) < 0.3, rng.normal(size=(12, 3))
    want = {}
    with of_envs(tmp_path, max_episodes=40, publish=publish, spare_slots=3) as buffer:
        if at_once:
            buffer.extend(reward=errors, terminated=ends, priority=errors)
        for t in range(12):
            if not at_once:
                buffer.add(reward=errors[t], terminated=ends[t], priority=errors[t])
        buffer.end_episodes()
        for place, serial in enumerate(buffer.serials.tolist()):
            for t, reward in enumerate(buffer.episode(place)["reward"].tolist()):
                want[serial, t] = (abs(reward) + EPSILON) ** 0.6
        assert len(want) == 36
        np.testing.assert_allclose(buffer.priorities(list(want)), [*want.values()], rtol=1e-5)


def test_a_step_that_is_shown_at_once_has_its_priority_at_once_and_others_the_highest(tmp_path):
    buffer = of_envs(tmp_path, publish="step")
    buffer.add(reward=0, terminated=False, priority=3.0)
    buffer.add(reward=0, terminated=False)
    buffer.add(reward=0, terminated=False, priority=[0.5])
    np.testing.assert_allclose(buffer.priorities([[0, t] for t in range(3)]), np.array([3, 3, 0.5]) ** 0.6, rtol=1e-5)


def test_errors_count_as_soon_as_a_step_without_one_ends_their_episode(tmp_path):
    buffer = of_envs(tmp_path)
    buffer.add(reward=0, terminated=False, priority=3.0)
    buffer.add(reward=0, terminated=True)
    np.testing.assert_allclose(buffer.priorities([[0, 0]]), [3**0.6], rtol=1e-5)


@pytest.mark.parametrize("publish", ["episode", "step"])
def test_the_error_of_a_reset_that_is_left_out_is_of_no_step(tmp_path, publish):
    buffer = of_envs(tmp_path, publish=publish, skips_resets=True, spare_slots=2)
    buffer.add(reward=[0, 1], terminated=[False, False], priority=[0.5, 0.5])
    buffer.add(reward=[0, 2], terminated=[True, False], priority=[0.6, 0.5])
    buffer.add(reward=[9, 3], terminated=[False, False], priority=[7.0, 0.7])  # the first is the observation of a reset
    buffer.add(reward=[4, 4], terminated=[False, False])
    buffer.end_episodes()
    got = {}
    for place, serial in enumerate(buffer.serials.tolist()):
        rewards = tuple(buffer.episode(place)["reward"].tolist())
        got[rewards] = buffer.priorities([[serial, t] for t in range(len(rewards))])
    want = {(0, 0): [0.5, 0.6], (1, 2, 3, 4): [0.5, 0.5, 0.7, 1], (4,): [1]}
    assert got.keys() == want.keys()
    for rewards, errors in want.items():
        np.testing.assert_allclose(got[rewards], np.array(errors) ** 0.6, rtol=1e-5)


def test_whole_episodes_are_given_with_their_errors_by_any_name(tmp_path):
    buffer = of_envs(tmp_path)
    buffer.store_episode(
        reward=[1, 2, 3], terminated=[0, 0, 1], priority=torch.tensor([1.0, 2, 3]), priority_name="new"
    )
    np.testing.assert_allclose(buffer.priorities([[0, 0], [0, 1], [0, 2]], name="new"), [1, 2**0.6, 3**0.6], rtol=1e-5)
    assert buffer.priorities([[0, 2]]).tolist() == [1]


def test_errors_wait_for_the_barrier_that_publishes_their_episodes(tmp_path):
    buffer = of_envs(tmp_path, durability="power", sync_every=2, spare_slots=2)
    for error in (3.0, 2.0, 5.0):
        buffer.store_episode(reward=[1], terminated=[True], priority=[error])
    np.testing.assert_allclose(buffer.priorities([[0, 0], [1, 0], [2, 0]]), [3**0.6, 2**0.6, 0], rtol=1e-5)
    buffer.close()
    got = ReplayBuffer.from_folder(tmp_path).priorities([[0, 0], [1, 0], [2, 0]])
    np.testing.assert_allclose(got, [3**0.6, 2**0.6, 5**0.6], rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("publish", ["episode", "step"])
def test_errors_that_come_with_their_steps_are_kept_by_a_first_draw_with_another_alpha(tmp_path, publish, alpha):
    buffer, errors = of_envs(tmp_path, publish=publish), [1.0, 2, 3, 4, 5, 6]
    buffer.store_episode(reward=[0, 0], terminated=[0, 1], priority=errors[:2])
    buffer.add(reward=0, terminated=False, priority=errors[2])
    buffer.extend(reward=[0, 0], terminated=[0, 1], priority=errors[3:5])
    buffer.store_episode(reward=[0], terminated=[1])
    buffer.update_priorities([[2, 0]], errors[5:])
    buffer.sample(1, prioritized=Prioritized(alpha=alpha), **STEP)
    given = buffer.priorities([[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [2, 0]])
    np.testing.assert_allclose(given, np.array(errors) ** alpha, rtol=1e-5)


def test_episodes_published_since_the_last_draw_keep_their_priorities_when_alpha_changes(tmp_path):
    buffer = make(tmp_path, (1,), max_episodes=9)
    buffer.sample(1, prioritized=Prioritized(alpha=1.0), **STEP)
    for _ in range(5):
        publish(buffer, 1)
    steps, errors = [[serial, 0] for serial in range(6)], np.array([1.0, 2, 3, 4, 5, 85])
    buffer.update_priorities(steps, errors)
    for alpha in (0.5, 1.0, 2.0):
        buffer.sample(1, prioritized=Prioritized(alpha=alpha), **STEP)
        np.testing.assert_allclose(buffer.priorities(steps), errors**alpha, rtol=1e-5)


@pytest.mark.parametrize("priority", [[1.0, 2], 1j, [[1.0]], [float("nan")], "x"])
def test_errors_that_do_not_fit_are_refused_before_anything_is_stored(tmp_path, priority):
    buffer = of_envs(tmp_path, publish="step")
    with pytest.raises(SchemaError, match=r"priority: got .* expected a finite number for the TD error of each step"):
        buffer.add(reward=1.0, terminated=False, priority=priority)
    assert buffer.num_steps == 0


def test_errors_of_other_environments_than_those_that_run_are_told_of_as_the_environments_are(tmp_path):
    buffer = of_envs(tmp_path)
    buffer.add(reward=[1, 2], terminated=[False, False], priority=[1, 2])
    with pytest.raises(SchemaError, match="got 3 environments, expected the 2 that run"):
        buffer.add(reward=[1, 2, 3], terminated=[False] * 3, priority=[1, 2, 3])


def test_a_field_named_priority_is_a_field(tmp_path):
    buffer = ReplayBuffer(tmp_path, 3, 4, {"priority": "float"})
    buffer.store_episode(priority=[4.0, 5])
    assert buffer.episode(0)["priority"].tolist() == [4, 5] and buffer.priorities([[0, 1]]).tolist() == [1]


# A ring of steps


def test_a_tree_that_follows_steps_one_by_one_is_the_one_that_is_made_anew(tmp_path):
    """Of a step that came or left, no anchors are cut: the journal tells by how many steps each slot moved."""
    buffer = ReplayBuffer(tmp_path, 30, 12, FIELDS, META, capacity=14, publish="step", spare_slots=2)
    rng, by_steps, cuts = np.random.default_rng(4), 0, []
    for step in range(80):
        ends = np.array([step % 17 == 10, step % 7 == 6])
        buffer.add(number=[0, 1], t=[0, 0], reward=[1, 1], terminated=ends, o=np.zeros((2, 2)))
        if step < 3:
            continue
        cuts.clear()
        batch = buffer.sample(16, n_steps=3, prioritized=True)
        (sampler,) = samplers_of(buffer)
        (one,) = anchor_priorities_of(sampler)
        by_steps += step > 3 and not cuts
        cut = partial(sampler.reader.selection.runs_of, 0, storage_of(buffer))
        count_cuts(one, cut, cuts)
        other = type(one)(storage_of(buffer), one.steps, sampler.how, sampler.reader.selection, by_slot=True)
        other.follow(None, True, later=False)
        assert one.count == other.count
        assert one.tree.total == pytest.approx(other.tree.total)
        for leaves in zip(*map(leaves_of_anchors, (one, other)), strict=True):
            mine, fresh = (set(zip(*np.stack(pair).tolist(), strict=True)) for pair in leaves)
            assert mine == fresh
        buffer.update_priorities(batch["_indices"], rng.random(16) + 0.5)
    assert by_steps > 20


@pytest.mark.parametrize("how", [*HOWS, Prioritized(variant="rank", sort_interval=1)])
@pytest.mark.parametrize("options", [unit[0] for unit in UNITS if unit[1]])
def test_of_a_ring_of_steps_exactly_the_items_that_are_left_are_drawn(tmp_path, options, how):
    """With a long episode beside short ones, so that episodes leave in another order than that of their serials."""
    fields = {**FIELDS, "o": "float"} if "n_steps" not in options else FIELDS
    buffer = ReplayBuffer(tmp_path, 30, 12, fields, META, circular=True, capacity=14, publish="step", spare_slots=3)
    rng = np.random.default_rng(3)
    for step in range(60):
        ends = np.array([step % 11 == 10, step % 3 == 2])
        shape = (2,) if fields["o"] == "float" else (2, 2)
        buffer.add(number=[0, 1], t=[0, 0], reward=[1, 1], terminated=ends, o=np.zeros(shape))
        if step % 5 in (1, 2) or step < 3:
            continue
        items = anchors_of(buffer, options)
        batch = buffer.sample(256, prioritized=how, **options)
        assert set(drawn(batch)) <= {*items}
        assert len(set(drawn(batch))) > len({*items}) // 3
        sampler = next(sampler for sampler in samplers_of(buffer) if sampler.reader.prioritized is not None)
        (one,) = anchor_priorities_of(sampler)
        assert one.count == len(items)
        errors = rng.random(256) + 0.5
        buffer.update_priorities(batch["_indices"], errors)
        priorities = priorities_of(buffer)
        table = storage_of(buffer).refresh()
        left = [(int(table.serial[s]), t) for s in table.visible for t in range(table.start[s], table.length[s])]
        assert priorities.num_steps == len(left) <= 14
        total = buffer.priorities(left).sum()
        assert priorities.tree.total == pytest.approx(total)
