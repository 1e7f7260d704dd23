"""Prices of 200 articles, asked from a supplier at the same time: tasks that only wait."""

import asyncio
import time

from shop.app import app


async def ask_supplier(article: int) -> float:
    """Stands for your HTTP client: the supplier needs a second for each answer."""
    await asyncio.sleep(1.0)
    return 10 + article / 100


@app.task(queue="prices", soft_time_limit=30)
async def price(article: int) -> tuple[float, float, float]:
    """The price, and when the call began and ended."""
    began = time.time()
    found = await ask_supplier(article)
    return found, began, time.time()


def most_at_once(calls: list[tuple[float, float, float]]) -> int:
    """How many calls were under way at the same time."""
    moments = [(began, 1) for _, began, _ in calls] + [(ended, -1) for _, _, ended in calls]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most
