"""A shop: a catalogue of several pages, a page for each article, a basket, and an order."""

from html import escape

from headway.envs.browser.site import Request, Response, Site, link, not_found, page, redirect
from headway.envs.browser.sites.words import COLOURS, GOODS

ARTICLES = 18
PER_PAGE = 6
MOST = 9
"""Pieces of one article that a basket takes."""


class Shop(Site):
    """Order some articles in the right numbers, and nothing else."""

    name = "shop"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        names = [f"{colour} {good}" for colour in COLOURS for good in GOODS]
        self.articles = sorted(self.random.sample(names, ARTICLES))
        self.prices = [self.random.randint(5, 90) for _ in self.articles]
        chosen = self.random.sample(range(ARTICLES), 2)
        self.wanted = {number: self.random.randint(1, 4) for number in chosen}
        self.basket: dict[int, int] = {}
        self.orders: list[dict[int, int]] = []
        said = " and ".join(f"{count} × {self.articles[number]}" for number, count in self.wanted.items())
        self.goal = f"Order {said} in this shop, and nothing else."

    def handle(self, request: Request) -> Response:
        match request.method, request.path.strip("/").split("/"):
            case "GET", [""]:
                return self._catalogue(_number(request.query.get("page", "1"), 1))
            case "GET", ["article", number]:
                return self._article(_number(number, -1))
            case "POST", ["basket", "add"]:
                return self._add(_field(request, "article", -1), _field(request, "count", 0))
            case "POST", ["basket", "remove"]:
                self.basket.pop(_field(request, "article", -1), None)
                return redirect("/basket")
            case "GET", ["basket"]:
                return self._show_basket()
            case "POST", ["order"] if self.basket:
                self.orders.append(self.basket)
                self.basket = {}
                return self._page("Thank you", "<p>Your order has been placed.</p>")
        return not_found()

    def progress(self) -> float:
        """Half for the basket or order that holds what is wanted and nothing else, by article; half for the order."""
        if len(self.orders) > 1:
            return 0.0
        held = self.orders[0] if self.orders else self.basket
        places = set(held) | set(self.wanted)
        share = sum(held.get(number) == self.wanted.get(number) for number in places) / len(places)
        return share if self.orders and share == 1.0 else share / 2

    def _page(self, title: str, *body: str) -> Response:
        count = sum(self.basket.values())
        return page(title, f"<nav>{link('/', 'Catalogue')} {link('/basket', f'Basket ({count})')}</nav>", *body)

    def _catalogue(self, number: int) -> Response:
        pages = -(-ARTICLES // PER_PAGE)
        number = min(max(1, number), pages)
        first = (number - 1) * PER_PAGE
        items = [
            f"<li>{link(f'/article/{i}', self.articles[i])} {self.prices[i]} €</li>"
            for i in range(first, min(first + PER_PAGE, ARTICLES))
        ]
        following = link(f"/?page={number + 1}", "Next page") if number < pages else ""
        return self._page("Catalogue", f"<ul>{''.join(items)}</ul><p>Page {number} of {pages} {following}</p>")

    def _article(self, number: int) -> Response:
        if not 0 <= number < ARTICLES:
            return not_found()
        return self._page(
            self.articles[number],
            f"<p>Price: {self.prices[number]} €</p><form method=post action=/basket/add>",
            f"<input type=hidden name=article value={number}>",
            "<label>Quantity <input name=count value=1></label> <button>Add to basket</button></form>",
        )

    def _add(self, number: int, count: int) -> Response:
        if not 0 <= number < ARTICLES:
            return not_found()
        if not 1 <= self.basket.get(number, 0) + count <= MOST or count < 1:
            return self._page("Quantity not possible", f"<p>A basket takes 1 to {MOST} of an article.</p>")
        self.basket[number] = self.basket.get(number, 0) + count
        return redirect("/basket")

    def _show_basket(self) -> Response:
        rows = [
            f"<li>{count} × {escape(self.articles[number])} <form method=post action=/basket/remove>"
            f"<input type=hidden name=article value={number}>"
            f"<button>Remove {escape(self.articles[number])}</button></form></li>"
            for number, count in self.basket.items()
        ]
        order = "<form method=post action=/order><button>Place the order</button></form>"
        return self._page("Basket", f"<ul>{''.join(rows)}</ul>{order}" if rows else "<p>The basket is empty.</p>")


def _field(request: Request, name: str, otherwise: int) -> int:
    return _number(request.form.get(name, ""), otherwise)


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.strip().isascii() and text.strip().isdigit() and len(text) < 6 else otherwise
