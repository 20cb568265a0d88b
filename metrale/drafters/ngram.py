"""Drafts copied from a sequence's own history: the tokens that followed the same context before."""

from __future__ import annotations

from collections.abc import Iterable

from metrale.errors import ConfigError


class NgramIndex:
    """The longest suffix of a history that occurs earlier in it, kept up to date token by token.

    `min_match` and `max_match` bound the length of the suffix. Of several earlier occurrences of the longest
    match the **latest** counts; it may overlap the suffix itself. History is prompt and emitted tokens, the
    anchor included.

    The index is a compressed trie of the history's prefixes read backwards from their last token, `max_match`
    deep. Each node knows the latest position that passed through it, so that inserting a position finds the
    longest earlier match and its latest place on the way. A token costs at most `max_match` steps however
    long the history, and memory is one leaf (an integer) and at most one node a token.
    """

    __slots__ = ("_match_end", "_match_length", "_max_match", "_min_match", "_root", "_tokens")

    def __init__(self, min_match: int, max_match: int) -> None:
        """ConfigError unless 1 <= min_match <= max_match."""
        if not 1 <= min_match <= max_match:
            raise ConfigError(
                f"prompt_lookup_min must be from 1 to prompt_lookup_max, got prompt_lookup_min={min_match}, "
                f"prompt_lookup_max={max_match}"
            )
        self._min_match = min_match
        self._max_match = max_match
        self._clear()

    def __len__(self) -> int:
        """Tokens in the history."""
        return len(self._tokens)

    @property
    def match_length(self) -> int:
        """Length of the suffix match behind the next proposal; 0: none of at least `min_match`."""
        return self._match_length

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the history."""
        for token_id in token_ids:
            self._tokens.append(token_id)
            self._insert(len(self._tokens) - 1)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of the history; the index is built anew where that drops any."""
        if num_tokens < len(self._tokens):
            kept = self._tokens[:num_tokens]
            self._clear()
            self.extend(kept)

    def propose(self, num_tokens: int) -> tuple[int, ...]:
        """Up to `num_tokens` tokens that followed the match, () without one. Changes nothing.

        A copy that reaches the history's end goes on in what it has copied: [5, 5, 5, 5] proposes 5, 5, 5,
        ... and [1, 2, 1, 2] proposes 1, 2, 1, ... Token ids have no meaning here: a copy may hold an EOS.
        """
        if not self._match_length or num_tokens < 1:
            return ()
        start = self._match_end + 1
        copied = self._tokens[start : start + num_tokens]
        period = len(copied)
        while len(copied) < num_tokens:
            copied += copied[: min(period, num_tokens - len(copied))]
        return tuple(copied)

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._root: dict[int | tuple[int, ...], int | _Node] = {}
        self._match_length = 0
        self._match_end = -1

    def _insert(self, end: int) -> None:
        """Add the prefix that ends at position `end`, and note its longest match among the earlier ones."""
        tokens = self._tokens
        self._match_length = 0
        limit = min(self._max_match, end + 1)
        depth = self._min_match
        if limit < depth:
            return
        children = self._root
        key: int | tuple[int, ...] = tuple(
            tokens[end + 1 - depth :]
        )  # the first edge is the whole shortest match
        while True:
            child = children.get(key)
            if child is None:
                children[key] = end
                return
            if isinstance(child, int):
                other, reach = child, min(limit, child + 1)
            else:
                other, reach = child.latest, child.depth
            common = _common_length(tokens, other, end, depth, reach)
            self._match_length, self._match_end = common, other
            if common < reach:
                children[key] = _Node(common, end, {tokens[other - common]: child, tokens[end - common]: end})
                return
            if isinstance(child, int):
                # whatever matches the older position matches this one as far, and this one is later
                children[key] = end
                return
            child.latest = end
            children, depth, key = child.children, common + 1, tokens[end - common]


class _Node:
    """A branching point: `depth` tokens shared by all positions below it, of which `latest` is the last."""

    __slots__ = ("children", "depth", "latest")

    def __init__(self, depth: int, latest: int, children: dict[int | tuple[int, ...], int | _Node]) -> None:
        self.depth = depth
        self.latest = latest
        self.children = children


def _common_length(tokens: list[int], first: int, second: int, known: int, limit: int) -> int:
    """How many tokens, at most `limit`, agree backwards from two positions; `known` of them surely do."""
    if tokens[first + 1 - limit : first + 1 - known] == tokens[second + 1 - limit : second + 1 - known]:
        return limit
    while tokens[first - known] == tokens[second - known]:
        known += 1
    return known
