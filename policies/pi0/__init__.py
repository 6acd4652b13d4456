"""The networks of pi0 and pi0.5: a vision-language model and an action expert that share attention."""
