"""The shop's workload: small transactions on schema `shop` at a steady rate, until it is stopped.

Each deed is one transaction that keeps the shop's invariants (`invariants.py`). Deeds of several threads interleave, lock the same rows and
sometimes roll back, like those of an application. If the server goes away, the workload waits for it.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psycopg2
import psycopg2.errors

from pgwal_pipeline.demo.shop import WAREHOUSES, describe_product, email_of, new_customer, payment_details, pick_method
from pgwal_pipeline.postgres.connection import Connection, plain_session

_RECONNECT_SECONDS = (0.2, 0.5, 1.0, 2.0)
_PATIENCE = "-c lock_timeout=5s -c statement_timeout=30s -c idle_in_transaction_session_timeout=60s"

Deed = Callable[[Connection, random.Random], bool]


class _Undone(Exception):
    """Rolls a transaction back."""


def place_order(conn: Connection, rng: random.Random) -> bool:
    """Place an order of one to four products. Products out of stock are left out; an order without lines is rolled back."""
    line_no = 0
    with suppress(_Undone), conn.transaction():
        customer = conn.execute(
            "SELECT id FROM shop.customers WHERE id >= (SELECT ceil(max(id) * %s) FROM shop.customers) ORDER BY id LIMIT 1", [rng.random()]
        ).fetchone()
        order = conn.execute(
            "INSERT INTO shop.orders (customer_id, delivery, note) "
            "VALUES (%s, daterange(current_date + 2, current_date + 5), %s) RETURNING id",
            [customer and customer[0], rng.choice([None, None, None, "ring twice", "gift wrapping, please"])],
        ).fetchone()
        assert order is not None
        wanted = conn.execute("SELECT sku FROM shop.products ORDER BY random() LIMIT %s", [rng.randrange(1, 5)]).fetchall()
        for (sku,) in sorted(wanted):  # in one order everywhere, so that two orders seldom deadlock
            quantity = rng.randrange(1, 4)
            taken = conn.execute(
                "UPDATE shop.inventory SET on_hand = on_hand - %(n)s WHERE sku = %(sku)s AND warehouse = %(at)s AND on_hand >= %(n)s",
                {"n": quantity, "sku": sku, "at": rng.choice(WAREHOUSES)},
            )
            if taken.rowcount:
                line_no += 1
                conn.execute(
                    "INSERT INTO shop.order_lines (order_id, line_no, sku, quantity, unit_price) "
                    "SELECT %s, %s, sku, %s, price FROM shop.products WHERE sku = %s",
                    [order[0], line_no, quantity, sku],
                )
        if line_no == 0:
            raise _Undone
        conn.execute(
            "UPDATE shop.orders SET total = (SELECT sum(amount) FROM shop.order_lines WHERE order_id = id) WHERE id = %s", [order[0]]
        )
    return line_no > 0


def pay(conn: Connection, rng: random.Random) -> bool:
    """Pay the oldest unpaid order that no other transaction has locked; the customer's `spent` and the order's `paid` grow."""
    return _settle(conn, rng, ("placed",), "paid", sign=1)


def refund(conn: Connection, rng: random.Random) -> bool:
    """Refund a paid order; the goods are not returned."""
    return _settle(conn, rng, ("paid",), "refunded", sign=-1)


def _settle(conn: Connection, rng: random.Random, before: tuple[str, ...], after: str, *, sign: int) -> bool:
    with conn.transaction():
        order = conn.execute(
            "SELECT id, customer_id, total * %s FROM shop.orders WHERE status = ANY (%s::shop.order_status[]) ORDER BY id LIMIT 1 "
            "FOR UPDATE SKIP LOCKED",
            [sign, list(before)],
        ).fetchone()
        if order is None:
            return False
        number, customer, amount = order
        method = pick_method(rng)
        conn.execute(
            "INSERT INTO shop.payments (order_id, amount, method, details) VALUES (%s, %s, %s, %s)",
            [number, amount, method, payment_details(rng, method)],
        )
        conn.execute("UPDATE shop.orders SET status = %s::shop.order_status, paid = paid + %s WHERE id = %s", [after, amount, number])
        conn.execute("UPDATE shop.customers SET spent = spent + %s WHERE id = %s", [amount, customer])
    return True


def ship(conn: Connection, _rng: random.Random) -> bool:
    """Ship the oldest paid order."""
    shipped = conn.execute(
        "UPDATE shop.orders SET status = 'shipped', shipped_at = now() WHERE id = "
        "(SELECT id FROM shop.orders WHERE status = 'paid' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)"
    )
    return shipped.rowcount > 0


def cancel(conn: Connection, rng: random.Random) -> bool:
    """Cancel the newest unpaid order: delete its lines and return the goods to one warehouse."""
    with conn.transaction():
        order = conn.execute(
            "UPDATE shop.orders SET status = 'cancelled', total = 0, delivery = NULL WHERE id = "
            "(SELECT id FROM shop.orders WHERE status = 'placed' ORDER BY id DESC LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id"
        ).fetchone()
        if order is None:
            return False
        lines = conn.execute("DELETE FROM shop.order_lines WHERE order_id = %s RETURNING sku, quantity", [order[0]]).fetchall()
        warehouse = rng.choice(WAREHOUSES)
        for sku, quantity in sorted(lines):
            conn.execute("UPDATE shop.inventory SET on_hand = on_hand + %s WHERE sku = %s AND warehouse = %s", [quantity, sku, warehouse])
    return True


def restock(conn: Connection, rng: random.Random) -> bool:
    """Fill the emptiest shelf: an update of a product whose long description does not change."""
    with conn.transaction():
        shelf = conn.execute("SELECT sku, warehouse FROM shop.inventory ORDER BY on_hand LIMIT 1 FOR UPDATE SKIP LOCKED").fetchone()
        if shelf is None:
            return False
        pieces = rng.randrange(20, 80)
        conn.execute("UPDATE shop.products SET received = received + %s, updated_at = now() WHERE sku = %s", [pieces, shelf[0]])
        conn.execute(
            "UPDATE shop.inventory SET on_hand = on_hand + %s, counted_at = now() WHERE sku = %s AND warehouse = %s", [pieces, *shelf]
        )
    return True


def transfer_stock(conn: Connection, rng: random.Random) -> bool:
    """Move pieces of one product from one warehouse to another."""
    source, target = rng.sample(WAREHOUSES, 2)
    shelf = None
    with suppress(_Undone), conn.transaction():
        shelf = conn.execute(
            "UPDATE shop.inventory SET on_hand = on_hand - 5 WHERE warehouse = %(at)s AND sku = "
            "(SELECT sku FROM shop.inventory WHERE warehouse = %(at)s AND on_hand > 20 ORDER BY random() LIMIT 1) "
            "AND on_hand > 20 RETURNING sku",
            {"at": source},
        ).fetchone()
        if shelf is None:
            raise _Undone
        conn.execute("UPDATE shop.inventory SET on_hand = on_hand + 5 WHERE sku = %s AND warehouse = %s", [shelf[0], target])
    return shelf is not None


def change_prices(conn: Connection, rng: random.Random) -> bool:
    """Change the prices of a few products. Orders keep the price they were placed at."""
    factor = rng.choice(["0.90", "0.95", "1.05", "1.10"])
    conn.execute(
        "UPDATE shop.products SET price = greatest(round(price * %s, 2), 1), updated_at = now() WHERE sku IN "
        "(SELECT sku FROM shop.products ORDER BY random() LIMIT %s)",
        [factor, rng.randrange(1, 6)],
    )
    return True


def rewrite_description(conn: Connection, rng: random.Random) -> bool:
    """Give a product another long description."""
    product = conn.execute("SELECT sku, name FROM shop.products ORDER BY random() LIMIT 1").fetchone()
    if product is None:
        return False
    conn.execute(
        "UPDATE shop.products SET description = %s, updated_at = now() WHERE sku = %s", [describe_product(rng, product[1]), product[0]]
    )
    return True


def change_sku(conn: Connection, rng: random.Random) -> bool:
    """Give a product another SKU: its primary key changes, and by cascade that of its shelves and a column of its order lines."""
    changed = conn.execute(
        "UPDATE shop.products SET sku = regexp_replace(sku, '(-r[0-9]+)?$', %s), updated_at = now() "
        "WHERE sku = (SELECT sku FROM shop.products ORDER BY random() LIMIT 1)",
        [f"-r{rng.randrange(10**6)}"],
    )
    return changed.rowcount > 0


def welcome_customer(conn: Connection, rng: random.Random) -> bool:
    """Add a customer."""
    account, name, email, address = new_customer(rng, rng.randrange(10**6, 10**9))
    conn.execute(
        "INSERT INTO shop.customers (account, name, email, address, tags) VALUES (%s, %s, %s, %s, '{newsletter}')",
        [account, name, email, address],
    )
    return True


def rename_customer(conn: Connection, rng: random.Random) -> bool:
    """Give a customer another name and e-mail address."""
    _, name, _, _ = new_customer(rng, 0)
    renamed = conn.execute(
        "UPDATE shop.customers SET name = %s, email = %s, tags = array_append(array_remove(tags, 'renamed'), 'renamed') "
        "WHERE id = (SELECT id FROM shop.customers ORDER BY random() LIMIT 1)",
        [name, email_of(name, rng.randrange(10**6, 10**9))],
    )
    return renamed.rowcount > 0


# Weights, about the number in a hundred transactions. Orders are paid and shipped as fast as they are placed, so that no queue grows.
DEEDS: dict[Deed, float] = {
    place_order: 31,
    pay: 28,
    ship: 25,
    restock: 5,
    cancel: 3,
    transfer_stock: 2.5,
    refund: 1.5,
    change_prices: 1.5,
    welcome_customer: 1,
    rename_customer: 1,
    rewrite_description: 0.5,
    change_sku: 0.25,
}


@dataclass(frozen=True, slots=True)
class Tally:
    """What a workload has done so far: committed transactions by deed, and transactions rolled back after a conflict."""

    done: dict[str, int]
    rolled_back: int
    connected: bool

    @property
    def transactions(self) -> int:
        """The number of committed transactions."""
        return sum(self.done.values())


class Workload:
    """Threads that run the shop's transactions on the database of `dsn`, together `rate` transactions a second.

    `start` returns at once; `stop` ends the threads after their current transactions. A thread whose error is not about the connection or
    concurrency sets `error` and ends.
    """

    def __init__(self, dsn: str, *, rate: float = 20.0, threads: int = 3, seed: int | None = None) -> None:
        self._dsn = dsn
        self._pause = threads / rate
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._done: Counter[str] = Counter()
        self._rolled_back = 0
        self._connections = 0
        self.error: BaseException | None = None
        rngs = [random.Random(None if seed is None else seed + number) for number in range(threads)]  # noqa: S311
        self._threads = [threading.Thread(target=self._run, args=[rng], name="shop", daemon=True) for rng in rngs]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 10.0) -> bool:
        """Stop the threads; return whether all ended within `timeout` seconds."""
        self._stopped.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def tally(self) -> Tally:
        """Return what has been done so far."""
        with self._lock:
            return Tally(dict(self._done), self._rolled_back, self._connections > 0)

    def _run(self, rng: random.Random) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                with plain_session(self._dsn, application_name="shop", connect_timeout=5, options=_PATIENCE) as conn:
                    failures = 0
                    with self._lock:
                        self._connections += 1
                    try:
                        self._trade(conn, rng)
                    finally:
                        with self._lock:
                            self._connections -= 1
            except psycopg2.OperationalError:
                # The server is away or starting: try again until it is back or the workload is stopped.
                self._stopped.wait(_RECONNECT_SECONDS[min(failures, len(_RECONNECT_SECONDS) - 1)])
                failures += 1
            except psycopg2.Error as error:
                self.error = error
                return

    def _trade(self, conn: Connection, rng: random.Random) -> None:
        deeds, weights = list(DEEDS), list(DEEDS.values())
        due = time.monotonic()
        while not self._stopped.is_set():
            due = max(due, time.monotonic() - 1.0) + rng.expovariate(1 / self._pause)
            if self._stopped.wait(due - time.monotonic()):
                return
            self._do(conn, rng, rng.choices(deeds, weights)[0])

    def _do(self, conn: Connection, rng: random.Random, deed: Deed) -> None:
        try:
            if not deed(conn, rng):
                deed = place_order
                if not deed(conn, rng):
                    return
        except (
            psycopg2.errors.TransactionRollback,
            psycopg2.errors.LockNotAvailable,
            psycopg2.errors.QueryCanceled,
            psycopg2.errors.IntegrityError,
        ):
            # A conflict: a deadlock with a change of SKU, or a product whose key changed during the order.
            with self._lock:
                self._rolled_back += 1
            return
        with self._lock:
            self._done[deed.__name__] += 1
