"""The working of a calculation as a person would write it, digit by digit, and the short form for answers without thinking."""


def column_add(a, b):
    """347 + 285 digit by digit: the text of the working."""
    x, y, carry, parts, place = a, b, 0, [], 0
    while x or y or place == 0:
        da, db = x % 10, y % 10
        total = da + db + carry
        text = f"{da} + {db}" + (f" + {carry}" if carry else "") + f" = {total}"
        x, y = x // 10, y // 10
        if x or y:
            text += f", write {total % 10}" + (" carry 1" if total > 9 else "")
        carry = total // 10
        parts.append(text)
        place += 1
    return "; ".join(parts)


def column_sub(a, b):
    """a - b with a >= b, digit by digit."""
    x, y, borrow, parts, place = a, b, 0, [], 0
    while x or y or place == 0:
        da, db = x % 10, y % 10
        x, y = x // 10, y // 10
        need = db + borrow
        text = f"{da} - {db}" + (" - 1" if borrow else "")
        if da < need:
            text += f", borrow: {da + 10 - need}"
            borrow = 1
        else:
            text += f" = {da - need}"
            borrow = 0
        parts.append(text)
        place += 1
    return "; ".join(parts)


def times_digit(a, d):
    """a * d split by place: "20 * 7 = 140, 3 * 7 = 21, 140 + 21 = 161"."""
    pieces, scale, rest = [], 1, a
    while rest:
        if rest % 10:
            pieces.append(rest % 10 * scale)
        rest //= 10
        scale *= 10
    pieces.reverse()
    if not pieces:
        return f"{a} * {d} = 0"
    if len(pieces) == 1:
        return f"{a} * {d} = {a * d}"
    text = ", ".join(f"{p} * {d} = {p * d}" for p in pieces)
    total = pieces[0] * d
    for p in pieces[1:]:
        text += f", {total} + {p * d} = {total + p * d}"
        total += p * d
    return text


def long_division(a, b):
    """a / b for a one-digit or two-digit b, digit by digit from the left."""
    rest, parts, started = 0, [], False
    for digit in str(a):
        rest = rest * 10 + int(digit)
        q = rest // b
        if q or started:
            parts.append(f"{rest} / {b} = {q} rest {rest - q * b}")
            started = True
        rest -= q * b
    return "; ".join(parts) if parts else f"{a} / {b} = 0"


def work(op, a, b):
    """(thinking text, short working for answers without thinking, result)."""
    if op == "+":
        return f"{a} + {b}: {column_add(a, b)}. Result {a + b}.", f"{a} + {b} = {a + b}", a + b
    if op == "-":
        if a >= b:
            return f"{a} - {b}: {column_sub(a, b)}. Result {a - b}.", f"{a} - {b} = {a - b}", a - b
        return (f"{a} is less than {b}, so the result is negative. {b} - {a}: {column_sub(b, a)}. Result {a - b}.",
                f"{a} - {b} = {a - b}", a - b)
    if op == "*":
        if a < 10 <= b:
            return f"{a} * {b} = {b} * {a}: {times_digit(b, a)}. Result {a * b}.", direct_product(a, b), a * b
        if b < 10:
            text = times_digit(a, b)
            return f"{a} * {b}: {text}. Result {a * b}.", direct_product(a, b), a * b
        tens, ones = b // 10 * 10, b % 10
        if ones == 0:
            return (f"{a} * {b}: {times_digit(a, b // 10)}, with a zero {a * b}. Result {a * b}.", direct_product(a, b), a * b)
        high, low = a * tens, a * ones
        text = (f"{a} * {b}: {a} * {ones}: {times_digit(a, ones)}. {a} * {b // 10}: {times_digit(a, b // 10)}, with a zero {high}. "
                f"{high} + {low}: {column_add(high, low)}. Result {a * b}.")
        return text, direct_product(a, b), a * b
    text = long_division(a, b)
    return f"{a} / {b}: {text}. Result {a // b}.", f"{a} / {b} = {a // b}", a // b


def direct_product(a, b):
    """The short working shown without thinking; small facts need none."""
    if max(a, b) <= 12 or min(a, b) < 2 or round_number(a) or round_number(b) and (b == 10 or a < 13):
        return f"{a} * {b} = {a * b}"
    if min(a, b) < 10:
        many, few = max(a, b), min(a, b)
        tens, ones = many // 10 * 10, many % 10
        if not ones:
            return f"{a} * {b} = {a * b}"
        return f"{a} * {b} = {tens} * {few} + {ones} * {few} = {tens * few} + {ones * few} = {a * b}"
    tens, ones = b // 10 * 10, b % 10
    parts = f"{a} * {b} = {a} * {tens} + {a} * {ones}. " if ones else ""

    def part(d):
        high, low = a // 10 * 10, a % 10
        return f"{a} * {d} = {high * d} + {low * d} = {a * d}" if low and high else f"{a} * {d} = {a * d}"
    if not ones:
        return part(tens)
    return f"{parts}{part(tens)}. {part(ones)}. {a * tens} + {a * ones} = {a * b}"


def round_number(n):
    return n in (10, 100, 1000)
