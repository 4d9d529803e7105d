"""Groups of options that several commands have: a dataclass, each field of which is an option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Have the parameters of a command that are such a dataclass stand for the options that are its fields.

    Typer reads the options of a command off its signature, and knows of no groups.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        options = _options(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
        parameters += options

    @wraps(command)
    def called(*args: Any, **kwargs: Any) -> None:
        for name, group in groups.items():
            kwargs[name] = group(**{field.name: kwargs.pop(field.name) for field in fields(group)})
        command(*args, **kwargs)

    vars(called)["__signature__"] = signature(command).replace(parameters=parameters)
    return called


def _options(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]
