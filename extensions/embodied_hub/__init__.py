"""`embodied push` and `embodied pull`: policies and datasets on the Hugging Face hub, with what a stranger needs."""
