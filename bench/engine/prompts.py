"""A dozen beginnings of code and prose that no standard library holds, each of at least 128 tokens."""

from __future__ import annotations

PROMPTS: tuple[str, ...] = (
    '''"""Reads the tide tables of a harbour and answers when a boat of a given draught may cross the bar."""

import csv
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path


@dataclass(frozen=True)
class TideReading:
    station: str
    taken_at: datetime
    height_m: float


def load_readings(path: Path) -> list[TideReading]:
    readings = []
    with path.open(newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
''',
    """class GreenhouseController:
    \"\"\"Opens the vents when it is too warm and waters the beds when they are dry.\"\"\"

    def __init__(self, sensors, actuators, target_temperature=21.5, min_soil_moisture=0.32):
        self.sensors = sensors
        self.actuators = actuators
        self.target_temperature = target_temperature
        self.min_soil_moisture = min_soil_moisture
        self.history = []

    def tick(self, now):
        temperature = self.sensors.read("air_temperature")
        moisture = self.sensors.read("soil_moisture")
        if temperature is None or moisture is None:
""",
    """Dear Ms Okafor,

thank you for sending the survey of the old mill so quickly. I have read it twice. The roof is in better shape than we
feared, but the eastern wall leans by almost four centimetres over its height, and the report says that the timber frame
behind it has been wet for years. Before we sign anything, I would like the engineer to open the wall in two places and
to tell us whether the sill can be replaced without taking the whole side down. Could you ask him what that would cost,
and when
""",
    """import asyncio
import json
import logging

log = logging.getLogger("orders")


async def reserve_stock(pool, order):
    \"\"\"Reserve every line of an order, or none of them.\"\"\"
    async with pool.acquire() as connection:
        async with connection.transaction():
            for line in order["lines"]:
                row = await connection.fetchrow(
                    "select available from stock where sku = $1 for update", line["sku"]
                )
                if row is None or row["available"] < line["quantity"]:
                    raise OutOfStock(line["sku"])
                await connection.execute(
""",
    """# Release notes, version 4.2

## What changed for operators

The scheduler no longer keeps the queue in memory. Jobs are written to the journal before they are acknowledged, so a
restart loses nothing that a client was told is safe. Expect about eight percent more disk traffic on busy nodes. The
old `--queue-size` option is still read, but it only limits how many jobs are prefetched.

## Upgrading

1. Stop the workers, one availability zone at a time.
2. Run `journal migrate --check` and read its summary.
3. If it names
""",
    """def shortest_route(graph, start, goal, avoid=frozenset()):
    \"\"\"Dijkstra over a dict of dicts; returns (distance, path), or (inf, []) when there is no way.\"\"\"
    queue = [(0.0, start, [start])]
    settled = {}
    while queue:
        distance, node, path = heapq.heappop(queue)
        if node == goal:
            return distance, path
        if node in settled and settled[node] <= distance:
            continue
        settled[node] = distance
        for neighbour, length in graph[node].items():
            if neighbour in avoid:
                continue
            heapq.heappush(
""",
    """import pytest

from billing.invoice import Invoice, InvoiceLine, round_half_even


@pytest.fixture
def invoice():
    lines = [
        InvoiceLine("hosting", quantity=3, unit_price="19.90", tax_rate="0.19"),
        InvoiceLine("support", quantity=1, unit_price="250.00", tax_rate="0.19"),
        InvoiceLine("handbook", quantity=2, unit_price="34.50", tax_rate="0.07"),
    ]
    return Invoice(number="2031-0007", customer="Lindqvist AB", lines=lines)


def test_total_is_the_sum_of_lines_and_taxes(invoice):
    assert invoice.net_total ==
""",
    """The lighthouse keeper's daughter had never seen a train. She had read of them, of course, in the three books that the
supply boat brought each autumn, and once a geologist had drawn one for her on the back of a chart: a kettle on wheels,
he said, that pulls a street of houses behind it. So when she stepped from the ferry that morning, with the letter in her
coat and salt still in her hair, and heard the whistle beyond the fish market, she put her suitcase down on the wet
stones and
""",
    '''class TokenBucket:
    """Allows `rate` calls a second on average, and bursts of up to `capacity`."""

    def __init__(self, rate, capacity, clock=time.monotonic):
        if rate <= 0 or capacity <= 0:
            raise ValueError("rate and capacity must be positive")
        self._rate = rate
        self._capacity = capacity
        self._clock = clock
        self._tokens = capacity
        self._updated = clock()
        self._lock = threading.Lock()

    def acquire(self, amount=1, timeout=None):
        """Take `amount` tokens; wait up to `timeout` seconds. Returns whether they were had."""
        deadline = None if timeout is None else self._clock() + timeout
        while True:
''',
    """import numpy as np


def fit_plane(points, weights=None):
    \"\"\"Least-squares plane through points of shape (n, 3).

    Returns the unit normal and the signed distance from the origin. Points may be weighted; a weight of zero leaves a
    point out.
    \"\"\"
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"expected points of shape (n, 3), got {points.shape}")
    if weights is None:
        weights = np.ones(len(points))
    centre = np.average(points, axis=0, weights=weights)
""",
    """def parse_recipe(text):
    \"\"\"Split a recipe into its title, its ingredients and its steps.

    The title is the first line that is not empty. Ingredients start with a dash, steps with a number and a dot; anything
    else belongs to the line before it.
    \"\"\"
    title = None
    ingredients = []
    steps = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped:
            continue
        if title is None:
            title = stripped
        elif stripped.startswith("-"):
            ingredients.append(
""",
    """Minutes of the allotment society, third meeting of the year. Present: eleven members and one guest. The treasurer reported
that the water bill had doubled, since the tap by the gate was left running for a week in May. It was agreed, with one
vote against, to fit a timer. Mr Haddad asked for a second compost bay and offered to build it if the society pays for
the boards. The chair thanked him. On the matter of the geese, nobody could say who had let them in, but it was noted
that
""",
)
