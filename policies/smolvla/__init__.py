"""SmolVLA: a small vision-language-action model with a flow-matching action expert, from LeRobot's checkpoints."""
