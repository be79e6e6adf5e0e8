"""What those get who have lost their SLO, or never had one: leftovers, and a share of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import FloatArray, IntArray
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
    """Serve the lost, by arrival: the oldest also on credit, the others from what is left over.

    Args:
        judged: The requests.
        entry: The other prefills of the step.
        limit_s: Time for the step, seconds.
        account: Of the lost; what they get is booked.
        rejects: Whether those without a first token in time will not be there any more.
    """
    decodes, prefills = judged.decodes, judged.prefills
    was_blocked, account.is_blocked = account.is_blocked, False
    if prefills.num_feasible == len(prefills.rows) and decodes.num_alive == len(decodes.rows):
        account.forget()
        return Share(decodes.rows[:0], decodes.rows[:0])
    is_lost = ~prefills.feasible
    if rejects:
        is_lost[prefills.num_started :] &= ~prefills.hopeless[prefills.num_started :]
    (places,), (held,) = is_lost.nonzero(), decodes.lost.nonzero()
    if not len(places) and not len(held):
        account.forget()
        return Share(held, places)
    account.earn(judged.state.elapsed_s)
    step = _LostStep(judged, entry, limit_s, account)
    arrival_s, first, most = judged.state.table.arrival_s, len(held), judged.tuning.num_lost
    if len(places) > most:
        places = places[arrival_s[prefills.rows[places]].argpartition(most)[:most]]
    rows = np.concatenate([decodes.rows[held], prefills.rows[places]])
    places = np.concatenate([held, places])
    cost, ctx = judged.state.cost, decodes.ctx[held]
    added_s = cost.decode_s(2.0, ctx) - cost.decode_s(1.0, 0.0)
    order = arrival_s[rows].argsort(kind="stable")
    num_before = int((order >= first).argmax()) if len(rows) > first else first
    num_first = step.add_decodes(held[order[:num_before]], added_s[order[:num_before]])
    for index in order[num_first:].tolist():
        if step.is_full:
            break
        if index < first:
            step.add_decode(int(places[index]), float(added_s[index]))
        else:
            step.add_prefill(int(places[index]))
    if step.is_blocked:  # what others get from slack while the oldest finds no room is no debt
        account.is_blocked = was_blocked or account.is_full
    else:
        account.receive(step.received_s)
    run, chosen = (np.array(x, dtype=np.int64) for x in (step.run, step.chosen))
    return Share(run, chosen, step.tokens, step.is_alone)


class _LostStep:
    """What the lost get in one step, and what is left over for the next of them.

    Attributes:
        run, chosen, tokens, is_alone: As in `Share`.
        is_blocked: The oldest lost prefill finds neither slot nor memory, also of those that sit
            out.
        received_s: Time of what the others left over that they got, seconds.
    """

    def __init__(self, judged: Judged, entry: Entry, limit_s: float, account: Account) -> None:
        self.judged, self.account, self.limit_s = judged, account, limit_s
        state, decodes, prefills = judged.state, judged.decodes, judged.prefills
        self.run: list[int] = []
        self.chosen: list[int] = []
        self.tokens, self.received_s = 0, 0.0
        self.is_alone = self.is_blocked = self.is_full = False
        self._is_passed = False  # somebody older waits: those after it get leftovers only
        self._is_closed = False  # for prompts: the next one does not fit
        self._starts = entry.served[entry.served >= prefills.num_started]
        self._room, self._entry_tokens = judged.token_room - entry.tokens, entry.tokens
        self._spare_s = 0.0
        if not entry.has_backlog:
            chunk_s = float(state.cost.prefill_marginal_s(float(entry.tokens), 0.0))
            self._spare_s = limit_s - decodes.decode_s - chunk_s
        self._blocks = prefills.size / state.block_size + 1.0  # one to spare
        # Free, and what decodes that sit out could give.
        self._slots = judged.num_free_slots - len(self._starts)
        self._free = state.num_free_blocks - float(self._blocks[self._starts].sum())
        self._held_slots = len(decodes.rows) - decodes.num_alive
        self._held_blocks = float(decodes.ctx[decodes.lost].sum()) / state.block_size

    def add_decodes(self, places: IntArray, added_s: FloatArray) -> int:
        """The first of these, for which the leftovers are enough; how many."""
        ends_s = added_s.cumsum()
        count = int(ends_s.searchsorted(self._spare_s, side="right"))
        if count:
            self._spare_s -= float(ends_s[count - 1])
            self.received_s += float(ends_s[count - 1])
            self.run += places[:count].tolist()
            self._room -= count * self.judged.state.tokens_per_decode
            self._held_slots -= count
            tokens = float(self.judged.decodes.ctx[places[:count]].sum())
            self._held_blocks -= tokens / self.judged.state.block_size
        return count

    def add_decode(self, place: int, added_s: float) -> None:
        """One that goes on for so many seconds; on credit only while nobody older waits."""
        judged, account = self.judged, self.account
        is_next = not self._is_passed and not self.chosen
        if self.is_alone:
            return
        if added_s <= self._spare_s and (is_next or self._keeps_its_kv()):
            self._spare_s -= added_s
            self.received_s += added_s
        elif is_next and account.credit_s > 0:
            account.credit_s -= added_s
        else:
            self._is_passed = True
            return
        self.run.append(place)
        self._room -= judged.state.tokens_per_decode
        self._held_slots -= 1
        self._held_blocks -= float(judged.decodes.ctx[place]) / judged.state.block_size

    def _keeps_its_kv(self) -> bool:
        """Whether one more of those that sit out may go on: nobody who starts needs its KV."""
        is_room = self._room >= self.judged.state.tokens_per_decode
        has_slot = self._held_slots + min(0, self._slots) > 0
        return is_room and has_slot and self._free >= len(self.judged.decodes.rows)

    def add_prefill(self, place: int) -> None:
        """One that goes on or starts: the oldest also in part, on credit, and for held KV."""
        judged = self.judged
        if self._is_passed or self.chosen:
            self._add_beside(place)
            return
        self._is_passed = True
        is_waiting = place >= judged.prefills.num_started
        blocks = float(self._blocks[place])
        starting = float(self._blocks[self._starts].sum())
        slots, free = self._slots + self._held_slots, self._free + self._held_blocks
        self.is_blocked = is_waiting and (
            slots + len(self._starts) <= 0 or free + starting <= blocks
        )
        if self.is_blocked:
            return
        tokens = 0
        if not is_waiting or (slots > 0 and free > blocks):
            tokens = self._tokens_in(place, judged.decodes.decode_s + self._spare_s, self._room)
        if tokens and not self._takes_from_others(place, tokens):
            self._take(place, tokens)
            return
        tokens = self._on_credit(place)
        if tokens:
            self.is_alone = True
            self._slots += len(self._starts)
            self._free += starting
            self._room += self._entry_tokens
            # With the next ones, as far as such a step costs anyway.
            self._spare_s = min(self.limit_s, 2.0 * judged.mixed_s) - judged.mixed_s
            self._take(place, tokens, on_credit=True)
            self._spare_s = min(self._spare_s, self.account.credit_s)

    def _add_beside(self, place: int) -> None:
        """One that ends in this step and displaces nobody; no prompt passes an older one.

        It starts with slots and memory to spare, so that those that arrive next find room. While
        the oldest finds no room, one that has begun goes on.
        """
        judged, prefills = self.judged, self.judged.prefills
        has_begun = place < prefills.num_started
        if self._spare_s <= 0 or self._room <= 0:
            self.is_full = True
        if self.is_full or self._is_closed:
            return
        need = int(prefills.new[place])
        if self.chosen:
            fits = prefills.service_s[place] <= self._spare_s and need <= self._room
            self._is_closed = not fits or not (has_begun or self._has_spare_room(place))
        elif self.is_blocked and has_begun:
            limit_s = judged.decodes.decode_s + self._spare_s
            need = self._tokens_in(place, limit_s, self._room)
            self._is_closed = not need or self._takes_from_others(place, need)
        else:
            self._is_closed = not self.is_blocked
            return
        if not self._is_closed:
            self._take(place, need)

    def _has_spare_room(self, place: int) -> bool:
        """Whether one may start and leave slots and memory for those that arrive next."""
        state, tuning = self.judged.state, self.judged.tuning
        slots = self._slots - int(tuning.spare_slots * state.max_num_running)
        blocks = self._free - int(tuning.spare_blocks * state.num_blocks)
        return slots > 0 and float(self._blocks[place]) <= blocks

    def _take(self, place: int, tokens: int, *, on_credit: bool = False) -> None:
        """Put a chunk into the step."""
        prefills = self.judged.prefills
        has = float(prefills.has[place])
        chunk_s = float(self.judged.state.cost.prefill_marginal_s(float(tokens), has))
        self.chosen.append(place)
        self.tokens += tokens
        self._room -= tokens
        self._spare_s -= chunk_s
        self.received_s += 0.0 if on_credit else chunk_s
        if place >= prefills.num_started:
            self._slots -= 1
            self._free -= float(self._blocks[place])
        self.is_full = tokens < prefills.new[place]  # nothing may come between its chunks

    def _takes_from_others(self, place: int, tokens: int) -> bool:
        """Whether more of it would go in than planned, from those admitted beside it.

        vLLM serves running requests before waiting ones, as long as there is budget.
        """
        prefills = self.judged.prefills
        has_begun = place < prefills.num_started
        return has_begun and tokens < prefills.new[place] and len(self._starts) > 0

    def _tokens_in(self, place: int, limit_s: float, room: int) -> int:
        """Tokens of one that a step of `limit_s` has time for; all or none of a whole prompt."""
        prefills, is_whole = self.judged.prefills, not self.judged.state.chunks_prefills
        need = int(prefills.new[place])
        ends = [float(need)] if is_whole else []
        tokens = min(need, tokens_in(self.judged, limit_s, room, float(prefills.has[place]), ends))
        return 0 if is_whole and tokens < need else tokens

    def _on_credit(self, place: int) -> int:
        """Tokens of one in a step without other prefills that the credit pays for; pays."""
        judged, account, prefills = self.judged, self.account, self.judged.prefills
        state, row = judged.state, prefills.rows[place]
        if account.credit_s <= 0 or self._is_upper_there(row):
            return 0
        need, has = int(prefills.new[place]), float(prefills.has[place])
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
    if not len(admit) and state.num_free_blocks > len(decodes.rows):
        return admit  # a decode takes one block at most
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
    blocks = int((tokens[~is_held] % state.block_size == 0).sum())
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
