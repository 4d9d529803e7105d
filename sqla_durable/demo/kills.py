"""When the processes are killed, and the loop that starts the next one each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Protocol

from sqla_durable.demo.exc import DemoError
from sqla_durable.demo.plan import Action, Label
from sqla_durable.demo.process import Process
from sqla_durable.demo.watch import Sight, Watch

_PATIENCE = 60.0
_BETWEEN_LOOKS = 0.003
_LONGER_THAN_A_STEP = 0.03
_LANDING = 0.001
_SLICE = 0.0002


@dataclass(frozen=True)
class Instant:
    """When to kill: ``delay`` seconds after the process has a claim and ``steps`` receipts are there."""

    steps: int
    delay: float


@dataclass(frozen=True)
class Kill:
    """A process that was killed, and what it was at."""

    process: int
    inside: bool
    """Whether a transaction was open, which PostgreSQL then rolled back."""
    where: str
    landed: bool = False
    """Whether the plan had landed before."""


class Audience(Protocol):
    """Is told what happens."""

    def saw(self, process: Process, sight: Sight) -> None:
        """The plan was looked at while a process carries it out."""

    def killed(self, kill: Kill) -> None:
        """A process was killed."""


def instants(kills: int, steps: int, chance: Random) -> list[Instant]:
    """Choose when to kill: anywhere in the plan, and of five kills or more the last two at its landing.

    :param kills: how often to kill.
    :param steps: how many steps the plan has.
    :param chance: the source of chance; the same seed chooses the same instants.
    """
    landing = 0 if kills <= 1 else 1 if kills < 5 else 2  # noqa: PLR2004
    anywhere = sorted(chance.randrange(max(1, steps - 2)) for _ in range(kills - landing))
    return [
        *(Instant(done, chance.uniform(0, _LONGER_THAN_A_STEP)) for done in anywhere),
        *(Instant(steps, chance.uniform(0, _LANDING)) for _ in range(landing)),
    ]


class Killer:
    """Starts processes that carry the plan out, one after the other, and kills them.

    :param watch: sees the plan.
    :param actions: the plan's actions.
    :param start: starts the process with the given number.
    :param audience: is told what happens.
    """

    def __init__(
        self, watch: Watch, actions: Sequence[Action], start: Callable[[int], Process], audience: Audience
    ) -> None:
        self._watch, self._actions, self._start, self._audience = watch, actions, start, audience

    def run(self, instants: Sequence[Instant]) -> list[Kill]:
        """Carry the plan out, killing at the given instants; then, if it is not finished, let a process end by itself.

        :return: the kills.
        :raises DemoError: where a process fails, or nothing happens for a minute.
        """
        kills: list[Kill] = []
        for number in count(1):
            with self._start(number) as process:
                if len(kills) == len(instants):
                    self._until(process, lambda _: False)
                elif self._reaches(process, instants[len(kills)]):
                    kills.append(self._kill(process))
                    self._audience.killed(kills[-1])
            sight = self._watch.look()
            if sight.landed and (sight.error is not None or len(kills) == len(instants)):
                break
        return kills  # a plan that has failed gets no more of them

    def _reaches(self, process: Process, instant: Instant) -> bool:
        """Wait for the instant; False where the process ended before."""
        before = self._watch.look()
        if before.landed:
            return self._until(process, lambda _: self._watch.connected(process.name))
        at_the_landing = instant.steps == len(self._actions)
        steps = instant.steps - 1 if at_the_landing else instant.steps
        if not self._until(process, lambda sight: sight.fence > before.fence and len(sight.steps) >= steps):
            return False
        if at_the_landing:
            self._creep(process)
        time.sleep(instant.delay)
        return not process.ended

    def _until(self, process: Process, reached: Callable[[Sight], bool]) -> bool:
        """Watch the process until the plan is as it should be; False where it ended before."""
        last, deadline = None, time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            ended = process.ended
            sight = self._watch.look()
            self._audience.saw(process, sight)
            if ended or reached(sight):
                return not ended
            if sight != last:
                last, deadline = sight, time.monotonic() + _PATIENCE
            time.sleep(_BETWEEN_LOOKS)
        raise DemoError(f"process {process.pid} has done nothing for {_PATIENCE:.0f} s.")

    def _creep(self, process: Process) -> None:
        """Let the last step pass in slices: the landing after it is so short that a look from outside misses it."""
        while not process.ended:
            process.freeze()
            done = len(self._watch.look().steps) == len(self._actions)
            process.thaw()
            if done:
                break
            time.sleep(_SLICE)

    def _kill(self, process: Process) -> Kill:
        process.freeze()
        statement = self._watch.transaction_of(process.name)
        sight = self._watch.look()
        self._audience.saw(process, sight)
        process.kill()
        inside = statement is not None and not sight.landed
        return Kill(process.pid, inside, self._place(sight, statement), sight.landed)

    def _place(self, sight: Sight, statement: str | None) -> str:
        position = len(sight.steps)
        if sight.landed:
            return "after the landing"
        if position == len(self._actions):
            return "before the landing" if statement is None else "inside the landing's transaction"
        if statement is not None:
            return f"{'between the two writes of' if 'pg_sleep' in statement else 'inside'} step {position}"
        if isinstance(self._actions[position], Label):
            return f"just before, during or just after the printing of step {position}"
        return f"between two steps, before step {position}"
