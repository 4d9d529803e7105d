"""A function as it was declared, and the functions that one process knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

from sqla_durable.changes import Changes, OnMismatch
from sqla_durable.codec import Codec, codec_for, codec_for_argument
from sqla_durable.exc import (
    ConfigurationError,
    InputError,
    ResultError,
    ResultMismatch,
    RunInputMismatch,
    UsageError,
)
from sqla_durable.functions.limits import UNLIMITED, Limits, Rate, limits_of, require_concurrency
from sqla_durable.functions.model import NAME_LENGTH
from sqla_durable.retry import LONGEST, Retry
from sqla_durable.step_key import stored_key
from sqla_durable.stepping import is_coroutine_function

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
AnyBody = Callable[..., Any]
StepKey = str | int
Aliases = Mapping[StepKey, StepKey | tuple[StepKey, ...]]
"""The former key of a renamed step, or several with the latest first, by its present key."""
LONGEST_BY_DEFAULT: Final = timedelta(hours=1)


@dataclass(frozen=True, eq=False)
class Definition:
    """One function.

    :param name: what its runs are known by; it stays the same when the Python function is renamed or moved.
    :param body: the user's function.
    :param input: how its input is stored; None where it takes none.
    :param output: how its result is stored.
    :param retry: how often a run of it may be started; None for what its run class says.
    :param max_duration: for how long it may be carried out at a time, None for any time.
    :param limits: how many of its runs may be live, and how many started in a time.
    :param changes: what is done where its code and the receipts of a run are at odds.
    """

    name: str
    body: AnyBody
    input: Codec[Any] | None
    output: Codec[Any]
    retry: Retry | None
    max_duration: timedelta | None
    changes: Changes
    limits: Limits = UNLIMITED

    def encode(self, given: tuple[object, ...]) -> str | None:
        """Return the input as JSON text, having refused one that the function would not be given as it is.

        :raises InputError: where it is not of the declared type, or does not come back equal.
        """
        if self.input is None:
            if given:
                raise InputError(f"function {self.name!r} takes no input, and was given {given[0]!r:.200}.")
            return None
        if not given:
            raise InputError(f"function {self.name!r} takes an input, and was given none.")
        try:
            return self.input.round_trip(given[0], self.name)[0]
        except ResultError as error:
            raise InputError(f"function {self.name!r}: {_said_of_input(error, self.input)}") from error

    def arguments(self, stored: object) -> tuple[Any, ...]:
        """Return what the body is called with beside the run.

        :raises RunInputMismatch: where the input that was stored does not decode any more.
        """
        if self.input is None:
            return ()
        try:
            return (self.input.decode(stored, self.name),)
        except ResultMismatch as error:
            reason = str(error).split(f" as {self.input.annotation}: ", 1)[-1].split(". Keep the return type")[0]
            raise RunInputMismatch(
                f"function {self.name!r}: the run was started with an input that does not decode any more as "
                f"{self.input.annotation}: {reason}. Keep the type able to read older inputs, or register the changed "
                "function under a new name."
            ) from error


class Registry:
    """The functions that one process knows, by name and by body.

    :param concurrency_per_tenant: how many runs of one tenant may be live, of whatever function.
    :param coroutines: whether they are coroutine functions, those of ``AsyncFunctions``.
    """

    def __init__(self, concurrency_per_tenant: int | None = None, *, coroutines: bool = False) -> None:
        self._form = "AsyncFunctions" if coroutines else "Functions"
        require_concurrency(f"{self._form}(concurrency_per_tenant)", concurrency_per_tenant)
        self.concurrency_per_tenant = concurrency_per_tenant
        self._coroutines = coroutines
        self._limits: dict[str, Limits] = {}
        self._unlimited: list[str] = []
        self._by_name: dict[str, Definition] = {}
        self._by_body: dict[AnyBody, Definition] = {}
        self._included: list[Registry] = []
        self._including: list[Registry] = []

    def add(
        self,
        name: str,
        body: AnyBody,
        *,
        retry: Retry | None,
        max_duration: timedelta | None,
        concurrency: int | None = None,
        concurrency_per_tenant: int | None = None,
        rate: Rate | None = None,
        on_mismatch: OnMismatch = OnMismatch.FAIL,
        aliases: Aliases | None = None,
    ) -> None:
        """Register a function.

        :raises ConfigurationError: where the name is taken, or the declaration cannot work.
        """
        refuse_name(name)
        known = (each._known(name) for each in (self, *self._including))  # noqa: SLF001 - of the same class
        if (taken := next(filter(None, known), None)) is not None:
            raise ConfigurationError(
                f"there is a function {name!r} already, {taken.body!r}; give {body!r} another name."
            )
        if not isinstance(cast(object, body), Hashable):
            raise ConfigurationError(f"function {name!r}: {body!r} has no hash, so it cannot be recognised; wrap it.")
        if (other := self._by_body.get(body)) is not None:
            raise ConfigurationError(
                f"function {name!r}: {body!r} is declared as {other.name!r} already; a function has one name."
            )
        if max_duration is not None and not timedelta(0) < max_duration <= LONGEST:
            raise ConfigurationError(
                f"function {name!r}: max_duration={max_duration}: more than 0 and up to {LONGEST.days} days, or None."
            )
        limits = limits_of(name, concurrency, concurrency_per_tenant, rate)
        takes = _inputs(name, body)
        self._refuse_other_form(name, body)
        try:
            input_ = codec_for_argument(body, 1) if len(takes) > 1 else None
            changes = Changes(OnMismatch(on_mismatch), _former(aliases or {}))
            definition = Definition(name, body, input_, codec_for(body), retry, max_duration, changes, limits)
        except (UsageError, ValueError) as error:
            raise ConfigurationError(f"function {name!r}: {error}") from error
        self._by_name[name] = self._by_body[body] = definition
        if limits != UNLIMITED or self.concurrency_per_tenant is not None:
            self._limits = {**self._limits, name: limits}
        else:
            self._unlimited = [*self._unlimited, name]

    def _refuse_other_form(self, name: str, body: AnyBody) -> None:
        if is_coroutine_function(body) is self._coroutines:
            return
        if self._coroutines:
            raise ConfigurationError(
                f"function {name!r}: {body!r} is no coroutine function; write async def, or declare it with Functions, "
                "which the same worker can carry out."
            )
        raise ConfigurationError(
            f"function {name!r}: {body!r} is a coroutine function; declare it with AsyncFunctions from "
            "sqla_durable.asyncio, whose worker carries out both; include() has these start its runs, too."
        )

    def include(self, other: Registry) -> None:
        """Know the functions of another one, too, those that are declared later as well; they are carried out there.

        :raises ConfigurationError: where both have a function of one name, or their limits per tenant differ.
        """
        if other in self._included:
            return
        if other.concurrency_per_tenant != self.concurrency_per_tenant:
            raise ConfigurationError(
                f"concurrency_per_tenant={self.concurrency_per_tenant} of these {self._form} and "
                f"{other.concurrency_per_tenant} of the {other._form} that they include: it is a limit of the table "
                "of both; give them the same."
            )
        for each in other:
            if (taken := self._known(each.name)) is not None:
                raise ConfigurationError(
                    f"there is a function {each.name!r} already, {taken.body!r}; give {each.body!r} another name."
                )
        self._included.append(other)
        other._including.append(self)

    def of(self, function: AnyBody | str) -> Definition:
        """Return the definition of a function, given itself or its name.

        :raises UsageError: where it is none of these.
        """
        if (known := self._known(function)) is None:
            names = ", ".join(map(repr, self.all_names())) or "none"
            raise UsageError(
                f"{function!r} is no function of these {self._form}; decorate it with @functions.function(name), "
                f"import the module that does, or include() the {self._other_form} that it is one of. Known: {names}."
            )
        return known

    def refuse_included(self, name: str) -> None:
        """Refuse to carry out a function of the other form.

        :raises UsageError: naming what carries it out.
        """
        if name not in self._by_name and (known := self._known(name)) is not None:
            kind = "a coroutine function" if is_coroutine_function(known.body) else "an ordinary function"
            raise UsageError(
                f"{name!r} is {kind}; execute it with the {self._other_form} that it is declared with, or leave it to "
                "an AsyncWorker, which carries out both."
            )

    def declared(self, function: AnyBody | str) -> Definition | None:
        """Return the definition of one of its own functions."""
        return self._by_name.get(function) if isinstance(function, str) else self._by_body.get(function)

    def _known(self, function: AnyBody | str) -> Definition | None:
        found = (each.declared(function) for each in (self, *self._included))
        return next((known for known in found if known is not None), None)

    @property
    def _other_form(self) -> str:
        return "Functions" if self._coroutines else "AsyncFunctions"

    def former_keys(self, name: str, step: str) -> tuple[str, ...]:
        """Return the former keys of a step of a function, which this process need not know."""
        known = self._known(name)
        return () if known is None else known.changes.former.get(step, ())

    def names(self) -> list[str]:
        """Return the names of all functions."""
        return list(self._by_name)

    def all_names(self) -> list[str]:
        """Return the names of all functions, with those that are included."""
        return [each.name for registry in (self, *self._included) for each in registry]

    def limits(self) -> Mapping[str, Limits]:
        """Return the limits of the functions that have any."""
        return self._limits

    def unlimited(self) -> list[str]:
        """Return the names of the functions that have none."""
        return self._unlimited

    def __iter__(self) -> Iterator[Definition]:
        return iter(self._by_name.values())


def _said_of_input(error: ResultError, codec: Codec[Any]) -> str:
    """Return what a codec says of a result, said of an input."""
    reason = str(error).split(": ", 1)[-1].split("; annotate the function")[0].rstrip(".")
    return f"input{reason.removeprefix('result')}; it takes {codec.annotation}."


def _former(aliases: Aliases) -> dict[str, tuple[str, ...]]:
    """Return aliases by stored keys.

    :raises UsageError: where two steps would share a receipt.
    """
    former = {
        stored_key(present): tuple(map(stored_key, keys if isinstance(keys, tuple) else (keys,)))
        for present, keys in aliases.items()
    }
    every = [key for keys in former.values() for key in keys]
    if shared := sorted(key for key in {*every} if every.count(key) > 1 or key in former):
        raise UsageError(
            f"aliases name {shared[0]!r} for two steps, which would share a receipt; a key is the former one of one "
            "step only, and no step's present one."
        )
    return former


def refuse_name(name: object) -> None:
    """Refuse what is no name of a function; what decorates without a name, for one."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
        raise ConfigurationError(
            f"function name {name!r}: a str of 1 to {NAME_LENGTH} printable characters, as in "
            '@functions.function("fulfil-order").'
        )


def _inputs(name: str, body: AnyBody) -> list[str]:
    """Return the names of a body's parameters, having refused what could not be called with a run and an input."""
    if not callable(cast(object, body)):
        raise ConfigurationError(f"function {name!r}: {body!r} cannot be called.")
    parameters = list(inspect.signature(body).parameters.values())
    positional = [each for each in parameters if each.kind in _POSITIONAL]
    needed = [each for each in parameters if each.default is each.empty and each.kind not in _VARIABLE]
    if not positional or [each for each in needed if each not in positional[:2]]:
        raise ConfigurationError(
            f"function {name!r}: {body!r} takes {inspect.signature(body)}; it is called with the run and one input, "
            "as in def fulfil(run: FunctionRun, order: Order) -> Shipment."
        )
    return [each.name for each in positional[:2]]
