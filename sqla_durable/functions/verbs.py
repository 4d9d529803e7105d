"""The verbs on functions, once for both forms: what :class:`.Functions` and its asyncio twin call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, cast
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Text, and_, func, not_, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import JSONB

from sqla_durable import clock, fence, listing
from sqla_durable.attempts import UNLIMITED
from sqla_durable.caller import AnySession, unproxied
from sqla_durable.claims import Claims
from sqla_durable.codec import codec_of
from sqla_durable.exc import (
    ConfigurationError,
    InputError,
    ReceiptMismatch,
    RunCancelled,
    RunFailed,
    RunInputMismatch,
    RunNotLanded,
    RunTimedOut,
    UsageError,
)
from sqla_durable.execution import Ending, Outcome
from sqla_durable.failure import Failure
from sqla_durable.functions.claims import FunctionClaims
from sqla_durable.functions.definition import AnyBody, Definition, Registry
from sqla_durable.functions.forking import Fork
from sqla_durable.functions.handle import FunctionHandle
from sqla_durable.functions.model import FunctionMixin, FunctionRows, FunctionStatus, FunctionT
from sqla_durable.functions.starting import StartMany
from sqla_durable.functions.summary import FunctionSummary
from sqla_durable.functions.waiting import Waiting, by_key, found, known_id, named
from sqla_durable.ground import Sessions
from sqla_durable.holder import Holder
from sqla_durable.prepared import Prepared
from sqla_durable.receipt import Receipt, StepOutcome, parsed
from sqla_durable.rows import AnyRow, Ident, bound
from sqla_durable.sqlstate import translated
from sqla_durable.start import refuse_instant, refuse_key
from sqla_durable.step_key import stored_key
from sqla_durable.store import Store
from sqla_durable.verbs import Verbs


class FunctionVerbs(Verbs[FunctionT]):
    """Everything that :class:`.Functions` can do.

    :param sessions: where sessions come from.
    :param run: the run class.
    :param receipt: its receipt class.
    :param signals: its signal class, if it has one.
    :param owner: the holder's name.
    :param registry: the functions that this process knows.
    """

    summary = FunctionSummary

    def __init__(
        self,
        sessions: Sessions,
        run: type[FunctionT],
        receipt: type[Any],
        signals: type[Any] | None,
        owner: str | None,
        registry: Registry,
    ) -> None:
        mapped = cast(object, run)
        if not (isinstance(mapped, type) and issubclass(mapped, FunctionMixin)):
            raise ConfigurationError(
                f"{mapped!r} is not the run class of functions; declare it as class DurableRun(FunctionMixin, Base)."
            )
        self.registry = registry
        super().__init__(Store(sessions, run, receipt, signals), owner)
        self.rows = cast("FunctionRows[FunctionT]", self.runs)
        self.waiting = Waiting(self.store, self.rows)

    def claims_of(self, owner: str | None) -> Claims[FunctionT]:
        """Make what claims its runs."""
        return FunctionClaims(self.store, self.reading, owner, self.registry)

    def named(self, holder: Holder[FunctionT]) -> str:
        """Return how the log calls a run."""
        # What is loaded: to say it must neither send a statement nor raise.
        row = vars(holder.row)
        words = {"function": "of function", "idempotency_key": "with the key", "tenant": "of tenant"}
        said = [f"{word} {row[name]!r}" for name, word in words.items() if row.get(name) is not None]
        return " ".join([super().named(holder), *said])

    def knows(self) -> Sequence[str]:
        """Return the names of the functions that this process knows."""
        return self.registry.names()

    def starts(self) -> Sequence[str]:
        """Return the names of the functions that can be started, of those that are included, too."""
        return self.registry.all_names()

    def limit_of_tenants(self) -> int | None:
        """Return how many runs of the table one tenant may have live."""
        return self.registry.concurrency_per_tenant

    def include(self, other: object) -> None:
        """See :meth:`.Functions.include`."""
        works = getattr(other, "works", None)
        others: Any = None if works is None or isinstance(other, type) else works()[0].verbs
        if not issubclass(type(others), FunctionVerbs):
            raise ConfigurationError(f"include({other!r}): pass Functions or AsyncFunctions.")
        entity, own = others.runs.entity, self.runs.entity
        if entity is not own:
            raise ConfigurationError(
                f"include({other!r}): these have their runs in {entity.__name__}, and not in {own.__name__}; start "
                "them there."
            )
        self.registry.include(others.registry)

    # starting

    def start_function(
        self,
        session: AnySession,
        function: AnyBody | str,
        given: tuple[object, ...],
        key: str | None,
        values: dict[str, Any],
    ) -> FunctionHandle[Any]:
        """See :meth:`.Functions.start`."""
        definition = self.registry.of(function)
        run: Any = self.start(session, key, self._values(definition, given, values))
        return FunctionHandle(definition.name, run.id, key, run.tenant)

    def start_many(
        self,
        session: AnySession,
        function: AnyBody | str,
        inputs: Sequence[tuple[object, ...]],
        keys: Sequence[str] | None,
        values: dict[str, Any],
    ) -> list[FunctionHandle[Any]]:
        """See :meth:`.Functions.start_many`."""
        definition = self.registry.of(function)
        every = [self._values(definition, given, values) for given in inputs]
        session = unproxied(session)
        session.flush()
        with translated():
            connection = self.store.callers_connection(session)
            started = StartMany(self.rows, connection, notify=not session.twophase).run(every, keys)
        tenant = values.get("tenant")
        names: Sequence[str | None] = [None] * len(started) if keys is None else keys
        return [FunctionHandle(definition.name, ident, key, tenant) for ident, key in zip(started, names, strict=True)]

    def _values(self, definition: Definition, given: tuple[object, ...], values: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of a run that is to be started."""
        text = definition.encode(given)
        retry = definition.retry
        own: dict[str, Any] = {
            "function": definition.name,
            "input": parsed(text),
            "max_duration": definition.max_duration,
        }
        if retry is not None:
            own["max_attempts"] = UNLIMITED if retry.max_attempts is None else retry.max_attempts
        if twice := sorted({*own, "max_attempts"}.intersection(values)):
            raise UsageError(f"start({twice[0]}=...) is said by the function itself; leave it out.")
        return own | _given(values)

    def decode_input(self, function: AnyBody | str, value: object) -> Any:
        """See :meth:`.Functions.decode_input`."""
        definition = self.registry.of(function)
        if definition.input is None:
            raise InputError(f"function {definition.name!r} takes no input, and was given {value!r:.200}.")
        try:
            return definition.input.decode(value, "input")
        except ReceiptMismatch as error:
            why = " ".join(str(error.__cause__ or error).split())
            takes = definition.input.annotation
            raise InputError(f"function {definition.name!r} takes {takes}, not {value!r:.200}: {why}") from error

    def fork(
        self,
        session: AnySession,
        handle: FunctionHandle[Any],
        from_step: str | int,
        key: str | None,
        values: dict[str, Any],
    ) -> FunctionHandle[Any]:
        """See :meth:`.Functions.fork`."""
        if twice := sorted({"function", "input", "tenant", "max_attempts"}.intersection(values)):
            raise UsageError(f"fork({twice[0]}=...) is that of the run that is forked; leave it out.")
        given = _given(values)
        step = stored_key(from_step)
        session = unproxied(session)
        session.flush()
        with translated():
            connection = self.store.callers_connection(session)
            source = self.id_of(connection, handle)
            former = self.registry.former_keys(handle.function, step)
            forking = Fork(self.rows, self.store.receipts, connection, notify=not session.twophase)
            row = forking.run(source, [step, *former], key, given)
        return FunctionHandle(row[1], row[0], key, row[2])

    # carrying out

    def prepare(self, holder: Holder[FunctionT]) -> tuple[Definition, tuple[Any, ...]]:
        """Return the function of a claimed run and what its body is called with, having set its retry policy."""
        row = holder.row
        definition = self.registry.of(row.function)
        if definition.retry is not None:
            holder.raised.retry = definition.retry
        holder.changes = definition.changes
        try:
            return definition, definition.arguments(self._input(holder, row))
        except RunInputMismatch as error:
            holder.mismatched(error)

    def _input(self, holder: Holder[FunctionT], row: FunctionT) -> Any:
        """Return the input of a run, as this library parses JSON: the user's engine may do that its own way."""
        dialect: Any = self.store.engine.dialect
        if dialect._json_deserializer is None:  # noqa: SLF001 - what create_engine(json_deserializer=) was given
            return row.input
        statement = select(sql_cast(self.rows.input, Text)).where(self.runs.matches())
        parameters = self.runs.parameters(holder.lease.identity)
        text: str | None = self.store.single(lambda connection: connection.scalar(statement, parameters))
        return parsed(text)

    def returned(self, holder: Holder[FunctionT], definition: Definition, result: object) -> None:
        """Take what a body has returned as the result of the whole run, to be written by its landing.

        :raises ResultError: where it would not come back equal.
        :raises StepUnreached: where a step that has a receipt was not reached.
        """
        holder.refuse_unreached()
        holder.output, _ = definition.output.round_trip(result, f"the end of {definition.name}")

    def publish(self, holder: Holder[FunctionT], state: object) -> None:
        """See :meth:`.FunctionRun.publish`."""
        holder.refuse_nested("publish")
        holder.refuse_lost()
        text = codec_of(Any).encode(state, "publish")
        parameters = self.store.parameters(holder.lease, state=text)
        self.store.write(holder.lease, lambda connection: self._publish.first(connection, parameters))

    def _answer(self, identity: Ident, connection: Connection) -> Outcome:
        outcome = super()._answer(identity, connection)
        if outcome.ending is Ending.NOT_CLAIMABLE:
            statement = select(self.rows.function).where(self.runs.matches())
            self.registry.refuse_included(connection.execute(statement, self.runs.parameters(identity)).scalar_one())
        return outcome

    # the caller's and the operator's verbs

    def cancel_function(self, session: AnySession, handle: FunctionHandle[Any] | UUID) -> bool:
        """See :meth:`.Functions.request_cancel`."""
        return self.request_cancel(session, self.ident(handle, session))

    def signal(
        self, session: AnySession, handle: FunctionHandle[Any] | UUID, name: str, payload: object, type_: Any
    ) -> bool:
        """See :meth:`.Functions.signal`."""
        return self.sending.signal(session, self.ident(handle, session), name, payload, type_)

    def update(
        self,
        handle: FunctionHandle[Any] | UUID,
        name: str,
        payload: object,
        type_: Any,
        returns: Any,
        timeout: timedelta,
    ) -> Any:
        """See :meth:`.Functions.update`."""
        return self.sending.update(self.ident(handle), name, payload, type_, returns, timeout, named(handle))

    def requeue_function(self, handle: FunctionHandle[Any] | UUID) -> bool:
        """See :meth:`.Functions.requeue`."""
        return self.requeue(self.ident(handle))

    # observing

    def handle(
        self, function: AnyBody | str, key: str | None, tenant: str | None, ident: UUID | None
    ) -> FunctionHandle[Any]:
        """See :meth:`.Functions.handle`."""
        if (key is None) is (ident is None):
            raise UsageError("handle(): say which run it is as key= or as id=, one of them.")
        if ident is None:
            refuse_key(self.rows, key)
        elif tenant is not None:
            raise UsageError(f"handle(tenant={tenant!r}): tenant= goes with key=; an id is that of one run.")
        elif not isinstance(cast(object, ident), UUID):
            raise UsageError(f"handle(id={ident!r}) is no UUID; pass UUID({ident!r}).")
        return FunctionHandle(self.registry.of(function).name, ident, key, tenant)

    def on(self, session: AnySession | None, work: Callable[[Connection], Any]) -> Any:
        """Read something in the caller's transaction, or else by itself."""
        if session is None:
            return self.store.single(work)
        session = unproxied(session)
        with translated():
            return work(self.store.callers_connection(session))

    def id_of(self, connection: Connection, handle: FunctionHandle[Any] | UUID) -> UUID:
        """Return the primary key that a handle stands for, having looked it up by the key where it is not known.

        :raises RunNotFound: where there is no such run.
        """
        if (known := known_id(handle)) is not None:
            return known
        row = connection.execute(select(self.rows.id).where(*by_key(self.rows, handle))).first()
        return cast(UUID, found(row, handle)[0])

    def ident(self, handle: FunctionHandle[Any] | UUID, session: AnySession | None = None) -> UUID:
        """Return the primary key that a handle stands for; see :meth:`id_of`."""
        known = known_id(handle)
        return known or cast(UUID, self.on(session, lambda connection: self.id_of(connection, handle)))

    def describe_function(self, handle: FunctionHandle[Any] | UUID, session: AnySession | None) -> FunctionSummary:
        """See :meth:`.Functions.describe`."""

        def work(connection: Connection) -> FunctionSummary:
            ident = self.id_of(connection, handle)
            return cast(FunctionSummary, found(self.described(connection, (ident,)), handle))

        return cast(FunctionSummary, self.on(session, work))

    def steps_of(self, handle: FunctionHandle[Any] | UUID, session: AnySession | None) -> tuple[Receipt, ...]:
        """See :meth:`.Functions.steps`."""

        def work(connection: Connection) -> tuple[Receipt, ...]:
            return self.reading.receipts(connection, (self.id_of(connection, handle),))

        return cast("tuple[Receipt, ...]", self.on(session, work))

    def wait(self, handle: FunctionHandle[Any] | UUID, timeout: timedelta | None) -> AnyRow:
        """See :meth:`.Functions.wait`; return how it has ended."""
        return self.waiting.until_landed(handle, timeout)

    def result(self, handle: FunctionHandle[Any] | UUID, timeout: timedelta | None, session: AnySession | None) -> Any:
        """See :meth:`.Functions.result`."""

        def check(row: AnyRow) -> Definition:
            _refuse_other(handle, row.function)
            return self.registry.of(row.function)

        if session is None:
            row = self.waiting.until_landed(handle, timeout, check)
        else:
            row = self.on(session, lambda connection: self.waiting.ending(connection, handle))
            if not self.waiting.has_landed(row):
                raise RunNotLanded(
                    f"{named(handle)} is {row.status.value} still; it is waited for without session= only."
                )
        _refuse_other(handle, row.function)
        lifecycle = self.runs.lifecycle
        if row.status == lifecycle.done:
            return self.registry.of(row.function).output.decode(parsed(row.output), f"the end of {row.function}")
        failure = None if row.error is None else Failure.from_json(json.loads(row.error))
        kinds = {lifecycle.cancelled: RunCancelled, lifecycle.timed_out: RunTimedOut}
        said = "" if failure is None else f": {failure.type}: {failure.message}"
        raise kinds.get(row.status, RunFailed)(f"{named(handle)} is {row.status.value}{said}", row.status, failure)

    def counts_by_function(self, conditions: Mapping[str, Any]) -> dict[str, dict[FunctionStatus, int]]:
        """See :meth:`.Functions.counts`."""
        statement = listing.counts(self.runs, self.wanted(**conditions), [self.rows.function])
        counted: dict[str, dict[FunctionStatus, int]] = {}
        rows = self.store.single(lambda connection: connection.execute(statement).all())
        for name, status, count in map(tuple[Any, ...], rows):
            counted.setdefault(name, dict.fromkeys(FunctionStatus, 0))[status] = count
        return counted

    @cached_property
    def _publish(self) -> Prepared:
        changes = {self.rows.state: sql_cast(bound("state", Text()), JSONB)}
        locking = self.runs.lock(self.runs.matches(), fence.holding(self.runs))
        return self.store.prepare(self.runs.update(locking, changes).returning(self.runs.fence), "fence")

    def extras(self) -> Sequence[ColumnElement[Any]]:
        """What is read for a :class:`.FunctionSummary` beside what every run has."""
        runs, receipts = self.rows, self.store.receipts
        own = [column == key for column, key in zip(receipts.run_key, runs.key, strict=True)]
        done = receipts.outcome == StepOutcome.SUCCEEDED.value
        steps = select(func.count()).select_from(receipts.table).where(*own, done).scalar_subquery()
        last = select(receipts.step).where(*own, done).order_by(receipts.recorded_at.desc()).limit(1).scalar_subquery()
        columns = runs.function, runs.tenant, runs.priority
        return [*cast("Sequence[ColumnElement[Any]]", columns), steps, last, sql_cast(runs.state, Text)]

    def wanted(
        self,
        *,
        function: AnyBody | str | None = None,
        tenant: str | None = None,
        waiting: bool | None = None,
        **conditions: Any,
    ) -> list[ColumnElement[bool]]:
        """Return the conditions that a caller of ``find`` asks for."""
        runs, found = self.rows, super().wanted(**conditions)
        if function is not None:
            name = function if isinstance(function, str) else self.registry.of(function).name
            found.append(runs.function == name)
        if tenant is not None:
            found.append(runs.tenant == tenant)
        if waiting is not None:
            waits = and_(runs.in_status(runs.lifecycle.ready), runs.available_at > clock.now())
            found.append(waits if waiting else not_(waits))
        return found


def _refuse_other(handle: object, function: str) -> None:
    """Refuse a handle that calls a run one of another function, whose result is of another type."""
    if isinstance(handle, FunctionHandle) and handle.function != function:
        raise UsageError(f"the run {handle.id} is one of function {function!r}, not of {handle.function!r}.")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that a caller has given; None is the default of its column, as in a flush.

    :raises UsageError: for a time at which no run can be due, which is called as the caller has called it.
    """
    if "available_at" in values:
        raise UsageError(f"available_at={values['available_at']!r}: a function's run is due at run_at=; write that.")
    due = values.get("run_at")
    refuse_instant("run_at", due)
    given = {**values, "run_at": None, "available_at": due}
    return {name: value for name, value in given.items() if value is not None}
