"""The parts that the cards of policies and datasets share."""

from __future__ import annotations

from collections.abc import Mapping


def card_text(front_matter: str, title: str, about: str, sections: Mapping[str, str]) -> str:
    """The text of README.md: metadata for the hub in YAML, then Markdown."""
    parts = [f"# {title}", about, *(f"## {name}\n\n{text.strip()}" for name, text in sections.items())]
    return f"---\n{front_matter.strip()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def licence_text(licence: str | None) -> str:
    """The section on the licence."""
    if licence is None:
        return "Its author states no licence (`embodied push --licence`). What it is made from has licences of its own."
    return f"`{licence}`. What it is made from has licences of its own."
