"""Family ``shop``: products to find, to put into a cart and to order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from clawgym.tasks.packs.seeded import FIRST, WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator
from clawgym.tasks.worlds.sites.shop import DELIVERIES, euros

from ._build import Action, GuiDraft, click, fill, refill

SHOP: dict[str, Generator[GuiDraft]] = {}
generator = partial(_generator, family="shop", into=SHOP)

_THINGS = {"Lamps": "lamp", "Chairs": "chair", "Rugs": "rug", "Clocks": "clock", "Vases": "vase"}
_CITIES = ("Lisbon", "Vienna", "Oslo", "Krakow", "Turin", "Ghent", "Riga", "Malaga")
_ID, _NAME, _CATEGORY, _CENTS, _STARS, _STOCK = range(6)

Product = list[Any]
Cart = Mapping[int, int]
"""Product -> how many."""


class _Stock:
    """A catalogue, and a product that is not in it."""

    def __init__(self, rng: random.Random, each: int = 5) -> None:
        colours = [word.title() for word in rng.sample(WORDS, each + 2)]
        self.products: list[Product] = []
        numbers = iter(rng.sample(range(100, 999), len(_THINGS) * each))
        spare = []
        for category, thing in _THINGS.items():
            shades = rng.sample(colours, each + 1)
            spare.append([0, f"{shades[-1]} {thing}", category, 0, 0, 0, ""])
            for shade in shades[:each]:
                cents = rng.randrange(1_200, 19_000, 50)
                about = f"A {thing} in {shade.lower()}, {rng.randint(20, 90)} cm."
                product = [next(numbers), f"{shade} {thing}", category, cents, rng.randint(25, 50), rng.randint(12, 40)]
                self.products.append([*product, about])
        self.missing = rng.choice(spare)
        codes = rng.sample(WORDS, 4)
        self.coupons = [{"code": f"{code}{rng.randint(10, 99)}".upper(), "percent": 10, "least": 0} for code in codes]
        self.no_coupon = self.coupons.pop()["code"]

    def draft(self, cart: Cart | None = None, end: Mapping[str, Any] | None = None, **rest: Any) -> GuiDraft:
        cart_rows = [list(line) for line in (cart or {}).items()]
        tables = {"products": self.products, "cart": cart_rows, "coupon": [], "orders": [], "order_lines": []}
        return GuiDraft(app="shop", start={"coupons": self.coupons}, tables=tables, end=end, **rest)


def _put(product: Product, number: int) -> list[Action]:
    """Put a product into the cart, from the catalogue."""
    some = refill("#quantity", str(number)) if number != 1 else []
    return [*click(f"#category-{product[_CATEGORY].lower()}", f"#product-{product[_ID]}"), *some, *click("#add")]


def _cart(lines: Cart) -> dict[str, Any]:
    return {"cart": [list(line) for line in lines.items()]}


def _address(rng: random.Random) -> dict[str, str]:
    return {
        "name": f"{rng.choice(FIRST)} {rng.choice(WORDS).title()}",
        "street": f"{rng.choice(WORDS).title()} Street {rng.randint(1, 99)}",
        "city": rng.choice(_CITIES),
        "delivery": rng.choice(sorted(DELIVERIES)),
        "gift": rng.choice(["yes", "no"]),
    }


def _buy(address: Mapping[str, str], place: bool = True) -> list[Action]:
    """Check out, from the cart."""
    calls = click("#checkout")
    for name in ("name", "street", "city"):
        calls += fill(f"#{name}", address[name])
    calls += click(f"#delivery-{address['delivery'].lower()}")
    calls += click("#gift") * (address["gift"] == "yes")
    return [*calls, *click("#buy" if place else "#cancel")]


def _ordered(address: Mapping[str, str], lines: Sequence[tuple[Product, int]], code: str = "") -> dict[str, Any]:
    """The tables after an order of ``lines``."""
    goods = sum(product[_CENTS] * number for product, number in lines)
    cents = goods - (goods * 10 // 100 if code else 0) + DELIVERIES[address["delivery"]]
    return {
        "cart": [],
        "orders": [[1, *address.values(), code, cents]],
        "order_lines": [[1, product[_ID], number] for product, number in lines],
    }


def _to(address: Mapping[str, str]) -> str:
    wrap = "gift-wrapped" if address["gift"] == "yes" else "not gift-wrapped"
    where = f"{address['name']}, {address['street']}, {address['city']}"
    return f"to {where}, with {address['delivery'].lower()} delivery, {wrap}"


@generator("shop-cart", level=1)
def shop_cart(rng: random.Random) -> GuiDraft:
    """Put a number of a product into the cart."""
    return _some(rng, there=True)


@generator("shop-cart-gone", level=1)
def shop_cart_gone(rng: random.Random) -> GuiDraft:
    """Put a product that the shop does not have into the cart; infeasible."""
    return _some(rng, there=False)


def _some(rng: random.Random, there: bool) -> GuiDraft:
    stock = _Stock(rng)
    product = rng.choice(stock.products) if there else stock.missing
    number = rng.randint(2, 9)
    instruction = f"Put {number} of the {product[_NAME]} into the cart. Do not order yet."
    kind = [p for p in stock.products if p[_CATEGORY] == product[_CATEGORY] and p is not product]
    shade = [p for p in stock.products if p[_NAME].split()[0] == product[_NAME].split()[0] and p is not product]
    near, far = kind[0], (shade or kind[1:])[0]
    if not there:
        return stock.draft(
            instruction=instruction,
            calls=[*click(f"#category-{product[_CATEGORY].lower()}"), *fill("#find", product[_NAME])],
            wrong={"another-of-its-kind": _put(near, number), "another-of-its-colour": _put(far, number)},
            why=f"The shop has no {product[_NAME]}.",
        )
    return stock.draft(
        instruction=instruction,
        calls=_put(product, number),
        end=_cart({product[_ID]: number}),
        wrong={
            "one-only": _put(product, 1),
            "another-of-its-kind": _put(near, number),
            "another-of-its-colour": _put(far, number),
            "does-not-add": _put(product, number)[:-1],
        },
    )


@generator("shop-coupon", level=2)
def shop_coupon(rng: random.Random) -> GuiDraft:
    """Use a coupon for the products in the cart."""
    return _with_coupon(rng, there=True)


@generator("shop-coupon-gone", level=2)
def shop_coupon_gone(rng: random.Random) -> GuiDraft:
    """Use a coupon that does not exist; infeasible."""
    return _with_coupon(rng, there=False)


def _with_coupon(rng: random.Random, there: bool) -> GuiDraft:
    stock = _Stock(rng)
    first, second, third = rng.sample(stock.products, 3)
    code = rng.choice(stock.coupons)["code"] if there else stock.no_coupon
    other = next(coupon["code"] for coupon in stock.coupons if coupon["code"] != code)
    cart = {product[_ID]: rng.randint(1, 6) for product in (first, second, third)}
    instruction = (
        f"Use the coupon {code} for what is in the cart, so that it is taken off there. Do not order, and leave the "
        f"products and their quantities as they are: {cart[first[_ID]]} of the {first[_NAME]} and the rest."
    )
    way = click("#nav-cart")

    def use(word: str) -> list[Action]:
        return [*fill("#coupon", word), *click("#apply")]

    if not there:
        return stock.draft(
            cart,
            instruction=instruction,
            calls=[*way, *use(code)],
            wrong={
                "another-coupon": [*way, *use(other)],
                "takes-a-product-out": [*way, *click(f"#remove-{first[_ID]}")],
            },
            why=f"The shop does not take the coupon {code}.",
        )
    return stock.draft(
        cart,
        instruction=instruction,
        calls=[*way, *use(code)],
        end={"coupon": [[code]]},
        wrong={
            "another-coupon": [*way, *use(other)],
            "does-not-apply-it": [*way, *fill("#coupon", code)],
            "takes-a-product-out": [*way, *use(code), *click(f"#remove-{first[_ID]}")],
        },
    )


@generator("shop-adjust", level=2)
def shop_adjust(rng: random.Random) -> GuiDraft:
    """Change one quantity in the cart, take another product out, and put a new one in."""
    stock = _Stock(rng)
    more, out, stays, new = rng.sample(stock.products, 4)
    cart = {product[_ID]: rng.randint(1, 6) for product in (more, out, stays)}
    number, some = rng.randint(7, 11), rng.randint(2, 9)
    change = [*refill(f"#quantity-{more[_ID]}", str(number)), *click(f"#update-{more[_ID]}")]
    drop, put = click(f"#remove-{out[_ID]}"), [*click("#nav-catalogue"), *_put(new, some)]
    way = click("#nav-cart")
    return stock.draft(
        cart,
        instruction=(
            f"In the cart, make it {number} of the {more[_NAME]}, take the {out[_NAME]} out, and put {some} of the "
            f"{new[_NAME]} in. Leave the rest, and do not order."
        ),
        calls=[*way, *change, *drop, *put],
        end=_cart({**{k: v for k, v in cart.items() if k != out[_ID]}, more[_ID]: number, new[_ID]: some}),
        wrong={
            "does-not-update": [*way, *change[:-1], *drop, *put],
            "takes-the-wrong-one-out": [*way, *change, *click(f"#remove-{stays[_ID]}"), *put],
            "adds-to-the-quantity": [*way, *drop, *put, *click("#nav-catalogue"), *_put(more, number)],
        },
    )


@generator("shop-order", level=3)
def shop_order(rng: random.Random) -> GuiDraft:
    """Order two products, with a coupon, to an address."""
    stock = _Stock(rng)
    lines = [*zip(rng.sample(stock.products, 2), (rng.randint(2, 6), 1), strict=True)]
    address, code = _address(rng), rng.choice(stock.coupons)["code"]
    put = [*_put(*lines[0]), *click("#nav-catalogue"), *_put(*lines[1])]
    use = [*fill("#coupon", code), *click("#apply")]
    way = next(way for way in sorted(DELIVERIES) if way != address["delivery"])
    return stock.draft(
        instruction=(
            f"Order {lines[0][1]} of the {lines[0][0][_NAME]} and {lines[1][1]} of the {lines[1][0][_NAME]}, with the "
            f"coupon {code}, {_to(address)}."
        ),
        calls=[*put, *use, *_buy(address)],
        end=_ordered(address, lines, code),
        wrong={
            "without-the-coupon": [*put, *_buy(address)],
            "other-delivery": [*put, *use, *_buy({**address, "delivery": way})],
            "does-not-place-it": [*put, *use, *_buy(address, place=False)],
            "one-product-only": [*_put(*lines[0]), *use, *_buy(address)],
        },
    )


@generator("shop-choice", level=3)
def shop_choice(rng: random.Random) -> GuiDraft:
    """Choose a product by price and rating, and order as many as a budget allows."""
    while True:
        stock = _Stock(rng, each=7)
        category = rng.choice(sorted(_THINGS))
        kind = sorted((p for p in stock.products if p[_CATEGORY] == category), key=lambda p: p[_CENTS])
        stars = rng.choice([35, 38, 40, 42])
        good = [product for product in kind if product[_STARS] >= stars]
        if len(good) < 2 or good[0] is kind[0] or good[0][_CENTS] == good[1][_CENTS]:
            continue
        address, product = _address(rng), good[0]
        money = rng.randrange(200, 500, 10) * 100
        number = (money - DELIVERIES[address["delivery"]]) // product[_CENTS]
        if 2 <= number <= product[_STOCK]:
            break
    put = _put(product, number)
    return stock.draft(
        instruction=(
            f"Of the {category.lower()} rated {euros(stars * 10)[:-1]} or better, take the cheapest, and order as many "
            f"of it as {money // 100} euros are enough for, delivery included, {_to(address)}. No coupon."
        ),
        calls=[*put, *_buy(address)],
        end=_ordered(address, [(product, number)]),
        wrong={
            "the-cheapest-of-all": [*_put(kind[0], min(number, kind[0][_STOCK])), *_buy(address)],
            "one-fewer": [*_put(product, number - 1), *_buy(address)],
            "does-not-place-it": [*put, *_buy(address, place=False)],
        },
    )
