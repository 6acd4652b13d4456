"""Shared parts of vision-language-action models with a flow-matching action expert: pi0 and SmolVLA."""
