"""What those get who have lost their SLO, or never had one: leftovers, and a share of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import IntArray, blocks_of_step
from sola_sched.planner.attain.entry import Entry, tokens_in
from sola_sched.planner.attain.lost import Judged


@dataclass(slots=True)
class Account:
    """The guaranteed share of engine time of the lost.

    Attributes:
        share: In [0, 1).
        most_s: Credit never exceeds this, in either direction: no burst of lost requests.
        credit_s: Engine time earned and not yet spent, seconds.
        is_blocked: The oldest lost request has full credit but neither slot nor memory: nobody
            else is admitted until it has.
        unseen_s: Engine time of steps in which nobody looked whether a lost request waits.
    """

    share: float
    most_s: float
    credit_s: float = 0.0
    is_blocked: bool = False
    unseen_s: float = 0.0

    def forget(self) -> None:
        """Nobody is lost: credit is earned by those who wait for it, not kept for a burst."""
        self.credit_s = min(self.credit_s, 0.0)
        self.unseen_s = 0.0

    def earn(self, elapsed_s: float) -> None:
        """Book the share of the engine time that has passed while a lost request was there."""
        earned_s = self.share * (self.unseen_s + elapsed_s)
        self.credit_s, self.unseen_s = min(self.most_s, self.credit_s + earned_s), 0.0

    def receive(self, seconds: float) -> None:
        """Book service from what others left over: the share is a minimum, not an extra."""
        self.credit_s = max(self.credit_s - seconds, -self.most_s)

    @property
    def is_full(self) -> bool:
        """Whether no more credit can be earned: it has been waiting to be spent."""
        return self.credit_s >= 0.99 * self.most_s


@dataclass(frozen=True, slots=True)
class Share:
    """What the lost get in a step.

    Attributes:
        run: Places of the lost decodes that take part.
        prefills: Places of the lost prefills in the step.
        tokens: Of their chunk.
        is_alone: Whether nobody else computes a prompt beside them.
    """

    run: IntArray
    prefills: IntArray
    tokens: int = 0
    is_alone: bool = False


def serve_lost(
    judged: Judged, entry: Entry, limit_s: float, account: Account, *, rejects: bool
) -> Share:
    """Serve the lost from what is left over, decodes before prompts, and the oldest on credit.

    Args:
        judged: The requests.
        entry: The other prefills of the step.
        limit_s: Time for the step, seconds.
        account: Of the lost; what they get is booked.
        rejects: Whether those without a first token in time will not be there any more.
    """
    state, decodes, prefills = judged.state, judged.decodes, judged.prefills
    was_blocked, account.is_blocked = account.is_blocked, False
    is_lost = ~prefills.feasible
    if rejects:
        is_lost = prefills.without_rejected(is_lost)
    (places,), (held,) = is_lost.nonzero(), decodes.lost.nonzero()
    if not len(places) and not len(held):
        account.forget()
        return Share(held, places)
    account.earn(state.elapsed_s)
    arrival_s = state.table.arrival_s
    held = held[arrival_s[decodes.rows[held]].argsort(kind="stable")]
    places = places[arrival_s[prefills.rows[places]].argsort(kind="stable")]
    places = places[: judged.tuning.num_lost]
    oldest_s = arrival_s[prefills.rows[places]].min(initial=np.inf)
    num_older = int(np.count_nonzero(arrival_s[decodes.rows[held]] <= oldest_s))
    step = _LostStep(judged, entry, limit_s, account)
    num_run = step.add_decodes(held, num_older)
    if len(places) and num_run >= num_older:
        step.add_prefills(places.tolist())
    if step.is_blocked:  # what others get from slack while the oldest finds no room is no debt
        account.is_blocked = was_blocked or account.is_full
    else:
        account.receive(step.received_s)
    chosen = np.array(step.chosen, dtype=np.int64)
    return Share(held[:num_run], chosen, step.tokens, step.is_alone)


class _LostStep:
    """What the lost get in one step, and what is left over for the next of them.

    Attributes:
        chosen, tokens, is_alone: The prefills, as in `Share`.
        is_blocked: The oldest lost prefill finds neither slot nor memory, also of those that sit
            out.
        received_s: Time of what the others left over that they got, seconds.
    """

    def __init__(self, judged: Judged, entry: Entry, limit_s: float, account: Account) -> None:
        self.judged, self.account, self.limit_s = judged, account, limit_s
        state, decodes, prefills = judged.state, judged.decodes, judged.prefills
        self.chosen: list[int] = []
        self.tokens, self.received_s = 0, 0.0
        self.is_alone = self.is_blocked = False
        self._starts = entry.served[entry.served >= prefills.num_started]
        self._room, self._entry_tokens = judged.token_room - entry.tokens, entry.tokens
        self._spare_s = 0.0
        if not entry.has_backlog:
            chunk_s = float(state.cost.prefill_marginal_s(float(entry.tokens), 0.0))
            self._spare_s = limit_s - decodes.decode_s - chunk_s
        self._blocks = prefills.size / state.block_size + 1.0  # one to spare
        self._starting = float(self._blocks[self._starts].sum())
        # Free, and what decodes that sit out could give.
        self._slots = judged.num_free_slots - len(self._starts)
        self._free = state.num_free_blocks - self._starting
        self._held_slots = decodes.num_lost
        self._held_blocks = float(decodes.ctx[decodes.lost].sum()) / state.block_size

    def add_decodes(self, held: IntArray, num_older: int) -> int:
        """How many of the lost decodes, by arrival, go on in what is left over.

        Of the `num_older` that came before any lost prefill also those that credit pays for. Of
        the others none whose slot or KV those who start may need.
        """
        decodes, state = self.judged.decodes, self.judged.state
        if not len(held):
            return 0
        added_s = state.cost.decode_s(2.0, decodes.ctx[held]) - state.cost.decode_s(1.0, 0.0)
        ends_s = added_s.cumsum()
        can = max(0, min(self._room // state.tokens_per_decode, len(held) + min(0, self._slots)))
        if self._free < len(decodes.rows):
            can = 0
        count = int(ends_s.searchsorted(self._spare_s, side="right"))
        count = min(count, max(can, num_older))
        if count:
            self.received_s = float(ends_s[count - 1])
            self._spare_s -= self.received_s
        while count < num_older and self.account.credit_s > 0.0:
            self.account.credit_s -= float(added_s[count])
            count += 1
        self._room -= count * state.tokens_per_decode
        self._held_slots -= count
        self._held_blocks -= float(decodes.ctx[held[:count]].sum()) / state.block_size
        return count

    def add_prefills(self, places: list[int]) -> None:
        """The oldest of these, which are by arrival, and others that end in the step.

        The oldest also in part, on credit, and for the KV of decodes that sit out. No prompt passes
        an older one, but for those that have begun while the oldest finds no room.
        """
        judged, prefills = self.judged, self.judged.prefills
        oldest, blocks = places[0], float(self._blocks[places[0]])
        slots, free = self._slots + self._held_slots, self._free + self._held_blocks
        has_room = oldest < prefills.num_started or (slots > 0 and free > blocks)
        self.is_blocked = not has_room and (
            slots + len(self._starts) <= 0 or free + self._starting <= blocks
        )
        if self.is_blocked:
            places = [place for place in places if place < prefills.num_started]
        tokens = self._left_over(places[0]) if places and (has_room or self.is_blocked) else 0
        if not tokens and not self.is_blocked:
            tokens = self._on_credit(oldest)
            self.is_alone = tokens > 0
        if not tokens:
            return
        if self.is_alone:
            self._slots += len(self._starts)
            self._free += self._starting
            self._room += self._entry_tokens
            # With the next ones, as far as such a step costs anyway.
            self._spare_s = min(self.limit_s, 2.0 * judged.mixed_s) - judged.mixed_s
        self._take(places[0], tokens)
        if self.is_alone:
            self._spare_s = min(self._spare_s, self.account.credit_s)
        for place in places[1:]:  # nothing comes between the chunks of one
            if tokens < prefills.new[places[0]] or not self._ends_beside(place):
                break
            self._take(place, int(prefills.new[place]))

    def _left_over(self, place: int) -> int:
        """Tokens of one for which what is left over is enough.

        None if it has begun, would go on later, and others start: vLLM serves running requests
        before waiting ones, so that it would get their tokens too.
        """
        prefills, decode_s = self.judged.prefills, self.judged.decodes.decode_s
        tokens = self._tokens_in(place, decode_s + self._spare_s, self._room)
        goes_on = place < prefills.num_started and tokens < prefills.new[place]
        return 0 if goes_on and len(self._starts) else tokens

    def _ends_beside(self, place: int) -> bool:
        """Whether one ends in this step and displaces nobody."""
        prefills = self.judged.prefills
        if prefills.service_s[place] > self._spare_s or prefills.new[place] > self._room:
            return False
        if prefills.chunk[place] < prefills.new[place]:
            return False
        has_room = self._slots > 0 and self._blocks[place] <= self._free
        return place < prefills.num_started or has_room

    def _take(self, place: int, tokens: int) -> None:
        """Put a chunk into the step."""
        prefills = self.judged.prefills
        has = float(prefills.has[place])
        chunk_s = float(self.judged.state.cost.prefill_marginal_s(float(tokens), has))
        self._room -= tokens
        self._spare_s -= chunk_s
        if self.chosen or not self.is_alone:  # the first one alone is paid for
            self.received_s += chunk_s
        self.chosen.append(place)
        self.tokens += tokens
        if place >= prefills.num_started:
            self._slots -= 1
            self._free -= float(self._blocks[place])

    def _tokens_in(self, place: int, limit_s: float, room: int) -> int:
        """Tokens of one that a step of `limit_s` has time for; all or none of a whole prompt."""
        prefills, is_whole = self.judged.prefills, not self.judged.state.chunks_prefills
        need = int(prefills.chunk[place])
        ends = [float(need)] if is_whole else []
        tokens = min(need, tokens_in(self.judged, limit_s, room, float(prefills.has[place]), ends))
        return 0 if is_whole and tokens < need else tokens

    def _on_credit(self, place: int) -> int:
        """Tokens of one in a step without other prefills that the credit pays for; pays."""
        judged, account, prefills = self.judged, self.account, self.judged.prefills
        state, row = judged.state, prefills.rows[place]
        if account.credit_s <= 0 or self._is_upper_there(row):
            return 0
        need, has = int(prefills.chunk[place]), float(prefills.has[place])
        tokens = self._tokens_in(place, self.limit_s, self._room + self._entry_tokens)
        if not tokens and account.is_full:
            tokens = min(need, judged.tile) if state.chunks_prefills else need
        price_s = float(state.cost.prefill_marginal_s(float(tokens), has))
        if place >= prefills.num_started and state.table.num_preemptions[row]:
            # Its place in memory is worth what computing the KV that comes back would be.
            price_s = float(state.cost.prefill_marginal_s(tokens + has, 0.0))
        if not tokens or (account.credit_s < price_s and not account.is_full):
            return 0
        account.credit_s -= price_s
        return tokens

    def _is_upper_there(self, row: int) -> bool:
        """Whether a prefill of a higher class would have to wait for this one."""
        state, prefills = self.judged.state, self.judged.prefills
        if not state.has_ranks:
            return False
        rank = state.rank_of(np.append(prefills.rows[prefills.feasible], row))
        return bool((rank[:-1] < rank[-1]).any())


def find_victims(
    judged: Judged, admit: IntArray, lost: Share, served: IntArray, share: float
) -> IntArray:
    """Lost requests that leave for the slots and blocks this step needs, the youngest first.

    Those that sit out and, with swapping, decodes that run on what is left over.

    Args:
        judged: The requests.
        admit: Rows that start in the step.
        lost: What the lost get.
        served: Places of all prefills in the step.
        share: Of the engine time that is the lost's.
    """
    state, decodes, prefills = judged.state, judged.decodes, judged.prefills
    table, num_started = state.table, prefills.num_started
    if prefills.num_kept == num_started and decodes.num_alive == len(decodes.rows):
        return admit[:0]
    most = 1 + state.tokens_per_decode // state.block_size  # blocks of a decode
    if not len(admit) and state.num_free_blocks > most * len(decodes.rows):
        return admit
    is_held = decodes.lost.copy()
    is_held[_safe(judged, lost.run, share)] = False
    is_pending = ~prefills.feasible[:num_started]
    is_pending[served[served < num_started]] = False
    pending = prefills.rows[is_pending.nonzero()[0]]
    held: IntArray = np.concatenate([decodes.rows[is_held], pending])
    if not len(held):
        return held
    tokens = table.num_prompt[decodes.rows] + table.num_output[decodes.rows]
    size = np.concatenate([tokens[is_held], table.num_computed[pending]])
    stay = decodes.ctx[~is_held]
    blocks = int(blocks_of_step(stay, state.tokens_per_decode, state.block_size).sum())
    blocks += int(np.ceil(table.prefill_target[admit] / state.block_size).sum()) + 1
    order = np.argsort(-table.arrival_s[held], kind="stable")
    freed = (-(-size[order] // state.block_size)).cumsum()
    count = max(0, len(admit) - judged.num_free_slots)
    short = blocks - state.num_free_blocks
    if short > 0:
        count = max(count, int(freed.searchsorted(short, side="left")) + 1)
    victims: IntArray = held[order[:count]]
    return victims


def _safe(judged: Judged, run: IntArray, share: float) -> IntArray:
    """Of the lost decodes that run, those that no other request displaces.

    Without swapping all: they would lose their KV. With it, where memory is what is short, running
    on what is left over of the time must not keep it from those on time: the first by arrival
    stay, up to the share of the memory that the share of the time is.
    """
    state, decodes = judged.state, judged.decodes
    if state.reload_s_per_token == math.inf or not len(run):
        return run
    order: IntArray = run[state.table.arrival_s[decodes.rows[run]].argsort(kind="stable")]
    room = share * state.num_blocks * state.block_size
    count = int(decodes.ctx[order].cumsum().searchsorted(room, side="right"))
    return order[: max(1, count)]
