"""Place an order: ``python -m outbox "tea tin" mail:ada@example.org chat:orders``."""

import argparse
from uuid import UUID, uuid4

from outbox.database import create_tables, new_session
from outbox.shop import place_order


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outbox", description=__doc__)
    parser.add_argument("article")
    parser.add_argument("recipients", nargs="+", metavar="recipient")
    parser.add_argument("--request", type=UUID, default=uuid4(), help="the id of a request that is made again")
    given = parser.parse_args()
    create_tables()
    with new_session.begin() as session:
        order = place_order(session, given.request, given.article, given.recipients)
        print(f"order {order.id}: {order.article}")


if __name__ == "__main__":
    main()
