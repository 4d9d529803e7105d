"""Writes two migrations where one would lock a table that is in use: for moments, and not for as long as it reads rows.

Two, and not one: what takes long can fail, on rows that a check refuses or an index that finds duplicates, and is then
repeated. So it may not stand in one migration with what cannot be done twice, such as adding a column.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from alembic.operations import ops
from alembic.runtime.migration import MigrationContext
from alembic.util import rev_id

from sqla_durable.alembic.phases import Phases

_THEN: Final = "validate and index"


def split(
    context: MigrationContext, _: str | Iterable[str | None] | Iterable[str], scripts: list[ops.MigrationScript]
) -> None:
    """Split the migration that is about to be written, if it changes tables that are there."""
    if len(scripts) != 1 or context.dialect.name != "postgresql" or context.connection is None:
        return
    (script,) = scripts
    upgrade, downgrade = script.upgrade_ops_list, script.downgrade_ops_list
    if len(upgrade) != 1 or upgrade[0].is_empty():
        return
    up = Phases.split(context, context.connection, upgrade[0], is_downgrade=False)
    down = Phases.split(context, context.connection, downgrade[0], is_downgrade=True)
    if up.are_repeatable_as_one() and down.are_repeatable_as_one():
        upgrade[0].ops = [*up.earlier.operations(), *up.later.operations()]
        downgrade[0].ops = [*down.earlier.operations(), *down.later.operations()]
        return
    upgrade[0].ops, downgrade[0].ops = up.earlier.operations(), down.later.operations()
    scripts.append(_following(script, up.later.operations(), down.earlier.operations()))


def _following(
    script: ops.MigrationScript, forth: list[ops.MigrateOperation], back: list[ops.MigrateOperation]
) -> ops.MigrationScript:
    upgrade = ops.UpgradeOps(forth, upgrade_token=script.upgrade_ops_list[0].upgrade_token)
    downgrade = ops.DowngradeOps(back, downgrade_token=script.downgrade_ops_list[0].downgrade_token)
    message = _THEN if script.message is None else f"{script.message}, {_THEN}"
    return ops.MigrationScript(
        rev_id(), upgrade, downgrade, message=message, head=script.rev_id, version_path=script.version_path
    )
