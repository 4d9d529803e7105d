"""The ground a store stands on: one engine, checked once, and the transactions and single statements made on it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import Connection, Engine, Executable
from sqlalchemy.orm import Mapper, Session

from sqla_durable.caller import require_postgresql
from sqla_durable.exc import ConfigurationError, DatabaseUnavailable, RetryableError
from sqla_durable.prepared import Prepared
from sqla_durable.session import StepSession
from sqla_durable.sqlstate import is_outdated, retry_conflicts, translated

ValueT = TypeVar("ValueT")
OLDEST_SERVER = (15,)


class Gate(Protocol):
    """Where one thread, or task, waits until another opens it, once."""

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it is open, or for so long."""
        ...

    def open(self) -> None:
        """Let the one that waits go on."""
        ...


class Sessions(Protocol):
    """Where sessions come from, and which kind of driver and thread their connections need."""

    is_async: bool

    def plain(self, bind: Engine | None = None) -> Session:
        """Return a session as the user's sessionmaker makes it, or one that is bound to ``bind`` instead."""
        ...

    def step(self) -> StepSession:
        """Return the same, as a :class:`.StepSession`."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for so long."""
        ...

    def gate(self) -> Gate:
        """Return a gate for what calls this to wait at."""
        ...

    def notified(self, driver: Any, seconds: float) -> list[str]:
        """Wait so long, on a driver's connection, for notifications; return their payloads as soon as there are any."""
        ...

    def concurrently(
        self, calls: Sequence[Callable[[], ValueT]]
    ) -> Generator[tuple[int, Callable[[], ValueT]], None, None]:
        """Make calls of the user's beside each other, each in a copy of the context.

        As each ends, yield its position, and what returns or raises what it has. Closed before, it leaves the calls
        that are under way to themselves, or cancels them where that can be done.
        """
        ...

    def run_in_thread(self, work: Callable[[], None]) -> None:
        """Run ``work``, which uses connections, in the thread that calls this."""
        ...

    def block(self, wait: Callable[[], object]) -> None:
        """Within that ``work``: call what blocks the thread."""
        ...


class Ground:
    """One engine, reached through one sessionmaker.

    :param sessions: where sessions come from.
    :param mappers: the mapped classes that must be bound to one engine.
    """

    def __init__(self, sessions: Sessions, *mappers: Mapper[Any]) -> None:
        self.sessions = sessions
        self._mappers = mappers

    @cached_property
    def engine(self) -> Engine:
        """The engine that the run class and its receipts are bound to."""
        session = self.sessions.plain()
        binds = [session.get_bind(mapper) for mapper in self._mappers]
        session.close()
        if not all(isinstance(bind, Engine) for bind in binds):
            raise ConfigurationError(
                "the sessionmaker is bound to a Connection; a step opens its own transaction, so bind it to an Engine."
            )
        if any(bind is not binds[0] for bind in binds):
            names = " and ".join(mapper.class_.__name__ for mapper in self._mappers)
            raise ConfigurationError(f"{names} are bound to different engines; bind them to one.")
        engine = cast(Engine, binds[0])
        require_postgresql(engine)
        if not engine.dialect.driver.startswith("psycopg") or engine.dialect.is_async is not self.sessions.is_async:
            raise ConfigurationError(
                f"{engine!r} uses the driver {engine.dialect.driver}; Runs needs a create_engine(), AsyncRuns a "
                "create_async_engine(), of psycopg 3, with a URL that starts with postgresql+psycopg://."
            )
        return engine

    @cached_property
    def notifies(self) -> bool:
        """Whether its transactions may send notifications: PostgreSQL refuses to prepare one that has sent any."""
        return not self.sessions.plain().twophase

    @property
    def schema_translate_map(self) -> dict[str | None, str | None]:
        """The engine's schema translation."""
        return _translation(self.engine)

    def prepare(self, statement: Executable, *columns: str) -> Prepared:
        """Compile a statement for this engine."""
        return Prepared(statement, self.engine, *columns)

    def connection(self, session: Session, isolation: str | None = None) -> Connection:
        """Return the connection of a session of the sessionmaker's, having refused one that would not do.

        :param isolation: the isolation level to begin the transaction at; by default the user's.
        """
        if isolation is not None:
            options = {"isolation_level": isolation}
            session.connection(bind_arguments={"mapper": self._mappers[0]}, execution_options=options)
        connection = self.callers_connection(session)
        if connection.engine.pool is not self.engine.pool:
            raise ConfigurationError(
                f"the session reached {connection.engine!r} where {self.engine!r} was expected; make one Runs for each "
                "engine."
            )
        return connection

    def callers_connection(self, session: Session) -> Connection:
        """Return the connection of a caller's transaction, having refused one that would not do."""
        engine = self.engine
        connection = session.connection(bind_arguments={"mapper": self._mappers[0]})
        if connection.engine is not engine and _translation(connection) != self.schema_translate_map:
            raise ConfigurationError(
                f"the session translates schemas by {_translation(connection)}, not by {self.schema_translate_map}; "
                "make one Runs for each schema_translate_map."
            )
        _refuse_unfit(connection)
        return connection

    @contextmanager
    def transaction(self, isolation: str | None = None) -> Generator[tuple[Session, Connection], None, None]:
        """Open a transaction of the library's own on a session as the user's sessionmaker makes it."""
        with translated(), self.sessions.plain() as session, session.begin():
            connection = self.connection(session, isolation)
            with dropping(connection):
                yield session, connection

    @cached_property
    def _after_begin(self) -> bool:
        """Whether something of the user's is done when a transaction begins, such as setting a tenant for policies."""
        of_session: Any = self.sessions.plain().dispatch
        of_engine: Any = self.engine.dispatch
        return bool(of_session.after_begin or of_engine.begin)

    @contextmanager
    def autocommit(self, engine: Engine | None = None, *, fit: bool = False) -> Generator[Connection, None, None]:
        """Open a connection for a single statement: no BEGIN, no COMMIT, one round trip.

        Where the user's sessions do something after BEGIN, a row may be seen, or written, in a transaction of theirs
        only; then it is one.

        :param fit: whether to refuse one on which steps could not be carried out.
        """
        if self._after_begin:
            with translated(), self.sessions.plain(engine) as session, session.begin():
                connection = session.connection(bind_arguments={"mapper": self._mappers[0]})
                if fit:
                    _refuse_unfit(connection)
                yield connection
            return
        with translated(), (engine or self.engine).connect() as connection:
            if fit:
                _refuse_unfit(connection)
            with autocommitting(connection):
                yield connection

    def single(self, work: Callable[[Connection], ValueT], *, fit: bool = False) -> ValueT:
        """Do ``work``, a single statement, again where it conflicts with another transaction.

        :param fit: as for :meth:`autocommit`.
        """

        def once() -> ValueT:
            with self.autocommit(fit=fit) as connection:
                return work(connection)

        return retry_conflicts(once)

    def own_engine(self) -> Engine:
        """Return an engine with a pool of its own, which connects and listens like the user's."""
        engine = self.engine
        own: Any = Engine(engine.pool.recreate(), engine.dialect, engine.url)
        # As an engine made by execution_options() does it, which would share the pool.
        own.dispatch = own.dispatch._join(engine.dispatch)  # noqa: SLF001
        own._has_events = cast(Any, engine)._has_events  # noqa: SLF001
        return cast(Engine, own.execution_options(**engine.get_execution_options()))

    def execute(self, work: Callable[[Session, Connection], ValueT], *, isolation: str | None = None) -> ValueT:
        """Do ``work`` in a transaction of its own, again where it conflicts with another one.

        :param isolation: as for :meth:`connection`.
        """

        def once() -> ValueT:
            with self.transaction(isolation) as (session, connection):
                return work(session, connection)

        return retry_conflicts(once)


def _refuse_unfit(connection: Connection) -> None:
    version = connection.dialect.server_version_info or OLDEST_SERVER
    if version < OLDEST_SERVER:
        raise ConfigurationError(f"PostgreSQL {version[0]} is too old; sqla_durable needs {OLDEST_SERVER[0]}.")
    driver: Any = connection.connection.dbapi_connection
    if driver.autocommit:
        raise ConfigurationError(
            f"{connection.engine!r} is in AUTOCOMMIT, where an effect and its receipt cannot commit together; "
            'use an engine without isolation_level="AUTOCOMMIT".'
        )


def _translation(bind: Engine | Connection) -> dict[str | None, str | None]:
    translate: dict[str | None, str | None] | None = bind.get_execution_options().get("schema_translate_map")
    return {} if translate is None else translate


@contextmanager
def autocommitting(connection: Connection) -> Generator[None, None, None]:
    """Have the driver commit each statement.

    An engine with ``isolation_level="AUTOCOMMIT"`` would do, but costs as much again as the rest of the call, and the
    isolation level of an engine of the user's that ``execution_options()`` made would win over it.
    """
    driver: Any = connection.connection.dbapi_connection
    before = driver.autocommit
    _set_autocommit(connection, driver, value=True)
    try:
        with dropping(connection):
            yield
    finally:
        if not connection.closed and not connection.invalidated:
            _set_autocommit(connection, driver, value=before)


def _set_autocommit(connection: Connection, driver: Any, *, value: bool) -> None:
    try:
        driver.autocommit = value
    except BaseException:
        # Cancelled in here, the connection would go back to the user's pool in one mode or the other.
        connection.invalidate()
        raise


@contextmanager
def dropping(connection: Connection) -> Generator[None, None, None]:
    """Raise errors of ours, and drop a connection that can be of no use.

    That is one to a server that takes no writes, or one with a statement prepared before a migration. The pool takes
    either for a healthy one and would hand it out again.
    """
    try:
        with translated():
            yield
    except RetryableError as error:
        useless = isinstance(error, DatabaseUnavailable) or is_outdated(error.__cause__)
        if useless and not connection.closed and not connection.invalidated:
            connection.invalidate()
        raise
