"""The six shares into which an iteration's time is divided, and the colour each has wherever it is drawn."""

COMPONENTS: dict[str, str] = {
    "physics": "#3b76c4",
    "render": "#1f9e8f",
    "policy": "#e58a1f",
    "learner": "#8d61c4",
    "transport": "#cc4b63",
    "idle": "#a9b1bb",
}
"""Name to colour. The colours keep their distance on white, on black, and to the colour-blind."""
