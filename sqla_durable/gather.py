"""A few independent calls at once, each a step with a receipt of its own.

The calls are made beside each other, in threads or tasks; all that is written is written by whoever has asked for them,
one receipt after the other, as the calls end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sqla_durable.codec import Codec, codec_for
from sqla_durable.exc import HolderError, LostLease, ReceiptMismatch, StepReused
from sqla_durable.holder import Given, Holder
from sqla_durable.receipt import Effect

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[ResultT_co]):
    """One step of :meth:`.Run.gather`, made by :func:`~sqla_durable.call` or :func:`~sqla_durable.keyed_call`.

    :param key: the step's key.
    :param fn: what is called.
    :param args: its positional arguments; of a keyed one, without the idempotency key.
    :param kwargs: its keyword arguments.
    :param effect: how often its effect happens.
    """

    key: str | int
    fn: Callable[..., ResultT_co]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    effect: Effect


def call(key: str | int, fn: Callable[P, ResultT], /, *args: P.args, **kwargs: P.kwargs) -> Call[ResultT]:
    """Return an external step for :meth:`.Run.gather`; nothing is called yet. See :meth:`.Run.external`."""
    return Call(key, fn, args, kwargs, Effect.EXTERNAL)


def keyed_call(
    key: str | int, fn: Callable[Concatenate[str, P], ResultT], /, *args: P.args, **kwargs: P.kwargs
) -> Call[ResultT]:
    """Return a keyed step for :meth:`.Run.gather`; nothing is called yet. See :meth:`.Run.keyed`."""
    return Call(key, fn, args, kwargs, Effect.KEYED)


class _Member:
    """One of the calls, and what has become of it."""

    def __init__(self, holder: Holder[Any], asked: Call[Any], name: str) -> None:
        self.asked = asked
        self.name = name
        self.codec: Codec[Any] = codec_for(asked.fn)
        self.leading = (holder.idempotency_key(asked.key),) if asked.effect is Effect.KEYED else ()
        self.fingerprint: str | None = None
        self.value: Any = None
        self.error: Exception | None = None

    @property
    def given(self) -> Given:
        return self.asked.fn, self.asked.args, self.asked.kwargs


def gathered(holder: Holder[Any], calls: Sequence[Call[Any]], make: Callable[..., Any]) -> tuple[Any, ...]:
    """Make the calls that have no receipt at once, and return the results of all in order.

    :param make: calls a function of the user's with arguments, and waits for its result.
    :raises ExceptionGroup: where several have failed; a single failure is raised as it is.
    """
    members = _taken(holder, calls)
    live = [member for member in members if not _answered(holder, member)]
    if live:
        holder.refuse_lost()
        _carry_out(holder, live, make)
    errors = [member.error for member in members if member.error is not None]
    if len(errors) > 1:
        raise ExceptionGroup(f"{len(errors)} of {len(members)} calls failed", errors)
    if errors:
        raise errors[0]
    # Not before: where one has failed, the same calls may be gathered again, and the others answer from receipts.
    holder.use_up(member.name for member in members)
    return tuple(member.value for member in members)


def _taken(holder: Holder[Any], calls: Sequence[Call[Any]]) -> list[_Member]:
    members: list[_Member] = []
    for asked in calls:
        name = holder.take(asked.key)
        if name in {member.name for member in members}:
            raise StepReused(f"step {name!r} is gathered twice; each call needs a key of its own.")
        members.append(_Member(holder, asked, name))
    return members


def _answered(holder: Holder[Any], member: _Member) -> bool:
    """Answer a call from its receipt, if it has one. Nothing is called where one does not fit."""
    if (known := holder.answer(member.name)) is None:
        return False
    try:
        with holder.raising(member.name):
            member.value = holder.replay(known, member.asked.effect, member.codec, member.given)
    except (ReceiptMismatch, HolderError):
        raise
    except Exception as error:  # noqa: BLE001 - it is raised when the others have ended
        member.error = error
    return True


def _carry_out(holder: Holder[Any], live: Sequence[_Member], make: Callable[..., Any]) -> None:
    """Make calls beside each other, and record each as it ends.

    :raises LostLease: where the fence has moved on, when all calls have ended.
    """
    lost: HolderError | None = None
    for member in live:
        member.fingerprint = holder.fingerprint(member.given)
    calls: list[Callable[[], Any]] = [partial(_made, holder, member, make) for member in live]
    with closing(holder.store.sessions.concurrently(calls)) as ended:
        for position, called in ended:
            member = live[position]
            if lost is not None:
                continue  # nothing can be recorded any more
            try:
                member.value = holder.settle(member.name, member.asked.effect, member.codec, called, member.fingerprint)
            except Exception as error:  # noqa: BLE001 - it is raised when the others have ended
                if isinstance(error, LostLease) and error.lease == holder.lease:
                    lost = error
                member.error = error
    if lost is not None:
        raise lost


def _made(holder: Holder[Any], member: _Member, make: Callable[..., Any]) -> Any:
    asked = member.asked
    with holder.within(member.name):
        return make(asked.fn, *member.leading, *asked.args, **asked.kwargs)
