"""Numbers of things in texts for users, with their noun in the singular or plural."""


def format_count(number: float, noun: str, plural: str = "") -> str:
    """Return a whole number with its noun, such as "1 image" or "1,200 images". `plural` is the plural of a noun to
    which no s can be added."""
    return f"{number:,.0f} {noun if number == 1 else plural or noun + 's'}"
