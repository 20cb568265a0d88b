"""The verdict on a verify: which drafts equal the target's picks. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def accept(draft_ids: Sequence[int], pick_ids: Sequence[int]) -> int:
    """Length of the longest prefix of the drafts that equals the picks.

    `pick_ids` has one entry more than `draft_ids`: entry i is the target's pick after row i, so the token that follows
    the accepted drafts is `pick_ids[accepted]`. An invalid pick (-1) equals no draft.
    """
    if len(pick_ids) != len(draft_ids) + 1:
        raise ValueError(
            f"accept: {len(pick_ids)} picks for {len(draft_ids)} drafts, expected {len(draft_ids) + 1}"
        )
    num_accepted = 0
    for draft, pick in zip(draft_ids, pick_ids, strict=False):
        if draft != pick or pick < 0:
            break
        num_accepted += 1
    return num_accepted
