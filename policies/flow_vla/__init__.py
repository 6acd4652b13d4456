"""What vision-language-action models with a flow-matching action expert share: pi0 and SmolVLA."""
