"""How docstrings become Markdown: examples as code, and indices such as [step][pass] as they stand, not as links."""

import re

import griffe

EXAMPLE = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n|$)", re.DOTALL)
INDICES = re.compile(r"(?<!`)((?:\[\w+\]){2,})")


class Docstrings(griffe.Extension):
    """Mark up what Python's docstrings say in ways that Markdown reads otherwise."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
            obj.docstring.value = INDICES.sub(r"`\1`", text)
