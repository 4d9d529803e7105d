"""TARGET: finds the object that ``module:object`` names, and refuses what is not of the wanted kind."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import sessionmaker

from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.options import FUNCTIONS, RUNS
from sqla_durable.functions import Functions
from sqla_durable.receipt import ReceiptMixin
from sqla_durable.run import RunMixin
from sqla_durable.runs import Runs
from sqla_durable.signal import SignalMixin


def find(target: str, wanted: Callable[[object], bool], expected: str) -> Any:
    """Return the object of the wanted kind that ``target`` names, or that the callable it names returns.

    :param wanted: says whether an object is of that kind.
    :param expected: the kind in words.
    :raises CommandError: where there is no such object, or it is of another kind.
    """
    found = _load(target)
    if callable(found) and not isinstance(found, type) and not wanted(found):
        found = _called(target, found)
        if found is None:
            raise CommandError(
                f"calling {target} returned None. If that does all of the work itself, start it with Python; otherwise "
                f"have it return {expected}."
            )
    if not wanted(found):
        raise CommandError(f"{target} is {found!r:.100}; expected {expected}.")
    return found


def runs_at(target: str, url: str | None) -> Any:
    """Return the :class:`.Runs` or :class:`.AsyncRuns` that ``target`` stands for.

    :param url: the database for a run class.
    :raises CommandError: as :func:`find`, or where a run class comes without a URL or without its receipts.
    """
    found = find(target, lambda each: is_runs(each) or is_functions(each) or is_run_class(each), RUNS)
    if is_run_class(found):
        of_signals = _owned(SignalMixin, found)
        signals = of_signals[0] if len(of_signals) == 1 else None
        engine = create_engine(url_of(target, url, "is a run class, which has"))
        return Runs(sessionmaker(engine), found, _receipts(found), signals=signals)
    if url is not None:
        raise CommandError(
            f"--url goes with a run class, but {target} is a {type(found).__name__}, which has an engine."
        )
    return found


def is_runs(found: object) -> bool:
    """Whether it is a :class:`.Runs` or an :class:`.AsyncRuns`."""
    # Not imported here: it needs greenlet, and whoever has made one has imported it.
    asyncio = sys.modules.get("sqla_durable.asyncio.runs")
    return isinstance(found, Runs) or (asyncio is not None and isinstance(found, asyncio.AsyncRuns))


def functions_at(target: str) -> Any:
    """Return the :class:`.Functions` or :class:`.AsyncFunctions` that ``target`` stands for.

    :raises CommandError: as :func:`find`.
    """
    return find(target, is_functions, FUNCTIONS)


def is_functions(found: object) -> bool:
    """Whether it is a :class:`.Functions` or an :class:`.AsyncFunctions`."""
    asyncio = sys.modules.get("sqla_durable.asyncio.functions")  # as above
    return isinstance(found, Functions) or (asyncio is not None and isinstance(found, asyncio.AsyncFunctions))


def is_run_class(found: object) -> bool:
    """Whether it is a mapped class with :class:`.RunMixin`."""
    return isinstance(found, type) and issubclass(found, RunMixin) and "__mapper__" in vars(found)


def _load(target: str) -> object:
    module, _, attributes = target.partition(":")
    if not attributes:
        raise CommandError(f"{target!r} does not name an object; write module:object, as in app.models:plans.")
    found = module_at(module)
    for position, name in enumerate(names := attributes.split(".")):
        if not hasattr(found, name):
            owner = ".".join([module, *names[:position]])
            raise CommandError(f"{owner} has no attribute {name!r}.")
        found = getattr(found, name)
    return found


def module_at(module: str) -> Any:
    """Return the module of this name.

    :raises CommandError: where there is none.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        raise CommandError(f"{module!r} is not the name of a module; write module:object, as in app.models:plans.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise CommandError(f"there is no module {error.name!r}, neither installed nor in {here}.") from error
        raise  # of an import in that module


def _called(target: str, found: Callable[..., object]) -> object:
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise CommandError(f"{target} is called without arguments, but {error}.") from error
    made = found()
    if inspect.iscoroutine(made):
        made.close()
        raise CommandError(f"{target} is a coroutine function; a callable that returns the object itself is wanted.")
    return made


def url_of(target: str, url: str | None, what: str = "has") -> Any:
    """Return the URL of the database for a target without an engine.

    :param what: what the target is, for the error.
    :raises CommandError: where there is none, or it is not of PostgreSQL.
    """
    source = "DATABASE_URL" if url is None else "--url"
    given = os.environ.get("DATABASE_URL") if url is None else url
    if not given:
        raise CommandError(f"{target} {what} no engine; give --url, or set DATABASE_URL.")
    try:
        parsed = make_url(given)
    except ArgumentError:
        raise CommandError(f"{source} is not a URL of a database, as in postgresql://user@host/database.") from None
    if parsed.get_backend_name() not in {"postgresql", "postgres"}:
        raise CommandError(f"{source} names {parsed.get_backend_name()}; sqla_durable needs PostgreSQL.")
    return parsed.set(drivername="postgresql+psycopg")


def _receipts(run: type[Any]) -> type[Any]:
    found = _owned(ReceiptMixin, run)
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(f"{each.__module__}.{each.__qualname__}" for each in found)) or "no class"
    verb = "hold" if len(found) > 1 else "that was imported holds"
    raise CommandError(f"{names} {verb} the receipts of {run.__name__}; name a Runs, which says whose it uses.")


def _owned(mixin: Any, run: type[Any]) -> list[type[Any]]:
    """Return the mapped classes with a mixin that hold something of a run class."""
    # Its registry would not do: these may be mapped by another one.
    waiting, found = [cast("type[Any]", mixin)], list[type[Any]]()
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        if "__mapper__" in vars(each) and issubclass(run, each.__run__) and each not in found:
            found.append(each)
    return found
