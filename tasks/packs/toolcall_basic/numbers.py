"""Family ``math``: questions with one exact answer, for a code interpreter."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import partial

from clawgym.tasks.packs.seeded import Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import ToolCallDraft, python

NUMBERS: dict[str, Generator[ToolCallDraft]] = {}
generator = partial(_generator, family="math", into=NUMBERS)

_END = "End with a line `Answer: ...` that holds the number and nothing else."


@generator("math-digits", level=1)
def math_digits(rng: random.Random) -> ToolCallDraft:
    """Compute the sum of the digits of a power."""
    while True:
        base, exponent = rng.randint(3, 99), rng.randint(40, 300)
        values = [sum(map(int, str(base**n))) for n in (exponent, exponent + 1, exponent - 1)]
        length = len(str(base**exponent))
        if len({*values, length}) == 4:
            break
    return ToolCallDraft(
        instruction=f"What is the sum of the decimal digits of {base}^{exponent}? {_END}",
        calls=[python(f"print(sum(map(int, str({base} ** {exponent}))))")],
        answer=str(values[0]),
        kind="number",
        wrong={
            "one-power-too-many": ([python(f"print(sum(map(int, str({base} ** {exponent + 1}))))")], str(values[1])),
            "counts-digits": ([python(f"print(len(str({base} ** {exponent})))")], str(length)),
            "all-candidates": ([], " or ".join(map(str, sorted(values)))),
            "answers-without-acting": ([], str(values[0] % 9 or 9)),
        },
    )


@generator("math-count", level=2)
def math_count(rng: random.Random) -> ToolCallDraft:
    """Count the numbers in a range that satisfy three conditions."""
    while True:
        top = rng.randint(2_000, 9_000)
        p, q, r = rng.sample((3, 4, 7, 9, 11, 13, 17), 3)
        digit = rng.randint(1, 9)
        rows = range(1, top + 1)
        one = sum((n % p == 0 or n % q == 0) and n % r != 0 and str(digit) not in str(n) for n in rows)
        both = sum((n % p == 0 and n % q == 0) and n % r != 0 and str(digit) not in str(n) for n in rows)
        any_r = sum((n % p == 0 or n % q == 0) and str(digit) not in str(n) for n in rows)
        any_digit = sum((n % p == 0 or n % q == 0) and n % r != 0 for n in rows)
        if len({one, both, any_r, any_digit}) == 4:
            break

    def code(condition: str) -> str:
        return f"print(sum(1 for n in range(1, {top + 1}) if {condition}))"

    either, spare, no_digit = f"(n % {p} == 0 or n % {q} == 0)", f"n % {r}", f"'{digit}' not in str(n)"
    return ToolCallDraft(
        instruction=(
            f"How many integers from 1 to {top} are divisible by {p} or by {q} (or by both), not divisible by {r}, and "
            f"written in decimal without the digit {digit}? {_END}"
        ),
        calls=[python(code(f"{either} and {spare} and {no_digit}"))],
        answer=str(one),
        kind="number",
        wrong={
            "and-for-or": (
                [python(code(f"{either.replace(' or ', ' and ')} and {spare} and {no_digit}"))],
                str(both),
            ),
            "forgets-the-divisor": ([python(code(f"{either} and {no_digit}"))], str(any_r)),
            "forgets-the-digit": ([python(code(f"{either} and {spare}"))], str(any_digit)),
        },
    )


@generator("math-fraction", level=3)
def math_fraction(rng: random.Random) -> ToolCallDraft:
    """Compute the expected value of a game of drawing, as a fraction."""
    while True:
        red, blue, draws, bonus = rng.randint(4, 12), rng.randint(4, 12), rng.randint(3, 4), rng.randint(2, 9)
        right, wrong = _expected(red, blue, draws, bonus, False), _expected(red, blue, draws, bonus, True)
        if right.denominator > 6 and right != wrong:
            break
    code = f"""
        from fractions import Fraction
        from itertools import combinations

        balls = [1] * {red} + [0] * {blue}
        drawn = list(combinations(range(len(balls)), {draws}))
        total = 0
        for some in drawn:
            reds = sum(balls[i] for i in some)
            total += reds * reds + ({bonus} if reds == {draws} else 0)
        print(Fraction(total, len(drawn)))
        """
    return ToolCallDraft(
        instruction=(
            f"An urn holds {red} red and {blue} blue balls. {draws} balls are drawn at once. The player gets the "
            f"square of the number of red balls among them, in points, and {bonus} points more if all of them are "
            f"red. What is the expected number of points, as a fraction in lowest terms? {_END}"
        ),
        calls=[python(code)],
        answer=str(right),
        said=f"\\boxed{{\\frac{{{right.numerator}}}{{{right.denominator}}}}}",
        kind="number",
        wrong={
            "puts-balls-back": ([], str(wrong)),
            "rounds": ([python(code)], f"{float(right):.6f}"),
            "forgets-the-bonus": ([], str(_expected(red, blue, draws, 0, False))),
            "upside-down": ([python(code)], str(1 / right)),
        },
    )


def _expected(red: int, blue: int, draws: int, bonus: int, back: bool) -> Fraction:
    """Expected points, without or with putting each ball back, by the distribution of the number of red ones."""
    chances = {0: Fraction(1)}
    for drawn in range(draws):
        after: dict[int, Fraction] = {}
        for reds, chance in chances.items():
            p = Fraction(red, red + blue) if back else Fraction(red - reds, red + blue - drawn)
            after[reds + 1] = after.get(reds + 1, Fraction(0)) + chance * p
            after[reds] = after.get(reds, Fraction(0)) + chance * (1 - p)
        chances = after
    return sum(
        (chance * (reds * reds + bonus * (reds == draws)) for reds, chance in chances.items()), start=Fraction(0)
    )


@generator("math-radical", level=3)
def math_radical(rng: random.Random) -> ToolCallDraft:
    """Compute the difference of the cubes of two roots exactly."""
    a, c, b = rng.randint(2, 30), rng.randint(1, 9), rng.choice((2, 3, 5, 6, 7, 10, 11, 13, 14, 15, 17, 19, 21))
    factor = 2 * c * (3 * a * a + c * c * b)
    constant = a * a - c * c * b
    sign = "-" if constant < 0 else "+"
    return ToolCallDraft(
        instruction=(
            f"The equation x^2 - {2 * a}x {sign} {abs(constant)} = 0 has the roots u > v. What is u^3 - v^3, exactly? "
            "End with a line `Answer: \\boxed{...}`."
        ),
        calls=[
            python(
                f"""
                from sympy import solve, simplify, symbols

                x = symbols("x")
                v, u = sorted(solve(x**2 - {2 * a}*x + {constant}, x))
                print(simplify(u**3 - v**3))
                """
            )
        ],
        answer=f"{factor}\\sqrt{{{b}}}",
        said=f"\\boxed{{\\sqrt{{{b}}} \\cdot {factor}}}",
        kind="math",
        wrong={
            "a-decimal": ([], f"{factor * b**0.5:.6f}"),
            "the-other-sign": ([], f"\\boxed{{-{factor}\\sqrt{{{b}}}}}"),
            "difference-cubed": ([], f"\\boxed{{{(2 * c) ** 3 * b}\\sqrt{{{b}}}}}"),
            "forgets-the-root": ([], str(factor)),
        },
    )
