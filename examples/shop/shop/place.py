"""Send a day's work of the shop: ``python -m shop.place``. It writes the ids into ``sent.json``."""

import json
from pathlib import Path

from shop import catalogue, images, mails, orders, prices

SENT = Path("sent.json")
ADDRESSES = [f"{name}@example.net" for name in ("ann", "bob", "cem", "dora", "emil", "fatima")]
CUSTOMERS = ("ann", "bob", "cem")


def main() -> None:
    """Send everything, and each mail and order twice, as a web form that is clicked twice does."""
    catalogue.write_list(1000)
    sent = {
        "mails": [mails.send_welcome(address).id for address in ADDRESSES * 2],
        "pictures": [
            images.thumbnail.delay(str(images.draw(f"picture-{number}", 240, 160)), 4).id
            for number in range(8)
        ],
        "catalogue": [catalogue.load.with_options(task_id="catalogue").delay(breaks_at=500).id],
        "prices": [each.id for each in prices.price.map([(n,) for n in range(200)])],
        "orders": [
            task_id
            for customer in CUSTOMERS * 2
            for task_id in orders.place(customer, [f"{customer}-{n}" for n in range(1, 5)])
        ],
    }
    SENT.write_text(json.dumps(sent))
    for kind, ids in sent.items():
        print(f"{kind}: {len(ids)} sent, {len(set(ids))} tasks")


if __name__ == "__main__":
    main()
