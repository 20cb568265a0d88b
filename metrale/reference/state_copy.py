"""Reference of `state_copy`: slots of a state tensor to other slots, of it or of another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from metrale.kernels.groups import check_slots


def state_copy(
    source: Tensor, destination: Tensor, from_slots: Sequence[int], to_slots: Sequence[int]
) -> None:
    """Copy slot `from_slots[i]` of every layer of `source` to slot `to_slots[i]` of `destination`.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | source | [L, S, ...] | any | in | one state tensor of all layers |
    | destination | [L, S', ...] | as source | inout | the same tensor, a checkpoint or host memory |
    | from_slots, to_slots | M integers each | | in | |

    Checkpoint, restore and fork are this copy of each state tensor of folded slots (nothing pending).

    Requires: slots in range; no slot twice in `to_slots`; none of them among `from_slots` where both are one tensor.
    """
    check_slots(source, destination, from_slots, to_slots)
    for i, j in zip(from_slots, to_slots, strict=True):
        destination[:, j].copy_(source[:, i])
