"""DraftSync: the tokens of each row that each drafter has followed, and those that it follows next."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from engine.drafters import Drafter, RowUpdate
from engine.requests import Request

Busy = Sequence[tuple[int, Request]]


class DraftSync:
    """Lets drafters follow the rows of a decoder. A drafter is named by its index.

    lengths: by row and drafter, the tokens of the row's text that the drafter has followed; absent: none.
    """

    def __init__(self, drafters: Sequence[Drafter], n_rows: int) -> None:
        self._drafters = drafters
        self.lengths: list[dict[int, int]] = [{} for _ in range(n_rows)]

    def begin(self, row: int, n_reused: int, most_ahead: int) -> None:
        """Start another prompt in a row that holds its first `n_reused` tokens. Drafters that had followed more than
        `most_ahead` tokens after these start anew: their caches may lack what they held before."""
        self.lengths[row] = {
            drafter: min(n, n_reused)
            for drafter, n in self.lengths[row].items()
            if n_reused and self._drafters[drafter].follows_parts and n - n_reused <= most_ahead
        }

    def follow(self, drafter: int, lengths: Sequence[tuple[int, Request, int]], mode: str) -> int:
        """Let a drafter follow rows up to these lengths; return the number of tokens that it had not seen."""
        updates = []
        for row, request, length in lengths:
            if (n_seen := self.lengths[row].get(drafter, 0)) < length:
                text = request.text if length == len(request.text) else request.text[:length]
                verified = range(len(request.prompt), request.length)
                of_request = request.noise_key(mode), request.prediction, verified
                updates.append(RowUpdate(row, request.id, text, n_seen, *of_request))
                self.lengths[row][drafter] = length
        self._drafters[drafter].follow(updates)
        return sum(len(update.tokens) - update.n_seen for update in updates)

    def catch_up(self, drafter: int, busy: Busy, limit: int | None, mode: str) -> tuple[int, bool]:
        """Let a drafter follow the prompts of all rows, or only a part if it has missed more than `limit` tokens.

        A part is the first `limit` of the missed tokens, and a token for each row, since every round adds some. Returns
        the number of tokens that the drafter followed, and True if these are all prompts.
        """
        missed = [request.length - self.lengths[row].get(drafter, 0) for row, request in busy]
        if limit is None or not self._drafters[drafter].follows_parts or sum(missed) <= limit:
            return self.follow(drafter, [(row, request, len(request.prompt)) for row, request in busy], mode), True
        ends = [min(end, limit + len(busy)) for end in accumulate(missed)]
        lengths = [
            (row, request, request.length - n_missed + end - begin)
            for (row, request), n_missed, (begin, end) in zip(busy, missed, pairwise([0, *ends]), strict=True)
        ]
        return self.follow(drafter, lengths, mode), False

    def follow_round(self, drafter: int | None, busy: Busy, mode: str) -> None:
        """Let a drafter, if any, follow the tokens of all rows before a round, the current one if it reads that."""
        if drafter is None:
            return
        n_ahead = self._drafters[drafter].reads_current
        self.follow(drafter, [(row, request, request.length + n_ahead) for row, request in busy], mode)
