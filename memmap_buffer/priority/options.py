"""`Prioritized`: how items are drawn by priority, and what their importance weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memmap_buffer.choices import Normalizer, Reduce, System, Ties, Variant, check_choice
from memmap_buffer.dtypes import check_count, check_number
from memmap_buffer.errors import SchemaError
from memmap_buffer.schema import Schema

if TYPE_CHECKING:
    from typing_extensions import Self

SYSTEMS: dict[str, dict[str, Any]] = {
    "memorax": {"alpha": 0.6, "beta": 0.4, "epsilon": 0, "normalize": "batch"},
    "reagent": {"alpha": 1.0, "beta": 0, "epsilon": 0, "normalize": None, "stratified": True},
    "nnabla-rl": {
        **{"alpha": 0.6, "beta": 0.4, "beta_steps": 10_000, "epsilon": 1e-8, "error_clip": (-1, 1)},
        **{"normalize": "buffer", "stratified": True, "sort_interval": 1_000_000},
    },
}
LOWEST = 1e-10  # probability: one of 0 has no finite weight


@dataclass(frozen=True)
class Prioritized:
    """Draw items, each with P(i) = p_i / Σ p over the items that the view can serve.

    The priority of a step is (|δ| + ε)^α of the error that it was last given by `update_priorities`, and until then the
    highest in any folder of the buffer when it came, 1 at first. A batch gains `_weights` (B,) float32,
    `_probabilities` (B,) float64 and `_indices` (`_index` for whole episodes). An item whose episode was overwritten
    before it was read is replaced, and weighs 0.

    Where every step can be drawn, nothing but the tree on the disk is needed. Where some cannot (an n-step item without
    a successor, a filter, a stride), or the unit is not a step, a second tree is kept in memory, some 9 bytes an item,
    built at the first draw and updated with the first.

    Args:
        alpha: α, 0 draws uniformly. Where that of the tree is another, its leaves are rescaled to it, one pass over all
            steps; α = 0 forgets the errors.
        epsilon: ε, so that a step without error is still drawn; with 0 it is not, until it has another error. Another ε
            than before is that of errors from then on.
        beta: β of the weights w = (N · P)^-β over N items; it rises linearly to 1 over `beta_steps` batches, or stays.
            β alone is not on the disk: a loader's `state_dict` has it, and `sample` counts from the
            opening of the buffer; to go on after n batches there, give `beta_at(n)` and what is left of `beta_steps`.
        normalize: divide by the highest weight of the "batch", by the highest that any item of the "buffer" has, or,
            with None, not at all.
        stratified: one draw in each of B segments of equal probability.
        replacement: False has no item twice in a batch: one is drawn after another, each with p_i / (Σ p - Σ of those
            before it in the batch). One that stands for an item whose episode was overwritten while it was read may be
            there already. Needs stratified=False. Weights and `_probabilities` are by P(i) as above. At least a
            billionth of Σ p must be left for each.
        variant: "proportional", or "rank": p = (1 / rank)^α, the highest priority having rank 1. Ranks are found in an
            order that is sorted anew after `sort_interval` changes (new priorities, items that came, items that went),
            by default as many as there are items.
        ties: whether equal priorities have a "shared" rank, the best of theirs, or each its "own" from the next sorting
            on, the oldest item the best.
        name: of the tree, `priority/<name>.npy`; draws of the same name share the priorities.
        reduce: a window or a whole episode has the priority of its "first" step, or the "max" or "mean" over all of its
            steps; by default windows have the first, episodes the mean. Other items have that of their timestep.
        weight_field: draw by this meta field instead: p = value^α, for which nothing is stored.
        error_clip: (low, high) to which errors δ are clipped before |δ| is taken, by every `update_priorities` of the
            name from the first draw on. It is not on the disk: a process has that of its last draw.

    Raises:
        SchemaError: a value that is not one of these.

    Source: Schaul et al. 2016, "Prioritized Experience Replay".
    """

    alpha: float = 0.6
    beta: float = 0.4
    beta_steps: int | None = None
    epsilon: float = 1e-6
    normalize: Normalizer = "batch"
    stratified: bool = True
    variant: Variant = "proportional"
    name: str = "td"
    reduce: Reduce = None
    sort_interval: int | None = None
    weight_field: str | None = None
    error_clip: tuple[float, float] | None = None
    ties: Ties = "shared"
    replacement: bool = True

    def __post_init__(self) -> None:
        clip = self.error_clip
        if clip is not None and not (isinstance(clip, tuple) and len(clip) == 2 and clip[0] < clip[1]):
            raise SchemaError(f"error_clip: got {clip!r}, expected (low, high), such as (-1, 1), or None")
        check_choice("normalize", self.normalize, Normalizer)
        check_choice("variant", self.variant, Variant)
        check_choice("ties", self.ties, Ties)
        if self.ties == "own" and self.variant != "rank":
            raise SchemaError(f"ties: got 'own' with variant={self.variant!r}; only variant='rank' has ranks")
        check_choice("reduce", self.reduce, Reduce)
        if not self.replacement and self.stratified:
            raise SchemaError("replacement=False draws one item after another; give stratified=False with it")
        for name, low, high in (("alpha", 0, 100), ("beta", 0, 1), ("epsilon", 0, 1e100)):
            check_number(name, getattr(self, name), low, high)
        for name in ("beta_steps", "sort_interval"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    @classmethod
    def like(cls, system: System, **changes: Any) -> Self:
        """The defaults of another system.

        Args:
            system: "memorax", "reagent" (whose priorities are drawn by as they are, and weigh nothing), or "nnabla-rl".
            changes: any argument of `Prioritized` in the place of the system's.

        Raises:
            SchemaError: the system is none of these.
        """
        check_choice("like", system, System)
        return cls(**{**SYSTEMS[system], **changes})

    @classmethod
    def parse(cls, option: Any, schema: Schema) -> Prioritized | None:
        """The option of that name; True means the defaults. Raises SchemaError."""
        if option is None or option is False:
            return None
        how = cls() if option is True else option
        if not isinstance(how, cls):
            raise SchemaError(f"prioritized: got {option!r}, expected Prioritized(...), or True for its defaults")
        if how.weight_field is not None:
            schema.require([how.weight_field], "prioritized", schema.meta_fields)
            field = schema.meta_fields[how.weight_field]
            if field.shape not in ((), (1,)) or field.storage.kind not in "fiub" or field.dtype == "bfloat16":
                raise SchemaError(f"prioritized: {how.weight_field!r} is no field of one number; give one")
        return how

    def beta_at(self, batch: int) -> float:
        """β of the batch of that number, counted from 0."""
        if self.beta_steps is None:
            return self.beta
        return min(1.0, self.beta + (1 - self.beta) * batch / self.beta_steps)


def compute_importance_weights(
    probabilities: Any, buffer_size: int, beta: float = 0.4, *, normalize: bool = True
) -> Any:
    """The weights that undo the bias of draws by priority: w = (N · P)^-β, divided by the highest of them.

    Args:
        probabilities: (B,) P, an array or a tensor of floats. Less than 10⁻¹⁰ counts as that; 0, as an item has that
            was drawn again, gives the weight 0.
        buffer_size: N, the number of items that could be drawn.
        beta: β, 0 … 1; 1 undoes all of the bias.
        normalize: False leaves the division out.

    Returns:
        (B,), of the same kind and dtype.

    Source: Schaul et al. 2016, "Prioritized Experience Replay", section 3.4; the arguments are memorax's.
    """
    weights = (buffer_size * probabilities.clip(LOWEST)) ** -beta * (probabilities > 0)
    if not normalize or not len(weights):
        return weights
    highest = weights.max()
    return weights / (highest if highest > 0 else 1)
