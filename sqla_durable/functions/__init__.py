"""Functions: ordinary ones whose steps are journaled, started in the caller's transaction and observed by a handle."""

from sqla_durable.functions.function_run import FunctionRun
from sqla_durable.functions.functions import Functions
from sqla_durable.functions.handle import FunctionHandle
from sqla_durable.functions.limits import Rate
from sqla_durable.functions.model import FunctionMixin, FunctionStatus, function_lifecycle, function_statuses
from sqla_durable.functions.summary import FunctionConditions, FunctionSummary

__all__ = [
    "FunctionConditions",
    "FunctionHandle",
    "FunctionMixin",
    "FunctionRun",
    "FunctionStatus",
    "FunctionSummary",
    "Functions",
    "Rate",
    "function_lifecycle",
    "function_statuses",
]
