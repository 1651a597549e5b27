"""A shop: a catalogue with categories, a page for each product, a cart, coupons, a checkout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from ._fields import Fields, Refused
from ._page import Again, App, e, hidden, page

__all__ = ["DELIVERIES", "Shop", "euros"]

DELIVERIES = {"Standard": 390, "Express": 990, "Pick-up": 0}
"""Way -> what it costs, in cents."""

_NOTES = {
    "added": "It is in your cart.",
    "changed": "Your cart was changed.",
    "removed": "It was taken out of your cart.",
    "coupon": "The coupon was applied.",
}


def euros(cents: int) -> str:
    """``12.34``."""
    return f"{cents // 100}.{cents % 100:02d}"


class _Sum(NamedTuple):
    goods: int
    off: int

    @property
    def left(self) -> int:
        return self.goods - self.off


class Shop(App):
    """``coupons`` of the start: ``code``, ``percent``, and ``least`` (cents). Amounts are whole cents; a coupon takes
    its percentage off the goods, rounded down, and nothing off the delivery."""

    TABLES: ClassVar = {
        "products": "id INTEGER PRIMARY KEY, name TEXT NOT NULL, category TEXT NOT NULL, cents INTEGER NOT NULL, "
        "stars INTEGER NOT NULL, stock INTEGER NOT NULL, about TEXT NOT NULL",
        "cart": "product INTEGER PRIMARY KEY REFERENCES products, quantity INTEGER NOT NULL CHECK (quantity > 0)",
        "coupon": "code TEXT PRIMARY KEY",
        "orders": "id INTEGER PRIMARY KEY, name TEXT NOT NULL, street TEXT NOT NULL, city TEXT NOT NULL, "
        "delivery TEXT NOT NULL, gift TEXT NOT NULL, coupon TEXT NOT NULL, cents INTEGER NOT NULL",
        "order_lines": "order_id INTEGER NOT NULL REFERENCES orders, product INTEGER NOT NULL REFERENCES products, "
        "quantity INTEGER NOT NULL, PRIMARY KEY (order_id, product)",
    }
    PART_OF: ClassVar = {"order_lines": ["order_id", "orders"]}
    PAGES: ClassVar = {
        "/": "catalogue",
        "/product": "product",
        "/cart": "cart",
        "/checkout": "checkout",
        "/order": "order",
    }
    ACTIONS: ClassVar = {
        "/add": "add",
        "/change": "set_quantity",
        "/remove": "remove",
        "/coupon": "apply_coupon",
        "/uncoupon": "remove_coupon",
        "/buy": "buy",
    }

    def _page(self, title: str, body: str, here: str = "", notice: str = "", scripts: tuple[str, ...] = ()) -> str:
        ((number,),) = self.rows("SELECT coalesce(sum(quantity), 0) FROM cart")
        nav = [("nav-catalogue", "/", "Catalogue"), ("nav-cart", "/cart", f"Cart ({number})")]
        return page(title, body, brand="Home & Hearth", nav=nav, here=here, notice=notice, scripts=scripts)

    # -- pages

    def catalogue(self, query: Fields) -> str:
        """All products, or those of a category."""
        categories = [row[0] for row in self.rows("SELECT DISTINCT category FROM products ORDER BY category")]
        chosen = query.choice("category", ["", *categories]) if query.has("category") else ""
        links = "".join(
            f'<a class="button{" chosen" if name == chosen else ""}" id="category-{e(name.lower() or "all")}" '
            f'href="{f"/?category={e(name)}" if name else "/"}">{e(name or "All")}</a>'
            for name in ["", *categories]
        )
        tiles = "".join(
            f'<a class="tile" id="product-{row["id"]}" href="/product?id={row["id"]}" '
            f'data-name="{e(row["name"].lower())}"><b>{e(row["name"])}</b><span>{euros(row["cents"])} euros</span>'
            f'<span class="quiet small">{_stars(row["stars"])}</span></a>'
            for row in self.rows("SELECT * FROM products WHERE ? IN ('', category) ORDER BY name, id", chosen)
        )
        body = (
            f'<div class="row between filters"><div class="row">{links}</div>'
            '<input type="text" id="find" aria-label="Filter by name" placeholder="Filter by name" autocomplete="off">'
            f'</div><div class="tiles">{tiles}</div><p class="quiet" id="none" hidden>Nothing is called that.</p>'
        )
        return self._page("Catalogue", body, "nav-catalogue", scripts=("/shop.js",))

    def product(self, query: Fields) -> str:
        """One product."""
        return self._shown(self._product(query.number("id")))

    def _product(self, number: int) -> Any:
        return self.row("product", "SELECT * FROM products WHERE id = ?", number)

    def _shown(self, row: Mapping[str, Any], wrong: str = "") -> str:
        told = f'<p class="problem" id="problem">{e(wrong)}</p>' if wrong else ""
        body = (
            f'{told}<div class="panel"><h1>{e(row["name"])}</h1><p class="quiet">{e(row["category"])}</p>'
            f"<p>{e(row['about'])}</p><p>{_stars(row['stars'])}</p>"
            f'<p><b id="price">{euros(row["cents"])} euros</b> <span class="quiet">{row["stock"]} in stock</span></p>'
            f'<form class="row" method="post" action="/add" autocomplete="off">{hidden(product=row["id"])}'
            '<label for="quantity">Quantity</label><input type="text" id="quantity" name="quantity" value="1" size="4">'
            '<button class="main" id="add">Add to cart</button>'
            '<a class="button" id="back" href="/">Catalogue</a></form></div>'
        )
        return self._page(row["name"], body)

    def _lines(self) -> list[Any]:
        return self.rows(
            "SELECT id, name, cents, stock, quantity FROM cart JOIN products ON product = id ORDER BY name, id"
        )

    def _sum(self) -> _Sum:
        goods = sum(line["cents"] * line["quantity"] for line in self._lines())
        coupon = self._coupon()
        return _Sum(goods, goods * coupon["percent"] // 100 if coupon and goods >= coupon["least"] else 0)

    def _coupon(self) -> Mapping[str, Any] | None:
        codes = [row[0] for row in self.rows("SELECT code FROM coupon")]
        return next((coupon for coupon in self.start["coupons"] if coupon["code"] in codes), None)

    def cart(self, query: Fields) -> str:
        """What is in the cart."""
        return self._filled(notice=self.note(query, _NOTES))

    def _filled(self, notice: str = "", wrong: str = "") -> str:
        rows = "".join(
            f"<tr><td>{e(line['name'])}</td><td class=number>{euros(line['cents'])}</td><td>"
            f'<form class="row" method="post" action="/change" autocomplete="off">{hidden(product=line["id"])}'
            f'<input type="text" id="quantity-{line["id"]}" name="quantity" value="{line["quantity"]}" size="3">'
            f'<button id="update-{line["id"]}">Update</button></form></td>'
            f"<td class=number>{euros(line['cents'] * line['quantity'])}</td><td>"
            f'<form method="post" action="/remove">{hidden(product=line["id"])}'
            f'<button id="remove-{line["id"]}">Remove</button></form></td></tr>'
            for line in self._lines()
        )
        told = f'<p class="problem" id="problem">{e(wrong)}</p>' if wrong else ""
        if not rows:
            return self._page("Cart", f'<h1>Cart</h1>{told}<p id="empty">Your cart is empty.</p>', "nav-cart", notice)
        money, coupon = self._sum(), self._coupon()
        less = f"<p>Coupon {e(coupon['code'])}: -{euros(money.off)} euros</p>" if coupon else ""
        voucher = (
            '<form method="post" action="/uncoupon"><button id="remove-coupon">Remove the coupon</button></form>'
            if coupon
            else '<form class="row" method="post" action="/coupon" autocomplete="off">'
            '<label for="coupon">Coupon</label><input type="text" id="coupon" name="code" size="14">'
            '<button id="apply">Apply</button></form>'
        )
        body = (
            f"<h1>Cart</h1>{told}<table><tr><th>Product</th><th class=number>Price</th><th>Quantity</th>"
            f"<th class=number>Together</th><th></th></tr>{rows}</table><br>"
            f'<div class="row between"><div>{voucher}</div><div><p>Goods: {euros(money.goods)} euros</p>{less}'
            f'<p><b id="total">Total without delivery: {euros(money.left)} euros</b></p>'
            '<a class="button go" id="checkout" href="/checkout">To the checkout</a></div></div>'
        )
        return self._page("Cart", body, "nav-cart", notice)

    def checkout(self, query: Fields) -> str:
        """Where it goes to."""
        del query
        if not self._lines():
            raise Refused("Your cart is empty.")
        return self._paying({}, {})

    def _paying(self, values: Mapping[str, str], wrong: Mapping[str, str]) -> str:
        rows = []
        for name, label in (("name", "Name"), ("street", "Street and number"), ("city", "City")):
            told = f'<div class="wrong" id="wrong-{name}">{e(wrong[name])}</div>' if name in wrong else ""
            rows.append(
                f'<label class="name" for="{name}">{label} *</label>'
                f'<div><input type="text" id="{name}" name="{name}" value="{e(values.get(name, ""))}">{told}</div>'
            )
        ways = "".join(
            f'<label><input type="radio" id="delivery-{way.lower()}" name="delivery" value="{way}"'
            f"{' checked' if values.get('delivery') == way else ''}>{way} ({euros(cents)} euros)</label>"
            for way, cents in DELIVERIES.items()
        )
        told = f'<div class="wrong" id="wrong-delivery">{e(wrong["delivery"])}</div>' if "delivery" in wrong else ""
        gift = " checked" if values.get("gift") == "yes" else ""
        body = (
            '<h1>Checkout</h1><div class="panel"><form method="post" action="/buy" autocomplete="off">'
            f'<div class="fields">{"".join(rows)}<span class="name">Delivery *</span>'
            f'<div><div class="choices">{ways}</div>{told}</div>'
            '<label class="name" for="gift">Gift wrap</label><div><input type="checkbox" id="gift" name="gift" '
            f'value="yes"{gift}> <span class="quiet small">free of charge</span></div></div>'
            f"<br><p>Goods: {euros(self._sum().left)} euros, and the delivery.</p>"
            '<div class="buttons"><button class="main" id="buy">Place the order</button>'
            '<a class="button" id="cancel" href="/cart">Back to the cart</a></div></form></div>'
        )
        return self._page("Checkout", body)

    def order(self, query: Fields) -> str:
        """An order that was placed."""
        row = self.row("order", "SELECT * FROM orders WHERE id = ?", query.number("id"))
        lines = "".join(
            f"<tr><td>{line['quantity']} x {e(line['name'])}</td></tr>"
            for line in self.rows(
                "SELECT quantity, name FROM order_lines JOIN products ON product = id WHERE order_id = ? ORDER BY name",
                row["id"],
            )
        )
        body = (
            f'<h1>Thank you, {e(row["name"])}</h1><p id="number">Your order has the number {row["id"]}.</p>'
            f"<table>{lines}</table><br><p>{e(row['delivery'])} delivery to {e(row['street'])}, {e(row['city'])}. "
            f"Total: {euros(row['cents'])} euros.</p>"
        )
        return self._page("Order", body)

    # -- what they do

    def _quantity(self, fields: Fields, stock: int) -> int | None:
        """How many are wanted, or None if it cannot be so many."""
        text = fields.text("quantity", 12)
        return int(text) if text.isascii() and text.isdigit() and 1 <= int(text) <= stock else None

    def add(self, fields: Fields) -> str:
        """Put so many more of a product into the cart."""
        row = self._product(fields.number("product"))
        there = sum(line["quantity"] for line in self._lines() if line["id"] == row["id"])
        number = self._quantity(fields, row["stock"] - there)
        if number is None:
            raise Again(self._shown(row, f"Choose a quantity from 1 on: {row['stock']} are in stock."))
        self.change(
            "INSERT INTO cart VALUES (?, ?) ON CONFLICT (product) DO UPDATE SET quantity = quantity + ?",
            *(row["id"], number, number),
        )
        return "/cart?note=added"

    def set_quantity(self, fields: Fields) -> str:
        """Change how many of a product are in the cart."""
        number = fields.number("product")
        line = next((line for line in self._lines() if line["id"] == number), None)
        if line is None:
            raise Refused("This is not in the cart.", 404)
        quantity = self._quantity(fields, line["stock"])
        if quantity is None:
            raise Again(self._filled(wrong=f"Choose a quantity from 1 to {line['stock']}."))
        self.change("UPDATE cart SET quantity = ? WHERE product = ?", quantity, number)
        return "/cart?note=changed"

    def remove(self, fields: Fields) -> str:
        """Take a product out of the cart."""
        row = self.row("product in the cart", "SELECT product FROM cart WHERE product = ?", fields.number("product"))
        self.change("DELETE FROM cart WHERE product = ?", row["product"])
        return "/cart?note=removed"

    def apply_coupon(self, fields: Fields) -> str:
        """Use a coupon; one at a time."""
        code = fields.text("code", 40).upper()
        coupon = next((coupon for coupon in self.start["coupons"] if coupon["code"] == code), None)
        if self._coupon() is not None or not self._lines():
            raise Refused("A coupon cannot be applied now.")
        if coupon is None:
            raise Again(self._filled(wrong="There is no such coupon."))
        if self._sum().goods < coupon["least"]:
            raise Again(self._filled(wrong=f"This coupon is for orders from {euros(coupon['least'])} euros."))
        self.change("INSERT INTO coupon VALUES (?)", code)
        return "/cart?note=coupon"

    def remove_coupon(self, fields: Fields) -> str:
        """Use no coupon."""
        del fields
        self.change("DELETE FROM coupon")
        return "/cart?note=changed"

    def buy(self, fields: Fields) -> str:
        """Order what is in the cart."""
        lines, money, coupon = self._lines(), self._sum(), self._coupon()
        if not lines:
            raise Refused("Your cart is empty.")
        values = {name: fields.text(name, 80) for name in ("name", "street", "city")}
        values["delivery"] = fields.choice("delivery", DELIVERIES) if fields.has("delivery") else ""
        values["gift"] = fields.choice("gift", ["yes"]) if fields.has("gift") else "no"
        wrong = {name: "This is needed." for name, value in values.items() if not value}
        if wrong:
            raise Again(self._paying(values, wrong))
        cents = money.left + DELIVERIES[values["delivery"]]
        code = coupon["code"] if coupon and money.off else ""
        number = self.change(
            "INSERT INTO orders (name, street, city, delivery, gift, coupon, cents) VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(*values.values(), code, cents),
        )
        for line in lines:
            self.change("INSERT INTO order_lines VALUES (?, ?, ?)", number, line["id"], line["quantity"])
        self.change("DELETE FROM cart")
        self.change("DELETE FROM coupon")
        return f"/order?id={number}"


def _stars(tenths: int) -> str:
    return f"&#9733; {tenths // 10}.{tenths % 10} of 5"
