"""Reference of `accept`: the verdict on every row group of a verify."""

from __future__ import annotations

import torch
from torch import Tensor

from metrale.kernels.groups import Groups


def accept(token_ids: Tensor, picks: Tensor, groups: Groups) -> Tensor:
    """How many drafts of each group equal the target's picks, and the token that follows them.

    | tensor | shape | dtype | dir | meaning |
    | --- | --- | --- | --- | --- |
    | token_ids | [T] | int64 | in | token fed in each row: a group's anchor, then its drafts |
    | picks | [T] | int64 | in | the target's pick after each row, -1 where there is none |
    | groups | | | in | the row groups, every one of at least one row |
    | result | [N, 2] | int64 | out | (accepted drafts, next token); the token is -1 where the row has no pick |

    Row i + 1 of a group is accepted when it equals the pick after row i and all before it were. The verdict is all that is
    written: nothing advances until the host has cut it at stops.

    Requires: no empty group. Source: Leviathan et al. 2022 (arXiv:2211.17192), for picks that are fixed by their seed.
    """
    if groups.num_rows != token_ids.shape[0] or picks.shape != token_ids.shape:
        raise ValueError(
            f"accept: token_ids: expected {groups.num_rows} rows, got {list(token_ids.shape)} and {list(picks.shape)}"
        )
    verdicts = []
    for group in groups.host:
        if not group.num_rows:
            raise ValueError(f"accept: groups: slot {group.slot} has no rows")
        rows = slice(group.first_row, group.first_row + group.num_rows)
        fed, said = token_ids[rows].tolist(), picks[rows].tolist()
        num_accepted = 0
        while num_accepted + 1 < len(fed) and said[num_accepted] == fed[num_accepted + 1] >= 0:
            num_accepted += 1
        verdicts.append((num_accepted, said[num_accepted]))
    return torch.tensor(verdicts, dtype=torch.int64, device=token_ids.device).view(-1, 2)
