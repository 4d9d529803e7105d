"""Carrying a run out with a coroutine function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy.util import greenlet_spawn

from sqla_durable.asyncio.stepping import AsyncStepping
from sqla_durable.asyncio.tasks import Watch, awaited, wait_for
from sqla_durable.dispatch import AsyncWork, in_slot
from sqla_durable.execution import Outcome
from sqla_durable.holder import Holder
from sqla_durable.verbs import Verbs

A = TypeVar("A")


SteppingT = TypeVar("SteppingT", bound=AsyncStepping[Any])


async def carry_out(
    verbs: Verbs[Any],
    target: object,
    make: Callable[[Holder[Any]], SteppingT],
    handler: Callable[[SteppingT], Awaitable[object]],
    *,
    run_now: bool = False,
    at_once: bool = False,
) -> Outcome:
    """Carry a run out with a coroutine function, which is cancelled when the holder may not go on.

    :param target: a holder, or what :meth:`.Verbs.claim` takes.
    :param make: makes of a holder what the handler is called with.
    :param at_once: as for :meth:`.Verbs.begin`.
    """
    watch = Watch()

    async def handled(run: SteppingT) -> None:
        # A task begins late where another one blocks the loop; the run may be lost since it was fenced.
        if at_once and not run.holder.was_just_claimed():
            await run.renew()
        await awaited(handler(run), handler)

    def begin(holder: Holder[Any]) -> None:
        watch.spared = lambda: holder.issuing
        run = make(holder)
        wait_for(watch.guard(handled(run)), handler)
        run.refuse_unawaited()

    outcome = await greenlet_spawn(verbs.execute, target, begin, on_lost=watch.cancel, run_now=run_now, at_once=at_once)
    watch.pass_on()
    return outcome


def work_of(
    verbs: Verbs[Any], make: Callable[[Holder[Any]], SteppingT], handler: Callable[[SteppingT], Awaitable[object]]
) -> AsyncWork:
    """Return the runs of ``verbs`` together with the coroutine function that carries them out.

    :param make: makes of a holder what the handler is called with.
    """

    async def handled(run: SteppingT) -> None:
        with in_slot(asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            await awaited(handler(run), handler)

    def execute(holder: Holder[Any]) -> Coroutine[Any, Any, Outcome]:
        return carry_out(verbs, holder, make, handled, at_once=True)

    return AsyncWork(verbs, execute)
