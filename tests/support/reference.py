"""The slow definition of the store: an in-memory buffer of lists and loops, written from the design alone.

Every view gives its items as {(serial, t): item}, in the order in which an unshuffled loader must give them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np


@dataclass(eq=False)
class Episode:
    """steps: field -> rows, one a timestep that is left. final: field -> row, or empty. meta: name -> value.

    forgotten: how many timesteps before these a ring has forgotten.
    """

    steps: dict
    final: dict
    meta: dict
    serial: int = -1
    forgotten: int = 0
    is_open: bool = False

    @property
    def length(self):
        return len(next(iter(self.steps.values())))

    def known(self, name):
        """A meta field, or the length."""
        return self.length if name == "episode_lens" else self.meta[name]


class Reference:
    """zeros, defaults: field -> the row that stands for a missing one."""

    def __init__(self, zeros, defaults, max_episodes, capacity=None):
        self.zeros, self.defaults = zeros, defaults
        self.max_episodes, self.capacity = max_episodes, capacity
        self.episodes, self.next_serial = [], 0
        self.published = []  # the episode of each timestep, in the order of their publication

    # Storing: a ring of the newest episodes and of the newest timesteps

    def publish(self, episode):
        """All of an episode, or what is there of one that is open."""
        episode.serial, self.next_serial = self.next_serial, self.next_serial + 1
        self.episodes.append(episode)
        self.show(episode, episode.length)

    def show(self, episode, count=1):
        """So many timesteps more of an episode, unless it has left."""
        self.published += [episode] * (count * (episode in self.episodes))
        self.episodes = self.episodes[-self.max_episodes :]
        self.published = [one for one in self.published if one in self.episodes]
        while self.capacity is not None and len(self.published) > self.capacity:
            self.forget(self.published.pop(0))

    def forget(self, episode):
        """The first timestep of an episode; one of which nothing is left leaves, unless more of it is to come."""
        for rows in episode.steps.values():
            del rows[0]
        episode.forgotten += 1
        self.end(episode, episode.is_open)

    def end(self, episode, is_open=False):
        """Nothing more of it will come, or something will."""
        episode.is_open = is_open
        if not (episode.length or is_open):
            self.leave(episode)

    def leave(self, *episodes):
        """These are there no more."""
        self.episodes = [one for one in self.episodes if one not in episodes]
        self.published = [one for one in self.published if one not in episodes]

    @property
    def num_steps(self):
        return sum(episode.length for episode in self.episodes)

    # Choosing

    def chosen(self, filter_meta=None, min_episode_len=1, top_k=None, whole=False):
        """Those that pass; `whole`: and of which a ring has forgotten nothing."""
        out = [
            episode
            for episode in self.episodes
            if episode.length >= max(1, min_episode_len)
            and not (whole and episode.forgotten)
            and all(
                holds({**episode.meta, "episode_lens": episode.length}[n], c) for n, c in (filter_meta or {}).items()
            )
        ]
        if top_k is not None:
            best = sorted(out, key=lambda episode: (episode.known(top_k[0]), episode.serial))[-top_k[1] :]
            out = [episode for episode in out if episode in best]
        return out

    def parts(self, episode, ends=("terminated", "truncated")):
        """What lies between two ends, each as an episode by itself of which the steps before are forgotten."""
        ended = [any(np.any(episode.steps[name][t]) for name in ends) for t in range(episode.length)]
        cuts = [0, *(t + 1 for t in range(episode.length - 1) if ended[t]), episode.length]
        for begin, stop in pairwise(cuts):
            steps = {name: rows[begin:stop] for name, rows in episode.steps.items()}
            final = episode.final if stop == episode.length else {}
            yield replace(episode, steps=steps, final=final, forgotten=episode.forgotten + begin)

    def items(self, cut, filter_fields=None, parted=False, **choice):
        """cut(episode) -> {t: item}; a step that does not exist passes no filter. `parted`: by `parts`."""
        out = {}
        for episode in (p for e in self.chosen(**choice) for p in (self.parts(e) if parted else [e])):
            for t, item in cut(episode).items():
                asked = dict(filter_fields or {})
                starts = holds(t + episode.forgotten, asked.pop("_start", (None, None)))
                if starts and all(t >= 0 and holds(episode.steps[n][t], c) for n, c in asked.items()):
                    item |= {"_start": item["_start"] + episode.forgotten} if "_start" in item else {}
                    out[episode.serial, t + episode.forgotten] = {**item, **episode.meta}
        return out

    # Views

    def at(self, episode, name, t, padding="zero", final=False):
        """(row, whether it exists) of a field at step t; with `final` the final observation is one step more."""
        rows = episode.steps[name] + ([episode.final[name]] if final and name in episode.final else [])
        if 0 <= t < len(rows):
            return rows[t], True
        if padding == "edge":
            return rows[0 if t < 0 else -1], False
        return {"zero": self.zeros, "default": self.defaults}[padding][name], False

    def around(self, episode, name, steps, padding="zero", final=False):
        """(rows, mask)"""
        pairs = [self.at(episode, name, t, padding, final) for t in steps]
        return np.array([row for row, _ in pairs]), np.array([exists for _, exists in pairs])

    def trajectory(self, episode, fields):
        if episode.forgotten:
            return {}
        item = {name: np.array(episode.steps[name]) for name in fields}
        return {0: {**item, "_lens": np.int64(episode.length), "_mask": np.ones(episode.length, bool)}}

    def timesteps(self, episode, fields):
        return {t: {name: episode.steps[name][t] for name in fields} for t in range(episode.length)}

    def transitions(self, episode, n, fields, sequence=(), gamma=None, reward="reward", terminated="terminated"):
        items = {}
        ended = terminated in episode.steps and bool(np.any(episode.steps[terminated][-1]))
        last = 1 if ended or episode.final else 0
        for t in range(episode.length):
            k = min(n, episode.length - t - 1 + last)
            if k == 0:
                continue
            item = {name: episode.steps[name][t] for name in fields}
            item |= {f"next_{name}": self.at(episode, name, t + k, final=True)[0] for name in fields}
            for name in sequence:
                rows = [episode.steps[name][t + i] if i < k else self.zeros[name] for i in range(n)]
                item[f"seq_{name}"] = np.array(rows)
            item["n_step_lens"] = np.int64(k)
            if gamma is not None:
                item["_return"] = np.float32(sum(gamma**i * float(episode.steps[reward][t + i]) for i in range(k)))
                item["_discount"] = np.float32(0 if ended and t + k == episode.length else gamma**k)
            items[t] = item
        return items

    def windows(
        self,
        episode,
        length,
        fields,
        stride=1,
        boundary="pad",
        padding="zero",
        pad_before=0,
        pad_after=None,
        front=False,
        burn_in=0,
        n_steps=0,
    ):
        last = episode.length - 1
        if pad_after is not None:  # how far a window may reach beyond the end
            last = min(last, episode.length + pad_after - length)
        starts = list(range(-pad_before, last + 1, stride))
        if pad_before and episode.forgotten:  # nothing is padded before it, as there were steps: the first begins it
            starts = list(range(0, last + 1, stride)) or [0] * bool(starts)
        if boundary != "pad":
            inside = [t for t in range(episode.length) if t + length <= episode.length]
            starts = spread(inside, stride, [0], boundary)
        items = {}
        for start in starts:
            missing = max(0, start + length - episode.length) if front else 0
            first = start - missing  # of a window whose padding stands in front
            steps = range(first, first + length)
            if missing:
                left = replace(episode, forgotten=0, steps={n: rows[start:] for n, rows in episode.steps.items()})
                cut = self.windows(left, length, fields, padding=padding, pad_before=missing)[-missing]
                items[start] = {**cut, "_start": np.int64(first)}
                continue
            item = {name: self.around(episode, name, steps, padding)[0] for name in fields}
            mask = np.array([0 <= t < episode.length for t in steps])
            item |= {"_mask": mask, "_lens": np.int64(mask.sum()), "_start": np.int64(start)}
            items[start] = {**item, "_reaches_episode_end": np.bool_(start + length >= episode.length)}
            if burn_in or n_steps:
                # Behind a head that is not there, steps that padding would have warmed up are learned from, too.
                warm = burn_in - pad_before * (start == 0 < episode.forgotten)
                alike = [warm <= k < length - n_steps and 0 <= t < episode.length for k, t in enumerate(steps)]
                follows = [not n_steps or t < episode.length - 1 or self.ended(episode) for t in steps]
                items[start]["_loss_mask"] = np.array(alike) & np.array(follows)
        return items

    def ended(self, episode, terminated="terminated"):
        """Whether something is known to follow the last step: an observation, or that nothing does."""
        return bool(episode.final) or bool(np.any(episode.steps[terminated][-1]))

    def continued(self, length, fields, stream=None, filter_fields=None, **choice):
        """{(serial, t): item} of windows that go on in the next episode, of the same value of `stream` where given."""
        chosen, out = self.chosen(**choice), {}
        for i, episode in enumerate(chosen):
            line = [e for e in chosen[i:] if stream is None or e.meta[stream] == episode.meta[stream]]
            steps = [(e, t) for e in line for t in range(e.length)]
            conditions = dict(filter_fields or {})
            starts = conditions.pop("_start", (None, None))
            for t in range(episode.length):
                passes = all(holds(episode.steps[n][t], c) for n, c in conditions.items())
                window = steps[t : t + length]
                if len(window) < length or not passes or not holds(t + episode.forgotten, starts):
                    continue
                item = {name: np.array([e.steps[name][s] for e, s in window]) for name in fields}
                item |= {"_lens": np.int64(length), "_mask": np.ones(length, bool)}
                item |= {"_start": np.int64(t + episode.forgotten)}
                item |= {"_reaches_episode_end": np.bool_(t + length >= episode.length)}
                item |= {"_is_first": np.array([k == 0 or s == 0 for k, (_, s) in enumerate(window)])}
                item |= {"_is_last": np.array([s == e.length - 1 and not e.is_open for e, s in window])}
                out[episode.serial, t + episode.forgotten] = {**item, **episode.meta}
        return out

    def crop(self, episode, start, length, fields):
        item = self.windows(episode, length, fields)[start]
        return {key: value for key, value in item.items() if key != "_mask"}

    def offsets(self, episode, offsets, stride=1, boundary="pad", padding="zero"):
        def cut(t):
            item = {}
            for name, values in offsets.items():
                steps = [t + k for k in values]
                item[name], item[f"_mask_{name}"] = self.around(episode, name, steps, padding, final=True)
            return item

        anchors = list(range(0, episode.length, stride))
        if boundary != "pad":
            masks = {t: [cut(t)[f"_mask_{name}"] for name in offsets] for t in range(episode.length)}
            inside = [t for t in range(episode.length) if all(mask.all() for mask in masks[t])]
            reach = -min(k for values in offsets.values() for k in (0, *values))
            anchors = spread(inside, stride, [min(reach, episode.length - 1)], boundary)
        return {t: cut(t) for t in anchors}


def spread(inside, stride, instead, boundary):
    """Every stride-th of the anchors that fit; with "shift" the last one too, and one if none fits."""
    anchors = inside[::stride]
    if boundary == "shift":
        anchors = sorted({*anchors, *inside[-1:]}) or instead
    return anchors


def holds(value, condition):
    """Whether a value passes a filter."""
    if callable(condition):
        return bool(condition(np.array([value]))[0])
    if isinstance(condition, tuple):
        low, high = condition
        return (low is None or low <= value) and (high is None or value < high)
    if isinstance(condition, (set, frozenset, list)):
        return any(value == member for member in condition)
    return bool(value == condition)


class SlowPriorities:
    """|δ| + ε of every step of several folders, and the highest so far in each, 1 at first.

    as_one: whether they are drawn from as one, so that a new step has the highest so far of all of them.
    opened: the folders whose priorities are open.
    """

    def __init__(self, num_folders, epsilon=1e-6):
        self.epsilon, self.as_one, self.opened = epsilon, False, set()
        self.raw, self.highest = [{} for _ in range(num_folders)], [1.0] * num_folders

    def follow(self, folder, shown):
        """The priorities look at a folder, which shows these steps, (serial, t): the moment at which new ones enter."""
        raw = self.raw[folder]
        self.opened.add(folder)
        if shown - raw.keys():
            self.highest[folder] = max(self.highest) if self.as_one else self.highest[folder]
        self.raw[folder] = {step: raw.get(step, self.highest[folder]) for step in shown}

    def update(self, folder, steps, errors):
        for step, error in zip(steps, errors, strict=True):
            if step in self.raw[folder]:
                self.raw[folder][step] = abs(error) + self.epsilon
                self.highest[folder] = max(self.highest[folder], self.raw[folder][step])
